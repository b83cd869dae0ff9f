"""Issue: one task handed out to be sampled, with the number of its attempts; and the group that is asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from envs.rewards import RewardContext
from ragr1_actors.core.types import Failure, Task


@dataclass(frozen=True, slots=True)
class Issue:
    """One task handed out: ``Issue("world/train/17#2", task, epoch=2, attempt=0)``."""

    issue_id: str
    """Task and epoch. All attempts share it, so that a task that is trained twice is counted."""
    task: Task
    epoch: int
    attempt: int = 0
    num_failures: int = 0
    """Attempts with a failure of the data."""
    num_outages: int = 0
    """Attempts with a failure of the infrastructure only."""

    @property
    def group_id(self) -> str:
        """Unique per attempt: the sampling seeds depend on it."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id

    def failed(self, failure: Failure) -> Issue:
        """Return the issue with one more attempt that failed."""
        is_data = failure is Failure.DATA
        return replace(self, num_failures=self.num_failures + is_data, num_outages=self.num_outages + (not is_data))


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to sample."""

    issue: Issue
    num_trajectories: int
    temperature: float
    """0 is greedy."""
    policy_version: int = 0
    """The newest version when the group was asked for; no token of it is sampled with an older one."""
    context: RewardContext = field(default_factory=lambda: RewardContext("eval"))
    """For the reward."""

    def trajectory_id(self, index: int) -> str:
        """Return the id of the group's trajectory ``index``: ``world/train/17#2/0``."""
        return f"{self.issue.group_id}/{index}"


def turn_seed(seed: int, trajectory_id: str, turn: int) -> int:
    """Return a 63-bit sampling seed that depends only on the run, the trajectory and the turn."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
