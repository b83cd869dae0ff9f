"""A rank that is killed or fails: the group starts anew and ends, to the bit, where it would have been."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import learners_common
import numpy as np
import pytest
from learners_common import make_config, make_groups, make_policy

from learners.grpo import GRPOLearner
from learners.learner_group import LearnerGroup
from ragr1_actors.checkpoint import LEARNER_FILE, read_tensors
from ragr1_actors.errors import FleetError, LearnerError
from ragr1_actors.schema import groups_to_record_batch

pytestmark = pytest.mark.ray
NUM_UPDATES = 5
FAILS_AT = 3
"""The update in which ranks fail, counted from 0: after the first of its two optimizer steps."""
Failure = Callable[[], None]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cuda_error() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def learner_error() -> None:
    raise LearnerError("learning cannot go on")


def mistake() -> None:
    raise TypeError("a mistake in a custom learner")


FAILURES: dict[str, Failure] = {f.__name__: f for f in (killed, cuda_error, learner_error, mistake)}


class FailingLearner(GRPOLearner):
    """Fails once for every file ``fail_<rank>`` in the folder of the policy, in the way that stands in it."""

    def train_step(self, *arguments: Any) -> None:
        meter = arguments[-1]
        order = self.policy_dir / f"fail_{self.rank}"
        if self.num_updates == FAILS_AT and meter.num_steps == 1 and order.exists():
            how = order.read_text().split()
            order.write_text(" ".join(how[1:])) if how[1:] else order.unlink()
            FAILURES[how[0]]()
        super().train_step(*arguments)


@pytest.fixture(scope="module")
def ray_with_tests(ray_local: ModuleType) -> ModuleType:
    for module in (sys.modules[__name__], learners_common):  # the actors cannot import the tests
        ray_local.cloudpickle.register_pickle_by_value(module)
    return ray_local


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy")


def make_group(ray: ModuleType, num_learners: int = 2, **learners: Any) -> LearnerGroup:
    settings = {"num_learners": num_learners, "num_cpus_per_learner": 0.5, "zero_stage": 2, "micro_batch_tokens": 64}
    config = make_config(learners=settings | learners, training={"lr": 1e-3, "num_minibatches": 2})
    return LearnerGroup(config)


def update(group: LearnerGroup, number: int) -> dict[str, float]:
    return group.update([groups_to_record_batch(make_groups(number))])


@pytest.fixture(scope="module")
def expected(
    ray_with_tests: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """State and last metrics of two ranks that nothing happened to."""
    group = make_group(ray_with_tests)
    group.build(f"{__name__}:FailingLearner", make_policy(tmp_path_factory.mktemp("whole") / "policy"))
    metrics = [update(group, number) for number in range(NUM_UPDATES)][-1]
    yield group.get_state(), metrics
    group.stop()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_rank_killed_in_an_update_changes_nothing(
    ray_with_tests: ModuleType,
    policy_dir: Path,
    expected: tuple[dict[str, np.ndarray], dict[str, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = make_group(ray_with_tests)
    group.build(f"{__name__}:FailingLearner", policy_dir)
    (policy_dir / "fail_1").write_text("killed")
    with caplog.at_level(logging.WARNING):
        metrics = [update(group, number) for number in range(NUM_UPDATES)][-1]
    assert_same(group.get_state(), expected[0])
    assert metrics == expected[1]
    assert group.num_restarts == 1
    assert "starts anew, 1 of at most 2 times: 3 updates are repeated, and update" in caplog.text
    assert not (policy_dir / "fail_1").exists()
    group.stop()
