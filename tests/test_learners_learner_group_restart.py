"""After a rank is killed or fails, the group restarts and reaches the same state to the bit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from learners_common import State, assert_same_arrays, make_config, make_groups, make_policy, pickle_by_value
from small_world import descendants, wait_for
from transformers import AutoModelForCausalLM

from learners.algorithms.grpo import GRPOLearner
from learners.ranks import call_history
from learners.ranks.learner_group import ActorOptions, LearnerGroup
from ragr1_actors.core.disk.files import POLICY_FOLDER
from ragr1_actors.core.disk.folders import SharedFolderWriter
from ragr1_actors.core.disk.learner_state import LEARNER_FILE, read_learner
from ragr1_actors.core.errors import FleetError, LearnerError
from ragr1_actors.core.schema import groups_to_record_batch

pytestmark = pytest.mark.engine

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


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stuck() -> None:
    threading.Event().wait()


FAILURES: dict[str, Failure] = {f.__name__: f for f in (killed, cuda_error, learner_error, mistake, stopped, stuck)}


class FailingLearner(GRPOLearner):
    """Fails once for every file ``fail_<rank>`` in the folder of the policy, in the way that the file names."""

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
    pickle_by_value(ray_local, __name__)
    return ray_local


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy")


def make_group(
    num_learners: int,
    hang_timeout_s: float = 120,
    max_learner_restarts: int = 2,
    actor_options: ActorOptions | None = None,
    **learners: Any,
) -> LearnerGroup:
    settings = {"num_learners": num_learners, "num_cpus_per_learner": 0.5, "zero_stage": 2, "micro_batch_tokens": 64}
    config = make_config(learners=settings | learners, training={"lr": 1e-3, "num_minibatches": 2})
    limits = {"hang_timeout_s": hang_timeout_s, "max_learner_restarts": max_learner_restarts}
    debugging = config.debugging.model_copy(
        update={"fault_tolerance": config.debugging.fault_tolerance.model_copy(update=limits)}
    )
    return LearnerGroup(config.model_copy(update={"debugging": debugging}), actor_options)


def update(group: LearnerGroup, number: int) -> dict[str, float]:
    return group.update([groups_to_record_batch(make_groups(number))])


def check_that_no_restart_mends(group: LearnerGroup, policy_dir: Path, how: str, error: type[Exception]) -> None:
    """An error of the learner itself ends the group; the processes of a stage before do for this one."""
    num_restarts = group.num_restarts
    group.build(f"{__name__}:FailingLearner", policy_dir)
    (policy_dir / "fail_0").write_text(how)
    with pytest.raises(error, match=r"learning cannot go on|a mistake in a custom learner"):
        for number in range(NUM_UPDATES):
            update(group, number)
    assert (group.num_restarts, group.is_stopped) == (num_restarts, True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, dict[str, float]]:
    """State and last metrics of one rank in this process, which ran without a failure."""
    group = make_group(0)
    group.build(f"{__name__}:FailingLearner", make_policy(tmp_path_factory.mktemp("whole") / "policy"))
    metrics = [update(group, number) for number in range(NUM_UPDATES)][-1]
    state = group.get_state()
    group.stop()
    return state, metrics


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_that_hangs_in_an_update_is_replaced(
    ray_with_tests: ModuleType,
    policy_dir: Path,
    expected: tuple[State, dict[str, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process is stopped; after the restart a rank answers, but waits for ever in the same update."""
    group = make_group(2, hang_timeout_s=15, max_learner_restarts=9)
    group.build(f"{__name__}:FailingLearner", policy_dir)
    (policy_dir / "fail_1").write_text("stopped stuck")
    with caplog.at_level(logging.WARNING):
        metrics = [update(group, number) for number in range(NUM_UPDATES)][-1]
    assert metrics["loss"] == pytest.approx(expected[1]["loss"], abs=1e-6)
    assert group.num_restarts >= 2  # on a busy machine a rank that starts may be taken for one that hangs
    assert "learner rank 1 hangs: it has not answered for" in caplog.text
    assert "hangs: it has made no progress for" in caplog.text  # the other rank waits for it
    assert not (policy_dir / "fail_1").exists()

    state, num_restarts = group.get_state(), group.num_restarts
    os.kill(group.foreach_learner(lambda learner: os.getpid())[0], signal.SIGSTOP)  # while nothing is asked of it
    assert wait_for(lambda: not group.actors, 600)
    assert_same_arrays(group.get_state(), state)
    assert group.num_restarts == num_restarts + 1
    group.stop()
    with pytest.raises(FleetError, match="was stopped"):
        group.get_state()


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_loads_its_libraries_is_replaced(
    ray_with_tests: ModuleType, policy_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped: list[int] = []
    before = descendants(os.getpid())  # ranks of another test may still end

    def stop() -> None:
        while not stopped:
            for pid in descendants(os.getpid()) - before:
                with contextlib.suppress(OSError):
                    is_rank = b"ray::LearnerWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    if is_rank and "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                        os.kill(pid, signal.SIGSTOP)
                        stopped.append(pid)
                        return
            time.sleep(0.01)

    thread = threading.Thread(target=stop)
    thread.start()
    unforked = {"runtime_env": {"py_executable": sys.executable}}  # a fork has its libraries from the start
    group = make_group(1, hang_timeout_s=15, actor_options=lambda rank: unforked)
    thread.join()
    assert group.num_restarts >= 1
    assert "learner rank 0 hangs: it has not answered for" in caplog.text
    group.build("grpo", policy_dir)
    assert update(group, 0)["num_steps"] > 0
    check_that_no_restart_mends(group, policy_dir, "mistake", FleetError)


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_killed_in_an_update_changes_nothing(
    ray_with_tests: ModuleType,
    policy_dir: Path,
    expected: tuple[State, dict[str, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = make_group(1)
    group.build(f"{__name__}:FailingLearner", policy_dir)
    (policy_dir / "fail_0").write_text("killed")
    with caplog.at_level(logging.WARNING):
        metrics = [update(group, number) for number in range(NUM_UPDATES)][-1]
    assert_same_arrays(group.get_state(), expected[0])
    assert metrics == expected[1]
    assert group.num_restarts == 1
    assert "learner rank 0 died" in caplog.text
    assert "restart 1 of 2: 3 updates are repeated, and update" in caplog.text
    assert not (policy_dir / "fail_0").exists()
    check_that_no_restart_mends(group, policy_dir, "learner_error", LearnerError)


@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_fail_again_and_again_while_a_checkpoint_is_written(
    ray_with_tests: ModuleType, policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(2, max_learner_restarts=3)
    group.build(f"{__name__}:FailingLearner", policy_dir)
    states = []
    for number in range(NUM_UPDATES):
        update(group, number)
        states.append(group.get_state())

    group.build(f"{__name__}:FailingLearner", policy_dir)  # from the start
    for number in range(FAILS_AT):
        update(group, number)
    writing, final = tmp_path / "writing", tmp_path / "final"
    group.begin_save(SharedFolderWriter(writing))
    (policy_dir / "fail_1").write_text("killed cuda_error")
    for number in range(FAILS_AT, NUM_UPDATES):
        update(group, number)
    assert group.num_restarts == 2
    assert "learner rank" in caplog.text and "CUDA error" in caplog.text
    group.finish_save()
    writing.rename(final)
    group.saved(SharedFolderWriter(writing), final)
    assert_same_arrays(dict(read_learner(final / LEARNER_FILE)), states[FAILS_AT - 1])
    model = AutoModelForCausalLM.from_pretrained(final / POLICY_FOLDER)
    np.testing.assert_array_equal(
        model.model.norm.weight.detach().numpy(), states[FAILS_AT - 1]["policy/weight/model.model.norm.weight"]
    )

    caplog.clear()
    os.kill(group.foreach_learner(lambda learner: os.getpid())[0], signal.SIGKILL)
    assert_same_arrays(group.get_state(), states[-1])  # from the file
    assert f"{NUM_UPDATES - FAILS_AT} updates are repeated, and apply" in caplog.text
    os.kill(group.foreach_learner(lambda learner: os.getpid())[1], signal.SIGKILL)
    with pytest.raises(
        FleetError, match=r"learner rank . (died|failed): .*; continue from the last checkpoint with --resume"
    ):
        group.get_weights()
    assert group.is_stopped


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_that_is_killed_keeps_the_factor_of_its_learning_rate(
    ray_with_tests: ModuleType, policy_dir: Path
) -> None:
    group = make_group(1)
    group.build(f"{__name__}:FailingLearner", policy_dir)
    group.scale_lr(0.5)
    (policy_dir / "fail_0").write_text("killed")
    for number in range(NUM_UPDATES):
        update(group, number)
    assert group.num_restarts == 1
    assert group.foreach_learner(lambda learner: learner.lr_factor) == [0.5]
    group.stop()


def test_batches_are_not_held_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(call_history, "MAX_HELD_CALLS", 3)
    history = call_history.CallHistory("grpo", Path("policy"))
    for number in range(3):
        history.add("update", number)
    assert history.is_whole
    history.add("begin_save", SharedFolderWriter(Path("writing")))
    assert not history.is_whole and "3 updates since the last checkpoint" in caplog.text
    history.add("update", 3)
    history.saved(SharedFolderWriter(Path("writing")), Path("final"))
    assert history.is_whole
    assert (history.state, history.calls) == (Path("final"), [("update", 3)])
