"""Calls of learner ranks: those that bring restarted ranks to the state of the old ones, and how long they take.

A rank that is stopped, swapped out or cut off does not answer, and the ``Watchdog`` of its fleet ends it. ``StepClock``
tells a rank that hangs inside a call from one whose work takes long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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


STEPS = 3
"""Factor: a rank may take this many times its longest step so far until the next step ends."""
FIRST_STEP_S = 600.0
"""Time limit of every step of the first call: it may load a reference model and compile kernels."""
_UNSEEN_S = 4.0
"""Seconds between two looks above which nothing counts as seen: the driver stood still, by Ctrl-Z or a slow storage."""


@dataclass(slots=True)
class StepClock:
    """Time of a rank's last progress, and the length of its steps. Call ``look`` about once a second."""

    timeout_s: float
    """Half of the least limit of a step: a rank that does not answer is found first, while the others wait for it."""
    clock: Callable[[], float] = time.monotonic
    _progress: int | None = field(default=None, init=False)
    _moved_s: float = field(default=0.0, init=False)
    _looked_s: float = field(default=0.0, init=False)
    _longest_s: float = field(default=0.0, init=False)
    _is_known: bool = field(default=False, init=False)
    """Whether a whole call has ended, so that ``_longest_s`` is the length of a step."""

    def begin_work(self) -> None:
        """Expect progress from now on; nothing was observed since the last call."""
        self._moved_s = self._looked_s = self.clock()

    def end_work(self) -> None:
        """Count the time since the last progress as a step, and the call as complete."""
        self._note_step()
        self._is_known = True

    def look(self, progress: int | None) -> str:
        """Return why the rank hangs, else "", given its number of micro-batches so far; None before it is known."""
        now = self.clock()
        self._moved_s += max(0.0, now - self._looked_s - _UNSEEN_S)
        self._looked_s = now
        if progress != self._progress:
            if self._progress is not None:
                self._note_step()
            self._progress = progress
        limit_s = max(2 * self.timeout_s, STEPS * self._longest_s) if self._is_known else FIRST_STEP_S
        silent_s = now - self._moved_s
        return f"it has made no progress for {silent_s:.0f} s" if silent_s > limit_s else ""

    def _note_step(self) -> None:
        now = self.clock()
        self._longest_s = max(self._longest_s, now - self._moved_s)
        self._moved_s = now
