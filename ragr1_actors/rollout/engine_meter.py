"""MeteredEngine: measures the time and the load of an engine's requests for one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.types import Completion, OnText, Sampling
from ragr1_actors.rollout.engines.base import Engine


class EngineLoad:
    """Number of requests of an engine, now and over time."""

    def __init__(self) -> None:
        """Begin without requests."""
        self.num_requests = 0
        self._at_s = self._request_s = self._share_s = 0.0

    def change(self, num_requests: int) -> NDArray[np.float64]:
        """Count requests that begin or end; return seconds until now, alone, times the requests, and over them."""
        now_s = asyncio.get_running_loop().time()
        self._request_s += self.num_requests * (now_s - self._at_s)
        self._share_s += (now_s - self._at_s) / max(1, self.num_requests)
        self._at_s = now_s
        self.num_requests += num_requests
        return np.array([now_s, self._request_s, self._share_s])


class MeteredEngine:
    """``Engine.generate`` for one trajectory, with the time that it takes."""

    def __init__(self, engine: Engine, load: EngineLoad) -> None:
        """Measure the requests of one trajectory to an engine, whose requests ``load`` counts."""
        self._engine, self._load = engine, load
        self._passed = np.zeros(3)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """See ``Engine.generate``."""
        started = self._load.change(1)
        try:
            return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)
        finally:
            self._passed += self._load.change(-1) - started

    def metrics(self) -> dict[str, float]:
        """Return the seconds at the engine: plain, weighted by its number of requests, and divided by it."""
        names = ("time/generation_s", "time/generation_rows_s", "time/generation_share_s")
        return dict(zip(names, self._passed.tolist(), strict=True))
