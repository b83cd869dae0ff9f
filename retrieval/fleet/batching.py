"""Batcher: many small questions over a few replicas. Pure asyncio; knows nothing of Ray.

::

    ask() ─┐                        ┌► replica 0   1 batch out, 2 where it has two stages
    ask() ─┼► queue ──► batch ──────┤
    ask() ─┘  one entry  all that   └► replica 1   down: pinged until it answers, and used again
              a query    waits           │
       ▲                                 ▼
       └── answers ◄── on failure: the batch goes to another replica, up to max_retries times

There is no timer: a batch leaves as soon as a replica has a slot, with everything that waits by then. An answer is a
pure function of the query, so asking again after a failure is safe. The same machine batches searches over retrievers
and, where those are apart, queries over encoders.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ragr1_actors.core.errors import RetrievalError

MAX_BATCH = 512
"""Queries in one batch; bounds what one failure delays."""
MIN_SHARE = 8
"""A queue is split over idle replicas in batches of at least this: smaller ones cost more than they spread."""
HALVE_FROM = 64
"""A replica's share of this many goes in two batches where it has two stages, encoder and index, of which one would
wait for the other. One stage takes it whole: a large batch costs less a query."""
ROOM = 2 * MAX_BATCH
"""Queries that may wait, for every replica that is up, before ``wait_for_room`` waits."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0

A = TypeVar("A")
"""The answer to one query: a list of passages, a vector."""


A_co = TypeVar("A_co", covariant=True)


class Replica(Protocol[A_co]):
    """One of several that give the same answers."""

    async def answer_batch(self, queries: list[str], k: int) -> Sequence[A_co]:
        """Answer every query, or raise ``RetrievalError`` if this replica cannot."""
        ...

    async def ping(self) -> None:
        """Return once the replica can answer, or raise ``RetrievalError``."""
        ...


class _Slots(Generic[A]):
    """A replica with what is out at it."""

    def __init__(self, replica: Replica[A], *, is_up: bool) -> None:
        self.replica = replica
        self.is_up = is_up
        self.is_member = True
        self.num_batches = 0
        self.num_queries = 0


class _Call(Generic[A]):
    """One call of ``ask``: its answers so far. One future for all of them, as one a query would cost milliseconds."""

    def __init__(self, num_queries: int, loop: asyncio.AbstractEventLoop) -> None:
        self._answers: list[A | None] = [None] * num_queries
        self._num_left = num_queries
        self.answered: asyncio.Future[list[Any]] = loop.create_future()

    def put(self, index: int, answer: A) -> None:
        self._answers[index] = answer
        self._num_left -= 1
        if not self._num_left and not self.answered.done():
            self.answered.set_result(self._answers)

    def fail(self, error: RetrievalError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)


class _Waiting(Generic[A]):
    """One query in the queue and everybody who waits for it."""

    __slots__ = ("calls", "k", "query")

    def __init__(self, query: str, k: int) -> None:
        self.query = query
        self.k = k
        self.calls: list[tuple[_Call[A], int]] = []
        """Each with the query's place in it."""


@dataclass(frozen=True, slots=True)
class BatcherCounts:
    """What a batcher has done since it was made."""

    queries: int
    coalesced: int
    """Of the queries, those that shared an answer that was on its way."""
    batches: int
    failed_attempts: int


class Batcher(Generic[A]):
    """Answers concurrent questions in batches, and hides replicas that fail."""

    def __init__(
        self, replicas: Mapping[str, Replica[A]], *, timeout_s: float, max_retries: int, has_stages: bool = False
    ) -> None:
        """Serve from ``replicas``.

        Args:
            replicas: by name, at least one; taken to be up until one fails.
            timeout_s: of one attempt at one replica, and of the wait for any to come up.
            max_retries: attempts after the first one.
            has_stages: whether a replica can work on two batches at once; see ``HALVE_FROM``.
        """
        assert replicas, "a batcher needs a replica"
        self._has_stages = has_stages
        # one more would wait at the replica, where it can neither grow nor be answered by another one
        self._max_batches = 2 if has_stages else 1
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._replicas = dict(replicas)
        self._random = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_dispatching = False
        self._slots: dict[str, _Slots[A]] = {}
        self._num_queries = self._num_coalesced = self._num_batches = self._num_failed = 0
        self._num_waiting_again = 0

    def counts(self) -> BatcherCounts:
        """Return what has been done."""
        return BatcherCounts(self._num_queries, self._num_coalesced, self._num_batches, self._num_failed)

    async def ask(self, queries: Sequence[str], k: int) -> list[A]:
        """Return the answer to each query: ``[len(queries)]``. Those who ask the same at a time share one answer.

        Cancelling a caller leaves everybody else's answers alone.

        Raises:
            RetrievalError: every attempt at one of them failed; the message has their number and the last cause.
        """
        if not queries:
            return []
        self._bind()
        call: _Call[A] = _Call(len(queries), asyncio.get_running_loop())
        self._num_queries += len(queries)
        for index, query in enumerate(queries):
            waiting = self._asked.get((query, k))
            if waiting is None:
                waiting = self._asked[query, k] = _Waiting(query, k)
                self._queue.append(waiting)
            else:
                self._num_coalesced += 1
            waiting.calls.append((call, index))
        if self._queue and not self._is_dispatching:
            self._is_dispatching = True
            self._start(self._dispatch())
        return await call.answered

    async def wait_for_room(self) -> None:
        """Return once fewer than ``ROOM`` queries wait for every replica that is up."""
        self._bind()
        while len(self._queue) >= ROOM * sum(slots.is_up for slots in self._slots.values()):
            if not self._queue:  # none is up, and nobody asked yet: asking is what says so
                return
            await self._changed.wait()

    def set_replicas(self, replicas: Mapping[str, Replica[A]]) -> None:
        """Serve from these from now on. A name known before keeps its state; a new one is used once it has answered a
        ping. What is out at one that left comes back or is asked again elsewhere."""
        assert replicas, "a batcher needs a replica"
        self._replicas = dict(replicas)
        self._bind()
        for name in self._slots.keys() - replicas.keys():
            left = self._slots.pop(name)
            left.is_up = left.is_member = False
        for name in replicas.keys() - self._slots.keys():
            slots = self._slots[name] = _Slots(replicas[name], is_up=False)
            self._start(self._probe(slots))
        self._announce()

    @property
    def replica_names(self) -> set[str]:
        """Of the replicas served from, up or down."""
        return set(self._replicas)

    def _bind(self) -> None:
        """Bind to the running event loop. Nothing of a loop that ended before can be waited for."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._slots = {name: _Slots(replica, is_up=True) for name, replica in self._replicas.items()}
        self._queue: deque[_Waiting[A]] = deque()
        self._asked: dict[tuple[str, int], _Waiting[A]] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dispatching = False

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

    def _take_batch(self) -> list[_Waiting[A]]:
        """Take an idle replica's share of the queue, of one ``k``."""
        num_idle = sum(slots.is_up and slots.num_batches == 0 for slots in self._slots.values())
        share = max(MIN_SHARE, -(-len(self._queue) // (1 + num_idle)))  # its own replica is not idle any more
        if self._has_stages and share >= HALVE_FROM:
            share = -(-share // 2)
        queue, size = self._queue, min(share, MAX_BATCH)
        batch = [queue.popleft()]
        k = batch[0].k
        while queue and len(batch) < size and queue[0].k == k:
            batch.append(queue.popleft())
        return batch

    async def _run(self, batch: list[_Waiting[A]], slots: _Slots[A] | None) -> None:
        """Get one batch answered. ``slots`` is the replica to try first, its slot taken; None where none was up."""
        self._num_batches += 1
        failure = RetrievalError("the search was abandoned")  # by a bug, or the loop's end: nobody may wait for ever
        answers: Sequence[A] | None = None
        try:
            answers = await self._try(batch, slots)
        except RetrievalError as error:
            failure = error
        finally:
            for index, waiting in enumerate(batch):
                self._asked.pop((waiting.query, waiting.k), None)
                for call, place in waiting.calls:
                    if answers is None:
                        call.fail(RetrievalError(*failure.args))
                    else:
                        call.put(place, answers[index])
            self._announce()

    async def _try(self, batch: list[_Waiting[A]], slots: _Slots[A] | None) -> Sequence[A]:
        """Ask one replica after another.

        Raises:
            RetrievalError: none of ``max_retries + 1`` attempts was answered.
        """
        queries = [waiting.query for waiting in batch]
        tried: list[_Slots[A]] = []
        cause = ""
        while slots is not None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answers = await slots.replica.answer_batch(queries, batch[0].k)
                if len(answers) == len(queries):
                    return answers
                cause = f"{len(answers)} answers to {len(queries)} queries"
            except TimeoutError:
                cause = f"no answer within {self._timeout_s:g} s"
            except RetrievalError as error:
                cause = str(error)
            finally:
                self._release(slots, len(batch))
            self._num_failed += 1
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

    async def _acquire(self, avoid: list[_Slots[A]], num_queries: int) -> _Slots[A] | None:
        """Take a slot of a replica that is up, another one than before if there is one.

        Batches that failed elsewhere come first: their callers have waited longest.

        Returns:
            None when none was up for ``timeout_s``.
        """
        if not avoid:
            return await self._wait_for_slot(avoid, num_queries)
        self._num_waiting_again += 1
        try:
            return await self._wait_for_slot(avoid, num_queries)
        finally:
            self._num_waiting_again -= 1
            self._announce()

    async def _wait_for_slot(self, avoid: list[_Slots[A]], num_queries: int) -> _Slots[A] | None:
        while True:
            up = [slots for slots in self._slots.values() if slots.is_up]
            others = [slots for slots in up if slots not in avoid]
            free = [slots for slots in others or up if slots.num_batches < self._max_batches]
            if free and (avoid or not self._num_waiting_again):
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

    def _release(self, slots: _Slots[A], num_queries: int) -> None:
        slots.num_batches -= 1
        slots.num_queries -= num_queries
        self._announce()

    def _mark_down(self, slots: _Slots[A]) -> None:
        if slots.is_up:
            slots.is_up = False
            self._start(self._probe(slots))

    async def _probe(self, slots: _Slots[A]) -> None:
        """Ping a replica until it answers, then use it again."""
        pause_s = _FIRST_PAUSE_S
        while slots.is_member and not slots.is_up:
            with contextlib.suppress(RetrievalError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await slots.replica.ping()
                slots.is_up = slots.is_member
                self._announce()
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _announce(self) -> None:
        """Wake everybody in ``_acquire`` and ``wait_for_room``: a slot is free, a replica is up, the queue is less."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine beside the callers. The loop itself keeps only weak references to tasks."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
