"""``ragr1 evaluate`` on a model folder, on baselines and at an endpoint, by the command line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web
from http_stub import served
from small_world import PLACES, THINGS, invoke, make_config, make_files

from envs.base import search_options
from envs.measures import Measure
from envs.search import SearchEnv
from ragr1_actors.core.config import EndpointSettings, RunConfig
from ragr1_actors.core.errors import ConfigError, EngineDeadError, FleetError
from ragr1_actors.core.types import Task
from ragr1_actors.evaluation.evaluate import _Pass, evaluation_tasks
from ragr1_actors.evaluation.evaluated_policy import BASELINES, EvalRequest, open_policy
from ragr1_actors.planning.preflight import check_names
from ragr1_actors.planning.prepare import in_turn, prepare_policy, split_tasks
from ragr1_actors.runs.scores import EvalArguments, TaskScore, append_score, open_scores, read_scores
from retrieval.http.retriever import PROBE

RECIPE = ("--recipe", "quickstart")
ON_CPU = ("env_runners.engine=transformers", "env_runners.num_gpus_per_env_runner=0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world, ``recipe.yaml`` over it, and ``policy``, the folder of a model that no run made."""
    files = make_files(tmp_path_factory.mktemp("files"))
    config = make_config(files)
    (files / "recipe.yaml").write_text(json.dumps(config.model_dump()))
    prepare_policy(config, files, (), files / "index")
    return files


def evaluated(files: Path, *arguments: str) -> dict[str, Any]:
    command = ["--recipe", str(files / "recipe.yaml"), "--tasks", str(files / "tasks.json"), "--json"]
    printed = invoke("evaluate", *arguments, *command)
    assert printed.startswith("{"), printed
    found: dict[str, Any] = json.loads(printed)
    return found


class Reader:
    """A hosted model that searches for the thing it is asked about, and answers with the place that it reads."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.under_way: list[int] = []
        """Requests at the same time, when each came."""
        self._now = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._now += 1
        self.under_way.append(self._now)
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(0.2)  # the others come meanwhile
        self._now -= 1
        choice = {"message": self.message_of(body), "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 6}})

    def message_of(self, body: dict[str, Any]) -> dict[str, Any]:
        said = body["messages"][-1]["content"]
        place = next((place for place in PLACES if place in said), "")
        thing = next((thing for thing in THINGS if thing in said), "")
        text = f"<answer> {place}" if place else f"<search> {thing}" if thing else "yes"
        return {"role": "assistant", "content": text}


class Measured(SearchEnv):
    measures: ClassVar[dict[str, Measure]] = {"letters": lambda ended: float(len(ended.task.question))}


@pytest.mark.engine
def test_a_measure_of_the_environment_has_its_mean_and_its_interval(files: Path) -> None:
    found = evaluated(files, str(files / "policy"), f"environment.env={__name__}:Measured")
    assert found["letters"] == found["intervals"]["letters"]["mean"] > 0


@pytest.mark.engine
def test_a_model_folder_with_the_settings_of_a_recipe(files: Path) -> None:
    assert "name its prompt and formats with --recipe" in invoke("evaluate", str(files / "policy"))
    found = evaluated(files, str(files / "policy"), "env_runners.max_new_tokens_per_turn=5")
    assert (found["policy"], found["method"]) == (str(files / "policy"), "search")
    assert (found["num_tasks"], found["num_failed"], found["num_trained_on"]) == (8, 0, 8)
    assert 0 < found["tokens"] <= 10  # two turns of five tokens: the override counts
    assert found["intervals"]["f1_rag_r1"]["mean"] == found["f1"]
    assert found["latency"] == []


@pytest.mark.engine
def test_the_overlap_with_training_is_of_the_tasks_that_are_asked(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = [str(files / "policy"), "env_runners.max_new_tokens_per_turn=5", "--num-tasks", "2"]
    assert evaluated(files, *short)["num_trained_on"] == 2
    config = make_config(files)
    alone = config.model_copy(update={"environment": config.environment.model_copy(update={"eval_tasks": ""})})
    trained, held_out, _ = split_tasks(alone, config.evaluation.num_tasks)
    found = evaluated(files, *short[:2], "environment.eval_tasks=''")
    assert found["num_trained_on"] == len(trained) == 8 - len(held_out) < 8, "what was held out is not counted"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": \n')
    found = evaluated(files, *short, f"environment.tasks={broken}", "--out", str(tmp_path / "out.jsonl"))
    assert (found["num_tasks"], found["num_trained_on"]) == (2, None)
    assert "how many of these questions were trained on is not known" in caplog.text


@pytest.mark.engine
def test_several_files_are_evaluated_as_one(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "0.jsonl").write_text('{"question": "Where does the lamp lie ?", "answer": "Riga"}')
    (tmp_path / "more" / "1.csv").write_text("Question,Answer\nWhere is the bird ?,Oslo\n")
    trained = f"environment.tasks=[{files / 'tasks.json'}, {tmp_path / 'more' / '1.csv'}]"
    short = [str(files / "policy"), "env_runners.max_new_tokens_per_turn=5", "environment.eval_tasks=''", trained]
    out = tmp_path / "out.jsonl"
    found = evaluated(files, *short, "--tasks", str(tmp_path / "more"), "--out", str(out))
    # of the eight and the two, one is the lamp's in other words, and one in five is held out
    assert (found["num_tasks"], found["num_trained_on"]) == (10, 8)
    assert "3 files: 10 tasks of 10 records; 2 of question and answer (0, tasks); 1 of Bamboogle (1)" in caplog.text
    settings, scores = read_scores(out)
    assert settings.tasks == f"{tmp_path / 'more'}, {files / 'tasks.json'}"
    assert {score.task_id for score in scores} == {"0/0", "1/0", *(f"tasks/{thing}" for thing in THINGS)}


@pytest.mark.engine
def test_an_index_brings_its_encoder(files: Path) -> None:
    recipe = files / "e5.yaml"
    settings = make_config(files).model_dump()
    settings["retrieval"]["encoder"] = "intfloat/e5-base-v2"
    recipe.write_text(json.dumps(settings))
    asked = ["evaluate", str(files / "policy"), "--recipe", str(recipe), "--tasks", str(files / "tasks.json")]
    refused = "index was built with encoder 'encoder', but retrieval.encoder is 'intfloat/e5-base-v2'; leave"
    assert refused in invoke(*asked)
    asked += ["--index", str(files / "index")]
    assert refused in invoke(*asked, "retrieval.encoder=intfloat/e5-base-v2")
    printed = invoke(*asked, "--num-tasks", "1", "env_runners.max_new_tokens_per_turn=2", "--json")
    assert json.loads(printed)["num_tasks"] == 1, printed
    kept = str(files / "kept.jsonl")  # nothing is kept: the policy knows no answer
    selected = ["select", str(recipe), f"policy.model={files / 'policy'}", "--tasks", str(files / "tasks.json")]
    selected += ["--out", kept, "--num-samples", "1"]
    assert refused in invoke(*selected)
    assert "none of the 8 tasks" in invoke(*selected, "--index", str(files / "index"))


@pytest.mark.engine
@pytest.mark.parametrize(("baseline", "rounds"), [("direct", 0.0), ("rag", 1.0)])
def test_baselines_of_a_model_folder(files: Path, baseline: str, rounds: float) -> None:
    short = "environment.prompt=Q {question}"  # the model has few positions
    found = evaluated(files, str(files / "policy"), short, "--baseline", baseline)
    assert (found["method"], found["rounds"], found["queries"]) == (baseline, rounds, rounds)


def test_a_direct_answer_needs_no_index(files: Path) -> None:
    request = EvalRequest(str(files / "policy"), recipe="search_r1_7b", baseline="direct")
    config = open_policy(request).config
    assert (search_options(config.environment).mode, config.retrieval.index) == ("direct", "")
    assert open_policy(request).index == config.retrieval.type == "ragr1_actors.evaluation.baselines:NoRetriever"


def test_what_a_baseline_changes_and_a_person_overrides(files: Path) -> None:
    policy, recipe = str(files / "policy"), str(files / "recipe.yaml")
    plain = open_policy(EvalRequest(policy, recipe=recipe))
    single = open_policy(EvalRequest(policy, recipe=recipe, baseline="single-query"))
    environment = single.config.environment
    assert environment.env == "search"
    assert environment.options == plain.config.environment.options | {
        "max_queries_per_turn": 1,
        "query_format": "single",
    }
    assert environment.prompt == plain.config.environment.prompt == "{question}"
    assert single.digest() != plain.digest() == open_policy(EvalRequest(policy, recipe=recipe)).digest()
    rag = open_policy(EvalRequest(policy, recipe=recipe, baseline="rag"))
    assert rag.config.environment.prompt == BASELINES["rag"]["prompt"]
    own = ("environment.prompt=Q {question}",)
    assert open_policy(EvalRequest(policy, recipe, own, baseline="rag")).config.environment.prompt == "Q {question}"
    (files / "prompt.txt").write_text("Say {question}\n")
    asked = EvalRequest(policy, recipe, own, prompt=files / "prompt.txt", baseline="rag")
    assert open_policy(asked).config.environment.prompt == "Say {question}"


def test_the_tasks_are_those_that_the_run_held_out(files: Path) -> None:
    words, recipe = ("environment.eval_tasks=''", "env_runners.temperature=0.7"), str(files / "recipe.yaml")
    own, other = (
        open_policy(EvalRequest(str(files / "policy"), recipe, (*words, f"debugging.seed={seed}"))) for seed in (0, 5)
    )
    assert (own.config.debugging.seed, other.config.debugging.seed) == (0, 5)
    assert evaluation_tasks(own.run, None, None) == evaluation_tasks(other.run, None, None)


def test_the_first_tasks_are_of_all_sources(files: Path) -> None:
    (files / "more.jsonl").write_text("".join(f'{{"question": "Q{n}?", "answer": "a"}}\n' for n in range(9)))
    config = make_config(files)
    named = [{"source": path} for path in (config.environment.eval_tasks, str(files / "more.jsonl"))]
    sections = config.model_dump()
    several = RunConfig.model_validate(sections | {"environment": sections["environment"] | {"eval_tasks": named}})
    found = evaluation_tasks(several, None, 4)
    assert len({task.source for task in found}) == 2 and found == in_turn(split_tasks(several, 8)[1])[:4]


@pytest.mark.parametrize(
    ("words", "is_equal"),
    [
        (("environment.env=tools",), True),
        (("environment.env=tools", "environment.options={max_calls_per_turn: 1}"), False),
        (("environment.env=tools", "policy.template_options={enable_thinking: false}"), False),
    ],
)
def test_the_digest_has_what_shapes_answers(files: Path, words: tuple[str, ...], is_equal: bool) -> None:
    asked = [
        EvalRequest(str(files / "policy"), str(files / "recipe.yaml"), ("environment.options={}", *more))
        for more in (("environment.env=tools",), words)
    ]
    first, second = (open_policy(one).digest() for one in asked)
    assert (first == second) is is_equal


def test_tasks_that_fail_again_do_not_lose_the_answers_of_the_file(files: Path) -> None:
    config = make_config(files)
    asked = evaluation_tasks(config, None, 3)
    subject = open_policy(EvalRequest(str(files / "policy"), str(files / "recipe.yaml")))
    answered = TaskScore(asked[0].task_id, "a", "answered", 1.0, 1.0, 1.0, 1.0, None, 1, 1, 5, 0.1)

    class Failing:
        def sample_tasks(self, tasks: list[Task], *given: object) -> int:
            raise FleetError("all failed")

    for concurrency in (1, 8):
        one = _Pass(subject, "", asked, concurrency, None)
        with pytest.raises(FleetError):
            one.answer(Failing(), lambda: None)  # type: ignore[arg-type]
        one = _Pass(subject, "", asked, concurrency, None)
        one.scores.append(answered)
        one.answer(Failing(), lambda: None)  # type: ignore[arg-type]
        assert one.num_failed == 2


def test_an_endpoint_has_its_own_engine_options(files: Path) -> None:
    endpoint = EndpointSettings(url="http://host/v1", model="big", key_env="", body={"stop": None})
    engine = "env_runners: {engine: vllm, engine_options: {tensor_parallel_size: 2}}"
    (files / "vllm.yaml").write_text(engine)
    recipe = str(files / "vllm.yaml")
    runners = open_policy(EvalRequest(recipe=recipe, endpoint=endpoint)).config.env_runners
    usual = {"url": "http://host/v1", "model": "big", "key_env": "", "body": {"stop": None}}
    assert (runners.engine, runners.engine_options, runners.max_concurrent_trajectories) == ("endpoint", usual, 8)
    own = ("env_runners.engine_options={timeout_s: 900}",)
    runners = open_policy(EvalRequest("", recipe, own, endpoint=endpoint, concurrency=2)).config.env_runners
    assert (runners.engine_options, runners.max_concurrent_trajectories) == ({"timeout_s": 900} | usual, 2)


def test_a_temperature_counts_only_if_it_is_asked_for(files: Path) -> None:
    (files / "warm.yaml").write_text("env_runners: {temperature: 0.7, top_p: 0.9}")
    policy, recipe = str(files / "policy"), str(files / "warm.yaml")
    assert open_policy(EvalRequest(policy, recipe)).decoding == "greedy"
    warm = open_policy(EvalRequest(policy, recipe, ("env_runners.temperature=0.5", "debugging.seed=3")))
    assert (warm.temperature, warm.decoding) == (0.5, "temperature 0.5, top_p 0.9, seed 3")


def test_an_override_counts_beside_an_endpoint(files: Path) -> None:
    endpoint = EndpointSettings(url="http://host/v1", model="big", key_env="")
    own = ("env_runners.max_concurrent_trajectories=3",)
    request = EvalRequest(overrides=own, endpoint=endpoint)
    assert open_policy(request).config.env_runners.max_concurrent_trajectories == 3
    with pytest.raises(
        ConfigError, match=r"got env_runners\.max_concurrent_trajectories=3, which evaluate replaces by 2"
    ):
        open_policy(replace(request, concurrency=2))


@pytest.mark.parametrize("recipe", ["search_r1_7b", "search_r1_grpo_7b", "ragr1_sq_7b", "ragr1_mq_7b"])
def test_published_checkpoints_have_their_formats(files: Path, recipe: str) -> None:
    environment = open_policy(
        EvalRequest(str(files / "policy"), recipe=recipe, index=files / "index")
    ).config.environment
    expected = {"ragr1_sq_7b": ("single", "ragr1", 1), "ragr1_mq_7b": ("comma", "ragr1_json", 3)}
    options = search_options(environment)
    shown = (options.query_format, options.observation_format, options.max_queries_per_turn)
    assert shown == expected.get(recipe, ("single", "searchr1", 1))
    assert (environment.max_turns, options.top_k) == (5, 3)


@pytest.mark.integration
def test_an_endpoint_searches_is_resumed_and_compared(files: Path, tmp_path: Path) -> None:
    reader, out = Reader(), tmp_path / "out.jsonl"
    with served(reader.answer) as url:
        command = ["--endpoint", f"{url}/v1", "--model", "big", "--concurrency", "3", "--out", str(out), "--latency"]
        command += ["--latency-tasks", "2", "--body", '{"user": "me"}']
        found = evaluated(files, *command)
        assert (found["em"], found["f1"], found["rounds"], found["queries"], found["tokens"]) == (1, 1, 1, 1, 12)
        assert (found["policy"], found["num_trained_on"]) == (f"big at {url}/v1", None)
        assert len(reader.bodies) == 1 + 2 * (8 + 2)  # the probe, and two turns per question
        assert {body["user"] for body in reader.bodies} == {"me"}
        assert (set(reader.under_way[: 1 + 2 * 2]), max(reader.under_way)) == ({1}, 3)
        alone, load = found["latency"]
        assert (alone["concurrency"], alone["num_tasks"], load["concurrency"], load["num_tasks"]) == (1, 2, 3, 8)
        assert 0 < alone["median_s"] <= alone["p95_s"]
        assert (load["tokens"], load["rounds"], load["queries"]) == (12.0, 1.0, 1.0)
        assert len(read_scores(tmp_path / "out.alone.jsonl")[1]) == 2
        lines = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:-3]) + lines[-3][:9])  # as a killed command leaves it
        reader.bodies.clear()
        again = evaluated(files, *command, "--against", str(out))
        assert len(reader.bodies) == 1 + 2 * 3
        assert (again["num_tasks"], again["em"], again["against"]["num_tasks"]) == (8, 1.0, 8)
        reader.bodies.clear()
        evaluated(files, *command)  # all is answered: nothing is loaded or asked
        assert reader.bodies == []
        refused = invoke("evaluate", *command, "--tasks", str(files / "tasks.json"), "--index", str(files / "index"))
        assert "is of another evaluation" in refused  # the defaults are other settings


class Caller(Reader):
    """A hosted model that calls the tool ``search`` instead, if it is told of it."""

    def message_of(self, body: dict[str, Any]) -> dict[str, Any]:
        message = super().message_of(body)
        said = body["messages"][-1]
        if "tools" not in body or said["role"] == "tool":
            return message | {"content": message["content"].removeprefix("<answer> ")}
        arguments = json.dumps({"queries": [message["content"].removeprefix("<search> ")]})
        function = {"name": "search", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}


@pytest.mark.integration
def test_an_endpoint_calls_tools(files: Path, tmp_path: Path) -> None:
    caller, out = Caller(), tmp_path / "out.jsonl"
    tools = ["environment.env=tools", "environment.options={top_k: 1}", "env_runners.max_context_tokens=900"]
    with served(caller.answer) as url:
        command = [*tools, "--endpoint", url, "--model", "big", "--out", str(out)]
        found = evaluated(files, *command)
        assert (found["em"], found["rounds"], found["queries"], found["num_tasks"]) == (1, 1, 1, 8)
        probe, call, result, *asked = caller.bodies
        assert ("tools" in probe, call["tools"], result["messages"][-1]["role"]) == (False, result["tools"], "tool")
        assert {len(body["messages"]) for body in asked} == {1, 3}
        task = ["--recipe", str(files / "recipe.yaml"), "--tasks", str(files / "tasks.json")]
        refused = invoke("evaluate", "policy.chat_format=hermes", *command, *task)
        assert "is of another evaluation" in refused


@pytest.mark.integration
def test_an_endpoint_without_tools_is_asked_in_text(files: Path, tmp_path: Path) -> None:
    """The policy of the recipe, whose template writes no calls, is of no account."""
    sections = make_config(files).model_dump()
    sections["policy"]["model"] = str(files / "policy")
    sections["environment"] |= {"env": "tools", "options": {}}
    recipe, reader = tmp_path / "recipe.yaml", Reader()
    recipe.write_text(json.dumps(sections))
    with served(reader.answer) as url:
        command = ["--endpoint", url, "--model", "big", "--recipe", str(recipe), "--tasks", str(files / "tasks.json")]
        refused = invoke("evaluate", *command)
        assert refused.startswith(
            "error: --endpoint: asked to call the tool search, the endpoint answered in text: 'yes'"
        )
        assert len(reader.bodies) == 2
        reader.bodies.clear()
        found = json.loads(invoke("evaluate", "policy.chat_format=hermes", *command, "--json"))
        assert found["num_tasks"] == 8
        assert all("tools" not in body for body in reader.bodies)


@pytest.mark.integration
def test_sampled_answers_are_told_from_greedy_ones(files: Path, tmp_path: Path) -> None:
    reader, out = Reader(), tmp_path / "out.jsonl"
    with served(reader.answer) as url:
        command = ["--endpoint", url, "--model", "big", "--out", str(out)]
        sampled = ["env_runners.temperature=0.7", "env_runners.top_p=0.9", *command]
        assert evaluated(files, *sampled)["decoding"] == "temperature 0.7, top_p 0.9, seed 0"
        assert {(body["temperature"], body["top_p"]) for body in reader.bodies[1:]} == {(0.7, 0.9)}
        task = ["--recipe", str(files / "recipe.yaml"), "--tasks", str(files / "tasks.json")]
        refused = invoke("evaluate", *command, *task)
        assert "decoding 'temperature 0.7, top_p 0.9, seed 0' there, 'greedy' here" in refused
        reader.bodies.clear()
        assert "            decoding  greedy\n" in invoke("evaluate", *command[:-2], *task)
        assert {(body["temperature"], "top_p" in body) for body in reader.bodies} == {(0.0, False)}


@pytest.mark.integration
def test_a_wrong_against_is_noticed_before_anything_is_asked(files: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other.jsonl", tmp_path / "out.jsonl"
    open_scores(other, EvalArguments("policy", "musique", 1, "0f", "search", "indexes/mine", "1a", 8))
    append_score(other, TaskScore("musique/1", "Riga", "answered", 1.0, 1.0, 1.0, 1.0, None, 1, 1, 6, 0.1))
    reader = Reader()
    with served(reader.answer) as url:
        command = ["--endpoint", url, "--model", "big", "--out", str(out), "--against", str(other)]
        task = ["--recipe", str(files / "recipe.yaml"), "--tasks", str(files / "tasks.json")]
        refused = invoke("evaluate", *command, *task)
    assert refused.startswith(f"error: --against: {other} has scores of 1 tasks of musique, and none of the 8 tasks")
    assert (reader.bodies, out.exists()) == ([], False)


@pytest.mark.integration
def test_what_was_answered_before_the_key_was_refused_is_kept(files: Path, tmp_path: Path) -> None:
    reader, out, num_allowed = Reader(), tmp_path / "out.jsonl", 1 + 2 * 3

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(reader.bodies) >= num_allowed:
            return web.json_response({"error": "no more money"}, status=402)
        return await reader.answer(request)

    with served(answer) as url:
        command = ["--endpoint", url, "--model", "big", "--concurrency", "2", "--out", str(out)]
        with pytest.raises(EngineDeadError, match=r"no more money.*; export a valid key"):
            evaluated(files, *command)
        num_kept = len(read_scores(out)[1])
        assert 0 < num_kept <= 3
        num_allowed = 1000
        assert evaluated(files, *command)["num_tasks"] == 8
        assert len(reader.bodies) <= 7 + 1 + 2 * (8 - num_kept)


@pytest.mark.integration
def test_a_question_that_is_asked_again_for_its_latency_searches_again(files: Path) -> None:
    reader, searched = Reader(), []

    async def retrieve(request: web.Request) -> web.StreamResponse:
        queries = (await request.json())["queries"]
        searched.extend(queries)
        found = [{"id": query, "title": query, "text": f"The {query} lies in Riga."} for query in queries]
        return web.json_response({"result": [[one] for one in found]})

    with served(reader.answer) as url, served(retrieve) as server:
        retrieval = [f"retrieval.options={{url: {server}}}", "retrieval.type=http", "retrieval.index="]
        command = [*retrieval, "--endpoint", url, "--model", "big"]
        assert evaluated(files, *command, "--latency", "--latency-tasks", "3")["rounds"] == 1.0
    assert searched[0] == PROBE
    assert sorted(searched[1:]) == sorted([*THINGS, *THINGS[:3]])


@pytest.mark.integration
@pytest.mark.parametrize(("baseline", "em", "rounds"), [("direct", 0.0, 0), ("rag", 1.0, 1), ("single-query", 1.0, 1)])
def test_baselines_at_an_endpoint(files: Path, baseline: str, em: float, rounds: int) -> None:
    reader = Reader()
    with served(reader.answer) as url:
        found = evaluated(
            files, "retrieval.requests.cache_size=0", "--endpoint", url, "--model", "big", "--baseline", baseline
        )
    assert (found["em"], found["rounds"], found["num_tasks"]) == (em, rounds, 8)
    stops = {tuple(body["stop"]) for body in reader.bodies[1:]}
    assert stops == {("</search>", "</answer>") if baseline == "single-query" else ("</answer>",)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate: name a run, a checkpoint, a model folder with --recipe, or --endpoint"),
        (["--endpoint", "http://h/v1"], "--endpoint URL and --model NAME belong together"),
        (["--endpoint", "http://me:pw@h/v1", "--model", "m"], "--endpoint: the address holds a password or a key"),
        (["--endpoint", "h", "--model", "m"], "--endpoint: got 'h', expected an address such as http"),
        (["--endpoint", "http://h", "--model", "m", "--body", "[1]"], "--body: got '[1]', expected a JSON object"),
        (["POLICY", "--recipe", "R", "--endpoint", "http://h", "--model", "m"], "beside --endpoint; name one"),
        (["./nowhere", "--recipe", "search_r1_7b"], "there is no folder ./nowhere; give a run, a model folder"),
        (["POLICY", "--recipe", "search_r2"], "unknown recipe 'search_r2'; did you mean 'search_r1"),
        (["POLICY", "--recipe", "search_r1_7b"], "torch finds no GPU on this machine"),
        (["POLICY", "--recipe", "search_r1_7b", *ON_CPU], "retrieval.corpus: there is no file wiki-18.jsonl"),
        (
            ["POLICY", "--recipe", "quickstart", "--tasks", "TASKS"],
            "no index is named, and the recipe's own passages are not",
        ),
        (["POLICY", "--recipe", "quickstart", "--prompt", "TASKS"], "has no {question}, where the question"),
        (["POLICY", "--recipe", "quickstart", "--prompt", "none.txt"], "--prompt: none.txt cannot be read"),
        (["POLICY", "--recipe", "quickstart", "--out", "none/a.jsonl"], "for --out; make it first"),
        (["POLICY", "env_runners.num_env_runners=4", *RECIPE], "got env_runners.num_env_runners=4, which evaluate"),
        (
            ["POLICY", "retrieval.num_retrievers=4", *RECIPE],
            "got retrieval.num_retrievers=4, which evaluate replaces by 0",
        ),
        (["POLICY", "training.group_size=4", *RECIPE], "got training.group_size, which has no effect"),
        (
            ["POLICY", "retrieval.encoders.num_encoders=4", *RECIPE],
            "got retrieval.encoders.num_encoders, which has no effect",
        ),
        (["POLICY", "policy.model=other", *RECIPE], "got policy.model=other, which evaluate replaces by"),
        (["POLICY", "retrieval.corpus=a.json", "--index", "I", *RECIPE], "no effect where an index is searched"),
        (["POLICY", "env_runners.top_p=0.9", *RECIPE], "no effect on greedy answers; set env_runners.temperature too"),
    ],
)
def test_what_is_refused(files: Path, arguments: list[str], message: str) -> None:
    names = {"POLICY": str(files / "policy"), "TASKS": str(files / "tasks.json")}
    printed = invoke("evaluate", *(names.get(argument, argument) for argument in arguments))
    assert printed.startswith("error: ")
    assert message in printed


def test_an_endpoint_is_not_trained() -> None:
    config = RunConfig()
    runners = config.env_runners.model_copy(update={"engine": "endpoint"})
    with pytest.raises(ConfigError, match=r"env_runners\.engine: got endpoint, which has neither token ids"):
        check_names(config.model_copy(update={"env_runners": runners}))
