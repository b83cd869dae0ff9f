"""RateLimit: a token bucket that holds one token, so that requests are spread evenly. Pure asyncio."""

from __future__ import annotations

import asyncio
import time


class RateLimit:
    """Lets concurrent callers of one process through, so many a second at most."""

    def __init__(self, rate_per_s: float) -> None:
        """Let ``rate_per_s`` callers through a second; 0 lets all through."""
        self._interval_s = 1.0 / rate_per_s if rate_per_s else 0.0
        self._next = 0.0
        self._held_until = 0.0

    async def wait(self) -> None:
        """Return when it is the caller's turn. One that is cancelled leaves its turn unused."""
        while True:
            turn = max(time.monotonic(), self._next, self._held_until)
            self._next = turn + self._interval_s
            await asyncio.sleep(turn - time.monotonic())
            if turn >= self._held_until:  # else there was a hold meanwhile
                return

    def hold(self, seconds: float) -> None:
        """Let nobody through for so long, those that wait already included."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)
