"""Groups of trajectories: requests to env runners, and the results for the driver.

A ``GroupRequest`` goes to a runner; a ``GroupSummary`` and a reference to the tokens come back as a ``FinishedGroup``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from envs.rewards import RewardContext
from ragr1_actors.core.types import Failure, StopReason, Task, TokenKind, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for a group: ``GroupRequest("world/train/17#2", task, num_trajectories=8, temperature=1.0, epoch=2)``."""

    issue_id: str
    """Id of task and epoch. All attempts share it, so that a task that is trained twice is noticed."""
    task: Task
    num_trajectories: int = 1
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    epoch: int = 0
    attempt: int = 0
    """Number of times that the group was asked for before in this epoch."""
    num_failures: int = 0
    """Number of attempts with a failure of the data."""
    num_outages: int = 0
    """Number of attempts with a failure of the infrastructure only."""
    policy_version: int = 0
    """Newest version when the group was asked for; no token of it is sampled with an older one."""
    context: RewardContext = field(default_factory=lambda: RewardContext("eval"))
    """Context for the reward."""

    @property
    def group_id(self) -> str:
        """Id that is unique per attempt, on which the sampling seeds depend."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id

    def trajectory_id(self, index: int) -> str:
        """Return the id of the group's trajectory ``index``: ``world/train/17#2/0``."""
        return f"{self.group_id}/{index}"

    def failed(self, failure: Failure) -> GroupRequest:
        """Return the request with one more failed attempt."""
        is_data = failure is Failure.DATA
        return replace(self, num_failures=self.num_failures + is_data, num_outages=self.num_outages + (not is_data))


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Summary of a group for the driver, which never reads the group's tokens."""

    rewards: tuple[float, ...]  # [num_trajectories that did not fail]
    num_failed: int
    errors: tuple[str, ...]
    oldest_version: int
    """Lowest policy version of any token; -1 if none was sampled."""
    means: dict[str, float]
    """Means over trajectories that did not fail: turns, tokens, stop reasons, measures, environment's metrics."""
    data_errors: tuple[str, ...] = ()
    """Errors with ``Failure.DATA``."""
    stop_reasons: tuple[StopReason, ...] = ()
    """Stop reasons of the trajectories that failed."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Values whose histograms are drawn: per trajectory that did not fail, and per turn with calls."""
    num_sampled_tokens: int = 0
    """Sum over all trajectories, failed ones included."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """Sampled group: its summary, and a reference to its tokens."""

    request: GroupRequest
    summary: GroupSummary
    batch: Any
    """``ray.ObjectRef`` of the group's record batch, or the batch itself if the driver samples."""


def summarize(group: TrajectoryGroup) -> GroupSummary:
    """Return the summary of a group for task ledger and metrics."""
    kept = [t for t in group.trajectories if not t.stop_reason.is_failure]
    totals: Counter[str] = Counter()
    for trajectory in kept:
        values: dict[str, float] = {
            "turns": float(len(trajectory.turns)),
            "tokens": float(trajectory.num_model_tokens),
            "observation_tokens": float((trajectory.kinds == TokenKind.OBSERVATION).sum()),
            "context_tokens": float(trajectory.num_tokens),
            "well_formed": float(trajectory.is_well_formed),
            f"stop_{trajectory.stop_reason.value}": 1.0,
            **trajectory.metrics,
        }
        totals.update(values)
    versions = [int(v) for t in kept for v in t.policy_versions[t.kinds == TokenKind.MODEL][:1]]
    return GroupSummary(
        rewards=tuple(t.reward for t in kept),
        num_failed=len(group.trajectories) - len(kept),
        errors=tuple(t.error for t in group.trajectories if t.error),
        oldest_version=min(versions, default=-1),
        means={name: total / len(kept) for name, total in totals.items()},
        data_errors=tuple(t.error for t in group.trajectories if t.stop_reason.failure is Failure.DATA),
        stop_reasons=tuple(t.stop_reason for t in group.trajectories if t.stop_reason.is_failure),
        samples={
            "turns": tuple(float(len(t.turns)) for t in kept),
            "calls_per_turn": tuple(float(len(turn.calls)) for t in kept for turn in t.turns if turn.calls),
            "tokens": tuple(float(t.num_model_tokens) for t in kept),
            "context_tokens": tuple(float(t.num_tokens) for t in kept),
        },
        num_sampled_tokens=sum(t.num_model_tokens - t.num_copied_tokens for t in group.trajectories),
    )
