"""VirtualLoop: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Everything in asyncio except files, sockets, threads and signals works in it unchanged. Libraries for tests, such as
looptime, serve real sockets beside the virtual clock; here nothing is polled, and a wait without a timer is an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that starts at 0 s. It does not wait for files, sockets, threads and signals."""

    def __init__(self) -> None:
        """Make the loop; close it like any other."""
        self._now_s = 0.0
        super().__init__(_Jump(self._advance))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds


class _Jump(selectors.SelectSelector):
    """Selector that lets the time of a wait pass at once. No file is ever ready."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let ``timeout`` seconds pass; raises ``RuntimeError`` for None, as the wait would have no end."""
        if timeout is None:
            raise RuntimeError("the simulation waits for ever: no timer is set and no task can run")
        if timeout > 0:
            self._advance(timeout)
        return []
