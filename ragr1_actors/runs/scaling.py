"""Decisions of a run about the sizes of its fleets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FleetName = Literal["runners", "retrievers", "encoders"]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Decision that gives a fleet another size, or moves replicas of it."""

    time_s: float
    """Unix time."""
    fleet: FleetName
    before: int
    """Number of replicas that was wanted before; ``after`` is the new one."""
    after: int
    reason: str

    def __str__(self) -> str:
        """Return one line: ``runners 2 -> 4: the learner waits 60 % of its time``."""
        return f"{self.fleet} {self.before} -> {self.after}: {self.reason}"
