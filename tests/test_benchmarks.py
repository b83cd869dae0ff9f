"""The benchmarks' arithmetic, and a small run of what needs no vLLM."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import BENCHMARKS
from benchmarks.learner import ratios as learner
from benchmarks.measurement import LOWER, Goal, Repeats, Sample, measure, quotient, render
from benchmarks.retrieval import sides as retrieval_sides
from benchmarks.rollout import baselines, ceiling, fleet, paced, sides, workload
from benchmarks.rollout import ratios as rollout
from benchmarks.rollout.intervals import uncovered_s, union
from benchmarks.rollout.probes import fond_of_tags, read_weights, sync_pause, tokens_past_stop
from benchmarks.scale import driver
from benchmarks.scale import ratios as scale
from envs.grammars.tags import STOP_TAGS
from ragr1_actors.cli import main as cli
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from retrieval.base import Passage
from retrieval.indexes.manifest import Manifest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["metric", "ratio", "goal", "met", "better", "ours", "theirs", "unit", "repeats", "spread", "machine"]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    texts = [" " + " ".join(workload.words()[:200])]
    make_tiny_policy(directory, texts, seed=0, vocab_size=500, hidden_size=16, num_layers=1, num_heads=2)
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> PolicyTokenizer:
    return PolicyTokenizer(policy_dir)


def test_the_median_repeat_counts_and_the_spread_is_relative_to_it() -> None:
    samples = [quotient(8.0, 10.0), quotient(9.0, 10.0), quotient(12.0, 10.0)]
    found = measure("m", samples, "s", Goal(0.9, at_least=True))
    assert (found.ratio, found.ours, found.theirs, found.repeats) == (0.9, 9.0, 10.0, 3)
    assert found.met is True
    assert found.spread == pytest.approx(0.4 / 0.9)
    assert measure("m", samples, "s", Goal(0.9, at_least=False)).met is True
    assert measure("m", samples, "s", Goal(0.89, at_least=False)).met is False
    assert measure("m", [Sample(0.0, 0.0, 9.0)], "tokens", Goal(0.0, at_least=False)).spread == 0


def test_one_json_object_a_line_with_the_keys_of_the_contract() -> None:
    line = measure("m", [quotient(1.0, 3.0)], "s", Goal(0.5, at_least=False)).to_json()
    assert "\n" not in line
    assert list(json.loads(line)) == KEYS
    assert json.loads(line)["ratio"] == 0.33333
    without_goal = json.loads(measure("m", [quotient(1.0, 3.0)], "s", LOWER).to_json())
    assert (without_goal["goal"], without_goal["met"]) == (None, None)
    assert render([measure("m", [quotient(1.0, 3.0)], "s", LOWER)], "title").row_count == 1


def test_an_index_build_is_compared_with_its_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_sides, "NUM_ENCODED_QUICK", 24)
    found = retrieval_sides.World(tmp_path, quick=True).index_build(0)
    assert Manifest.read(tmp_path / "built-0").count == 24
    assert found.ours > 0 and found.theirs > 0


def test_time_of_one_set_of_intervals_outside_another() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert uncovered_s([(0, 4), (3, 6)], [(1, 2), (1.5, 5)]) == pytest.approx(2.0)
    assert uncovered_s([(0, 1)], []) == 1
    assert uncovered_s([], [(0, 1)]) == 0


def test_a_side_counts_its_tokens_and_what_its_searches_hid() -> None:
    def record(name: str, turn: int, start: float, end: float, tokens: int) -> sides.TurnRecord:
        return sides.TurnRecord(name, turn, [], Sampling(9), tokens, (start, end))

    turns = [record("a", 0, 0, 2, 20), record("b", 0, 1, 5, 40), record("a", 1, 3, 4, 7)]
    run = sides.SideRun(5.0, turns, [(2, 3), (4.5, 6)])
    assert run.num_tokens == 67
    assert run.tokens_per_s == pytest.approx(67 / 5)
    assert run.search_s == 2.5
    assert run.hidden == Sample(1 - 1.0 / 2.5, 1.0, 2.5)
    assert run.waiting == Sample((10.0 - 2.5 - 7.0) / 10.0, 10.0 - 2.5 - 7.0, 10.0)


def test_the_workload_is_the_stated_one_and_the_same_everywhere() -> None:
    plans = [workload.plan(f"t/{index}") for index in range(500)]
    tokens = [count for plan in plans for count in plan.turn_tokens]
    assert plans == [workload.plan(f"t/{index}") for index in range(500)]
    assert {len(plan.turn_tokens) for plan in plans} == {2, 3, 4}
    assert (min(tokens), max(tokens)) == (workload.MIN_TURN_TOKENS, workload.MAX_TURN_TOKENS)
    assert median(tokens) == pytest.approx(workload.TURN_TOKENS_MEDIAN, rel=0.1)
    latencies = [workload.search_latency_s(plan.queries(0)) for plan in plans]
    assert median(latencies) == pytest.approx(workload.SEARCH_MEDIAN_S, rel=0.15)
    assert len(set(workload.words())) == workload.NUM_WORDS


class BabblingEngine:
    """Generates as many tokens as it may."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        num = sampling.max_new_tokens
        assert sampling.stop == STOP_TAGS
        assert on_text is not None  # as in production, the environment reads the partial text
        return Completion([300] * num, [0.0] * num, [0] * num, "babble", FinishReason.LENGTH)

    def release(self, request_id: str) -> None:
        pass

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.last_pause_s = 0.25

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeLLM:
    """The part of ``AsyncLLM`` that the other sides use."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: dict[str, list[int]], params: Any, request_id: str) -> AsyncIterator[Any]:
        self.prompts.append(prompt["prompt_token_ids"])
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[300] * params["max_tokens"])])


async def test_all_sides_take_the_same_turns(
    policy_dir: Path, tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "SEARCH_MEDIAN_S", 0.001)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    names = [f"bench/{index}" for index in range(5)]
    plans = [workload.plan(name) for name in names]
    config = sides.make_config().model_copy(
        update={"env_runners": sides.make_config().env_runners.model_copy(update={"max_context_tokens": 100_000})}
    )
    ours = await sides.run_loop(config, str(policy_dir), BabblingEngine(), names)
    assert ours.num_tokens == sum(sum(plan.turn_tokens) for plan in plans)
    assert len(ours.searches) == sum(plan.num_searches for plan in plans)
    llm = FakeLLM()
    bare = await baselines.replay(llm.generate, ours.turns, num_in_flight=2)
    assert sorted(map(len, llm.prompts)) == sorted(len(turn.prompt_ids) for turn in ours.turns)
    one_by_one = await baselines.lockstep(llm.generate, tokenizer, ours.turns, batched_search=False)
    batched = await baselines.lockstep(llm.generate, tokenizer, ours.turns, batched_search=True)
    assert bare.num_tokens == one_by_one.num_tokens == batched.num_tokens == ours.num_tokens
    assert len(one_by_one.searches) == len(ours.searches)
    assert len(batched.searches) == max(plan.num_searches for plan in plans)


async def test_a_paced_step_takes_as_long_for_any_batch(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced, "STEP_S", 0.01)
    monkeypatch.setattr(paced, "PREFILL_S", 0.001)
    engine = paced.PacedEngine(tokenizer)
    heard: list[str] = []

    async def timed(index: int, length: int, tokens: int) -> float:
        started = time.perf_counter()
        told = heard.append if index == 0 else None
        found = await engine.generate([index] * length, Sampling(tokens), request_id="", on_text=told)
        assert len(found.token_ids) == tokens
        return time.perf_counter() - started

    alone = await timed(0, 100, 20)
    assert alone >= 0.1 + 20 * 0.01  # the prompt, then the steps
    assert len(heard) == 20 and heard[-1].startswith(heard[3])
    await engine.reset_prefix_cache()
    batch = await asyncio.gather(*(timed(1 + index, 1, 20 - index) for index in range(10)))
    assert all(seconds >= (20 - index) * 0.01 for index, seconds in enumerate(batch))
    assert max(batch) < 10 * 11 * 0.01, "the steps of one row came after those of another"
    monkeypatch.setattr(paced, "PREFILL_S", 0.02)
    await timed(50, 64, 20)
    assert 0.01 + 6 * 0.02 <= await timed(50, 90, 1) < 90 * 0.02  # 84 of its tokens are cached


@pytest.mark.slow
def test_the_ceiling_counts_every_token_of_real_trajectories(policy_dir: Path) -> None:
    samples = ceiling.loop_samples(policy_dir, 2)
    sample = samples["loop_ceiling"]
    assert sample.ours > 2 * fleet.GROUP_SIZE * workload.MIN_TURNS * workload.MIN_TURN_TOKENS
    assert sample.ratio == pytest.approx(sample.ours / sample.theirs)
    assert sample.ratio > 100  # far from the goal: this machine may be busy, and two groups take 0.04 s
    assert samples["loop_cost"].ours == sample.theirs
    assert samples["loop_cost"].ratio > 1, "the engine alone took longer than the loop with it"


def test_the_paced_loops_take_the_same_turns(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "STEP_S", 0.0002)
    monkeypatch.setattr(workload, "SEARCH_MEDIAN_S", 0.002)
    monkeypatch.setattr(sides, "MAX_CONTEXT_TOKENS", 100_000)
    sample = {metric: samples[0] for metric, samples in rollout.run_paced(policy_dir, 8, Repeats(1)).items()}
    assert set(sample) == {"vs_lockstep_paced", "vs_batched_paced", "lockstep_waiting"}
    assert all(len(samples) == 1 for samples in rollout.run_paced(policy_dir, 2, Repeats(1)).values())
    assert 0 < sample["lockstep_waiting"].ratio < 1
    assert sample["vs_lockstep_paced"].ours == sample["vs_batched_paced"].ours > 0


def test_tokens_behind_the_stop_string_are_counted(tokenizer: PolicyTokenizer) -> None:
    ids = tokenizer.encode("ab</search>cd")
    assert tokens_past_stop(ids, STOP_TAGS, tokenizer) == 2
    assert tokens_past_stop(ids[:-2], STOP_TAGS, tokenizer) == 0
    assert tokens_past_stop(ids[:-3], STOP_TAGS, tokenizer) is None
    assert tokens_past_stop(ids, ("bx", "b<"), tokenizer) == 2  # made up of two tokens


async def test_the_pause_is_divided_by_the_time_of_a_copy(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    weights = read_weights(policy_dir)
    sample = await sync_pause(BabblingEngine(), weights, 1)
    assert sample.ours == 0.25
    assert sample.ratio == sample.ours / sample.theirs > 1
    tag = tokenizer.encode("</search>")
    fond = fond_of_tags(weights, tokenizer)
    assert (fond["lm_head.weight"][tag] == 3 * weights["lm_head.weight"][tag]).all()
    assert (fond["lm_head.weight"][300] == weights["lm_head.weight"][300]).all()


def test_the_scripts_of_the_fleet_are_as_long_as_drawn(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    scripts = fleet.Scripts(fleet.TURN_TOKENS_MEDIAN)
    assert scripts["fleet/3@0#0/1"] == scripts["fleet/3@7#0/1"] != scripts["fleet/3@0#0/2"]
    *searches, answer = scripts["fleet/3@0#0/1"]
    assert all(turn.endswith("</search>") for turn in searches)
    assert answer.endswith("</answer>")


def test_a_fleet_is_measured_until_its_load_runs_out(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TOKEN_LATENCY_S", 0.0)
    monkeypatch.setattr(workload, "SEARCH_MEDIAN_S", 0.001)
    runner = EnvRunnerGroup(fleet.make_config(0), policy_dir, workload.SlowRetriever())
    found = fleet.run_fleet(runner, 2, fleet.SLOTS + 1)
    runner.stop()
    assert found.groups_per_s == pytest.approx(2 / found.wall_s)  # the last ``SLOTS`` of each runner are left out
    assert found.cpu_s > 0


def test_every_metric_has_a_goal_or_says_that_it_has_none() -> None:
    assert set(rollout.GOALS) == set(rollout.UNITS) == set(rollout.METRICS)
    assert all(metric in (rollout.__doc__ or "") for metric in rollout.METRICS)
    assert all(metric in (scale.__doc__ or "") for metric in scale.METRICS)
    with pytest.raises(UserError, match="got --only no_such, expected one of engine_parity, "):
        next(rollout.run(only="no_such"))


@pytest.mark.slow
def test_the_walks_of_a_trajectory_and_of_a_policy_version_do_not_grow() -> None:
    printed = subprocess.run([sys.executable, "-m", "benchmarks.walks"], cwd=ROOT, capture_output=True, text=True)
    sizes = re.findall(r"^(trajectory|policy version): (\d+) files, (\d+) carriers$", printed.stdout, re.MULTILINE)
    assert [walk for walk, *_ in sizes] == ["trajectory", "policy version"], printed.stderr
    (_, files, carriers), (_, files_of_weights, _) = sizes
    assert (int(files) <= 20, int(carriers) <= 26, int(files_of_weights) <= 9) == (True,) * 3, printed.stdout
    assert "  learners/packing.py" in printed.stdout and "  learners.packing.MicroBatch" in printed.stdout


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    assert result.exception is None, result.exception
    return result.output


def test_an_answer_is_the_same_up_to_the_rounding_of_its_scores() -> None:
    riga, oslo = Passage("p1", "Riga", "by the sea", 0.5), Passage("p2", "Oslo", "in the north", 0.25)
    assert retrieval_sides.same_answer([riga, oslo], [replace(riga, score=0.5 + 1e-8), oslo])
    assert not retrieval_sides.same_answer([riga, oslo], [replace(riga, score=0.51), oslo])
    assert not retrieval_sides.same_answer([riga, oslo], [oslo, riga])
    assert not retrieval_sides.same_answer([riga], [replace(riga, text="by a lake")])
    assert not retrieval_sides.same_answer([riga], [riga, oslo])


@pytest.mark.ray
def test_the_traffic_of_a_fleet_goes_through_a_driver(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_ACTORS": 1, "NUM_GROUPS": 8, "PER_RUNNER": 2, "NUM_RUNNERS": 8, "GROUP_SIZE": 2}.items():
        monkeypatch.setattr(driver, name, value)
    real = driver.RealTraffic(policy_dir, groups_per_s=16.0)
    try:
        found = real.measure(3)
    finally:
        real.close()
    assert 0 < found.groups_per_s < 17  # at most 8 groups in flight, of half a second each
    assert 0 < found.cpu_s_per_group < 1


def test_bench_needs_a_checkout_and_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("rollout") == (
        f"error: no benchmarks/ in {tmp_path}; run ragr1 bench in the folder of a checkout of the project"
    )
    monkeypatch.chdir(ROOT)
    assert invoke("no_such") == f"error: got bench no_such, expected one of {', '.join(BENCHMARKS)}"


def test_bench_prints_json_or_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(learner, "NUM_PLANNED", 16)
    arguments = ("learner", "--only", "prefix_sharing", "--repeats", "2", "--quick")
    (line,) = invoke(*arguments, "--json").splitlines()
    found = json.loads(line)
    assert list(found) == KEYS
    assert (found["metric"], found["repeats"]) == ("prefix_sharing", 2)
    monkeypatch.setattr(cli, "console", Console(width=200))
    table = invoke(*arguments)
    assert learner.describe() in table
    assert "prefix_sharing" in table
