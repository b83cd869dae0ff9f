"""The collapse guard: when alarms begin, and a run with a far too high learning rate: warned of, stopped, saved."""

import json
import math
import random
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from rich.console import Console
from small_world import PLACES, THINGS, deterministic, make_config, make_files

from learners import learner
from learners.deepspeed.deepspeed_engine import Schedule
from ragr1_actors.core.config import GuardSettings, RunConfig
from ragr1_actors.core.errors import ConfigError, UserError
from ragr1_actors.core.types import Task
from ragr1_actors.planning.prepare import prepare
from ragr1_actors.runs.checkpoint import Checkpoints, read_state
from ragr1_actors.runs.report import RunReport
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.events import Alarm, GuardState
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.guard import RULES, Guard
from ragr1_actors.training.training_run import TrainingRun

HEALTHY = {
    "learner/entropy": 0.5,
    "learner/good_logprob": -0.4,
    "learner/grad_norm": 1.0,
    "learner/logprob_gap_mean": 0.01,
    "rollout/well_formed": 0.98,
    "rollout/queries": 2.0,
    "rollout/repeat_query_rate": 0.05,
    "rollout/observation_share": 0.5,
}
COLLAPSED = {
    "entropy jumps": ("entropy", "learner/entropy", 1.3),
    "entropy vanishes": ("entropy", "learner/entropy", 0.05),
    "good actions become unlikely": ("good_logprob", "learner/good_logprob", -0.75),
    "gradients grow": ("grad_norm", "learner/grad_norm", 4.5),
    "engine and learner disagree": ("logprob_gap", "learner/logprob_gap_mean", 0.2),
    "turns lose their format": ("format", "rollout/well_formed", 0.8),
    "searches stop": ("searches", "rollout/queries", 0.5),
    "searches are repeated": ("repeat_queries", "rollout/repeat_query_rate", 0.4),
    "evidence fills the context": ("observation_share", "rollout/observation_share", 1.05),
    "evidence vanishes": ("observation_share", "rollout/observation_share", 0.1),
    "a number is none": ("grad_norm", "learner/grad_norm", math.nan),
}


def observe(guard: Guard, *history: dict[str, float], first: int = 1) -> list[tuple[int, str]]:
    """Return iteration and name of the alarms that begin."""
    return [
        (iteration, alarm.name)
        for iteration, changed in enumerate(history, start=first)
        for alarm in guard.observe(iteration, HEALTHY | changed)
    ]


@pytest.mark.parametrize("case", COLLAPSED)
def test_an_alarm_begins_once_for_each_way_to_collapse(case: str) -> None:
    name, metric, value = COLLAPSED[case]
    guard = Guard(GuardSettings())
    assert observe(guard, *[{}] * 10, {metric: value}) == []  # a single iteration is noise
    assert observe(guard, *[{metric: value}] * 3, first=12) == [(12, name)]
    assert guard.metrics() == {"guard/active": 1, "guard/alarms": 1, "guard/roll_backs": 0}
    assert observe(guard, {}, first=15) == []
    assert guard.metrics()["guard/active"] == 0
    assert observe(guard, *[{metric: value}] * 2, first=16) == [(17, name)]
    assert guard.metrics()["guard/alarms"] == 2
    assert guard.answer() == []  # a warning asks for nothing


def test_every_alarm_is_tested() -> None:
    assert {name for name, _, _ in COLLAPSED.values()} == set(RULES)
    assert {rule.metric for rule in RULES.values()} == set(HEALTHY)


def test_a_healthy_run_has_no_alarm() -> None:
    """Metrics move a long way, but no faster than in a healthy run, with the noise of small batches."""
    rng = random.Random(0)
    guard = Guard(GuardSettings())
    for iteration in range(1, 301):
        done = iteration / 300
        healthy = {
            "learner/entropy": 0.6 - 0.5 * done,
            "learner/good_logprob": -0.5 + 0.4 * done,
            "learner/grad_norm": 2 - 1.5 * done,
            "learner/logprob_gap_mean": 0.01,
            "rollout/well_formed": 0.8 + 0.18 * done,
            "rollout/queries": 3 - 2.5 * done,
            "rollout/repeat_query_rate": 0.1,
            "rollout/observation_share": 0.2 + 0.5 * done,
        }
        noisy = {name: value * rng.uniform(0.9, 1.1) for name, value in healthy.items()}
        assert guard.observe(iteration, noisy) == []


def test_a_slow_loss_of_format_is_noticed() -> None:
    """A baseline that followed the metric would lose sight of it."""
    falling = [{"rollout/well_formed": 0.98 - 0.004 * index} for index in range(60)]
    ((iteration, name),) = observe(Guard(GuardSettings()), *falling)
    assert name == "format"
    assert 30 < iteration < 50


def test_without_a_baseline_only_fixed_limits_count() -> None:
    guard = Guard(GuardSettings())
    wrong = {"learner/entropy": 50.0, "learner/logprob_gap_mean": 0.5}
    assert observe(guard, {}, {}, wrong, wrong) == [(4, "logprob_gap")]
    only_gap = {"learner/logprob_gap_mean": 0.01}
    assert Guard(GuardSettings()).observe(1, only_gap) == []  # the other metrics are missing: no step was taken


def test_values_outside_the_limits_are_in_no_baseline() -> None:
    guard = Guard(GuardSettings(baseline_iterations=4))
    assert observe(guard, *[{}] * 4, *[{"learner/grad_norm": 5.0}] * 20) == [(6, "grad_norm")]
    assert guard.state.tracks["grad_norm"].values == [1.0] * 4
    assert guard.num_active == 1


def test_the_first_gradient_is_no_alarm() -> None:
    """As long as no rewards differ, the norm of the gradient is 0."""
    guard = Guard(GuardSettings(action="roll_back"))
    norms = [0.0] * 8 + [0.3] * 12
    assert [guard.observe(n, {"learner/grad_norm": norm}) for n, norm in enumerate(norms)] == [[]] * 20
    assert not guard.is_suspicious


def test_settings_choose_action_limits_and_patience() -> None:
    chosen = {
        "action": "stop",
        "actions": {"entropy": "ignore", "searches": "warn"},
        "limits": {"grad_norm": [None, 20], "searches": [0.9, None]},
        "patience": 3,
    }
    guard = Guard(AlgorithmConfig().training(guard=chosen).freeze().training.guard)
    bad = {"learner/entropy": 9.0, "learner/grad_norm": 10.0, "rollout/queries": 1.5, "rollout/well_formed": 0.1}
    assert observe(guard, *[{}] * 10, *[bad] * 3) == [(13, "format"), (13, "searches")]
    assert [(alarm.name, alarm.action) for alarm in guard.state.alarms] == [("format", "stop"), ("searches", "warn")]
    (answered,) = guard.answer()
    assert answered.name == "format"
    assert guard.why_stop([answered])
    assert guard.answer() == []
    silent = Guard(GuardSettings(action="ignore"))
    assert observe(silent, *[{}] * 10, *[bad] * 5) == []


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ({"acton": "stop"}, "unknown key training.guard.acton; did you mean 'action'"),
        ({"action": "halt"}, "training.guard.action: got 'halt'"),
        ({"actions": {"entrpy": "stop"}}, r"training.guard.actions.entrpy.*'entropy'"),
        ({"limits": {"entropy": [1]}}, "training.guard.limits.entropy"),
    ],
)
def test_wrong_settings_are_refused(guard: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig().training(guard=guard).freeze()


def test_an_alarm_says_what_happened() -> None:
    alarm = Alarm("entropy", "learner/entropy", 23, 0.412, 0.2675, 0.107, "roll_back")
    assert str(alarm) == "iteration 23: learner/entropy is 0.412, above 0.268 (baseline 0.107)"
    low = replace(alarm, value=0.01, limit=0.0214, rolled_back_to=20)
    assert "is 0.01, below 0.0214 (baseline 0.107); rolled back to iteration 20" in str(low)
    assert str(replace(alarm, value=None, baseline=None)) == "iteration 23: learner/entropy is not finite"


@given(
    st.lists(st.sampled_from([0.01, 0.4, 0.5, 0.6, 3.0, math.inf]), min_size=1, max_size=60),
    st.integers(0, 59),
)
def test_a_resumed_run_has_the_same_alarms(entropies: list[float], resumed_at: int) -> None:
    settings = GuardSettings(action="roll_back", baseline_iterations=4)
    whole, parts = Guard(settings), Guard(settings)
    for iteration, entropy in enumerate(entropies, start=1):
        if iteration == resumed_at:
            saved = json.dumps(asdict(parts.state), allow_nan=False)
            parts = Guard(settings, TypeAdapter(GuardState).validate_json(saved))
        metrics = {"learner/entropy": entropy}
        assert parts.observe(iteration, metrics) == whole.observe(iteration, metrics)
    assert parts.state == whole.state


def test_an_alarm_of_the_last_iteration_is_answered_by_a_run_that_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    alarm = Alarm("entropy", "learner/entropy", 10, 0.9, 0.2, 0.1, "roll_back")
    run = TrainingRun.__new__(TrainingRun)
    run._config = AlgorithmConfig().training(num_iterations=10).freeze()
    made: list[str] = []
    for name in ("_reinforce", "_evaluate", "_save"):
        monkeypatch.setattr(run, name, lambda *given, name=name: made.append(name), raising=False)
    monkeypatch.setattr(run, "_has_stage", lambda name: True, raising=False)
    for unanswered, expected in (([], []), ([alarm], ["_reinforce"])):
        made.clear()
        run._guard = Guard(run._config.training.guard, GuardState(unanswered=unanswered, alarms=unanswered))
        run._run_stages(SimpleNamespace(iteration=10), SimpleNamespace())  # type: ignore[arg-type]
        assert made == [*expected, "_evaluate", "_save"]


def test_a_roll_back_goes_on_with_the_history_of_the_checkpoint() -> None:
    settings = GuardSettings(action="roll_back", max_roll_backs=2, lr_factor=0.1)
    guard = Guard(settings)
    for number in (1, 2):
        observe(guard, *[{}] * 10)
        then = TypeAdapter(GuardState).validate_python(asdict(guard.state))
        assert observe(guard, {}, {"learner/entropy": 5.0}, first=11) == []
        assert guard.is_suspicious  # what is saved now would be no state to go back to
        assert observe(guard, {"learner/entropy": 5.0}, first=13) == [(13, "entropy")]
        alarms = guard.answer()
        assert guard.last_good(alarms) == 10  # the metrics of 12 are those of the policy after 11 updates
        assert guard.why_stop(alarms) == ""
        assert guard.next_lr_factor == pytest.approx(0.1**number)
        guard.rolled_back(alarms, 10, then)
        assert guard.state.tracks == then.tracks
        assert [alarm.rolled_back_to for alarm in guard.state.alarms] == [10] * number
        assert guard.metrics() == {"guard/active": 0, "guard/alarms": number, "guard/roll_backs": number}
        assert not guard.is_suspicious
    assert "after 2 roll-backs" in guard.why_stop(alarms)


# -- real training ---------------------------------------------------------------------------------------------------

QUESTIONS = (
    "Where is the {} ?",
    "Where does the {} lie ?",
    "Which town has the {} ?",
    "Find the {} for me .",
    "The {} lies in",
    "Tell me where the {} is .",
    "In which town is the {} ?",
    "Who has seen the {} ?",
)
NUM_HELD_OUT = 24


def make_world(directory: Path) -> Path:
    """The small world with eight ways to ask for each thing, of which three are held out."""
    files = make_files(directory)
    split: dict[str, list[dict[str, str]]] = {"tasks": [], "eval_tasks": []}
    for row, question in enumerate(QUESTIONS):
        for column, thing in enumerate(THINGS):
            task = {"id": f"{thing}-{row}", "question": question.format(thing), "answer": PLACES[column % 4]}
            split["eval_tasks" if (row + column) % 8 in (0, 3, 6) else "tasks"].append(task)
    for name, tasks in split.items():
        (files / f"{name}.json").write_text(json.dumps(tasks))
    return files


def mostly_right(task: Task, rng: random.Random) -> list[str]:
    """Guess a place one time in five; otherwise look it up."""
    if rng.random() < 0.2:
        return [f"<answer> {rng.choice(PLACES)}</answer>"]
    thing = task.task_id.split("/")[1].split("-")[0]
    return [f"<search> {thing}</search>", f"<answer> {task.golden_answers[0]}</answer>"]


NUM_ITERATIONS = 30


def make_guarded(files: Path, guard: dict[str, Any], evaluation_interval: int = 1, **training: Any) -> RunConfig:
    """A run with an evaluation after every iteration, and a checkpoint after every other."""
    config = make_config(files, guard=guard, **training)
    evaluation = config.evaluation.model_copy(update={"interval": evaluation_interval, "num_tasks": NUM_HELD_OUT})
    checkpointing = config.checkpointing.model_copy(update={"interval": 2, "keep_trajectories": False})
    return config.model_copy(update={"evaluation": evaluation, "checkpointing": checkpointing})


def drifting(files: Path, guard: dict[str, Any], num_iterations: int = NUM_ITERATIONS) -> RunConfig:
    """An entropy bonus that slowly outweighs the reward, while the learning rate rises.

    The rounding of the processor decides in which iteration the policy is lost, and which alarm is the first.
    """
    drift = {"lr": 3e-3, "warmup_steps": 60, "entropy_coeff": 1.0}
    return make_guarded(files, guard, evaluation_interval=10, num_iterations=num_iterations, **drift)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def pretrained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has a checkpoint after SFT."""
    run_dir = tmp_path_factory.mktemp("pretrained") / "run"
    config = drifting(files, {})
    create_run_directory(config, run_dir)
    algorithm = Algorithm.start(config, run_dir, replace(prepare(config, run_dir), demonstrate=mostly_right))
    try:
        algorithm.pretrain(lambda step, metrics: None)
        algorithm.save({"wall_s": 0.0, "stages": []})
    finally:
        algorithm.stop()
    return run_dir


def go_on(pretrained: Path, run_dir: Path, config: RunConfig) -> tuple[RunReport, str]:
    """Train with RL in a copy of the directory; return the report and what was printed."""
    if not run_dir.exists():
        shutil.copytree(pretrained, run_dir, symlinks=True)
    with (run_dir.parent / "printed").open("a+") as printed:
        report = TrainingRun(config, run_dir, Console(file=printed, width=200)).execute()
        printed.seek(0)
        return report, printed.read()


def rl_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_metrics(run_dir) if row["stage"] == "rl"]


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the iterations, without those of evaluations."""
    return [row for row in rl_rows(run_dir) if "rollout/reward" in row]


@pytest.mark.engine
def test_the_guard_warns_before_the_policy_is_lost(files: Path, pretrained: Path, tmp_path: Path) -> None:
    report, printed = go_on(pretrained, tmp_path / "run", drifting(files, {}))
    rows = training_rows(tmp_path / "run")
    rewards = [row["rollout/reward"] for row in rows]
    best = max(rewards[:5])  # of the iterations that must pass before there is a baseline
    lost = 1 + max(index for index, reward in enumerate(rewards, start=1) if reward >= best / 4)
    first = report.alarms[0]
    assert best > 0.7
    assert first.iteration <= lost, (rewards, report.alarms)
    assert printed.count(f"guard: {first}\n") == 1
    row = rows[first.iteration - 1]
    assert row["guard/active"] >= 1
    assert row["guard/alarms"] >= 1
    assert first.metric in (tmp_path / "run" / "report.html").read_text()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["alarms"][0]["name"] == first.name


def only_format(action: str) -> dict[str, Any]:
    """The alarm of a lost format alone; the others watch numbers that are noisy in batches this small."""
    return {"action": "ignore", "actions": {"format": action}, "limits": {"format": [0.7, None]}}


LR, LR_FACTOR, BREAK = 3e-4, 0.001, 10


@dataclass(frozen=True)
class BreakingSchedule(Schedule):
    """A learning rate that breaks the policy in one step, after ten iterations that teach it something."""

    def lr_at(self, step: int) -> float:
        return self.lr * (1 if step < BREAK else 200)


@pytest.mark.engine
def test_a_roll_back_saves_the_policy_and_the_books(
    files: Path, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "Schedule", BreakingSchedule)
    run_dir = tmp_path / "run"
    settings = {**only_format("roll_back"), "lr_factor": LR_FACTOR}
    config = make_guarded(
        files, settings, num_iterations=18, lr=LR, options={"drop_zero_variance": False}, entropy_coeff=0.01
    )  # so that every iteration takes a step
    report, printed = go_on(pretrained, run_dir, config)
    first = report.alarms[0]
    assert first.iteration > BREAK
    assert first.rolled_back_to is not None
    assert first.rolled_back_to <= first.iteration - 3
    said = f"guard: rolled back to iteration {first.rolled_back_to}, the learning rate is multiplied by {LR_FACTOR}"
    assert said in printed
    rows = training_rows(run_dir)
    assert [row["iteration"] for row in rows] == list(range(1, 19)), "each iteration has one line"
    assert {alarm.iteration for alarm in report.alarms} == {first.iteration}
    assert rows[-1]["guard/roll_backs"] == 1
    lrs = [LR] * first.rolled_back_to + [LR * LR_FACTOR] * (BREAK - first.rolled_back_to) + [LR * 200 * LR_FACTOR] * 8
    assert [row["learner/lr"] for row in rows] == pytest.approx(lrs)
    rewards = [row["rollout/reward"] for row in rows]
    assert min(rewards[-3:]) > max(rewards[:5]) - 0.3, "the policy from before the collapse"
    assert asdict(report.tasks) == {
        "issued": 18 * 8,
        "trained": 18 * 8,
        "failed": 0,
        "skipped": 0,
        "lost": 0,
        "doubled": 0,
    }
    newest = Checkpoints(RunStore(run_dir)).latest()
    assert newest is not None
    state = read_state(newest)
    assert state.iteration == 18
    assert state.task_ledger.outstanding == []
    assert state.policy_version > 19, "no two policies have the same version"


@pytest.mark.engine
def test_a_stop_ends_with_one_sentence_and_a_checkpoint(files: Path, pretrained: Path, tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", drifting(files, only_format("stop"))
    with pytest.raises(
        UserError, match=r"the guard stopped the run .*, at iteration \d+: rollout/well_formed is .*--resume"
    ):
        go_on(pretrained, run_dir, config)
    newest = Checkpoints(RunStore(run_dir)).latest()
    assert newest is not None
    stopped = read_state(newest)
    (alarm,) = stopped.extra["guard"]["alarms"]
    page = (run_dir / "report.html").read_text()
    assert "not finished: " in page and "rollout/well_formed is " in page
    assert not (run_dir / "report.json").exists(), "it would be taken for finished"
    assert stopped.iteration == alarm["iteration"] < NUM_ITERATIONS
    assert stopped.task_ledger.counts.lost == 0
    one_more = drifting(files, only_format("stop"), num_iterations=stopped.iteration + 1)
    report, printed = go_on(pretrained, run_dir, one_more)  # --resume goes on in spite of it
    assert [asdict(found) for found in report.alarms][:1] == [alarm]
    assert printed.count(f"guard: {report.alarms[0]}\n") == 1
