"""Alarms of a run, and the state that its collapse guard stores in a checkpoint; ``training/guard.py`` is the guard."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragr1_actors.core.config import GuardAction


@dataclass(frozen=True, slots=True)
class Alarm:
    """Metric that left its limits: ``Alarm("entropy", "learner/entropy", 23, 0.41, 0.27, 0.107, "warn")``."""

    name: str
    metric: str
    iteration: int
    """Iteration in which it began."""
    value: float | None
    """Value of the metric; None if it was not finite."""
    limit: float | None
    """Limit that the value passed; None if any finite value is allowed so far."""
    baseline: float | None
    """Baseline of the metric; None if the limit does not depend on the run."""
    action: GuardAction
    rolled_back_to: int | None = None
    """Iteration of the checkpoint from which the run continued; None without a roll-back."""

    def __str__(self) -> str:
        """Return ``iteration 23: learner/entropy is 0.41, above 0.27 (baseline 0.107)``."""
        text = f"iteration {self.iteration}: {self.metric} is "
        if self.value is None or self.limit is None:
            text += "not finite"
        else:
            text += f"{self.value:.3g}, {'above' if self.value > self.limit else 'below'} {self.limit:.3g}"
        if self.baseline is not None:
            text += f" (baseline {self.baseline:.3g})"
        if self.rolled_back_to is not None:
            text += f"; rolled back to iteration {self.rolled_back_to}"
        return text


@dataclass(slots=True)
class Track:
    """Memory of an alarm about its metric."""

    values: list[float] = field(default_factory=list)
    """Newest values inside the limits; their median is the baseline."""
    best: float | None = None
    """Best baseline so far."""
    num_outside: int = 0
    """Number of values outside the limits in a row, up to now."""
    outside_since: int = 0
    """Iteration of the first value outside."""


@dataclass(slots=True)
class GuardState:
    """State of a guard, as JSON in every checkpoint."""

    tracks: dict[str, Track] = field(default_factory=dict)
    """Tracks by alarm."""
    alarms: list[Alarm] = field(default_factory=list)
    """Alarms that have begun, in their order, including those before a roll-back."""
    unanswered: list[Alarm] = field(default_factory=list)
    """Alarms whose stop or roll-back is still to come."""
    num_roll_backs: int = 0
