"""Events of a run: changes of its fleets' sizes, alarms about its metrics, and incidents.

Incidents are failures and the reactions to them, from the warnings that the project's modules log.

The collapse guard, ``training/guard.py``, stores its state of the alarms in a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

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


PACKAGES = ("cluster", "envs", "learners", "ragr1_actors", "retrieval")


@dataclass(frozen=True, slots=True)
class Incident:
    """Death, hang, restart, retry or fallback: ``Incident(1790000000.0, "env runner 0 died (...)")``."""

    time_s: float
    """Unix time."""
    what: str


class IncidentLog(logging.Handler):
    """Prints the project's warnings and keeps them until they are taken, while the ``with`` block runs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Take ``say``, which prints a line."""
        super().__init__(logging.WARNING)
        self._say = say
        self._found: list[Incident] = []

    def __enter__(self) -> Self:
        """Listen to the loggers of all packages."""
        for name in PACKAGES:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the handler from the loggers."""
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler.emit``."""
        self._found.append(Incident(record.created, record.getMessage()))
        self._say(record.getMessage())

    def take(self) -> list[Incident]:
        """Return the incidents since the last call."""
        taken, self._found = self._found, []
        return taken
