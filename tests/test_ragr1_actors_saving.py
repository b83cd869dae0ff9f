"""Checkpoints that are written while the learner goes on: of the state at which they were begun, one at a time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learners_common import make_config, make_groups, make_policy

from learners import learner_worker
from learners.learner_group import LearnerGroup
from ragr1_actors.checkpoint import LEARNER_FILE, CheckpointStore, read_tensors, write_tensors
from ragr1_actors.errors import UserError
from ragr1_actors.saving import CheckpointSaver
from ragr1_actors.schema import groups_to_record_batch


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[LearnerGroup]:
    group = LearnerGroup(make_config())
    group.build("grpo", make_policy(tmp_path / "policy"))
    yield group
    group.stop()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", num_to_keep=2)


def update(learners: LearnerGroup) -> dict[str, np.ndarray]:
    learners.update([groups_to_record_batch(make_groups(0))])
    return learners.get_state()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


class SlowDisk:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.error: OSError | None = None

    def write(self, path: Path, tensors: Mapping[str, Any]) -> None:
        assert self.is_free.wait(60)
        if self.error is not None:
            raise self.error
        write_tensors(path, tensors)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(learner_worker, "write_tensors", disk.write)
    return disk


def test_the_learner_goes_on_while_its_state_of_before_is_written(
    learners: LearnerGroup, store: CheckpointStore, disk: SlowDisk
) -> None:
    saver = CheckpointSaver(store, learners)
    first = update(learners)
    saver.begin(1, {"iteration": 1}, None)
    second = update(learners)
    saver.look()
    assert store.latest() is None  # a run that dies here has no checkpoint, rather than half of one
    threading.Timer(0.5, disk.is_free.set).start()
    saver.begin(2, {"iteration": 2}, None)  # waits for the one before
    assert store.steps() == [1]
    saver.finish()
    assert store.steps() == [1, 2]
    newest = store.latest()
    assert newest is not None
    assert_same(read_tensors(newest.parent / "step_1" / LEARNER_FILE), first)
    assert_same(read_tensors(newest / LEARNER_FILE), second)
    third = update(learners)
    saver.restore(newest)
    assert_same(learners.get_state(), second)
    assert_same(update(learners), third)


def test_what_could_not_be_written_is_raised_when_somebody_looks(
    learners: LearnerGroup, store: CheckpointStore, disk: SlowDisk
) -> None:
    saver = CheckpointSaver(store, learners)
    disk.is_free.set()
    saver.begin(1, {}, None)
    saver.finish()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    saver.begin(2, {}, None)
    with pytest.raises(UserError, match=r"no room to write a checkpoint .* free some space"):
        saver.finish()
    saver.look()  # said once
    assert store.steps() == [1]
    disk.error = None
    saver.begin(3, {}, None)
    saver.finish()
    assert store.steps() == [1, 3]
