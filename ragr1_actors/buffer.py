"""Finished groups on their way to the learner."""

from __future__ import annotations

from collections import deque

from ragr1_actors.env_runner_group import FinishedGroup


class GroupBuffer:
    """Holds finished groups in the order they came, and hands out batches none of whose groups is too stale."""

    def __init__(self, max_policy_lag: int) -> None:
        """Take the versions a group may be behind the policy that it trains."""
        self._max_policy_lag = max_policy_lag
        self._groups: deque[FinishedGroup] = deque()

    def __len__(self) -> int:
        """Groups held."""
        return len(self._groups)

    def add(self, group: FinishedGroup) -> None:
        """Take a finished group."""
        self._groups.append(group)

    def drop_stale(self, policy_version: int) -> list[FinishedGroup]:
        """Remove and return the groups that are too far behind ``policy_version``; their tasks are issued again."""
        oldest = policy_version - self._max_policy_lag
        stale = [group for group in self._groups if group.summary.oldest_version < oldest]
        self._groups = deque(group for group in self._groups if group.summary.oldest_version >= oldest)
        return stale

    def take(self, count: int) -> list[FinishedGroup]:
        """Remove and return the ``count`` groups that came first."""
        return [self._groups.popleft() for _ in range(count)]
