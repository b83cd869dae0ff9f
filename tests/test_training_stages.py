"""Runs with one task, groups of one or nothing to learn; evaluation of a run; interrupts and SIGTERM."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gateway_world import Client
from rich.console import Console
from small_world import (
    descendants,
    ended,
    invoke,
    make_config,
    make_files,
    make_recipe,
    session_folders,
    started,
    wait_for,
)

from envs.search import SearchEnv
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.process.interrupts import InterruptGuard, TerminationError, exit_status
from ragr1_actors.core.types import Message, Task
from ragr1_actors.evaluation.evaluate import evaluate_policy
from ragr1_actors.evaluation.evaluated_policy import EvalRequest
from ragr1_actors.pages.report import facts
from ragr1_actors.rollout.gateway.agents import AgentSession
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.report import RunReport, read_report
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.scores import read_scores
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.training_run import TrainingRun


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def changed(config: RunConfig, section: str, **settings: Any) -> RunConfig:
    old = getattr(config, section)
    return config.model_copy(update={section: type(old).model_validate(old.model_dump() | settings)})


def execute(config: RunConfig, run_dir: Path) -> tuple[RunReport, str]:
    printed = io.StringIO()
    create_run_directory(config, run_dir)
    report = TrainingRun(config, run_dir, Console(file=printed, width=300)).execute()
    return report, printed.getvalue()


def always_right(task: Task, answer: str) -> float:
    return 1.0


def never_a_number(task: Task, answer: str) -> float:
    return float("nan")


class Unsearchable(SearchEnv):
    """An environment that never begins."""

    async def reset(self, task: Task) -> list[Message]:
        raise RuntimeError("no library today")


@pytest.mark.engine
def test_a_reward_of_nan_ends_the_run_with_where_it_came_from(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 2, "num_demonstrations": 16}, num_iterations=1)
    config = changed(config, "environment", eval_tasks="", reward=f"{__name__}:never_a_number")
    with pytest.raises(FleetError, match=r"never_a_number \(.*line \d+\) gave nan as the reward, expected a finite"):
        execute(config, tmp_path / "run")


@pytest.mark.engine
def test_a_general_failure_ends_the_run_before_all_tasks_failed(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragr1_actors.training.batches.HOPELESS_TASKS", 3)
    config = make_config(files, {"num_steps": 0}, num_iterations=1)
    config = changed(config, "environment", eval_tasks="", env=f"{__name__}:Unsearchable")
    config = changed(config, "debugging", fault_tolerance={"max_task_retries": 0})
    algorithm = Algorithm.create(config, tmp_path / "run")
    with pytest.raises(FleetError, match=r"all of the last 3 tasks failed; the last one with: .*no library today"):
        algorithm.train()
    algorithm.stop()


@pytest.mark.engine
@pytest.mark.parametrize("obstacle", ["", "directory", "bug"])
def test_an_interrupted_run_has_its_page_and_ends_as_interrupted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    run_dir, config = tmp_path / "run", make_config(files, {"num_steps": 0}, num_iterations=3)
    if obstacle == "directory":  # a page cannot be written there
        (run_dir / "report.html" / "mine").mkdir(parents=True)
    if obstacle == "bug":
        monkeypatch.setattr(facts, "tiles", lambda *arguments: 1 / 0)
    train = Algorithm.train

    def interrupted(algorithm: Algorithm, *arguments: Any) -> dict[str, float]:
        metrics = train(algorithm, *arguments)
        if algorithm.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    monkeypatch.setattr(Algorithm, "train", interrupted)
    create_run_directory(config, run_dir)
    printed = io.StringIO()
    with pytest.raises(TerminationError):
        TrainingRun(config, run_dir, Console(file=printed, width=300)).execute()
    assert Checkpoints(RunStore(run_dir)).latest() is not None
    assert not (run_dir / "report.json").exists()
    if obstacle:
        assert "report.html was not written: " in printed.getvalue()
    else:
        page = (run_dir / "report.html").read_text()
        assert "not finished: 2 iterations of RL so far" in page and "GiB at the peak" in page


class SometimesUnsearchable(SearchEnv):
    """An environment that does not know every third task."""

    async def reset(self, task: Task) -> list[Message]:
        if zlib.crc32(task.task_id.encode()) % 3 == 0:
            raise LookupError("no such shelf")
        return await super().reset(task)


@pytest.mark.engine
def test_tasks_that_were_given_up_are_in_the_report(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=2)
    config = changed(config, "environment", env=f"{__name__}:SometimesUnsearchable")
    config = changed(config, "debugging", fault_tolerance={"max_task_retries": 1})
    report, _ = execute(config, tmp_path / "run")
    assert report.failed_tasks
    assert report.tasks.failed == len(report.failed_tasks)
    for failed in report.failed_tasks:
        assert (failed.failure, failed.num_tries) == ("data", 2)
        assert re.fullmatch(rf"{re.escape(__file__)}, line \d+: LookupError: no such shelf", failed.error)
    assert read_report(tmp_path / "run").failed_tasks == report.failed_tasks
    printed = io.StringIO()
    run_dir = (tmp_path / "run").rename(tmp_path / "run [bold] today")
    TrainingRun(config, run_dir, Console(file=printed, width=300)).describe_end(report)
    assert f"tensorboard --logdir '{run_dir}/tensorboard'\n" in printed.getvalue()
    assert f"\nreport        {run_dir}/report.html\n" in printed.getvalue()
    assert (
        f"training tasks given up: {len(report.failed_tasks)}, listed in the report; the last was" in printed.getvalue()
    )


@pytest.fixture(scope="module")
def idle_run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunReport, str]:
    """Every reward is alike, so that GRPO drops all groups of all three iterations."""
    config = make_config(files, {"num_steps": 0}, num_iterations=3, group_size=2)
    config = changed(config, "environment", eval_tasks="", reward=f"{__name__}:always_right")
    run_dir = tmp_path_factory.mktemp("idle") / "run"
    return run_dir, *execute(config, run_dir)


@pytest.mark.engine
def test_iterations_without_learning_are_reported_once(idle_run: tuple[Path, RunReport, str]) -> None:
    run_dir, _, printed = idle_run
    assert printed.count("nothing learned") == 1
    assert printed.index("loading the policy, the index and the learner\n") < printed.index("actors loaded in ")
    assert "no group with different rewards: nothing learned in iteration 1\n" in printed
    rows = [row for row in read_metrics(run_dir) if row["stage"] == "rl"]
    assert [row["learner/num_steps"] for row in rows] == [0.0] * 3


@pytest.mark.engine
def test_the_evaluations_of_a_run_have_a_bar_on_a_terminal(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=0)
    console = Console(file=io.StringIO(), width=150, force_terminal=True, record=True)
    create_run_directory(config, tmp_path / "run")
    TrainingRun(config, tmp_path / "run", console).execute()
    printed = console.export_text()
    assert re.search(r"evaluating .* 8/8 ", printed)
    assert re.search(r"loading the policy, the index and the learner 0:\d\d:\d\d", printed)


@pytest.mark.engine
def test_a_run_that_builds_an_index_tells_what_is_odd_in_the_corpus(files: Path, tmp_path: Path) -> None:
    articles = [{"_id": p, "wikipedia_title": p, "text": [f"{p}\n", f"{p} is a port.\n"]} for p in ("Riga", "Oslo")]
    articles.append({"_id": "7", "wikipedia_title": "", "text": ["\n"]})
    (tmp_path / "kilt.json").write_text("".join(json.dumps(article) + "\n" for article in articles))
    config = make_config(files, {"num_steps": 0}, num_iterations=0)
    config = changed(config, "retrieval", index="", corpus=str(tmp_path / "kilt.json"), type="bm25")
    _, printed = execute(config, tmp_path / "run")
    told = (
        'kilt.json ({"_id", "wikipedia_title", "text": [paragraph, ...]}): 3 passages of 3 records; 1 passages without'
    )
    assert told in printed
    assert "never found (33%; line 3)" in printed


@pytest.mark.engine
def test_evaluate_a_run_and_its_checkpoint(idle_run: tuple[Path, RunReport, str], files: Path) -> None:
    run_dir, report, _ = idle_run
    before = sorted(run_dir.rglob("*"))
    expected = report.stages[-1].eval
    for path in (run_dir, *(run_dir / name for name in ("checkpoints/step_3", "checkpoints/step_3/policy", "policy"))):
        found = json.loads(invoke("evaluate", str(path), "--json"))
        assert (found["em"], found["num_tasks"], found["tokens"]) == (expected.em, 1, expected.tokens)
    printed = invoke("evaluate", str(run_dir), "--tasks", str(files / "tasks.json"), "--num-tasks", "3")
    assert printed.split()[:1] == ["em"]
    assert "num_tasks  3" in printed
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.engine
def test_an_evaluation_shows_what_it_loads_before_its_tasks(idle_run: tuple[Path, RunReport, str]) -> None:
    shown: list[object] = []

    @contextmanager
    def show(what: str) -> Iterator[None]:
        shown.append(what)
        yield
        shown.append("loaded")

    evaluate_policy(EvalRequest(str(idle_run[0])), on_task=lambda done, total: shown.append((done, total)), show=show)
    assert shown == ["loading the policy and the index", "loaded", (0, 1), (1, 1)]


@pytest.mark.engine
def test_a_run_begins_with_the_policy_of_another_and_needs_it_no_longer(
    idle_run: tuple[Path, RunReport, str], files: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(idle_run[0], first)
    config = changed(make_config(files, {"num_steps": 0}, num_iterations=0), "environment", eval_tasks="")
    (tmp_path / "recipe.yaml").write_text(json.dumps(config.model_dump()))
    command = ["train", str(tmp_path / "recipe.yaml"), f"policy.model={first}", "--run-dir", str(second)]
    assert "error: " not in (printed := invoke(*command)), printed
    began = read_report(second).stages[0].eval
    assert began == idle_run[1].stages[-1].eval
    newest = first / "checkpoints" / "step_3" / "policy"
    assert f"model: {newest}\n" in (second / "config.yaml").read_text()
    assert (second / "policy" / "model.safetensors").samefile(newest / "model.safetensors")  # no room is needed
    shutil.rmtree(first)
    (second / "report.json").unlink()
    shutil.rmtree(second / "checkpoints")
    assert "error: " not in (printed := invoke(*command[:2], "--resume", *command[-2:])), printed
    assert read_report(second).stages[0].eval == began


@pytest.mark.engine
def test_an_evaluation_goes_on_with_its_file(
    idle_run: tuple[Path, RunReport, str], files: Path, tmp_path: Path
) -> None:
    run_dir, *_ = idle_run
    out = tmp_path / "out.jsonl"
    command = ("evaluate", str(run_dir), "--tasks", str(files / "tasks.json"), "--num-tasks", "4", "--json")
    plain = json.loads(invoke(*command))
    found = json.loads(invoke(*command, "--out", str(out)))
    same = {name: value for name, value in plain.items() if name != "intervals"}
    assert {name: found[name] for name in same} == same
    assert plain["intervals"]["tokens"] == found["intervals"]["tokens"]
    assert plain["num_trained_on"] > 0
    _, scores = read_scores(out)
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    out.write_bytes(b"".join(lines[:3]) + lines[3][:9])  # as a killed command leaves it
    again = json.loads(invoke(*command, "--out", str(out), "--against", str(out)))
    assert (again["num_tasks"], again["em"], again["tokens"]) == (4, found["em"], found["tokens"])
    once, twice = ([replace(one, latency_s=0.0) for one in found] for found in (scores, read_scores(out)[1]))
    assert sorted(twice, key=attrgetter("task_id")) == sorted(once, key=attrgetter("task_id"))
    assert out.read_bytes().startswith(b"".join(lines[:3]))  # what was answered is not answered again
    assert (again["against"]["num_tasks"], again["against"]["p_value"]) == (4, 1.0)
    assert "of another evaluation" in invoke(*command[:2], "--out", str(out))
    assert "none of the 1 tasks asked for" in invoke(*command[:2], "--against", str(out))  # those that the run held out
    printed = invoke(*command[:-1], "--out", str(out))
    assert "95 % interval" in printed
    assert "of these questions are in the training file" in printed


@pytest.mark.engine
def test_evaluate_refuses_what_it_cannot(idle_run: tuple[Path, RunReport, str], tmp_path: Path) -> None:
    run_dir, *_ = idle_run
    assert "neither the directory of a run nor a checkpoint" in invoke("evaluate", str(tmp_path))
    assert "the rest it was trained on" in invoke("evaluate", str(run_dir), "--num-tasks", "9")
    assert "there is no file" in invoke("evaluate", str(run_dir), "--tasks", str(tmp_path / "none.json"))
    assert invoke("evaluate", str(run_dir), "--index", str(tmp_path)).startswith("error: ")


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "ppo"])
@pytest.mark.engine
def test_groups_of_one(files: Path, tmp_path: Path, algorithm: str) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=1, group_size=1, algorithm=algorithm)
    report, printed = execute(changed(config, "environment", eval_tasks=""), tmp_path / "run")
    assert report.tasks.trained == 8
    assert "nothing learned" not in printed  # without siblings the reward itself is what is learned from


@pytest.mark.engine
def test_a_task_file_of_one_task(files: Path, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('[{"question": "Where is the lamp ?", "answer": "Riga"}]')
    (tmp_path / "other.json").write_text('[{"question": "Where is the cup ?", "answer": "Lyon"}]')
    common = make_config(files, {"num_steps": 2, "num_demonstrations": 16}, num_iterations=1)
    config = changed(common, "environment", tasks=str(tmp_path / "one.json"), eval_tasks=str(tmp_path / "other.json"))
    report, _ = execute(config, tmp_path / "run")
    assert report.tasks.trained == 8  # eight epochs of it
    assert report.tasks.lost == report.tasks.doubled == 0


@pytest.mark.engine
def test_a_task_file_of_one_task_leaves_none_to_hold_out(files: Path, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('[{"question": "Where is the lamp ?", "answer": "Riga"}]')
    config = changed(make_config(files), "environment", tasks=str(tmp_path / "one.json"), eval_tasks="")
    (tmp_path / "recipe.yaml").write_text(json.dumps(config.model_dump()))
    refused = invoke("train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / "run"))
    assert refused.startswith(f"error: {tmp_path / 'one.json'}"), refused


def test_the_exit_status_tells_the_signals_apart() -> None:
    with InterruptGuard() as guard:
        with pytest.raises(TerminationError) as terminated, guard.held():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        assert (exit_status(terminated.value), exit_status(interrupted.value)) == (143, 130)


def test_a_second_interrupt_in_a_held_block_marks_the_guard_as_torn() -> None:
    with InterruptGuard() as guard:
        with pytest.raises(KeyboardInterrupt), guard.held():
            os.kill(os.getpid(), signal.SIGINT)
            assert not guard.is_torn
            os.kill(os.getpid(), signal.SIGINT)
        assert guard.is_torn


def test_an_interrupt_that_a_library_caught_is_raised_again_until_it_is_acknowledged() -> None:
    with InterruptGuard() as guard:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(TerminationError), guard.held(), guard.held():
            pass
        guard.acknowledge()
        with guard.held():
            pass
        with pytest.raises(KeyboardInterrupt), guard.held():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), guard.held():
            os.kill(os.getpid(), signal.SIGINT)
            assert not guard.is_torn, "the first of this block is held back"
        assert not guard.is_torn


@pytest.mark.ray
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_wait_of_ray_keeps_its_exit_status(
    ray_local: ModuleType, number: signal.Signals, status: int
) -> None:
    @ray_local.remote(num_cpus=0)
    class Signaller:
        def send(self, process: int) -> None:
            os.kill(process, number)
            time.sleep(30)

    signaller = Signaller.remote()
    with InterruptGuard(), pytest.raises(KeyboardInterrupt) as interrupted:
        ray_local.get(signaller.send.remote(os.getpid()))
    assert exit_status(interrupted.value) == status
    ray_local.kill(signaller)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.engine
def test_sigterm_writes_a_checkpoint_and_ends_all_actors(files: Path, tmp_path: Path) -> None:
    recipe = str(make_recipe(tmp_path / "recipe.yaml", files, num_iterations=1000))
    run_dir = tmp_path / "run"
    with started(recipe, "--run-dir", str(run_dir), cwd=tmp_path) as process:
        assert wait_for(lambda: len(list((run_dir / "trajectories").glob("iteration_*.arrow"))) >= 2, 600, process)
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 143, stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr and "Stack" not in stderr, stderr
    assert Checkpoints(RunStore(run_dir)).latest() is not None
    assert "not finished: " in (run_dir / "report.html").read_text()
    assert wait_for(lambda: ended(children), 120)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.parametrize("line", ["all keys", "actors"], ids=["before Ray starts", "before the actors are ready"])
def test_sigterm_before_training_is_one_line_and_leaves_nothing(files: Path, tmp_path: Path, line: str) -> None:
    recipe, run_dir = str(make_recipe(tmp_path / "recipe.yaml", files)), tmp_path / "run"
    with started(recipe, "--run-dir", str(run_dir), cwd=tmp_path) as process:
        assert process.stdout is not None
        assert any(line in printed for printed in process.stdout)
        children, folders = descendants(process.pid), session_folders(process.pid)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 143, stderr
    assert stderr == f"interrupted; go on with: ragr1 train {recipe} --run-dir {run_dir} --resume\n"
    assert wait_for(lambda: ended(children), 120)
    assert bool(folders) == (line == "actors")
    assert not any(folder.exists() for folder in folders)


async def fails(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    raise KeyError("document")


@pytest.mark.engine
def test_agents_that_fail_are_said(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(files, {"num_steps": 0}, num_iterations=2)
    config = changed(config, "environment", agent=f"{__name__}:fails")
    config = changed(config, "policy", chat_format="hermes")
    _, printed = execute(config, tmp_path / "run")
    assert (
        printed.count("100 % of the agents failed in iteration 1; ragr1 view") == 1 and "in iteration 2;" not in printed
    )
    caplog.clear()
    evaluate_policy(EvalRequest(str(tmp_path / "run"), num_tasks=2))
    (said,) = [one.getMessage() for one in caplog.records if "agents failed" in one.getMessage()]
    assert re.fullmatch(
        r"2 of 2 agents failed; the last: .*test_training_stages.py, line \d+: KeyError: 'document'", said
    )
