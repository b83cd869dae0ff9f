"""Batches concurrent queries over replicas that all hold the same evidence. Pure asyncio; does not import Ray.

::

    PooledRetriever.search ──► normalise ──► answer cache ─hit──► Hits(is_cached=True)
                                             │ miss
    Batcher.ask ─┐                           ▼      ┌► replica 0   1 batch out, 2 where it has two stages
    Batcher.ask ─┼► queue, one entry ──► batch ─────┤
    Batcher.ask ─┘  per query                       └► replica 1   down: pinged until it answers, then used again
                    on failure: the batch goes to another replica, up to max_retries times

There is no timer: a batch leaves as soon as a replica has a free slot, with all queries that wait by then. An answer is
a pure function of the query, so a query may be asked again after a failure. One ``Batcher`` batches searches over
retrievers; another one batches queries over encoders if these are separate actors.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ragr1_actors.core.errors import RetrievalError, one_line
from retrieval.base import Hits, Passage
from retrieval.corpora.text import normalise

MAX_BATCH = 512
"""Limit of queries in one batch; bounds the number that one failure delays."""
MIN_SHARE = 8
"""Least number of queries in the batches into which the queue is split over idle replicas: smaller batches cost more
per query than the second replica saves."""
HALVE_FROM = 64
"""Number of queries from which a share leaves in two batches if replicas have two stages, encoder and index: else one
stage waits for the other. With one stage a large batch costs less per query."""
ROOM = 2 * MAX_BATCH
"""Number of queries that may wait per replica that is up before ``wait_for_room`` waits."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0

_log = logging.getLogger(__name__)
A = TypeVar("A")
"""Answer to one query: its hits, or its vector."""
A_co = TypeVar("A_co", covariant=True)


class Replica(Protocol[A_co]):
    """One of several replicas that give the same answers."""

    async def answer_batch(self, queries: list[str], k: int) -> Sequence[A_co]:
        """Return one answer per query, or raise ``RetrievalError`` if this replica cannot answer."""

    async def ping(self) -> None:
        """Return once the replica can answer, or raise ``RetrievalError``."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer that says why no replica can answer the query; the query is not asked again."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolArguments:
    """Timeout, retries and cache of a pool of replicas; keys of the recipe's ``retrieval`` section."""

    timeout_s: float = 30.0
    """Limit of one attempt at one replica, and of the wait until any replica is up."""
    max_retries: int = 2
    """Number of attempts after the first one."""
    cache_size: int = 0
    """Number of answers kept; 0 turns the cache off."""
    max_batch: int = MAX_BATCH
    """Limit of queries that a replica is given at once."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Counts of a ``PooledRetriever`` since its start, and its load now."""

    queries: int
    cached: int
    """Queries answered from the cache."""
    failed_attempts: int
    """Batches that a replica did not answer."""
    waiting: int
    """Distinct queries in its queue."""
    outstanding: int
    """Distinct queries at replicas."""


@dataclass(slots=True, eq=False)
class _Slots(Generic[A]):
    """Replica with the number of batches that are out at it."""

    name: str
    replica: Replica[A]
    is_up: bool
    is_member: bool = True
    num_batches: int = 0
    num_queries: int = 0


class _Call(Generic[A]):
    """Call of ``ask`` with its answers so far. One future serves all queries: one per query costs milliseconds."""

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


@dataclass(slots=True, eq=False)
class _Waiting(Generic[A]):
    """Query in the queue with the calls that wait for it."""

    query: str
    k: int
    asked_at: float
    """Time on the loop's clock."""
    calls: list[tuple[_Call[A], int]] = field(default_factory=list)
    """Calls, each with the position of the query in it."""


class Batcher(Generic[A]):
    """Answers concurrent queries in batches, and hides replicas that fail."""

    def __init__(
        self,
        replicas: Mapping[str, Replica[A]],
        settings: PoolArguments,
        *,
        has_stages: bool = False,
        seed: int | None = None,
    ) -> None:
        """Serve from ``replicas``.

        Args:
            replicas: at least one replica, by name; each counts as up until it fails.
            settings: timeout and retries.
            has_stages: whether a replica can work on two batches at once; see ``HALVE_FROM``.
            seed: seed of the choice among replicas, for a simulation that must repeat.
        """
        assert replicas, "a batcher needs a replica"
        self._has_stages = has_stages
        # A further batch would wait at the replica, where it cannot grow or go to another replica.
        self._max_batches = 2 if has_stages else 1
        self._timeout_s, self._max_retries = settings.timeout_s, settings.max_retries
        self._max_batch = settings.max_batch
        self._replicas = dict(replicas)
        self._random = random.Random(seed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_dispatching = False
        self._slots: dict[str, _Slots[A]] = {}
        self._queue: deque[_Waiting[A]] = deque()
        self._asked: dict[tuple[str, int], _Waiting[A]] = {}
        self._num_queries = self._num_failed = 0
        self._num_waiting_again = 0
        self._down_since: float | None = None
        """Time on the loop's clock at which a batch found no replica up; None once one is up again."""
        self._problem = ""
        """Last error of any replica, from a batch or a ping."""

    def load(self, num_cached: int) -> ClientLoad:
        """Return the load now and the counts since the start; ``num_cached`` queries were not asked here."""
        num_waiting = len(self._queue)
        return ClientLoad(
            self._num_queries + num_cached, num_cached, self._num_failed, num_waiting, len(self._asked) - num_waiting
        )

    async def ask(self, queries: Sequence[str], k: int) -> list[A]:
        """Return the answer to each query: ``[len(queries)]``. Equal queries of concurrent calls share one answer.

        Cancelling one call does not affect the others.

        Raises:
            RetrievalError: every attempt at a query failed; the message has the number of attempts and the last cause.
        """
        if not queries:
            return []
        self._bind()
        call: _Call[A] = _Call(len(queries), asyncio.get_running_loop())
        self._num_queries += len(queries)
        now = asyncio.get_running_loop().time()
        for index, query in enumerate(queries):
            waiting = self._asked.get((query, k))
            if waiting is None:
                waiting = self._asked[query, k] = _Waiting(query, k, now)
                self._queue.append(waiting)
            waiting.calls.append((call, index))
        if self._queue and not self._is_dispatching:
            self._is_dispatching = True
            self._start(self._dispatch())
        return await call.answered

    async def wait_for_room(self) -> None:
        """Return once fewer than ``ROOM`` queries per replica that is up are waiting."""
        self._bind()
        while len(self._queue) >= ROOM * sum(slots.is_up for slots in self._slots.values()):
            if not self._queue:  # no replica is up and no query waits: a search must run to report that
                return
            await self._changed.wait()

    def set_replicas(self, replicas: Mapping[str, Replica[A]]) -> None:
        """Use these replicas from now on; there must be at least one.

        A known name keeps its replica and state; a new one is used once it has answered a ping. A batch at a removed
        replica is answered by it, or asked again at another one.
        """
        assert replicas, "a batcher needs a replica"
        self._replicas = dict(replicas)
        self._bind()
        for name in self._slots.keys() - replicas.keys():
            left = self._slots.pop(name)
            left.is_up = left.is_member = False
        for name in [name for name in replicas if name not in self._slots]:
            slots = self._slots[name] = _Slots(name, replicas[name], is_up=False)
            self._start(self._probe(slots))
        self._announce()

    def _bind(self) -> None:
        """Bind to the running event loop, and drop the state that belongs to an earlier one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._slots = {name: _Slots(name, replica, is_up=True) for name, replica in self._replicas.items()}
        self._queue.clear()
        self._asked.clear()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dispatching = False
        self._down_since = None

    async def _dispatch(self) -> None:
        """Send batches while queries wait: in a separate task, after all calls of this loop turn have queued theirs."""
        try:
            while self._queue:
                slots = await self._acquire([], 0, self._queue[0].asked_at)
                batch = self._take_batch()
                if slots is not None:
                    slots.num_queries += len(batch)
                self._start(self._run(batch, slots))
        finally:
            self._is_dispatching = False

    def _take_batch(self) -> list[_Waiting[A]]:
        """Take the share of one replica from the queue: the first queries with the ``k`` of the very first one."""
        num_idle = sum(slots.is_up and slots.num_batches == 0 for slots in self._slots.values())
        share = max(MIN_SHARE, -(-len(self._queue) // (1 + num_idle)))  # the chosen replica no longer counts as idle
        if self._has_stages and share >= HALVE_FROM:
            share = -(-share // 2)
        queue, size = self._queue, min(share, self._max_batch)
        batch = [queue.popleft()]
        k = batch[0].k
        others: list[_Waiting[A]] = []
        while queue and len(batch) < size:
            (batch if queue[0].k == k else others).append(queue.popleft())
        queue.extendleft(reversed(others))
        return batch

    async def _run(self, batch: list[_Waiting[A]], slots: _Slots[A] | None) -> None:
        """Answer one batch. ``slots`` is the replica to try first, with its slot taken; None if no replica was up."""
        failure = RetrievalError("the search was abandoned")  # for a bug or a cancellation: no call may hang
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
        """Try one replica after another until one answers.

        Raises:
            RetrievalError: all of ``max_retries + 1`` attempts failed.
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
                cause = f"{slots.name}: {len(answers)} answers to {len(queries)} queries"
            except TimeoutError:
                cause = self._no_answer(slots)
            except RetrievalError as error:
                cause = str(error)
            except Exception as error:  # a replica may fail in any way, and another one may answer
                _log.exception("%s failed", slots.name)
                cause = f"{slots.name}: {type(error).__name__}: {one_line(error)}"
            finally:
                slots.num_batches -= 1
                slots.num_queries -= len(batch)
                self._announce()
            self._num_failed += 1
            self._problem = cause
            tried.append(slots)
            if slots.is_up:
                slots.is_up = False
                self._start(self._probe(slots))
            if len(tried) > self._max_retries:
                break
            slots = await self._acquire(tried, len(batch), asyncio.get_running_loop().time())
        if slots is None:
            last = f"; the last error: {self._problem}" if self._problem != cause else ""
            cause = f"{cause and cause + '; then '}no replica was up for {self._timeout_s:g} s{last}"
        raise RetrievalError(
            f"search failed after {len(tried)} attempts on {len(set(tried))} of {len(self._slots)} replicas: {cause}"
        )

    async def _acquire(self, avoid: list[_Slots[A]], num_queries: int, since: float) -> _Slots[A] | None:
        """Take a slot of a replica that is up, if possible one not in ``avoid``; return None if none is up in time.

        Batches that failed before go first, since their callers have waited longest. ``since`` is the time on the
        loop's clock from which the batch waits: what was asked together gives up together.
        """
        self._num_waiting_again += bool(avoid)
        gives_up_at: float | None = None  # on the loop's clock; None while a replica is up
        try:
            while True:
                up = [slots for slots in self._slots.values() if slots.is_up]
                others = [slots for slots in up if slots not in avoid]
                free = [slots for slots in others or up if slots.num_batches < self._max_batches]
                if free and (avoid or not self._num_waiting_again):
                    idle = [slots for slots in free if slots.num_batches == 0]
                    # The less loaded of two random replicas is close to the best, and clients do not all choose the
                    # same.
                    pair = self._random.sample(idle or free, min(2, len(idle or free)))
                    chosen = min(pair, key=lambda slots: slots.num_queries)
                    chosen.num_batches += 1
                    chosen.num_queries += num_queries
                    return chosen
                # While replicas are up this wait ends, since the batches that hold their slots time out.
                if up:
                    self._down_since = gives_up_at = None
                else:  # announcements that bring no replica do not prolong the wait
                    if self._down_since is None:
                        self._down_since = asyncio.get_running_loop().time()
                    gives_up_at = max(since, self._down_since) + self._timeout_s
                async with asyncio.timeout_at(gives_up_at):
                    await self._changed.wait()
        except TimeoutError:
            return None
        finally:
            if avoid:
                self._num_waiting_again -= 1
                self._announce()

    async def _probe(self, slots: _Slots[A]) -> None:
        """Ping a replica until it answers, then use it again."""
        pause_s = _FIRST_PAUSE_S
        while slots.is_member and not slots.is_up:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await slots.replica.ping()
                slots.is_up = slots.is_member
                self._announce()
                return
            except TimeoutError:
                self._problem = self._no_answer(slots)
            except RetrievalError as error:
                self._problem = str(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _no_answer(self, slots: _Slots[A]) -> str:
        return f"{slots.name}: no answer within {self._timeout_s:g} s"

    def _announce(self) -> None:
        """Wake ``_acquire`` and ``wait_for_room``, because a slot is free, a replica is up, or the queue is shorter."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task, and keep a reference, since the event loop keeps only weak ones."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PooledRetriever:
    """Retriever over replicas of any kind: it normalises, caches, merges equal queries, batches and retries."""

    def __init__(
        self,
        replicas: Mapping[str, Replica[Hits | Refusal]],
        settings: PoolArguments,
        *,
        has_stages: bool = False,
        seed: int | None = None,
    ) -> None:
        """Search ``replicas``, at least one, by name; each answers a query with ``Hits`` or a ``Refusal``."""
        self.batcher: Batcher[Hits | Refusal] = Batcher(replicas, settings, has_stages=has_stages, seed=seed)
        self._cache_size = settings.cache_size
        self._cache: OrderedDict[tuple[str, int], Hits] = OrderedDict()
        """Hits by query and ``k``, the least recently used first; all from one index version."""
        self._version = ""
        self._num_cached = 0

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages per query, each list a new ``Hits``: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, or a query was refused; the message has the cause.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        clean = [normalise(query) for query in queries]
        distinct = dict.fromkeys(clean)
        known = {query: self._cache[query, k] for query in distinct if (query, k) in self._cache}
        for query in known:
            self._cache.move_to_end((query, k))
        cached = set(known)
        missing = [query for query in distinct if query not in known]
        if missing:
            before = self._version
            known |= await self._ask(missing, k)
            if cached and self._version != before:  # a server has another index now: an answer is of one
                known |= await self._ask([query for query in distinct if query in cached], k)
                cached = set()
        self._num_cached += sum(query in cached for query in clean)
        # calls that ask the same query must not share a list
        return [
            Hits(known[query], is_cached=query in cached, index_version=known[query].index_version) for query in clean
        ]

    def load(self) -> ClientLoad:
        """Return the counts since the start and the load now."""
        return self.batcher.load(self._num_cached)

    async def _ask(self, queries: list[str], k: int) -> dict[str, Hits]:
        found: dict[str, Hits] = {}
        refusals: list[Refusal] = []
        for query, answer in zip(queries, await self.batcher.ask(queries, k), strict=True):
            if isinstance(answer, Refusal):
                refusals.append(answer)
            else:
                found[query] = answer
                if answer.index_version != self._version:
                    self._cache.clear()
                    self._version = answer.index_version
                self._cache[query, k] = answer
                if len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        if refusals:
            raise RetrievalError(refusals[0].reason)
        return found
