"""What the fleet of env runners keeps of each group that a runner samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from cluster.fleet import Member, MemberId, Process, Pulse
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.summary import GroupSummary


@dataclass(slots=True, eq=False)
class Flight:
    """A group at a runner."""

    request: GroupRequest
    runner: Member[Pulse]
    runner_id: MemberId
    """The life of the runner in which it was asked."""
    process: Process
    summary: Any
    """References of the two results."""
    batch: Any
    sent_at: float = field(default_factory=time.monotonic)
    twin: Flight | None = None
    """The same group at another runner."""
    was_hedged: bool = False
    is_abandoned: bool = False
    """Its twin has finished."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A sampled group: its summary, and a reference to its tokens."""

    request: GroupRequest
    summary: GroupSummary
    batch: Any
    """``ray.ObjectRef`` of the group's record batch; the record batch itself if the driver samples."""
