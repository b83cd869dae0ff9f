"""BatchCollector over a fleet that finishes everything at once."""

from __future__ import annotations

import pytest

from ragr1_actors.core.types import Task
from ragr1_actors.rollout.env_runner import GroupRequest, GroupSummary
from ragr1_actors.rollout.env_runner_group import FinishedGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.collector import BatchCollector, mean_lag

BATCH = 4


class InstantFleet:
    """Samples each group the moment it is asked for, with the policy version of that moment."""

    def __init__(self) -> None:
        self.version = 0
        self.finished: list[FinishedGroup] = []
        self.num_sampled = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.finished)

    @property
    def num_finished(self) -> int:
        return len(self.finished)

    def submit(self, request: GroupRequest) -> None:
        self.num_sampled += 1
        self.finished.append(FinishedGroup(request, GroupSummary((1.0, 0.0), 0, (), self.version, {}), None))

    def collect(self) -> list[FinishedGroup]:
        finished, self.finished = self.finished, []
        return finished


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_nothing_is_sampled_in_vain(lag: int) -> None:
    """However fast the runners are, no group is too old when the learner gets to it, and it never waits for one."""
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2, max_policy_lag=lag)
    fleet = InstantFleet()
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    collector = BatchCollector(training.freeze(), tasks, fleet)
    lags = []
    for version in range(10):
        fleet.version = version
        found = collector.next_batch(version)
        batch = found.groups
        lags.append(mean_lag(batch, version))
        assert (len(batch), found.num_stale, found.num_awaited) == (BATCH, 0, 0)
        if lag:
            collector.keep_busy(while_learning=True)
            assert fleet.num_sampled == BATCH * (1 + version + lag)
        assert collector.trained(batch) == []
    assert fleet.num_sampled == BATCH * (10 + lag)
    assert max(lags) == lag
    assert collector.tasks.counts() == {"issued": 40 + lag * BATCH, "trained": 40, "failed": 0, "lost": 0, "doubled": 0}


class StragglingFleet(InstantFleet):
    """One group in five takes as long as ten others; what is asked for later overtakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: list[tuple[int, FinishedGroup]] = []
        self.num_collected = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.finished) + len(self.slow)

    def submit(self, request: GroupRequest) -> None:
        super().submit(request)
        if self.num_sampled % 5 == 1:
            self.slow.append((self.num_collected + 10, self.finished.pop()))

    def collect(self) -> list[FinishedGroup]:
        self.num_collected += 1
        self.finished += [group for at, group in self.slow if at <= self.num_collected]
        self.slow = [(at, group) for at, group in self.slow if at > self.num_collected]
        finished, self.finished = self.finished[:1], self.finished[1:]
        return finished


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_learner_waits_for_a_group_that_would_be_too_old(lag: int) -> None:
    lags, num_stale, num_awaited = train(StragglingFleet(), lag, "wait")
    assert (max(lags), num_stale) == (lag, 0)
    assert num_awaited > 0 or lag == 0


@pytest.mark.parametrize("lag", [1, 3])
def test_or_drops_it_and_samples_its_task_again(lag: int) -> None:
    lags, num_stale, num_awaited = train(StragglingFleet(), lag, "drop")
    assert max(lags) <= lag
    assert num_stale > 0
    assert num_awaited == 0


def train(fleet: InstantFleet, lag: int, stale_groups: str, num_iterations: int = 30) -> tuple[list[float], int, int]:
    """Return the lag of every group that was trained, and how many were stale and awaited; check the books."""
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2, max_policy_lag=lag)
    training = training.debugging(fault_tolerance={"stale_groups": stale_groups})
    collector = BatchCollector(training.freeze(), [Task(f"t/{n}", "?", ("a",)) for n in range(1000)], fleet)
    lags: list[float] = []
    num_stale = num_awaited = 0
    for version in range(num_iterations):
        fleet.version = version
        found = collector.next_batch(version)
        lags += [mean_lag([group], version) for group in found.groups]
        num_stale, num_awaited = num_stale + found.num_stale, num_awaited + found.num_awaited
        if lag:
            collector.keep_busy(while_learning=True)
        collector.trained(found.groups)
    counts = collector.tasks.counts()
    assert (counts["trained"], counts["lost"], counts["doubled"]) == (num_iterations * BATCH, 0, 0)
    return lags, num_stale, num_awaited


def test_groups_that_a_node_took_with_it_are_sampled_again() -> None:
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2)
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    fleet = InstantFleet()
    collector = BatchCollector(training.freeze(), tasks, fleet)
    lost = [[0, 2], [1], []]
    found = collector.next_batch(0, lambda batches: lost.pop(0))
    assert (len(found.groups), found.num_stale, lost) == (BATCH, 0, [])
    assert fleet.num_sampled == BATCH + 3
    collector.trained(found.groups)
    assert collector.tasks.counts() == {"issued": BATCH, "trained": BATCH, "failed": 0, "lost": 0, "doubled": 0}
