"""Checkpoints that are written while the learner continues: they hold the state at which they were begun."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_world
from learners_common import make_config, make_groups, make_policy
from rich.console import Console
from small_world import invoke

from learners.ranks import learner_group
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.digests import FileDigest
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.disk.learner_state import LEARNER_FILE, TensorPart, read_tensors, write_parts
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.runs.checkpoint import Checkpoints, CheckpointSaver
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm import Algorithm, OnIteration
from ragr1_actors.training.training_run import TrainingRun

pytestmark = pytest.mark.engine


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[LearnerGroup]:
    group = LearnerGroup(make_config())
    group.build("grpo", make_policy(tmp_path / "policy"))
    yield group
    group.stop()


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(RunStore(tmp_path), num_to_keep=2)


def steps(store: Checkpoints) -> list[int]:
    newest = store.latest()
    return sorted(int(path.name.removeprefix("step_")) for path in newest.parent.glob("step_*")) if newest else []


def update(learners: LearnerGroup) -> dict[str, np.ndarray]:
    learners.update([groups_to_record_batch(make_groups(0))])
    return learners.get_state()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


class SlowDisk:
    """Writes once ``is_free`` is set."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.error: OSError | None = None

    def write(self, path: Path, parts: Mapping[str, TensorPart], source: str) -> None:
        assert self.is_free.wait(60)
        if self.error is not None:
            raise self.error
        write_parts(path, parts, source)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(learner_group, "write_parts", disk.write)
    return disk


def test_the_learner_continues_while_its_earlier_state_is_written(
    learners: LearnerGroup, store: Checkpoints, disk: SlowDisk
) -> None:
    saver = CheckpointSaver(store, learners)
    first = update(learners)
    saver.begin(1, {"iteration": 1}, None)
    second = update(learners)
    saver.commit_if_written()
    assert store.latest() is None  # a run that dies here has no checkpoint, rather than half of one
    threading.Timer(0.5, disk.is_free.set).start()
    saver.begin(2, {"iteration": 2}, None)  # waits for the one before
    assert steps(store) == [1]
    saver.finish()
    assert steps(store) == [1, 2]
    newest = store.latest()
    assert newest is not None
    assert_same(read_tensors(newest.parent / "step_1" / LEARNER_FILE), first)
    assert_same(read_tensors(newest / LEARNER_FILE), second)
    third = update(learners)
    learners.load_state(newest)
    assert_same(learners.get_state(), second)
    assert_same(update(learners), third)


def test_a_write_error_is_raised_by_the_next_call(learners: LearnerGroup, store: Checkpoints, disk: SlowDisk) -> None:
    saver = CheckpointSaver(store, learners)
    disk.is_free.set()
    saver.begin(1, {}, None)
    saver.finish()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    saver.begin(2, {}, None)
    with pytest.raises(UserError, match=r"no room to write a checkpoint .* free some space"):
        saver.finish()
    saver.commit_if_written()  # raised once
    assert steps(store) == [1]
    disk.error = None
    saver.begin(3, {}, None)
    saver.finish()
    assert steps(store) == [1, 3]


def changed(config: RunConfig, section: str, **settings: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})


def test_a_checkpoint_is_due_after_minutes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_world.make_config(small_world.make_files(tmp_path), small_world.SHORT | {"num_steps": 3})
    config = changed(config, "checkpointing", interval=1000, interval_minutes=2, num_to_keep=9)
    now = 0.0
    monkeypatch.setattr("ragr1_actors.planning.prepare.overlap", lambda train, evaluation: [])
    monkeypatch.setattr("ragr1_actors.training.training_run.time", SimpleNamespace(monotonic=lambda: now))
    original, saved = Algorithm.train, []

    def train(self: Algorithm, on_iteration: OnIteration | None = None) -> dict[str, float]:
        nonlocal now
        now += 50
        return original(self, on_iteration)

    monkeypatch.setattr(Algorithm, "train", train)
    monkeypatch.setattr(Algorithm, "save", lambda self, *_, **__: saved.append((self.sft_step, self.iteration)))
    create_run_directory(config, tmp_path / "run")
    TrainingRun(config, tmp_path / "run", Console(quiet=True)).execute()
    assert saved == [(3, 0), (3, 3), (3, 4)], "after SFT, after 150 s, at the end"


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint_and_it_can_be_asked(tmp_path: Path) -> None:
    config = small_world.make_config(small_world.make_files(tmp_path), small_world.SHORT, num_iterations=4, lr=3e-2)
    config = config.model_copy(
        update={
            "evaluation": config.evaluation.model_copy(update={"interval": 1}),
            "checkpointing": config.checkpointing.model_copy(
                update={"interval": 100, "num_to_keep": 1, "best_metric": "f1"}
            ),
        }
    )
    run_dir = tmp_path / "run"
    create_run_directory(config, run_dir)
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    scores = {
        (row["iteration"] if row["stage"] != "eval_sft" else 0): row["eval/f1"]
        for row in read_metrics(run_dir)
        if "eval/f1" in row and row["stage"] != "eval_start"
    }
    found = run_dir / "checkpoints"
    best = (found / "best").readlink().name
    assert scores[int(best.removeprefix("step_"))] == max(scores.values())
    assert {path.name for path in found.iterdir()} == {"best", best, "step_4"}
    assert read_json(found / "best" / "score.json") == {"metric": "f1", "value": max(scores.values())}
    assert json.loads(invoke("evaluate", str(found / "best"), "--json"))["f1"] == max(scores.values())
    assert "Where is the lamp ?" in invoke("ask", str(found / "best"), "Where is the lamp ?")


def test_a_folder_that_rank_0_did_not_write_into_is_no_checkpoint(
    learners: LearnerGroup, store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_group, "write_parts", lambda *arguments: None)  # as on a disk of another node
    written = {LEARNER_FILE: FileDigest(1, "9f2c")}
    monkeypatch.setattr(learner_group, "digest_files", lambda *arguments: written)
    saver = CheckpointSaver(store, learners)
    saver.begin(1, {"iteration": 1}, None)
    with pytest.raises(UserError, match=r"written without learner\.safetensors; if another node wrote it"):
        saver.finish()
    assert steps(store) == []
