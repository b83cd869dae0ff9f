"""What the fleet of env runners keeps of each runner, and of each group that a runner samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ragr1_actors.rollout.env_runner_actor import Process
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.summary import GroupSummary


@dataclass(slots=True, eq=False)
class Runner:
    """An env runner, as the group sees it."""

    index: int
    handle: Any
    is_healthy: bool = True
    is_lost: bool = False
    """It cannot start again."""
    is_draining: bool = False
    """It takes no request any more, and is ended once it has none."""
    process: Process | None = None
    """None before its first answer."""
    num_deaths: int = 0
    died_at: float | None = None
    """None if it is healthy or was never."""
    num_failed_loads: int = 0
    num_hangs: int = 0
    """In a row, without a finished group in between."""
    num_in_flight: int = 0
    """Trajectories that it was asked for and has not returned."""
    probe: Any = None
    """Reference of the call that is open: a ping of a healthy runner, else ``catch_up`` with the newest weights."""
    probed_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """``env runner 3``."""
        return f"env runner {self.index}"

    @property
    def life(self) -> str:
        """``env runner 3, life 2`` after its first death."""
        return f"{self.name}, life {1 + self.num_deaths}"

    @property
    def takes_requests(self) -> bool:
        """Whether it may be given a group now."""
        return self.is_healthy and not self.is_draining


@dataclass(slots=True, eq=False)
class Flight:
    """A group at a runner."""

    request: GroupRequest
    runner: Runner
    summary: Any
    """References of the two results."""
    batch: Any
    process: Process | None
    """That of the runner when it was asked."""
    sent_at: float = field(default_factory=time.monotonic)
    twin: Flight | None = None
    """The same group at another runner."""
    was_hedged: bool = False
    is_abandoned: bool = False
    """Its twin has finished."""


@dataclass(slots=True)
class Newest:
    """The policy version published last."""

    version: int
    fetch: Callable[[], Any]
    """Returns its weights, once."""
    weights: Any = None


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A sampled group: its summary, and a reference to its tokens."""

    request: GroupRequest
    summary: GroupSummary
    batch: Any
    """``ray.ObjectRef`` of the group's record batch; the record batch itself if the driver samples."""
