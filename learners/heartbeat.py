"""Heartbeat: tells an actor that hangs from one that works on something long.

An actor that is stopped, swapped out or cut off does not answer. One that waits for ever inside a call answers, but its
progress does not move. A long step is no hang: the limit grows with the longest step that was seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

INTERVAL_S = 2.0
"""Between two questions to an actor."""
STEPS = 3
"""An actor may take this many times the longest step so far until the next."""
VERDICT_TIMEOUT_S = 60.0
"""Longest wait for Ray's verdict on an actor: Ray declares a node lost only after several unanswered health checks."""
FIRST_STEP_S = 600.0
"""Time limit of every step of the first call: it may load a reference model and compile kernels."""
FIRST_ANSWER_S = 600.0
"""Longest time until the first answer: Ray starts the process, whose place is reserved."""
BLOCKED_S = 120.0
"""Longest silence of a process that ends a profile: no thread of it can answer meanwhile."""

_VERDICT_INTERVAL_S = 0.5


@dataclass(slots=True)
class Heartbeat:
    """The answers of one actor. ``look`` is to be called about once a second."""

    ask: Callable[[], Any]
    """Calls the actor, in a thread that its work does not block; the result is a number that grows with its work."""
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _call: Any = field(default=None, init=False)
    _asked_s: float = field(default=0.0, init=False)
    _made_s: float = field(default=math.inf, init=False)
    _progress: int | None = field(default=None, init=False)
    """None before the first answer."""
    _moved_s: float = field(default=0.0, init=False)
    _looked_s: float = field(default=0.0, init=False)
    _longest_s: float = field(default=0.0, init=False)
    _is_known: bool = field(default=False, init=False)
    """Whether a whole call has ended, so that ``_longest_s`` says how long a step takes."""

    def begin_work(self) -> None:
        """Expect progress and answers from now on; nothing was observed since the last call."""
        self._asked_s = self._moved_s = self._looked_s = self.clock()

    def end_work(self) -> None:
        """Count the time since the last progress as a step, and the call as a whole one."""
        self._note_step()
        self._is_known = True

    def forget_steps(self) -> None:
        """The actor begins other work: its first call may take long again."""
        self._longest_s, self._is_known = 0.0, False

    def look(self, *, is_working: bool, is_blocked: bool = False) -> str:
        """Return why the actor hangs, or nothing.

        ``is_working``: progress is expected. ``is_blocked``: the call may keep all threads from answering.
        """
        now = self.clock()
        # a driver that stood still, by Ctrl-Z or a slow storage, learned nothing about the actor meanwhile
        unseen_s = max(0.0, now - self._looked_s - 2 * INTERVAL_S)
        self._looked_s = now
        self._asked_s += unseen_s
        self._moved_s += unseen_s
        if self._call is not None and ray.wait([self._call], timeout=0)[0]:
            call, self._call = self._call, None
            try:
                self._note(ray.get(call))
            except RayError:  # it died: the call that waits for its result raises
                return ""
        if self._call is None and (self._progress is None or now - self._asked_s >= INTERVAL_S):
            self._call, self._asked_s = self.ask(), now
        if self._progress is None:
            self._made_s = min(self._made_s, now)
            has_time = now - self._made_s < FIRST_ANSWER_S
            return "" if has_time else f"it has not answered in the {FIRST_ANSWER_S:g} s since it was started"
        if self._call is not None and now - self._asked_s > (BLOCKED_S if is_blocked else self.timeout_s):
            return f"it has not answered for {now - self._asked_s:.0f} s"
        # twice the time of an answer: where all wait for the one that is stopped, that one is named
        limit_s = max(2 * self.timeout_s, STEPS * self._longest_s) if self._is_known else FIRST_STEP_S
        if is_working and now - self._moved_s > limit_s:
            return f"it has made no progress for {now - self._moved_s:.0f} s"
        return ""

    def wait_for_verdict(self) -> None:
        """Return once the actor answers or Ray says that it is dead.

        Before, Ray may still believe that the node of the actor is there, and would place a new actor on it.
        """
        deadline_s = self.clock() + VERDICT_TIMEOUT_S
        while (left_s := deadline_s - self.clock()) > 0:
            try:
                ray.get(self.ask(), timeout=left_s)
            except ActorUnavailableError:  # neither
                time.sleep(_VERDICT_INTERVAL_S)
            except RayError:
                return
            else:
                return

    def _note(self, progress: int) -> None:
        if progress != self._progress:
            if self._progress is not None:
                self._note_step()
            self._progress = progress

    def _note_step(self) -> None:
        now = self.clock()
        self._longest_s = max(self._longest_s, now - self._moved_s)
        self._moved_s = now
