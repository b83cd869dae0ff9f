"""The whole loop on a world of eight sentences: it learns, is reproducible, resumes exactly, and stops on a signal."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from small_world import (
    PLACES,
    SHORT,
    THINGS,
    descendants,
    deterministic,
    ended,
    make_config,
    make_files,
    make_recipe,
    started,
    wait_for,
)

from envs.base import ENVS, EnvContext
from envs.measures import RewardContext
from envs.search import SearchEnv
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import EnvironmentSettings, PolicySettings, RunConfig
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.disk.learner_state import read_tensors
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.process.interrupts import InterruptGuard
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import Completion, FinishReason, Message, OnText, Sampling, Task, TokenKind, Trajectory
from ragr1_actors.evaluation.asking import ask
from ragr1_actors.evaluation.evaluate import evaluate
from ragr1_actors.planning.prepare import prepare
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, GroupSummary
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.batches import rollout_metrics
from ragr1_actors.training.training_run import TrainingRun


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("world"))


def mixed(task: Task, rng: random.Random) -> list[str]:
    """Guess a place six times in ten, right one time in four; otherwise look it up."""
    if rng.random() < 0.6:
        return [f"<answer> {rng.choice(PLACES)}</answer>"]
    thing = task.task_id.split("/")[1]
    return [f"<search> {thing}</search>", f"<answer> {task.golden_answers[0]}</answer>"]


@contextmanager
def algorithm(config: RunConfig, run_dir: Path) -> Iterator[Algorithm]:
    built = Algorithm.start(config, run_dir, replace(prepare(config, run_dir), demonstrate=mixed))
    try:
        yield built
    finally:
        built.stop()


FAMILY = ("ppo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "dpo", "ipo")


@pytest.fixture(scope="module")
def demonstrated(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy that has learned the format."""
    run_dir = tmp_path_factory.mktemp("demonstrated")
    losses: list[float] = []
    with algorithm(make_config(files), run_dir) as trained:
        trained.pretrain(lambda step, metrics: losses.append(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    return run_dir / "policy_sft"


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY)])
@pytest.mark.engine
def test_reward_rises(files: Path, tmp_path: Path, demonstrated: Path, name: str) -> None:
    config = make_config(files, {"num_steps": 0}, algorithm=name, num_iterations=20)
    config = config.model_copy(update={"policy": PolicySettings(model=str(demonstrated))})
    with algorithm(config, tmp_path) as trained:
        history = [trained.train() for _ in range(20)]
    rewards = [metrics["rollout/reward"] for metrics in history]
    first, last = np.mean(rewards[:3]), np.mean(rewards[-5:])
    assert first < 0.75  # there is room above it
    assert last > first + 0.4 * (1 - first), rewards
    assert history[0]["learner/logprob_gap_max"] < 1e-4  # engine and learner agree on every token at lag 0
    assert history[-1]["tasks/trained"] == 20 * 8 + sum(metrics["loop/set_aside_groups"] for metrics in history)
    assert history[-1]["tasks/lost"] == history[-1]["tasks/doubled"] == 0


def run(config: RunConfig, run_dir: Path) -> list[dict[str, Any]]:
    create_run_directory(config, run_dir)
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    return rows(run_dir)


def evaluated_config(files: Path) -> RunConfig:
    config = make_config(files, SHORT)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"interval": 2})})


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a short run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(evaluated_config(files), run_dir)
    return run_dir


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_metrics(run_dir)]


@pytest.mark.engine
def test_the_same_seed_gives_the_same_metrics_line_for_line(files: Path, tmp_path: Path, whole: Path) -> None:
    config = evaluated_config(files)
    first = run(config, tmp_path / "a")
    assert first == rows(whole)
    assert [row["iteration"] for row in first if row["stage"] == "rl" and "loop/policy_lag" in row] == [1, 2, 3, 4]
    other = run(
        config.model_copy(update={"debugging": config.debugging.model_copy(update={"seed": 1})}), tmp_path / "c"
    )
    assert other != first
    report = read_json(tmp_path / "a" / "report.json")
    assert [stage["stage"] for stage in report["stages"]] == ["start", "sft", "rl"]
    assert report["tasks"] == {"issued": 32, "trained": 32, "failed": 0, "skipped": 0, "lost": 0, "doubled": 0}


@pytest.mark.slow
@pytest.mark.engine
def test_a_recorded_run_is_replayed_without_a_retriever(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No corpus, index or encoder: the policy's own folder is all that the two runs share beside the records."""
    monkeypatch.setattr(
        "envs.sources.evidence_demonstration", lambda task, *_: mixed(task, random.Random(task.task_id))
    )
    config = make_config(files, SHORT)
    recorded = run(config, tmp_path / "recorded")
    options = {"run": str(tmp_path / "recorded")}
    retrieval = config.retrieval.model_copy(update={"type": "replay", "options": options, "index": ""})
    policy = config.policy.model_copy(update={"model": str(tmp_path / "recorded" / "policy")})
    again = run(config.model_copy(update={"retrieval": retrieval, "policy": policy}), tmp_path / "again")
    assert again == recorded
    assert sum(row.get("rollout/queries", 0) for row in again) > 0
    assert not (tmp_path / "again" / "index").exists()


INTERRUPTS = {
    "at once in SFT": (LearnerGroup, "update", 12, True),
    "at the end of a step of SFT": (LearnerGroup, "update", 12, False),
    "while the policy of SFT is saved": (LearnerGroup, "save_policy", 1, True),
    "in the evaluation behind SFT": (Algorithm, "evaluate", 2, True),
    "while RL samples": (EnvRunnerGroup, "sample", 3 * 8 + 2 * 8 + 3, True),  # after three evaluations, two batches
    "at the end of a step of RL": (LearnerGroup, "update", 14 + 3, False),
}
"""The n-th call of the method is interrupted: before it has done anything, or by a signal that is held back."""


@pytest.mark.parametrize(
    "place", [place if "RL" in place else pytest.param(place, marks=pytest.mark.slow) for place in INTERRUPTS]
)
@pytest.mark.engine
def test_an_interrupted_run_resumes_to_the_same_metrics_and_weights(
    files: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config = evaluated_config(files)
    owner, method, calls_left, is_at_once = INTERRUPTS[place]
    original = getattr(owner, method)

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0 and is_at_once:
            raise KeyboardInterrupt
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments, **options)

    run_dir = tmp_path / "cut"
    create_run_directory(config, run_dir)
    monkeypatch.setattr(owner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        TrainingRun(config, run_dir, Console(quiet=True)).execute()
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    assert rows(run_dir) == rows(whole)
    theirs, ours = (Checkpoints(RunStore(directory)).latest() for directory in (whole, run_dir))
    assert theirs is not None
    assert ours is not None
    expected, found = (read_tensors(path / "learner.safetensors") for path in (theirs, ours))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.engine
def test_an_evaluation_beside_training_is_that_of_the_policy_it_names(whole: Path, files: Path, tmp_path: Path) -> None:
    """It is logged once, after the iteration beside whose sampling it took place."""
    logged = [row for row in rows(whole) if row["stage"] == "rl"]
    assert [("eval/em" in row, row["iteration"]) for row in logged] == [
        *((False, 1), (False, 2), (False, 3), (True, 2), (False, 4))
    ]
    result, version = logged[3], int(logged[3]["eval/policy_version"])
    assert version == logged[1]["loop/policy_version"]
    groups = read_trajectories(whole / "trajectories" / "eval_iteration_00002.arrow")
    versions = {int(v) for g in groups for t in g.trajectories for v in t.policy_versions[t.kinds == TokenKind.MODEL]}
    assert (len(groups), versions) == (8, {version})
    config = make_config(files, SHORT)
    between = Algorithm.start(config, tmp_path, prepare(config, tmp_path))  # evaluated between the same iterations
    between.pretrain(lambda step, metrics: None)
    for _ in range(2):
        between.train()
    expected = between.evaluate().by_name()
    between.stop()
    assert {name: result[f"eval/{name}"] for name in expected} == expected


@pytest.mark.engine
def test_trained_trajectories_are_kept_with_their_advantages_and_ratios(whole: Path) -> None:
    for iteration in range(1, 5):
        table = pa.ipc.open_file(whole / "trajectories" / f"iteration_{iteration:05d}.arrow").read_all()
        num_model = [sum(kind == TokenKind.MODEL for kind in row) for row in table.column("kinds").to_pylist()]
        found = zip(num_model, table.column("advantages").to_pylist(), table.column("ratios").to_pylist(), strict=True)
        learned = [(count, advantages, ratios) for count, advantages, ratios in found if ratios is not None]
        assert all(len(advantages) == len(ratios) == count for count, advantages, ratios in learned)
        (logged,) = [row for row in rows(whole) if row["iteration"] == iteration and "learner/ratio_mean" in row]
        assert sum(count for count, *_ in learned) == logged["learner/tokens"]


@pytest.mark.engine
def test_sampled_tokens_are_those_of_the_batch_and_of_the_evaluation_beside_it(whole: Path) -> None:
    def num_sampled(name: str) -> int:
        path = whole / "trajectories" / f"{name}.arrow"
        groups = read_trajectories(path) if path.is_file() else []
        return sum(trajectory.num_model_tokens for group in groups for trajectory in group.trajectories)

    logged = {row["iteration"]: row for row in read_metrics(whole) if "loop/policy_lag" in row}
    assert (whole / "trajectories" / "eval_iteration_00002.arrow").is_file()
    assert logged[3]["env_runners/sampled_tokens"] > logged[3]["learner/tokens"]
    for iteration, found in logged.items():
        beside = num_sampled(f"eval_iteration_{iteration - 1:05d}")
        assert found["env_runners/sampled_tokens"] == num_sampled(f"iteration_{iteration:05d}") + beside


@pytest.mark.engine
def test_evaluations_that_begin_before_one_has_ended_wait_for_it(files: Path, tmp_path: Path) -> None:
    config = make_config(files, SHORT)
    algorithm = Algorithm.start(config, tmp_path, prepare(config, tmp_path))
    algorithm.pretrain(lambda step, metrics: None)
    results: list[EvalResult] = []
    for _ in range(2):
        algorithm.evaluate_beside("", lambda result, examples: results.append(result))
    between = algorithm.evaluate()
    assert results == [between, between]
    algorithm.stop()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_with_a_lag_an_evaluation_has_one_version_and_training_may_have_several(
    ray_local: ModuleType, files: Path, tmp_path: Path, in_flight: str
) -> None:
    config = evaluated_config(files)
    runners = {"num_env_runners": 2, "max_concurrent_trajectories": 4, "in_flight": in_flight}
    config = config.model_copy(
        update={
            "env_runners": config.env_runners.model_copy(update=runners),
            "training": config.training.model_copy(update={"max_policy_lag": 2, "num_iterations": 6}),
        }
    )
    logged = [row for row in run(config, tmp_path / "run") if row["stage"] == "rl"]
    named = {row["iteration"]: row["eval/policy_version"] for row in logged if "eval/em" in row}
    assert sorted(named) == [2, 4]

    def versions(name: str) -> list[set[int]]:
        groups = read_trajectories(tmp_path / "run" / "trajectories" / f"{name}.arrow")
        found = [t.policy_versions[t.kinds == TokenKind.MODEL] for g in groups for t in g.trajectories]
        return [{int(version) for version in one} for one in found]

    for iteration, version in named.items():
        assert versions(f"eval_iteration_{iteration:05d}") == [{int(version)}] * 8
    if in_flight == "finish":
        assert {len(found) for number in range(1, 7) for found in versions(f"iteration_{number:05d}")} == {1}


@pytest.mark.engine
def test_an_evaluation_task_that_fails_is_asked_again_and_else_counted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {"lamp": 2, "coin": 99}  # the machinery's, before the task is let through
    asked: Counter[str] = Counter()

    class ShakyEnv(SearchEnv):
        async def reset(self, task: Task) -> list[Message]:
            thing = task.task_id.split("/")[1]
            asked[thing] += 1
            if asked[thing] <= failures.get(thing, 0):
                raise ConnectionError(f"the {thing} is out of reach")
            return await super().reset(task)

    monkeypatch.setitem(ENVS, "search", ShakyEnv)
    config = make_config(files)
    with algorithm(config, tmp_path) as built:
        result = built.evaluate()
        assert (result.num_tasks, result.num_failed) == (7, 1)
        assert asked == dict.fromkeys(THINGS, 1) | {
            "lamp": 3,
            "coin": 1 + config.debugging.fault_tolerance.max_task_retries,
        }
        assert "1 of 8 evaluation tasks failed 4 times; the last one with: " in caplog.text
        assert ": ConnectionError: the coin is out of reach" in caplog.text
        failures |= dict.fromkeys(THINGS, 999)
        with pytest.raises(FleetError, match=r"8 of 8 evaluation tasks failed 4 times; .* is out of reach"):
            built.evaluate()


class Recorder(ScriptedEngine):
    """An engine that answers at once, and notes the temperature of each request."""

    temperatures: ClassVar[dict[str, float]] = {}

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        super().__init__({}, tokenizer.encode)
        self.token_ids = tokenizer.encode("<answer> Riga</answer>")

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        self.temperatures[request_id] = sampling.temperature
        count = len(self.token_ids)
        versions = [self._version] * count
        return Completion(self.token_ids, [0.0] * count, versions, "<answer> Riga</answer>", FinishReason.STOP)


@pytest.mark.engine
def test_evaluation_is_greedy_and_training_is_not(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=1)
    engine = {"engine": f"{__name__}:Recorder", "temperature": 0.7}
    config = config.model_copy(update={"env_runners": config.env_runners.model_copy(update=engine)})
    Recorder.temperatures.clear()
    run(config, tmp_path / "run")
    assert {name: value for name, value in Recorder.temperatures.items() if "#" not in name} == dict.fromkeys(
        (f"eval_tasks/{thing}/0" for thing in THINGS), 0.0
    )
    assert {value for name, value in Recorder.temperatures.items() if "#" in name} == {0.7}
    Recorder.temperatures.clear()
    evaluate(tmp_path / "run")
    ask(tmp_path / "run", "Where is the lamp ?")
    assert Recorder.temperatures == dict.fromkeys(("ask/0/0", *(f"eval_tasks/{thing}/0" for thing in THINGS)), 0.0)


NOTED: list[tuple[str, float]] = []


async def noting(trajectory: Trajectory, context: RewardContext) -> float:
    NOTED.append((context.split, context.progress))
    return float(trajectory.trajectory_id[-1] in "02")  # groups without different rewards are sampled again


@pytest.mark.engine
def test_a_reward_knows_the_progress_of_the_run_in_evaluations_too(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=2)
    changed = {
        "env_runners": config.env_runners.model_copy(update={"engine": f"{__name__}:Recorder"}),
        "environment": config.environment.model_copy(update={"reward": f"{__name__}:noting"}),
        "evaluation": config.evaluation.model_copy(update={"interval": 1}),
    }
    NOTED.clear()
    run(config.model_copy(update=changed), tmp_path / "run")
    assert {progress for split, progress in NOTED if split == "train"} == {0.0, 0.5}
    assert [*dict.fromkeys(progress for split, progress in NOTED if split == "eval")] == [0.0, 0.5, 1.0]
    NOTED.clear()
    evaluate(tmp_path / "run")
    assert set(NOTED) == {("eval", 1.0)}


def test_a_metric_that_a_group_lacks_counts_as_zero() -> None:
    def finished(**means: float) -> FinishedGroup:
        request = GroupRequest("t#0", Task("t", "?", ("a",)), 2, 1.0)
        summary = GroupSummary((1.0, 0.0), 0, (), 0, {"queries": 3.0, "rounds": 2.0, "repeated_queries": 0.0, **means})
        return FinishedGroup(request, summary, None)

    metrics = rollout_metrics([finished(stop_answered=1.0), finished(stop_answered=0.5, stop_max_turns=0.5)])
    assert metrics["rollout/stop_answered"] == 0.75
    assert metrics["rollout/stop_max_turns"] == 0.25
    assert metrics["rollout/queries_per_round"] == 1.5


def test_equal_rewards_have_no_variance_whatever_the_rounding() -> None:
    summaries = [GroupSummary((0.1,) * 3, 0, (), 0, {}), GroupSummary((0.1, 0.2), 0, (), 0, {})]
    request = GroupRequest("t#0", Task("t", "?", ("a",)), 2, 1.0)
    metrics = rollout_metrics([FinishedGroup(request, summary, None) for summary in summaries])
    assert metrics["rollout/groups_with_variance"] == 0.5  # the standard deviation of the first is 1.4e-17


def test_an_interrupt_waits_for_the_step_and_a_second_one_does_not() -> None:
    with InterruptGuard() as guard:
        done = False
        with pytest.raises(KeyboardInterrupt), guard.held():
            os.kill(os.getpid(), signal.SIGINT)
            done = True
        assert done
        with pytest.raises(KeyboardInterrupt), guard.held():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the second signal was held back")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.engine
def test_ctrl_c_ends_all_actors_and_resume_goes_on(files: Path, tmp_path: Path) -> None:
    num_iterations = 8
    recipe = str(make_recipe(tmp_path / "recipe.yaml", files, num_iterations=num_iterations))
    run_dir = tmp_path / "run"
    trajectories = run_dir / "trajectories"
    with started(recipe, "--run-dir", str(run_dir), cwd=tmp_path) as process:
        is_under_way = wait_for(lambda: len(list(trajectories.glob("iteration_*.arrow"))) >= 3, 600, process)
        assert is_under_way, process.communicate()
        children = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    checkpoint = Checkpoints(RunStore(run_dir)).latest()
    assert checkpoint is not None
    state = read_json(checkpoint / "state.json")
    assert 3 <= state["iteration"] < num_iterations
    assert state["task_ledger"]["counts"]["trained"] == 8 * state["iteration"]
    assert wait_for(lambda: ended(children), 120)

    with started(recipe, "--run-dir", str(run_dir), "--resume", cwd=tmp_path) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stderr) == (0, "")
    assert f"RL iteration {state['iteration']}" in stdout
    num_tasks = 8 * num_iterations
    counts = {"issued": num_tasks, "trained": num_tasks, "failed": 0, "skipped": 0, "lost": 0, "doubled": 0}
    assert read_json(run_dir / "report.json")["tasks"] == counts
    assert [row["iteration"] for row in rows(run_dir) if row["stage"] == "rl"] == list(range(1, num_iterations + 1))
    trained = Counter(
        group.trajectories[0].trajectory_id.removesuffix("/0")  # task, epoch and attempt
        for path in trajectories.glob("iteration_*.arrow")
        for group in read_trajectories(path)
    )
    assert set(trained.values()) == {1}  # no task twice in an epoch
    assert len(trained) == num_tasks


def failing_reward(task: Task, answer: str) -> float:
    raise RuntimeError("reward boom")


@pytest.mark.parametrize(
    ("environment", "env_runners", "reason"),
    [
        ({"reward": f"{__name__}:failing_reward"}, {}, r"all 16 demonstrations failed.*reward boom"),
        ({}, {"max_context_tokens": 19}, "all 16 demonstrations failed.*raise it"),
    ],
)
@pytest.mark.engine
def test_demonstrations_that_all_fail_say_why(
    tmp_path: Path, environment: dict[str, Any], env_runners: dict[str, Any], reason: str
) -> None:
    config = make_config(make_files(tmp_path), {"num_steps": 2, "num_demonstrations": 16})
    config = config.model_copy(
        update={
            "environment": config.environment.model_copy(update=environment),
            "env_runners": config.env_runners.model_copy(update=env_runners),
        }
    )
    algorithm = Algorithm.create(config, tmp_path / "run")
    with pytest.raises(FleetError, match=reason):
        algorithm.pretrain(lambda step, metrics: None)
    algorithm.stop()


class KillsItsRunnerOnce(SearchEnv):
    """The first trajectory of a run kills the process of its env runner."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self._marker = Path(settings.tasks).with_name("killed")

    async def reset(self, task: Task) -> list[Message]:
        try:
            self._marker.touch(exist_ok=False)
        except FileExistsError:
            return await super().reset(task)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@pytest.mark.ray
@pytest.mark.engine
def test_a_killed_runner_is_counted_in_the_metrics(ray_local: ModuleType, tmp_path: Path) -> None:
    config = make_config(make_files(tmp_path), {"num_steps": 0}, num_iterations=2)
    environment = {"env": f"{__name__}:KillsItsRunnerOnce"}
    runners = {"num_env_runners": 2, "num_cpus_per_env_runner": 0.5}
    config = config.model_copy(
        update={
            "environment": config.environment.model_copy(update=environment),
            "env_runners": config.env_runners.model_copy(update=runners),
        }
    )
    run(config, tmp_path / "run")
    first, last = [row for row in read_metrics(tmp_path / "run") if row["stage"] == "rl"]
    assert first["env_runners/num_restarts"] == last["env_runners/num_restarts"] == 1
    assert first["env_runners/num_lost"] == 0
    assert 1 <= first["env_runners/num_healthy"] <= 2
    assert 0 < first["env_runners/load"] <= 64
    assert first["env_runners/queue"] == 0
    assert last["tasks/trained"] == 16
