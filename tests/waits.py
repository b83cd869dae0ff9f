"""Waits for a state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], timeout_s: float = 120.0) -> None:
    """Return once ``holds()`` is true; the event loop goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.002)
