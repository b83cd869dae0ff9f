"""Finished groups on their way to the learner."""

from __future__ import annotations

from collections import deque

from learners.advantages import has_variance
from learners.algorithms.options import GroupOptions
from learners.algorithms.registry import learner_options
from ragr1_actors.core.config import RunConfig
from ragr1_actors.rollout.env_runner_group import FinishedGroup


def max_set_aside(config: RunConfig) -> int:
    """Groups a batch that the algorithm's dynamic sampling may pass over."""
    options = learner_options(config.training)
    num_batches = options.max_sampled_batches if isinstance(options, GroupOptions) else 1
    return (num_batches - 1) * config.training.train_batch_size


class GroupBuffer:
    """Holds finished groups in the order they came, and hands out batches none of whose groups is too stale.

    With dynamic sampling, ``max_set_aside`` groups a batch whose rewards are all alike do not count, so that others are
    sampled in their place (DAPO, arXiv:2503.14476, section 3.2). One more does, and fills the batch up: which groups
    make a batch at lag 0 depends on the order of the tasks, not on that in which groups come.
    """

    def __init__(self, max_policy_lag: int, max_set_aside: int = 0) -> None:
        """Take the versions a group may be behind the policy that it trains, and how many a batch are set aside."""
        self._max_policy_lag = max_policy_lag
        self._max_set_aside = max_set_aside
        self._groups: deque[FinishedGroup] = deque()
        self._set_aside: list[FinishedGroup] = []

    def __len__(self) -> int:
        """Groups that a batch can be made of."""
        return len(self._groups) + max(0, len(self._set_aside) - self._max_set_aside)

    def add(self, group: FinishedGroup) -> None:
        """Take a finished group."""
        if self._max_set_aside and not has_variance(group.summary.rewards):
            self._set_aside.append(group)
        else:
            self._groups.append(group)

    def drop_set_aside(self) -> list[FinishedGroup]:
        """Remove and return, in the order of their tasks, the groups that were set aside for the last batch."""
        dropped, self._set_aside = self._set_aside, []
        return sorted(dropped, key=lambda group: group.request.issue.issue_id)

    def drop_stale(self, policy_version: int) -> list[FinishedGroup]:
        """Remove and return the groups that are too far behind ``policy_version``; their tasks are issued again."""
        oldest = policy_version - self._max_policy_lag

        def is_stale(group: FinishedGroup) -> bool:
            return 0 <= group.summary.oldest_version < oldest  # below 0: nothing was sampled, which does not age

        held = [*self._groups, *self._set_aside]
        self._groups = deque(group for group in self._groups if not is_stale(group))
        self._set_aside = [group for group in self._set_aside if not is_stale(group)]
        return [group for group in held if is_stale(group)]

    def take(self, count: int) -> list[FinishedGroup]:
        """Remove and return the ``count`` groups that came first, the last of them from what was set aside."""
        self._set_aside.sort(key=lambda group: group.request.issue.issue_id)
        missing = max(0, count - len(self._groups))
        filling, self._set_aside = self._set_aside[:missing], self._set_aside[missing:]
        return [self._groups.popleft() for _ in range(count - missing)] + filling
