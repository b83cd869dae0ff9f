"""An engine that takes the time of a GPU and computes nothing, to measure the loops without a CPU's generation.

A decode step takes ``STEP_S`` however many rows it has, up to ``MAX_ROWS``: on a GPU it is the reading of the weights
that takes its time. On a CPU it is the arithmetic, so that a row that runs on alone costs its own tokens and no more,
which flatters a loop that has the others wait for it.

For Qwen2.5-7B in bf16 on an H200, none of it measured:

* weights 15.2 GB ÷ 4.8 TB/s = 3.2 ms [calc]
* keys and values: 96 rows x 300 tokens x 57 kB ÷ 4.8 TB/s = 0.3 ms [calc]
* launches, sampling, scheduling: 0.5 ms [assumed]
* per token of a prompt that is not cached: 2 x 7.6e9 FLOP ÷ 400 TFLOP/s = 38 us [calc, at 40 % of the peak], in which
  all rows wait

Steps come when they are due, also while this process is busy, as an engine runs in other processes; a request joins
the first step that begins after it was made. What the loop does for every token, it does here too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from benchmarks.rollout import workload
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.rollout.engines.base import PolicyTokenizer

STEP_S = 0.004
PREFILL_S = 38e-6
"""Per token."""
MAX_ROWS = 256
_KEY_TOKENS = 64
"""Of the prompt, which begins with the question: enough to tell trajectories apart."""


@dataclass(slots=True, eq=False)
class _Row:
    num_uncached: int
    num_tokens: int
    done: asyncio.Future[None]
    on_text: OnText | None
    asked_at: float
    num_said: int = 0


class PacedEngine:
    """``Engine`` for our loop, and ``AsyncLLM``, as far as the lock-step loop asks for it, in ``generate_bare``."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        words = tokenizer.encode(" " + " ".join(workload.words()[: workload.MAX_TURN_TOKENS]))
        self._ids = words[: workload.MAX_TURN_TOKENS]
        self._texts = [tokenizer.decode(self._ids[:count]) for count in range(len(self._ids) + 1)]
        self._waiting: list[_Row] = []
        self._running: list[_Row] = []
        self._cached: dict[tuple[int, ...], int] = {}
        self._clock: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        count = sampling.max_new_tokens
        await self._say(prompt_token_ids, count, on_text)
        return Completion(self._ids[:count], [0.0] * count, [0] * count, self._texts[count], FinishReason.LENGTH)

    async def generate_bare(
        self, prompt: Mapping[str, list[int]], num_tokens: int, request_id: str
    ) -> AsyncIterator[Any]:
        await self._say(prompt["prompt_token_ids"], num_tokens, None)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=self._ids[:num_tokens])])

    async def _say(self, prompt: Sequence[int], num_tokens: int, on_text: OnText | None) -> None:
        key = tuple(prompt[:_KEY_TOKENS])
        num_uncached = max(1, len(prompt) - self._cached.get(key, 0))
        self._cached[key] = len(prompt) + num_tokens
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        row = _Row(num_uncached, num_tokens, done, on_text, time.perf_counter())
        self._waiting.append(row)
        if self._clock is None or self._clock.done():
            self._clock = asyncio.create_task(self._run())
        await row.done

    async def _run(self) -> None:
        """Take step after step until there are no rows. ``now`` is the engine's time; this process may be behind it."""
        now = 0.0
        while self._waiting or self._running:
            if not self._running:
                now = max(now, self._waiting[0].asked_at)
            admitted = [row for row in self._waiting if row.asked_at <= now][: MAX_ROWS - len(self._running)]
            self._waiting = [row for row in self._waiting if row not in admitted]
            self._running += admitted
            now += STEP_S + PREFILL_S * sum(row.num_uncached for row in admitted)
            await asyncio.sleep(max(0.0, now - time.perf_counter()))
            self._tell()

    def _tell(self) -> None:
        for row in self._running:
            row.num_said += 1
            if row.on_text is not None:
                row.on_text(self._texts[row.num_said])
            if row.num_said == row.num_tokens:
                row.done.set_result(None)
        self._running = [row for row in self._running if not row.done.done()]

    async def reset_prefix_cache(self) -> None:
        self._cached.clear()

    def release(self, request_id: str) -> None:
        pass

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        pass

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass
