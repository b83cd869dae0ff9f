"""BatchCollector over a fleet that finishes everything at once: its batches, and what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from learners_common import make_groups

from envs.tasks.curriculum import Curriculum, Shuffle, Stats, TaskStats
from learners.advantages import group_advantages
from learners.train_batch import make_batch
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.types import FailedTask, Failure, StopReason, Task, TrajectoryGroup
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, GroupSummary, summarize
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.batches import HOPELESS_TASKS, MAX_OUTAGES, BatchCollector, TaskLedger, mean_lag

BATCH = 4
TASK = Task("t", "?", ("a",))


class InstantFleet:
    """Samples each group the moment it is asked for, with the policy version of that moment."""

    def __init__(self) -> None:
        self.version = 0
        self.num_sampled = 0

    async def sample(self, request: GroupRequest) -> FinishedGroup:
        self.num_sampled += 1
        return FinishedGroup(request, GroupSummary((1.0, 0.0), 0, (), self.version, {}, num_sampled_tokens=7), None)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_nothing_is_sampled_in_vain(lag: int, loop: DriverLoop) -> None:
    """However fast the runners are, no group is too old when the learner gets to it, and it never waits for one."""
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2, max_policy_lag=lag)
    fleet = InstantFleet()
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    collector = BatchCollector(training.freeze(), tasks, fleet.sample)
    lags = []
    for version in range(10):
        fleet.version = version
        batch = loop.run(collector.next_batch(version))
        lags.append(mean_lag(batch, version))
        assert (len(batch), collector.num_stale, collector.num_awaited) == (BATCH, 0, 0)
        if lag:
            loop.run(collector.feed(while_learning=True))
            assert fleet.num_sampled == BATCH * (1 + version + lag)
        assert collector.trained(batch) == []
    assert fleet.num_sampled == BATCH * (10 + lag)
    assert max(lags) == lag
    assert collector.tasks.counts() == {
        "issued": 40 + lag * BATCH,
        "trained": 40,
        "failed": 0,
        "skipped": 0,
        "lost": 0,
        "doubled": 0,
    }


def test_the_sampled_tokens_of_all_groups_count_and_groups_in_flight_can_be_dropped(loop: DriverLoop) -> None:
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2)
    collector = BatchCollector(
        training.freeze(), [Task(f"t/{n}", "?", ("a",)) for n in range(100)], InstantFleet().sample
    )
    batch = loop.run(collector.next_batch(0))
    assert [group.request.issue_id for group in batch] == [f"{group.request.task.task_id}#0" for group in batch]
    assert collector.num_sampled_tokens == 7 * BATCH
    loop.run(collector.feed())
    assert len(collector.tasks.get_state()["outstanding"]) == 2 * BATCH
    loop.run(collector.drop_in_flight())
    assert collector.num_sampled_tokens == 7 * 2 * BATCH
    assert collector.num_finished_batches() == 0.0


class StragglingFleet(InstantFleet):
    """One group in five takes as long as thirty others; what is asked for later overtakes it."""

    async def sample(self, request: GroupRequest) -> FinishedGroup:
        group = await super().sample(request)
        for _ in range(30 if self.num_sampled % 5 == 1 else 1):
            await asyncio.sleep(0)
        return group


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_learner_waits_for_a_group_that_would_be_too_old(lag: int, loop: DriverLoop) -> None:
    lags, num_stale, num_awaited = train(loop, StragglingFleet(), lag, "wait")
    assert (max(lags), num_stale) == (lag, 0)
    assert num_awaited > 0 or lag == 0


@pytest.mark.parametrize("lag", [1, 3])
def test_or_drops_it_and_samples_its_task_again(lag: int, loop: DriverLoop) -> None:
    lags, num_stale, num_awaited = train(loop, StragglingFleet(), lag, "drop")
    assert max(lags) <= lag
    assert num_stale > 0
    assert num_awaited == 0


def train(
    loop: DriverLoop, fleet: InstantFleet, lag: int, stale_groups: str, num_iterations: int = 30
) -> tuple[list[float], int, int]:
    """Return the lag of every group that was trained, and how many were stale and awaited; check the books."""
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2, max_policy_lag=lag)
    training = training.debugging(fault_tolerance={"stale_groups": stale_groups})
    collector = BatchCollector(training.freeze(), [Task(f"t/{n}", "?", ("a",)) for n in range(1000)], fleet.sample)
    lags: list[float] = []
    num_stale = num_awaited = 0
    for version in range(num_iterations):
        fleet.version = version
        found = loop.run(collector.next_batch(version))
        lags += [mean_lag([group], version) for group in found]
        num_stale, num_awaited = num_stale + collector.num_stale, num_awaited + collector.num_awaited
        if lag:
            loop.run(collector.feed(while_learning=True))
        collector.trained(found)
    counts = collector.tasks.counts()
    assert (counts["trained"], counts["lost"], counts["doubled"]) == (num_iterations * BATCH, 0, 0)
    return lags, num_stale, num_awaited


def test_groups_that_a_node_took_with_it_are_sampled_again(loop: DriverLoop) -> None:
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2)
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    fleet = InstantFleet()
    collector = BatchCollector(training.freeze(), tasks, fleet.sample)
    lost = [[0, 2], [1], []]
    found = loop.run(collector.next_batch(0, lambda batches: lost.pop(0)))
    assert (len(found), collector.num_stale, lost) == (BATCH, 0, [])
    assert fleet.num_sampled == BATCH + 3
    collector.trained(found)
    assert collector.tasks.counts() == {
        "issued": BATCH,
        "trained": BATCH,
        "failed": 0,
        "skipped": 0,
        "lost": 0,
        "doubled": 0,
    }


class Recorder(Curriculum):
    """Keeps what it was asked with."""

    asked: ClassVar[list[tuple[int, Stats]]] = []

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        self.asked.append((len(rest), dict(stats)))
        return range(len(rest))

    def skip(self, task: Task, stats: Stats) -> bool:
        return task.question == "skip"


@pytest.mark.parametrize("lag", [0, 1])
def test_the_curriculum_is_asked_before_each_batch_with_what_was_trained(lag: int, loop: DriverLoop) -> None:
    Recorder.asked.clear()
    config = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2, max_policy_lag=lag)
    config = config.environment(curriculum=f"{__name__}:Recorder")
    tasks = [Task(f"t/{number:02}", "skip" if number == 1 else "?", ("a",)) for number in range(40)]
    fleet = InstantFleet()
    collector = BatchCollector(config.freeze(), tasks, fleet.sample)
    for version in range(3):
        fleet.version = version
        batch = loop.run(collector.next_batch(version))
        if lag:
            loop.run(collector.feed(while_learning=True))
        collector.trained(batch)
    ids = [task.task_id for task in tasks if task.question != "skip"]
    expected = [
        (40 - number, {task_id: TaskStats(2, 1, 1.0) for task_id in ids[: batch * BATCH]})
        for batch, number in enumerate((0, 5 + lag * BATCH, 5 + BATCH + lag * BATCH))
    ]
    assert Recorder.asked == expected
    assert collector.metrics()["tasks/skipped"] == 1.0


# -- failures ----------------------------------------------------------------------------------------------------------


def ended(reasons: Sequence[StopReason]) -> TrajectoryGroup:
    """A group whose trajectories ended so; those that did not fail have rewards 0, 1, 2, ..."""
    group = make_groups(0, num_groups=1, group_size=len(reasons))[0]
    trajectories = [
        replace(trajectory, stop_reason=reason, reward=0.0 if reason.is_failure else float(number), error=reason.value)
        for number, (trajectory, reason) in enumerate(zip(group.trajectories, reasons, strict=True))
    ]
    return replace(group, trajectories=tuple(trajectories))


class FailingFleet(InstantFleet):
    """Its trajectories end as ``by_task`` says at the first, second, ... try, and at last with answers."""

    def __init__(self, by_task: dict[str, list[list[StopReason]]]) -> None:
        super().__init__()
        self.by_task = by_task

    async def sample(self, request: GroupRequest) -> FinishedGroup:
        self.num_sampled += 1
        tries = self.by_task.get(request.task.task_id, [])
        reasons = tries.pop(0) if tries else [StopReason.ANSWERED] * request.num_trajectories
        return FinishedGroup(request, summarize(ended(reasons)), None)


OK, SEARCH, ENGINE, ENV = (
    StopReason.ANSWERED,
    StopReason.RETRIEVAL_FAILED,
    StopReason.ENGINE_ERROR,
    StopReason.ENV_ERROR,
)


def batch_of(
    loop: DriverLoop, tries: list[list[StopReason]], *, rule: str = "refill", retries: int = 2
) -> tuple[BatchCollector, FinishedGroup, int]:
    """Collect a batch of one group; return it with the collector and the number of groups that were sampled."""
    settings = AlgorithmConfig().training(train_batch_size=1, group_size=3)
    settings = settings.debugging(fault_tolerance={"failed_trajectories": rule, "max_task_retries": retries})
    tasks = [Task("a", "?", ("a",)), Task("b", "?", ("b",))]
    config = settings.freeze()
    first = TaskLedger(tasks, config.debugging.seed, Shuffle({})).next().task
    fleet = FailingFleet({first.task_id: tries})
    collector = BatchCollector(config, tasks, fleet.sample)
    (group,) = loop.run(collector.next_batch(0))
    collector.trained([group])
    assert collector.tasks.counts()["lost"] == collector.tasks.counts()["doubled"] == 0
    return collector, group, fleet.num_sampled


@pytest.mark.parametrize("reason", [SEARCH, ENGINE])
def test_a_failure_of_the_infrastructure_does_not_count_against_the_task(reason: StopReason, loop: DriverLoop) -> None:
    collector, group, num_sampled = batch_of(loop, [[OK, OK, reason]] * 5, retries=0)
    assert (group.request.attempt, group.summary.num_failed, num_sampled) == (5, 0, 6)
    assert collector.tasks.failed_tasks == []


def test_a_task_that_no_machine_can_serve_does_not_hold_the_run(loop: DriverLoop) -> None:
    collector, group, num_sampled = batch_of(loop, [[ENGINE, ENGINE, ENGINE]] * 99)
    assert num_sampled == MAX_OUTAGES + 1
    (failed,) = collector.tasks.failed_tasks
    assert (failed.failure, failed.num_tries, failed.error) == (Failure.INFRASTRUCTURE, MAX_OUTAGES, ENGINE.value)
    assert group.request.task.task_id != failed.task_id


def test_a_task_on_which_the_environment_raises_is_quarantined(loop: DriverLoop) -> None:
    # searches fail meanwhile, which does not count
    collector, group, num_sampled = batch_of(
        loop, [[ENV, OK, SEARCH], [SEARCH, OK, OK], [ENV] * 3, [ENV, SEARCH, SEARCH]]
    )
    (failed,) = collector.tasks.failed_tasks
    assert failed == FailedTask(failed.task_id, 0, Failure.DATA, 4, ENV.value)
    assert num_sampled == 5
    assert group.request.task.task_id != failed.task_id
    collector.tasks.next()
    assert collector.tasks.next().task.task_id != failed.task_id


@pytest.mark.parametrize(("rule", "num_sampled", "num_failed"), [("refill", 2, 0), ("shrink", 1, 1)])
def test_a_group_is_refilled_or_shrunk(rule: str, num_sampled: int, num_failed: int, loop: DriverLoop) -> None:
    collector, group, sampled = batch_of(loop, [[OK, ENV, OK]], rule=rule)
    assert (sampled, group.summary.num_failed, len(group.summary.rewards)) == (num_sampled, num_failed, 3 - num_failed)
    assert collector.tasks.failed_tasks == []


@pytest.mark.parametrize("rule", ["refill", "shrink"])
def test_failures_are_counted_by_what_ended_the_trajectory(rule: str, loop: DriverLoop) -> None:
    collector, group, _ = batch_of(loop, [[ENV, OK, SEARCH], [SEARCH, ENGINE, SEARCH], [OK, OK, SEARCH]], rule=rule)
    found = {name: value for name, value in collector.metrics().items() if name.startswith("env_runners/")}
    assert group.summary.num_failed == (rule == "shrink")
    assert found == {
        "env_runners/num_retrieval_failed": 4.0,
        "env_runners/num_service_failed": 0.0,
        "env_runners/num_engine_error": 1.0,
        "env_runners/num_env_error": 1.0,
    }
    assert collector.metrics()["tasks/trained"] == 1.0


def test_a_group_is_shrunk_after_its_last_try(loop: DriverLoop) -> None:
    _, group, num_sampled = batch_of(loop, [[OK, ENV, OK]] * 9, retries=2)
    assert (num_sampled, group.summary.rewards) == (3, (0.0, 2.0))


@pytest.mark.parametrize("rule", ["refill", "shrink"])
def test_one_trajectory_alone_is_no_group(rule: str, loop: DriverLoop) -> None:
    """Its advantage would be its reward, as it has no baseline."""
    collector, _, num_sampled = batch_of(loop, [[ENV, OK, ENV]] * 9, rule=rule, retries=1)
    assert num_sampled == 3
    assert [failed.num_tries for failed in collector.tasks.failed_tasks] == [2]


def test_failed_trajectories_are_in_no_baseline() -> None:
    batch = make_batch([ended([OK, SEARCH, OK, ENV])], lambda members: members, has_rollout_logprobs=True)
    assert batch is not None
    assert batch.rewards.tolist() == [0.0, 2.0]
    advantages = group_advantages(batch.rewards, torch.tensor(batch.group_ids))
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("reason", [StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.ANSWERED])
def test_what_the_policy_did_wrong_is_no_failure(reason: StopReason, loop: DriverLoop) -> None:
    assert reason.failure is None
    _, group, num_sampled = batch_of(loop, [[reason, OK, OK]])
    assert (num_sampled, group.summary.num_failed, group.summary.rewards) == (1, 0, (0.0, 1.0, 2.0))


def test_the_run_ends_when_nothing_but_failures_comes_back(loop: DriverLoop) -> None:
    settings = (
        AlgorithmConfig().training(train_batch_size=4, group_size=2).debugging(fault_tolerance={"max_task_retries": 0})
    )
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    bad = {task.task_id: [[ENV, ENV]] for task in tasks}
    for task in tasks[::2]:  # not one after the other
        bad[task.task_id] = []
    collector = BatchCollector(settings.freeze(), tasks, FailingFleet(bad).sample)
    for _ in range(10):
        collector.trained(loop.run(collector.next_batch(0)))
    assert len(collector.tasks.failed_tasks) > HOPELESS_TASKS
    collector = BatchCollector(
        settings.freeze(), tasks, FailingFleet({task.task_id: [[ENV, ENV]] for task in tasks}).sample
    )
    with pytest.raises(FleetError, match=rf"all of the last {HOPELESS_TASKS} tasks failed; the last one with: env_err"):
        loop.run(collector.next_batch(0))
