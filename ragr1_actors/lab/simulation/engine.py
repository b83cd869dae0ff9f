"""SimulatedEngine and SimulatedReplica: they take the time of an engine and of a retriever, and compute nothing.

The rows of an engine decode in step: after ``V`` tokens of progress each row has ``V`` more than when it joined. One
timer waits for the row that ends first, and an event is a turn, or a query in it, but not a token.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from envs.options import QueryFormat
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.lab.simulation.virtual_time import VirtualLoop
from ragr1_actors.lab.simulation.workload import Attempt, answer_text, search_text
from ragr1_actors.planning.pace import EnginePace, SearchPace
from retrieval.base import Hits

LoadAt = Callable[[float], float]
"""Function that returns the work of a token at a time in seconds; 1 is the pace's value."""
SPREAD = 0.2
"""Standard deviation of the logarithm of a batch's seconds at a retriever."""


class SimulatedEngine:
    """``Engine`` that plays attempts by request id."""

    def __init__(
        self, loop: VirtualLoop, pace: EnginePace, query_format: QueryFormat, load_at: LoadAt, version: int
    ) -> None:
        """Begin without rows; ``version`` is the policy's."""
        self._pace, self._query_format, self._load_at = pace, query_format, load_at
        self._version = version
        self._attempts: dict[str, Attempt] = {}
        self._next_turn: dict[str, int] = {}
        self._cached: dict[str, int] = {}  # tokens of each trajectory in the cache
        self._loop = loop
        self._progress = 0.0  # tokens that a row has got since the start
        self._progress_s = self._loop.time()  # time of this progress
        self._prefilled_s = 0.0  # time until which all rows wait for prompts to be read
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # progress, order, callback
        self._order = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_changed = self._is_paused = False
        self._num_context = 0  # number of tokens with which the rows began
        self.num_rows = 0
        self.num_tokens = 0
        """Number of tokens sampled since the start."""

    def play(self, request_id: str, attempt: Attempt) -> None:
        """Set the turns of a request; after its last turn it answers again."""
        self._attempts[request_id] = attempt

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Take the time of the next turn, at most ``max_new_tokens`` of it, and return its text."""
        number = self._next_turn.get(request_id, 0)
        self._next_turn[request_id] = number + 1
        attempt = self._attempts[request_id]
        is_last = number >= len(attempt.turns) - 1
        turn = attempt.turns[-1 if is_last else number]
        num_tokens, version = min(turn.num_tokens, sampling.max_new_tokens), self._version
        text, ends = "", list[tuple[int, int]]()
        if is_last:
            text = answer_text(is_right=attempt.is_right)
        elif turn.num_queries:
            text, ends = search_text(turn, f"{request_id}/{number}", self._query_format)
        done = self._loop.create_future()
        self._advance()
        num_read = len(prompt_token_ids) - self._cached.get(request_id, 0)
        self._prefilled_s = max(self._loop.time(), self._prefilled_s) + num_read * self._pace.prefill_s
        work = self._load_at(self._loop.time())
        if on_text is not None:
            for tokens, length in ends:
                self._expect(tokens * work, lambda length=length: on_text(text[:length]))  # type: ignore[misc]
        self._expect(num_tokens * work, lambda: self._finish(done))
        self.num_rows += 1
        self._num_context += len(prompt_token_ids)
        self._change()
        await done
        self._num_context -= len(prompt_token_ids)
        self._cached[request_id] = len(prompt_token_ids) + num_tokens
        self.num_tokens += num_tokens
        return Completion([0] * num_tokens, [0.0] * num_tokens, [version] * num_tokens, text, FinishReason.STOP)

    def release(self, request_id: str) -> None:
        """Forget ``request_id``."""
        for by_id in (self._attempts, self._next_turn, self._cached):
            by_id.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Set the version, like ``publish``."""
        self.publish(version)

    def publish(self, version: int) -> None:
        """Set the version. The rows wait until their caches are computed again; other trajectories wait later."""
        self._advance()
        self._version = version
        self._cached.clear()
        self._prefilled_s = max(self._loop.time(), self._prefilled_s) + self._num_context * self._pace.prefill_s
        self._change()

    def pause(self) -> None:
        """Stop all rows until ``resume``."""
        self._advance()
        self._is_paused = True
        self._change()

    def resume(self) -> None:
        """Continue all rows."""
        self._advance()
        self._is_paused = False
        self._change()

    async def check(self) -> None:
        """Do nothing: nothing can be wrong."""

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    def _expect(self, tokens: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self._progress + tokens, self._order, event))

    def _finish(self, done: asyncio.Future[None]) -> None:
        self.num_rows -= 1
        if not done.done():  # else its trajectory was cancelled
            done.set_result(None)

    def _advance(self) -> None:
        """Give all rows the tokens of the time that has passed."""
        now_s = self._loop.time()
        since_s = max(self._progress_s, self._prefilled_s)
        if self.num_rows and not self._is_paused and now_s > since_s:
            self._progress += (now_s - since_s) / self._pace.step_s(self.num_rows)
        self._progress_s = now_s

    def _change(self) -> None:
        """Set the timer again, once for all changes of this turn of the loop."""
        if not self._is_changed:
            self._is_changed = True
            self._loop.call_soon(self._set_timer)

    def _set_timer(self) -> None:
        self._is_changed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events and not self._is_paused:
            left = max(0.0, self._events[0][0] - self._progress)
            start_s = max(self._progress_s, self._prefilled_s)
            self._timer = self._loop.call_at(start_s + left * self._pace.step_s(self.num_rows), self._happen)

    def _happen(self) -> None:
        self._advance()
        self._timer = None
        # events due within a millionth of a token, as the timer was set for them
        while self._events and self._events[0][0] <= self._progress + 1e-6:
            heapq.heappop(self._events)[2]()
        self._change()


class SimulatedReplica:
    """``Replica`` of an index that takes one batch after another, in order of arrival."""

    def __init__(self, loop: VirtualLoop, pace: SearchPace, hits: Hits, rng: random.Random) -> None:
        """Find ``hits`` for every query. ``rng`` spreads the times of batches."""
        self._loop, self._pace, self._hits, self._rng = loop, pace, hits, rng
        self._free_s = 0.0
        self._work_s = 0.0
        self.num_queries = self.num_batches = 0
        """Numbers of queries and batches, answered or waiting here."""

    def busy_s(self) -> float:
        """Return the seconds of work until now."""
        return self._work_s - max(0.0, self._free_s - self._loop.time())

    async def answer_batch(self, queries: list[str], k: int) -> Sequence[Hits]:
        """Wait for the earlier batches, and take the time of this one."""
        now_s = self._loop.time()
        work_s = self._pace.batch_s(len(queries)) * self._rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        self._free_s = max(now_s, self._free_s) + work_s
        self._work_s += work_s
        self.num_queries += len(queries)
        self.num_batches += 1
        await asyncio.sleep(self._free_s - now_s + self._pace.overhead_s)
        return [self._hits] * len(queries)

    async def ping(self) -> None:
        """Answer at once."""
