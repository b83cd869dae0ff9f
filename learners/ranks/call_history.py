"""CallHistory: the calls that bring restarted learner ranks to the state of the old ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from ragr1_actors.core.disk.folders import AnyFolder, FolderWriter

logger = logging.getLogger(__name__)

MAX_HELD_CALLS = 256
"""Limit of updates since the last checkpoint whose batches are held; beyond it, a failing rank ends the run."""


@dataclass
class CallHistory:
    """Calls that bring new ranks to the state of the old ones."""

    learner_name: str
    policy_dir: AnyFolder
    state: AnyFolder | None = None
    """Folder of the state to start at; None is the state after ``build``."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Calls since the start: ``("update", batch references)`` and ``("begin_save", writer)``."""

    is_whole: bool = True
    """Whether ``calls`` has every call since the start."""

    def add(self, method: str, argument: Any) -> None:
        """Hold a call, if a later restart can use it."""
        if not self.is_whole and method == "update" and not any(held == "begin_save" for held, _ in self.calls):
            return
        if len(self.calls) == MAX_HELD_CALLS:
            self.calls, self.is_whole = [], False
            logger.warning(
                "%d updates since the last checkpoint: their batches are released, and a learner rank that fails now "
                "ends the run; save more often",
                MAX_HELD_CALLS,
            )
        self.calls.append((method, argument))

    def begin_at(self, state: AnyFolder) -> None:
        """Start at a state that was just loaded or saved."""
        self.state, self.calls, self.is_whole = state, [], True

    def saved(self, writer: FolderWriter, final: AnyFolder) -> None:
        """Start at the state that ``begin_save(writer)`` wrote, now in the folder ``final``."""
        begun = ("begin_save", writer)
        if begun in self.calls:  # else more calls followed it than are held
            later = self.calls[self.calls.index(begun) + 1 :]
            self.begin_at(final)
            self.calls = later
