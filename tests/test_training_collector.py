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
        batch, num_stale = collector.next_batch(version)
        lags.append(mean_lag(batch, version))
        assert (len(batch), num_stale) == (BATCH, 0)
        if lag:
            collector.keep_busy(while_learning=True)
            assert fleet.num_sampled == BATCH * (1 + version + lag)
        assert collector.trained(batch) == []
    assert fleet.num_sampled == BATCH * (10 + lag)
    assert max(lags) == lag
    assert collector.tasks.counts() == {"issued": 40 + lag * BATCH, "trained": 40, "failed": 0, "lost": 0, "doubled": 0}


def test_groups_that_a_node_took_with_it_are_sampled_again() -> None:
    training = AlgorithmConfig().training(train_batch_size=BATCH, group_size=2)
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    fleet = InstantFleet()
    collector = BatchCollector(training.freeze(), tasks, fleet)
    lost = [[0, 2], [1], []]
    batch, num_stale = collector.next_batch(0, lambda batches: lost.pop(0))
    assert (len(batch), num_stale, lost) == (BATCH, 0, [])
    assert fleet.num_sampled == BATCH + 3
    collector.trained(batch)
    assert collector.tasks.counts() == {"issued": BATCH, "trained": BATCH, "failed": 0, "lost": 0, "doubled": 0}
