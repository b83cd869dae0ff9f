"""Incidents: failures in a run and the reactions to them, from the warnings that the project's modules log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

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
