"""QueryBatcher: many small searches over a few replicas. Pure asyncio; knows nothing of Ray.

::

    search() ─┐                        ┌► replica 0   2 batches out at most
    search() ─┼► queue ──► batch ──────┤
    search() ─┘  one entry  all that   └► replica 1   down: pinged until it answers, and used again
                 a query    waits           │
        ▲                                   ▼
        └── results ◄── on failure: the batch goes to another replica, up to max_retries times

There is no timer: a batch leaves as soon as a replica has a slot, with everything that waits by then. A search is a
pure function of the query, so asking again after a failure is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragr1_actors.errors import RetrievalError
from retrieval.base import Passage

MAX_BATCH = 512
"""Queries in one batch; bounds what one failure delays."""
MIN_SHARE = 8
"""A queue is split over idle replicas in batches of at least this: smaller ones cost more than they spread."""
BATCHES_PER_REPLICA = 2
"""One is searched while the next one travels."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


class Replica(Protocol):
    """One of several that give the same answers."""

    async def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Search, or raise ``RetrievalError`` if this replica cannot."""
        ...

    async def ping(self) -> None:
        """Return once the replica can search, or raise ``RetrievalError``."""
        ...


class _Slots:
    """A replica with what is out at it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_up = True
        self.num_batches = 0
        self.num_queries = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One query in the queue and everybody who waits for it."""

    query: str
    k: int
    found: asyncio.Future[list[Passage]]


class QueryBatcher:
    """Answers concurrent searches in batches, and hides replicas that fail."""

    def __init__(self, replicas: Sequence[Replica], *, timeout_s: float, max_retries: int) -> None:
        """Serve from ``replicas``.

        Args:
            replicas: at least one; taken to be up until one fails.
            timeout_s: of one attempt at one replica, and of the wait for any to come up.
            max_retries: attempts after the first one.
        """
        assert replicas, "a batcher needs a replica"
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._replicas = list(replicas)
        self._random = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed; the message has their number and the last cause.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        if self._loop is not asyncio.get_running_loop():
            self._reset()
        found = await asyncio.gather(*[self._ask(query, k) for query in queries])
        return [list(passages) for passages in found]  # callers that asked the same must not share a list

    def _reset(self) -> None:
        """Bind to the running event loop. Nothing of a loop that ended before can be waited for."""
        self._loop = asyncio.get_running_loop()
        self._slots = [_Slots(replica) for replica in self._replicas]
        self._queue: deque[_Waiting] = deque()
        self._asked: dict[tuple[str, int], asyncio.Future[list[Passage]]] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dispatching = False

    def _ask(self, query: str, k: int) -> asyncio.Future[list[Passage]]:
        """Queue a query, unless the same one is in flight. Cancelling one caller leaves the others' answer alone."""
        assert self._loop is not None
        found = self._asked.get((query, k))
        if found is None:
            found = self._asked[query, k] = self._loop.create_future()
            found.add_done_callback(lambda ended: self._forget((query, k), ended))
            self._queue.append(_Waiting(query, k, found))
            if not self._is_dispatching:
                self._is_dispatching = True
                self._start(self._dispatch())
        return asyncio.shield(found)

    def _forget(self, asked: tuple[str, int], found: asyncio.Future[list[Passage]]) -> None:
        """Take an answer out of what is in flight, and look at its failure: whoever asked may have been cancelled."""
        self._asked.pop(asked, None)
        if not found.cancelled():
            found.exception()  # else asyncio logs "Future exception was never retrieved"

    async def _dispatch(self) -> None:
        """Send what waits while anything waits. A task of its own, so that all callers of one loop turn are in."""
        try:
            while self._queue:
                slots = await self._acquire([], 0)
                batch = self._take_batch()
                if slots is not None:
                    slots.num_queries += len(batch)
                self._start(self._run(batch, slots))
        finally:
            self._is_dispatching = False

    def _take_batch(self) -> list[_Waiting]:
        """Take an idle replica's share of the queue, of one ``k``."""
        num_idle = sum(slots.is_up and slots.num_batches == 0 for slots in self._slots)
        share = max(MIN_SHARE, -(-len(self._queue) // (1 + num_idle)))  # its own replica is not idle any more
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < min(share, MAX_BATCH) and self._queue[0].k == batch[0].k:
            batch.append(self._queue.popleft())
        return batch

    async def _run(self, batch: list[_Waiting], slots: _Slots | None) -> None:
        """Get one batch answered. ``slots`` is the replica to try first, its slot taken; None where none was up."""
        try:
            results = await self._try(batch, slots)
        except RetrievalError as error:
            for waiting in batch:
                waiting.found.set_exception(RetrievalError(*error.args))
        else:
            for waiting, passages in zip(batch, results, strict=True):
                waiting.found.set_result(passages)
        finally:
            for waiting in batch:  # a bug, or the loop's end: nobody may wait for ever
                if not waiting.found.done():
                    waiting.found.set_exception(RetrievalError("the search was abandoned"))

    async def _try(self, batch: list[_Waiting], slots: _Slots | None) -> list[list[Passage]]:
        """Ask one replica after another.

        Raises:
            RetrievalError: none of ``max_retries + 1`` attempts was answered.
        """
        queries = [waiting.query for waiting in batch]
        tried: list[_Slots] = []
        cause = ""
        while slots is not None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    results = await slots.replica.search_batch(queries, batch[0].k)
                if len(results) == len(queries):
                    return results
                cause = f"{len(results)} answers to {len(queries)} queries"
            except TimeoutError:
                cause = f"no answer within {self._timeout_s:g} s"
            except RetrievalError as error:
                cause = str(error)
            finally:
                self._release(slots, len(batch))
            tried.append(slots)
            self._mark_down(slots)
            if len(tried) > self._max_retries:
                break
            slots = await self._acquire(tried, len(batch))
        if slots is None:
            cause = f"{cause and cause + '; then '}no replica was up for {self._timeout_s:g} s"
        raise RetrievalError(
            f"search failed after {len(tried)} attempts on {len(set(tried))} of {len(self._slots)} replicas: {cause}"
        )

    async def _acquire(self, avoid: list[_Slots], num_queries: int) -> _Slots | None:
        """Take a slot of a replica that is up, another one than before if there is one.

        Returns:
            None when none was up for ``timeout_s``.
        """
        while True:
            up = [slots for slots in self._slots if slots.is_up]
            others = [slots for slots in up if slots not in avoid]
            free = [slots for slots in others or up if slots.num_batches < BATCHES_PER_REPLICA]
            if free:
                idle = [slots for slots in free if slots.num_batches == 0]
                # The less loaded of two at random: near the best of all, and not the same for every client.
                pair = self._random.sample(idle or free, min(2, len(idle or free)))
                chosen = min(pair, key=lambda slots: slots.num_queries)
                chosen.num_batches += 1
                chosen.num_queries += num_queries
                return chosen
            changed = self._changed
            try:
                # With replicas up the wait ends by itself: whatever holds their slots times out.
                async with asyncio.timeout(None if up else self._timeout_s):
                    await changed.wait()
            except TimeoutError:
                return None

    def _release(self, slots: _Slots, num_queries: int) -> None:
        slots.num_batches -= 1
        slots.num_queries -= num_queries
        self._announce()

    def _mark_down(self, slots: _Slots) -> None:
        if slots.is_up:
            slots.is_up = False
            self._start(self._probe(slots))

    async def _probe(self, slots: _Slots) -> None:
        """Ping a replica until it answers, then use it again."""
        pause_s = _FIRST_PAUSE_S
        while not slots.is_up:
            with contextlib.suppress(RetrievalError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await slots.replica.ping()
                slots.is_up = True
                self._announce()
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _announce(self) -> None:
        """Wake everybody in ``_acquire``: a slot is free or a replica is up."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine beside the callers. The loop itself keeps only weak references to tasks."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
