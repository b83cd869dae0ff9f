"""What a run decided about the sizes of its fleets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FleetName = Literal["runners", "retrievers", "encoders"]


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A fleet got another size, or replicas of it moved."""

    time_s: float
    """Unix time."""
    fleet: FleetName
    before: int
    """Replicas that were wanted before, and from now on in ``after``."""
    after: int
    reason: str

    def __str__(self) -> str:
        """Return one line: ``runners 2 -> 4: the learner waits 60 % of its time``."""
        return f"{self.fleet} {self.before} -> {self.after}: {self.reason}"
