"""VirtualLoop: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Everything in asyncio but files, sockets, threads and signals works in it unchanged. Libraries for tests, such as
looptime, serve real sockets beside the virtual clock; here nothing is polled, and a wait for nothing is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Files, sockets, threads and signals are never waited for."""

    def __init__(self) -> None:
        """Make the loop; close it as any other."""
        self._now_s = 0.0
        super().__init__(_Jump(self._advance))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds


class _Jump(selectors.SelectSelector):
    """Lets the time pass that the loop would wait for, at once. No file is ever ready."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let ``timeout`` seconds pass; with None the loop waits for what cannot happen."""
        if timeout is None:
            raise RuntimeError("the simulation waits for ever: no timer is set and no task can run")
        if timeout > 0:
            self._advance(timeout)
        return []
