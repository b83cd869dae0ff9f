"""Tools are functions and classes. The environment answers their calls, and says what is wrong with a call."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from fakes import OnePassage
from tool_templates import write_tool_family
from typer.testing import CliRunner

from envs.base import EnvContext
from envs.checker import check_env, check_tool
from envs.grammars.calls import GRAMMARS
from envs.options import ToolOptions
from envs.sources import TeacherSource
from envs.tasks.demonstrations import as_message
from envs.tools.base import Arguments, FunctionTool, Tool, ToolResult, make_tools, schema_of
from envs.tools.env import LAST_TURN_NOTICE, MALFORMED_NOTICE, NO_ANSWER_NOTICE, ToolEnv
from ragr1_actors.cli.main import app
from ragr1_actors.core.config import EnvironmentSettings, EnvRunnerSettings, SamplerConfig
from ragr1_actors.core.errors import ConfigError, RetrievalError, ServiceError, ToolError
from ragr1_actors.core.resolve import resolve
from ragr1_actors.core.types import CallRequest, Completion, FinishReason, StopReason, Task, TokenKind, Trajectory
from ragr1_actors.planning.preflight import check_names, check_tokenizer
from ragr1_actors.rollout.chat_format import make_chat_format
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from retrieval.base import Passage

HERE = __name__
TASK = Task("t", "Where was Ana born?", ("Riga",))
WRITE = GRAMMARS["hermes"].write


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


async def slow(name: str) -> dict[str, str]:
    """Look a name up.

    Args:
        name: Whose.
    """
    await asyncio.sleep(0)
    if name == "wrong":
        raise ToolError(f"there is no {name}")
    if name == "away":
        raise ServiceError("http://10.0.0.9: gone")
    if name == "broken":
        raise KeyError(name)
    return {"name": name}


def no_docs(a: int) -> int:
    return a


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Add.

    Args:
        a: One.
    """
    return a


def no_description(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a + b


def no_json(a: int) -> object:
    """Return what is no JSON.

    Args:
        a: One.
    """
    return {a}


class Counter(Tool):
    """Counts its calls, per trajectory, and how many it gets at once."""

    schema = schema_of(add)
    closed = 0

    def __init__(self, context: EnvContext, options: ToolOptions) -> None:
        super().__init__(context, options)
        self.num_calls = 0

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        self.num_calls += len(calls)
        return [ToolResult(f"{len(calls)} of {self.num_calls}", ()) for _ in calls]

    def close(self) -> None:
        Counter.closed += 1


class Finds(OnePassage):
    """Finds a passage that names the query, and notes what is asked at once."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def search(self, queries: list[str], k: int) -> list[Any]:
        self.asked.append(list(queries))
        return [[Passage(f"p/{query}", query, f"{query} was born in Riga.", 0.5)] for query in queries]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("tools") / "policy", "qwen2.5")


def call(name: str, /, **arguments: Any) -> CallRequest:
    return CallRequest(name, arguments)


async def play(
    tokenizer: PolicyTokenizer, turns: list[str], tools: list[str], retriever: Any = None, **more: Any
) -> Trajectory:
    environment = EnvironmentSettings(env="tools", tools=tools, max_turns=4, **more)
    config = SamplerConfig(environment=environment, env_runners=EnvRunnerSettings(max_context_tokens=20_000))
    request = GroupRequest("t", TASK, 1, 1.0)
    runner = EnvRunner(config, tokenizer, retriever or Finds(), ScriptedEngine({}, list))  # type: ignore[arg-type]
    runner.engine = ScriptedEngine({"t/0": turns}, runner._chat.turn_ids, turn_start=tokenizer.turn_start)
    (found,) = (await runner.sample_group(request)).trajectories
    return found


def text(tokenizer: PolicyTokenizer, found: Trajectory, kind: TokenKind) -> str:
    decoded: str = tokenizer._pieces.decode(found.token_ids[found.kinds == kind].tolist(), skip_special_tokens=False)
    return decoded


# -- tools -------------------------------------------------------------------------------------------------------------


def test_a_function_says_what_it_takes() -> None:
    schema = schema_of(add)["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "Another."}
    assert "return" not in schema


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docs, "no_docs because it has no docstring"),
        (no_hint, "Argument a is missing a type hint"),
        (no_description, "no description for the argument 'b'"),
    ],
)
def test_a_function_without_a_hint_or_a_description_is_refused_with_its_line(function: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema_of(function)
    assert problem in str(caught.value)
    assert re.match(rf"{function.__name__} \(.*test_envs_tools\.py, line \d+\): ", str(caught.value))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([f"{HERE}:TASK"], "is neither a function nor a subclass of Tool"),
        ([f"{HERE}:add", f"{HERE}:Counter"], "two tools are named add"),
        ([f"{HERE}:nothing"], "has no 'nothing'"),
        (["serch"], "expected one of crop, open_page, read_section, search, zoom or my_module"),
    ],
)
def test_what_is_no_tool_is_refused(names: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_tools(names, EnvContext(Finds(), list), ToolOptions())  # type: ignore[arg-type]


async def test_what_a_function_returns_is_text_or_json() -> None:
    context = EnvContext(Finds(), list)  # type: ignore[arg-type]
    (found,) = await FunctionTool(slow, context, ToolOptions()).call([{"name": "Ana"}])
    assert json.loads(found.text) == {"name": "Ana"}
    assert (found.calls[0].tool, found.calls[0].arguments, found.calls[0].result) == (
        "slow",
        {"name": "Ana"},
        found.text,
    )
    with pytest.raises(ConfigError, match=r"no_json \(.*line \d+\) returned \{1\}, expected text or what JSON"):
        await FunctionTool(no_json, context, ToolOptions()).call([{"a": 1}])


def says(name: str) -> str:
    """Say a long text.

    Args:
        name: The word that is repeated.
    """
    if name == "wrong":
        raise ToolError("no " * 500)
    return f"{name} " * 500


@pytest.mark.parametrize("name", ["Ana", "wrong"])
async def test_a_result_is_cut_to_the_budget(name: str) -> None:
    context = EnvContext(Finds(), str.split)  # type: ignore[arg-type]
    options = ToolOptions(max_observation_tokens=20)
    (found,) = await FunctionTool(says, context, options).call([{"name": name}])
    word = "no" if name == "wrong" else name
    assert found.text == " ".join([word] * 13) + "\n(The rest of the result is cut.)"
    assert found.calls[0].result == found.text and len(found.text.split()) == 20
    (whole,) = await FunctionTool(slow, context, options).call([{"name": "Ana"}])
    assert "cut" not in whole.text


def counts(number: int, places: Optional[list[int]] = None, kind: Literal["a", "b"] | None = None) -> str:  # noqa: UP045
    """Count.

    Args:
        number: How often.
        places: Where.
        kind: Of what.
    """
    return f"{list(range(number))} {places} {kind}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"number": 2.0, "places": [1.0, 2]}, "[0, 1] [1, 2] None"),
        ({"number": 1, "places": None, "kind": None}, "[0] None None"),
        ({"number": 1, "kind": "b"}, "[0] None b"),
        ({"number": 1.5}, "number: 1.5 is not of type 'integer'"),
        ({"number": 1, "kind": "c"}, "kind: 'c' is not one of ['a', 'b', None]"),
        ({"number": None}, "number: None is not of type 'integer'"),
        ({"number": 1, "often": 2}, "there is no argument often; the arguments are: number, places, kind"),
    ],
)
async def test_arguments_fit_a_function_or_are_refused(arguments: dict[str, Any], said: str) -> None:
    tool = FunctionTool(counts, EnvContext(Finds(), list), ToolOptions())  # type: ignore[arg-type]
    if problem := tool.problem_of(arguments):
        assert problem == said
    else:
        assert (await tool.call([arguments]))[0].text == said


def takes_a_path(path: Path) -> str:
    """Open.

    Args:
        path: Where.
    """
    return str(path)


def takes_many(*names: str) -> str:
    """Open.

    Args:
        names: Which.
    """
    return str(names)


def by_place(name: str, /) -> str:
    """Open.

    Args:
        name: Which.
    """
    return name


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (takes_a_path, "path has the type Path, expected text, a number"),
        (takes_many, r"got \*names: .*str.*, expected arguments that can be given by name"),
        (by_place, "expected arguments that can be given by name"),
        (functools.reduce, "reduce"),
    ],
)
def test_a_function_that_no_call_can_satisfy_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        schema_of(function)


def halves(name: str) -> str:
    """Say.

    Args:
        name: What.
    """
    if name == "wrong":
        raise ToolError("half \ud83d")
    return "half \ud83d"


@pytest.mark.parametrize("name", ["right", "wrong"])
async def test_half_of_a_surrogate_pair_is_replaced(name: str) -> None:
    context = EnvContext(Finds(), list)  # type: ignore[arg-type]
    (found,) = await FunctionTool(halves, context, ToolOptions()).call([{"name": name}])
    assert found.text == "half \ufffd"


# -- the environment ---------------------------------------------------------------------------------------------------


async def test_calls_of_a_turn_are_answered_together_and_the_text_is_the_answer(tokenizer: PolicyTokenizer) -> None:
    retriever = Finds()
    turns = [
        WRITE([call("search", queries=["Ana", "Bo"]), call("add", a=1, b=2), call("search", queries=["Cy", "ana"])]),
        "<think>so</think>Riga",
    ]
    found = await play(tokenizer, turns, ["search", f"{HERE}:add"], retriever)
    assert (found.stop_reason, found.answer, found.metrics["em"]) == (StopReason.ANSWERED, "Riga", 1.0)
    assert found.metrics["rows"] == 1.0
    assert [one.action for one in found.turns] == ["call", "answer"]
    assert sum(len(asked) for asked in retriever.asked) == 3  # "ana" is there already
    assert [(one.tool, one.arguments) for one in found.turns[0].calls] == [
        ("search", {"query": "Ana", "k": 3}),
        ("search", {"query": "Bo", "k": 3}),
        ("add", {"a": 1, "b": 2}),
        ("search", {"query": "Cy", "k": 3}),
    ]
    assert (found.metrics["queries"], found.metrics["rounds"], found.metrics["duplicate_queries"]) == (3.0, 1.0, 1.0)
    read = text(tokenizer, found, TokenKind.OBSERVATION)
    assert read.count("<tool_response>") == read.count("</tool_response>") == 3
    assert "(1) Ana: Ana was born in Riga." in read
    assert "\n3\n" in read


async def test_searches_begin_while_the_turn_is_sampled(tokenizer: PolicyTokenizer) -> None:
    retriever = Finds()
    first, second = call("search", queries=["Ana"]), call("search", queries=["Bo"])
    environment = EnvironmentSettings(env="tools", max_turns=4)
    config = SamplerConfig(environment=environment)
    runner = EnvRunner(config, tokenizer, retriever, ScriptedEngine({}, list))  # type: ignore[arg-type]

    class Slow(ScriptedEngine):
        async def generate(self, ids: Any, sampling: Any, *, request_id: str, on_text: Any = None) -> Completion:
            on_text(WRITE([first]) + "\n<tool_c")
            await asyncio.sleep(0.01)
            assert retriever.asked == [["Ana"]]
            token_ids = runner._chat.turn_ids(WRITE([first, second]))
            zeros = [0] * len(token_ids)
            return Completion(token_ids, [0.0] * len(zeros), zeros, WRITE([first, second]), FinishReason.STOP)

    runner.engine = Slow({}, list)  # type: ignore[arg-type]
    context = EnvContext(retriever, tokenizer.encode, parser=runner._chat.parser)
    env = runner._env_class(environment, context)
    await env.reset(TASK)
    completion = await runner.engine.generate([], None, request_id="", on_text=env.peek)  # type: ignore[arg-type]
    result = await env.act(completion)
    assert retriever.asked == [["Ana"], ["Bo"]]
    assert result.calls[0].waited_s == 0.0
    env.close()


SEARCHED = WRITE([call("search", queries=["Ana"])])


@pytest.mark.parametrize(
    ("first", "action"),
    [(SEARCHED + "\n<tool_call>\n{", "malformed"), (WRITE([call("none"), call("search", queries=["Ana"])]), "call")],
)
async def test_a_search_of_a_turn_that_made_no_call_is_abandoned(first: str, action: str) -> None:
    class Fails(Finds):
        async def search(self, queries: list[str], k: int) -> list[Any]:
            found = await super().search(queries, k)
            if len(self.asked) == 1:
                raise RetrievalError("down")
            return found

    retriever, settings = Fails(), EnvironmentSettings(env="tools", options={"max_calls_per_turn": 1})
    env = ToolEnv(settings, EnvContext(retriever, list, parser=GRAMMARS["hermes"].parser))
    await env.reset(TASK)
    for turn, expected in ((first, action), (SEARCHED, "call")):
        env.peek(turn)
        await asyncio.sleep(0)  # the search begins
        assert (await env.act(Completion([1], [0.0], [0], turn, FinishReason.STOP))).action == expected
    assert retriever.asked == [["Ana"], ["Ana"]]


async def test_wrong_calls_are_results_that_the_policy_reads(tokenizer: PolicyTokenizer) -> None:
    wrong = [
        call("serch", queries=["Ana"]),
        call("search", query="Ana"),
        call("search", queries="Ana"),
        call("add", a="x"),
        call("slow", name="wrong"),
    ]
    found = await play(tokenizer, [WRITE(wrong), "Riga"], ["search", f"{HERE}:add", f"{HERE}:slow"])
    assert found.stop_reason is StopReason.ANSWERED
    assert found.metrics["tool_errors"] == 5.0
    assert (found.metrics["rounds"], found.metrics["queries"]) == (0.0, 0.0)  # none of them searched
    read = text(tokenizer, found, TokenKind.OBSERVATION)
    assert "There is no tool named serch. The tools are: search, add, slow." in read
    assert "The arguments of search are wrong: 'queries' is a required property" in read
    assert "The arguments of search are wrong: queries: 'Ana' is not of type 'array'" in read
    assert "The arguments of add are wrong: a: 'x' is not of type 'integer'" in read
    assert "\nthere is no wrong\n" in read
    assert [one.tool for one in found.turns[0].calls] == ["serch", "search", "search", "add", "slow"]


@pytest.mark.parametrize(
    ("name", "reason", "error"),
    [
        ("away", StopReason.SERVICE_FAILED, "http://10.0.0.9: gone"),
        ("broken", StopReason.ENV_ERROR, "test_envs_tools.py, line"),
    ],
)
async def test_other_errors_of_a_tool_end_the_trajectory(
    tokenizer: PolicyTokenizer, name: str, reason: StopReason, error: str
) -> None:
    found = await play(tokenizer, [WRITE([call("slow", name=name)]), "Riga"], [f"{HERE}:slow"])
    assert found.stop_reason is reason
    assert error in found.error


async def test_turns_that_are_no_call_and_no_answer_are_said(tokenizer: PolicyTokenizer) -> None:
    turns = ["<tool_call>\n{'name'", "<think>I wonder", "  ", "Riga"]
    found = await play(tokenizer, turns, ["search"])
    assert [one.action for one in found.turns] == ["malformed"] * 3 + ["answer"]
    assert found.metrics["malformed"] == 3.0
    read = text(tokenizer, found, TokenKind.NOTICE)
    assert read.count(MALFORMED_NOTICE) == 2
    assert NO_ANSWER_NOTICE + LAST_TURN_NOTICE in read
    assert read.count("<|im_start|>user\n") + text(tokenizer, found, TokenKind.OBSERVATION).count("user\n") == 3


async def test_a_call_in_the_last_turn_is_not_answered(tokenizer: PolicyTokenizer) -> None:
    retriever = Finds()
    found = await play(tokenizer, [WRITE([call("search", queries=[str(n)])]) for n in range(4)], ["search"], retriever)
    assert found.stop_reason is StopReason.MAX_TURNS
    assert len(retriever.asked) == 3
    assert found.metrics["unanswered_call"] == 1.0
    assert text(tokenizer, found, TokenKind.NOTICE).startswith(LAST_TURN_NOTICE.strip())


async def test_calls_over_the_limit_get_a_result_that_says_so(tokenizer: PolicyTokenizer) -> None:
    turns = [WRITE([call("add", a=n) for n in range(3)]), WRITE([call("search", queries=["a", "b"])]), "Riga"]
    tools = [f"{HERE}:add", "search"]
    options = {"max_calls_per_turn": 2, "max_queries_per_turn": 1}
    found = await play(tokenizer, turns, tools, options=options)
    assert [one.result for one in found.turns[0].calls] == ["0", "1", "At most 2 calls of one turn are answered."]
    assert [one.arguments["query"] for one in found.turns[1].calls] == ["a"]
    assert found.metrics["queries_over_limit"] == 1.0


async def test_a_class_gets_all_calls_of_a_turn_and_lives_as_long_as_its_trajectory(tokenizer: PolicyTokenizer) -> None:
    Counter.closed = 0
    turns = [WRITE([call("add", a=1), call("add", a=2)]), WRITE([call("add", a=3)]), "Riga"]
    for _ in range(2):
        found = await play(tokenizer, turns, [f"{HERE}:Counter"])
        read = text(tokenizer, found, TokenKind.OBSERVATION)
        assert read.count("2 of 2") == 2
        assert read.count("1 of 3") == 1
    assert Counter.closed == 2


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3.5", "mistral"])
async def test_a_conversation_of_a_teacher_is_played(tmp_path: Path, family: str) -> None:
    def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}

    calls = [called("search", {"queries": ["Ana", "Bo"]}), called("add", {"a": 1, "b": 2})]
    record = {
        "messages": [
            {"role": "user", "content": TASK.question},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "Ana was born in Oslo."},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Riga"},
        ]
    }
    (tmp_path / "teacher.json").write_text(json.dumps(record), encoding="utf-8")
    source = TeacherSource(EnvironmentSettings(env="tools"), tmp_path / "teacher.json")
    (task,) = source.tasks("train")
    tokenizer = write_tool_family(tmp_path / "policy", family)
    chat = make_chat_format("auto", tokenizer)
    turns = [chat.write(as_message(turn, "lines")) for turn in source.demonstrate(task, random.Random(0))]
    found = await play(tokenizer, turns, ["search", f"{HERE}:add"])
    assert (found.stop_reason, found.answer) == (StopReason.ANSWERED, "Riga"), found.error
    assert found.metrics["rows"] == 1.0
    assert [one.tool for one in found.turns[0].calls] == ["search", "search", "add"]
    assert found.turns[0].calls[2].result == "3"
    read = text(tokenizer, found, TokenKind.OBSERVATION)
    assert "Ana was born in Riga" in read
    assert "Oslo" not in read


def test_tools_need_a_format_with_calls(tmp_path: Path) -> None:
    tokenizer = write_tool_family(tmp_path / "policy", "qwen2.5")
    config = SamplerConfig(environment=EnvironmentSettings(env="tools"))
    tags = config.model_copy(update={"policy": config.policy.model_copy(update={"chat_format": "tags"})})
    runner = EnvRunner(tags, tokenizer, Finds(), ScriptedEngine({}, list))  # type: ignore[arg-type]
    (found,) = asyncio.run(runner.sample_group(GroupRequest("t", TASK, 1, 1.0))).trajectories
    assert "environment.env: tools needs a chat format that writes calls; set policy.chat_format" in found.error


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"environment": {"env": "tools", "tools": [f"{HERE}:no_docs"]}}, "no_docs"),
        (
            {"environment": {"env": "tools", "tools": ["serch"]}},
            "got 'serch', expected one of crop, open_page,",
        ),
        (
            {"environment": {"env": "tools"}, "policy": {"chat_format": "pythonic"}},
            "got pythonic, but the chat template writes hermes; set it to auto",
        ),
    ],
)
def test_what_is_wrong_is_said_before_a_run(
    tmp_path: Path, tokenizer: PolicyTokenizer, changes: dict[str, Any], problem: str
) -> None:
    changes.setdefault("policy", {})["model"] = str(tokenizer._policy_dir)
    config = resolve(changes)
    with pytest.raises(ConfigError, match=problem):
        check_tokenizer(config)
        check_names(config)


class Short(Counter):
    """Answers one call too few."""

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        return []


class NoSchema(Counter):
    """Has a schema that is none."""

    schema = {"type": "function", "function": {"name": "odd", "parameters": {"type": "thing"}}}  # noqa: RUF012


async def asks(kind: Literal["city", "person"], names: list[str]) -> str:
    """Ask for names.

    Args:
        kind: Of what.
        names: Which.
    """
    return f"{kind} {names}"


@pytest.mark.parametrize("name", ["search", f"{HERE}:add", f"{HERE}:asks", f"{HERE}:Counter"])
def test_a_tool_that_works_has_no_fault(name: str) -> None:
    checks = asyncio.run(check_tool(name, EnvironmentSettings()))
    assert [one.problem for one in checks] == ["", ""]


def test_a_tool_is_tried_with_arguments_that_fit_its_schema() -> None:
    (_, tried) = asyncio.run(check_tool(f"{HERE}:asks", EnvironmentSettings()))
    assert tried.name == 'it answers asks({"kind": "city", "names": ["lamp"]})'


@pytest.mark.parametrize(
    ("name", "number", "problem"),
    [
        ("Short", 1, "returned [] for one call, expected a list with a ToolResult for each call"),
        ("NoSchema", 0, "'thing' is not valid under any of the given schemas"),
        ("no_json", 1, "returned {1}, expected text or what JSON can hold"),
    ],
)
def test_what_is_wrong_with_a_tool_is_said_with_its_line(name: str, number: int, problem: str) -> None:
    found = asyncio.run(check_tool(f"{HERE}:{name}", EnvironmentSettings()))[number]
    assert problem in found.problem
    printed = CliRunner().invoke(app, ["check", "tool", f"{HERE}:{name}"])
    assert printed.exit_code == 1


async def test_the_environment_of_tools_passes_its_own_check() -> None:
    assert [one.problem for one in await check_env(ToolEnv, EnvironmentSettings(env="tools"))] == [""] * 8


@pytest.mark.parametrize("items", [True, [{"type": "integer"}]])
async def test_a_schema_without_one_schema_of_items_leaves_numbers_as_they_are(items: Any) -> None:
    parameters = {"type": "object", "properties": {"places": {"items": items}}}
    schema = {"type": "function", "function": {"name": "counts", "parameters": parameters}}
    tool = FunctionTool(lambda **given: str(given), EnvContext(Finds(), list), ToolOptions(), schema)  # type: ignore[arg-type]
    assert (await tool.call([{"places": [1.0]}]))[0].text == "{'places': [1.0]}"
