"""The whole loop on a world of a few sentences: it learns, repeats itself, resumes exactly, and stops when told to."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ragr1_actors.algorithm import Algorithm
from ragr1_actors.checkpoint import CheckpointStore, read_json, read_tensors
from ragr1_actors.config import AlgorithmConfig, RunConfig
from ragr1_actors.interrupt import InterruptGuard
from ragr1_actors.metrics import deterministic, read_metrics
from ragr1_actors.run_directory import create_run_directory
from ragr1_actors.training_run import TrainingRun
from ragr1_actors.types import Task

ROOT = Path(__file__).resolve().parent.parent
THINGS = ["lamp", "coin", "shoe", "book", "ring", "cup", "key", "fork"]
SHORT = {"num_steps": 14, "num_demonstrations": 64}
PLACES = ["Riga", "Oslo", "Bonn", "Lyon"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that says where eight things lie, an index over it, and a question about each."""
    from retrieval.build import build_index
    from retrieval.corpus import read_passages

    directory = tmp_path_factory.mktemp("world")
    places = {thing: PLACES[index % 4] for index, thing in enumerate(THINGS)}
    corpus = [{"id": t, "title": t, "text": f"The {t} lies in {p}."} for t, p in places.items()]
    tasks = [{"id": t, "question": f"Where is the {t} ?", "answer": p} for t, p in places.items()]
    (directory / "corpus.json").write_text(json.dumps(corpus))
    (directory / "tasks.json").write_text(json.dumps(tasks))
    build_index(read_passages(directory / "corpus.json"), directory / "index", progress=False)
    return directory


def make_config(files: Path, sft: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """Everything in the driver."""
    sft = sft or {}
    return (
        AlgorithmConfig()
        .environment(
            tasks=str(files / "tasks.json"),
            eval_tasks=str(files / "tasks.json"),
            prompt="{question}",
            max_turns=2,
            top_k=1,
        )
        .policy(hidden_size=64, num_layers=2, num_heads=2, vocab_size=400)
        .env_runners(num_env_runners=0, max_context_tokens=160, max_new_tokens_per_turn=12)
        .retrieval(index=str(files / "index"), num_retrievers=0)
        .sft(**{"num_steps": 150, "batch_size": 16, "num_demonstrations": 256, "lr": 6e-3, "warmup_steps": 3, **sft})
        .training(**{"train_batch_size": 8, "group_size": 8, "lr": 1e-3, "num_iterations": 4, **training})
        .learners(num_learners=0, zero_stage=0, micro_batch_tokens=4096)
        .evaluation(num_tasks=8)
        .debugging(seed=0, num_threads=1)
        .freeze()
    )


@pytest.fixture(autouse=True)
def leave_training_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world has eight questions: evaluate on those that are trained on, which a real run never does."""
    monkeypatch.setattr("ragr1_actors.workspace.overlap", lambda train, evaluation: [])


def mixed(task: Task, rng: random.Random) -> list[str]:
    """Guess a place six times in ten, right one time in four; otherwise look it up."""
    if rng.random() < 0.6:
        return [f"<answer> {rng.choice(PLACES)}</answer>"]
    thing = task.task_id.split("/")[1]
    return [f"<search> {thing}</search>", f"<answer> {task.golden_answers[0]}</answer>"]


@contextmanager
def algorithm(config: RunConfig, run_dir: Path) -> Iterator[Algorithm]:
    built = Algorithm(config, run_dir)
    built.workspace = replace(built.workspace, demonstrate=mixed)
    try:
        yield built
    finally:
        built.stop()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_reward_rises(files: Path, tmp_path: Path, name: str) -> None:
    with algorithm(make_config(files, algorithm=name, num_iterations=20, vf_lr=3e-3), tmp_path) as trained:
        losses: list[float] = []
        trained.pretrain(lambda step, metrics: losses.append(metrics["loss"]))
        history = [trained.train() for _ in range(20)]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    rewards = [metrics["rollout/reward"] for metrics in history]
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert first < 0.7
    assert last > first + 0.2, rewards
    assert history[0]["learner/logprob_gap_max"] < 1e-4  # engine and learner agree on every token at lag 0
    assert history[-1]["tasks/trained"] == 20 * 8
    assert history[-1]["tasks/lost"] == history[-1]["tasks/doubled"] == 0


def run(config: RunConfig, run_dir: Path) -> list[dict[str, Any]]:
    create_run_directory(config, run_dir)
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    return [deterministic(row) for row in read_metrics(run_dir)]


def test_the_same_seed_gives_the_same_metrics_line_for_line(files: Path, tmp_path: Path) -> None:
    config = make_config(files, SHORT)
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert first == second
    assert [row["stage"] for row in first].count("rl") == 4
    other = run(
        config.model_copy(update={"debugging": config.debugging.model_copy(update={"seed": 1})}), tmp_path / "c"
    )
    assert other != first
    report = read_json(tmp_path / "a" / "report.json")
    assert [stage["stage"] for stage in report["stages"]] == ["start", "sft", "rl"]
    assert report["tasks"] == {"issued": 32, "trained": 32, "failed": 0, "lost": 0, "doubled": 0}


@pytest.mark.parametrize("stop_in", ["sft", "rl"])
def test_an_interrupted_run_resumes_as_if_nothing_had_happened(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_in: str
) -> None:
    config = make_config(files, SHORT)
    expected = run(config, tmp_path / "whole")
    count = 0
    method = "_demonstration_batches" if stop_in == "sft" else "_next_batch"
    original = getattr(Algorithm, method)

    def interrupted(self: Algorithm, *arguments: Any) -> Any:
        nonlocal count
        if stop_in == "sft":
            return (batch for index, batch in enumerate(original(self, *arguments)) if index < 11 or stop())
        count += 1
        return stop() if count == 3 else original(self, *arguments)

    def stop() -> bool:
        raise KeyboardInterrupt

    run_dir = tmp_path / "cut"
    create_run_directory(config, run_dir)
    monkeypatch.setattr(Algorithm, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        TrainingRun(config, run_dir, Console(quiet=True)).execute()
    monkeypatch.setattr(Algorithm, method, original)
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    assert [deterministic(row) for row in read_metrics(run_dir)] == expected
    whole, resumed = (CheckpointStore(d / "checkpoints").latest() for d in (tmp_path / "whole", run_dir))
    assert whole is not None
    assert resumed is not None
    ours, theirs = (read_tensors(path / "learner.safetensors") for path in (resumed, whole))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])


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


@pytest.mark.ray
def test_ctrl_c_writes_a_checkpoint_and_leaves_no_actor(files: Path, tmp_path: Path) -> None:
    config = make_config(files, SHORT, num_iterations=100_000).model_dump()
    config["env_runners"]["num_env_runners"] = config["retrieval"]["num_retrievers"] = 1
    config["sft"]["num_steps"] = 2
    config["environment"]["eval_tasks"] = ""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(config))
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "ragr1_actors", "train", str(recipe), "--run-dir", str(run_dir)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    trajectories = run_dir / "trajectories"
    while process.poll() is None and time.monotonic() < deadline and len(list(trajectories.glob("*.arrow"))) < 3:
        time.sleep(0.2)
    children = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    checkpoint = CheckpointStore(run_dir / "checkpoints").latest()
    assert checkpoint is not None
    state = read_json(checkpoint / "state.json")
    assert state["iteration"] >= 3
    assert state["sampler"]["counts"]["trained"] == 8 * state["iteration"]
    deadline = time.monotonic() + 30
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def descendants(root: int) -> set[int]:
    """Process ids below ``root``, Ray's among them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, frontier = set(), {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found
