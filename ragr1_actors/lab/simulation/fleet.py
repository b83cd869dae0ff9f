"""SimulatedRunners and SimulatedRetrievers: the two fleets of a run in virtual time, with engines and replicas.

Each env runner is the real ``EnvRunner`` with a ``SimulatedEngine``. It searches through a real ``PooledRetriever``,
like every runner of a run, over the ``SimulatedReplica`` objects of the fleet, which all runners share.

The rows of an engine decode in step: after ``V`` tokens of progress each row has ``V`` more than when it joined. One
timer waits for the row that ends first, and an event is a turn, or a query in it, but not a token.

``VirtualLoop`` is an asyncio event loop whose clock jumps to the next timer instead of waiting for it. Everything in
asyncio except files, sockets, threads and signals works in it unchanged. Libraries for tests, such as looptime, serve
real sockets beside the virtual clock; here nothing is polled, and a wait without a timer is an error.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from cluster.autoscaler import FleetState
from envs.base import search_options
from envs.options import QueryFormat
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.lab.simulation.workload import (
    CACHED,
    CHARACTERS_PER_TOKEN,
    Attempt,
    CountingTokenizer,
    Workload,
    answer_text,
    search_text,
)
from ragr1_actors.planning.pace import EnginePace, Pace, SearchPace
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, RequestQueue, summarize
from retrieval.base import Hits, Passage
from retrieval.replicas.batching import PoolArguments, PooledRetriever
from retrieval.replicas.replica_set import REFRESH_S


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that starts at 0 s. It does not wait for files, sockets, threads and signals."""

    def __init__(self) -> None:
        """Make the loop; close it like any other."""
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jump.now_s


class _Jump(selectors.SelectSelector):
    """Selector that lets the time of a wait pass at once. No file is ever ready."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let ``timeout`` seconds pass; raises ``RuntimeError`` for None, as the wait would have no end."""
        if timeout is None:
            raise RuntimeError("the simulation waits for ever: no timer is set and no task can run")
        self.now_s += max(0.0, timeout)
        return []


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


@dataclass(slots=True, eq=False)
class _Life:
    """Times at which a replica was asked for, became ready, and ended."""

    started_s: float
    ready_s: float
    ended_s: float | None = None

    def seconds(self, now_s: float) -> float:
        return (now_s if self.ended_s is None else min(now_s, self.ended_s)) - self.started_s


class SimulatedRetrievers:
    """Replicas, with the clients of the env runners."""

    def __init__(self, loop: VirtualLoop, config: RunConfig, pace: Pace, workload: Workload, num_replicas: int) -> None:
        """Start with ``num_replicas`` that are ready."""
        rng = random.Random(f"retrievers {config.debugging.seed}")
        self._pace, self._settings, self._rng = pace.search, config.retrieval, rng
        top_k = search_options(config.environment).top_k
        text = "x" * max(1, round(workload.passage_tokens * CHARACTERS_PER_TOKEN / top_k))
        found = [Passage(f"p{i}", "title", text, 1.0) for i in range(top_k)]
        self._hits = Hits(found, index_version="simulated")
        self._lives: dict[SimulatedReplica, _Life] = {}  # of all replicas, those that have ended included
        self._clients: dict[int, SimulatedClient] = {}
        self._loop = loop
        for _ in range(num_replicas):
            self._start(0.0)

    @property
    def busy_s(self) -> float:
        """Replica-seconds of work since the start."""
        return fsum(replica.busy_s() for replica in self._lives)

    def _wanted(self) -> list[SimulatedReplica]:
        return [replica for replica, life in self._lives.items() if life.ended_s is None]

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are queries."""
        loads = [client.pool.load() for client in self._clients.values()]
        waiting, outstanding = sum(load.waiting for load in loads), sum(load.outstanding for load in loads)
        num_running = len(self._searched())  # they are searched, or will be within ``REFRESH_S``; the others load
        return FleetState(
            self._loop.time(),
            num_running,
            len(self._wanted()) - num_running,
            ongoing=float(outstanding),
            queued=float(waiting),
            busy_s=self.busy_s,
            num_answered=float(sum(replica.num_queries for replica in self._lives) - outstanding),
        )

    def metrics(self) -> dict[str, float]:
        """Return the counters of ``RetrieverGroup.metrics``: queries, queries per batch, and seconds of work."""
        queries = sum(replica.num_queries for replica in self._lives)
        batches = sum(replica.num_batches for replica in self._lives)
        return {
            "retrieval/retriever_queries": float(queries),
            "retrieval/retriever_batch": queries / batches if batches else 0.0,
            "retrieval/retriever_busy_s": self.busy_s,
        }

    def replica_s(self) -> float:
        """Return the paid replica-seconds."""
        return sum(life.seconds(self._loop.time()) for life in self._lives.values())

    def client(self, number: int) -> SimulatedClient:
        """Return the client of the env runner ``number``."""
        settings = PoolArguments(self._settings.requests.timeout_s, self._settings.requests.max_retries)
        pool = PooledRetriever(self._searched(), settings, seed=self._rng.getrandbits(32))
        self._clients[number] = SimulatedClient(pool, self._hits)
        return self._clients[number]

    def forget(self, number: int) -> None:
        """Drop the client of an env runner that has ended."""
        self._clients.pop(number, None)

    def scale_to(self, num_replicas: int) -> None:
        """Start replicas, or end the newest: clients follow within ``REFRESH_S``, and batches there are answered."""
        before = self._wanted()
        for _ in range(len(before), num_replicas):
            self._start(self._pace.start_s)
        for replica in before[num_replicas:]:
            self._lives[replica].ended_s = self._loop.time() + REFRESH_S
        self._loop.call_later(REFRESH_S, self._refresh)

    def _start(self, after_s: float) -> None:
        now_s = self._loop.time()
        replica = SimulatedReplica(self._loop, self._pace, self._hits, random.Random(self._rng.getrandbits(32)))
        self._lives[replica] = _Life(now_s, now_s + after_s)
        if after_s:
            self._loop.call_later(after_s + REFRESH_S, self._refresh)

    def _searched(self) -> dict[str, SimulatedReplica]:
        now_s = self._loop.time()
        return {
            f"replica {number}": replica
            for number, (replica, life) in enumerate(self._lives.items(), start=1)
            if life.ended_s is None and life.ready_s <= now_s
        }

    def _refresh(self) -> None:
        if found := self._searched():
            for client in self._clients.values():
                client.pool.batcher.set_replicas(found)


class SimulatedClient:
    """``PacedRetriever`` of one env runner; queries that its cache would have answered are answered at once."""

    def __init__(self, pool: PooledRetriever, hits: Hits) -> None:
        """Take the pool; ``hits`` are the results from the cache."""
        self.pool = pool
        self._hits = hits

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the same passages for every query."""
        asked = [query for query in queries if not query.startswith(CACHED)]
        found = dict(zip(asked, await self.pool.search(asked, k), strict=True)) if asked else {}
        return [found[query] if query in found else Hits(self._hits, is_cached=True) for query in queries]

    async def wait_for_room(self) -> None:
        """See ``Batcher.wait_for_room``."""
        await self.pool.batcher.wait_for_room()


@dataclass(slots=True, eq=False)
class _Runner:
    index: int
    runner: EnvRunner
    engine: SimulatedEngine
    life: _Life


class SimulatedRunners:
    """Env runners that sample groups in virtual time, in the loop of the driver."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: RunConfig,
        pace: Pace,
        workload: Workload,
        retrievers: SimulatedRetrievers,
        load_at: LoadAt,
    ) -> None:
        """Begin without runners; ``load_at`` scales the work of the engines."""
        self._config, self._pace, self._workload, self._retrievers = config, pace, workload, retrievers
        self._load_at = load_at
        self._loop = loop
        most = 2 * config.env_runners.max_concurrent_trajectories  # as in EnvRunnerGroup
        self.queue = RequestQueue[_Runner, asyncio.Task[FinishedGroup]](
            lambda: self._ready, self._call, most, loop.time, nullcontext()
        )
        self._version = 0
        self._runners: list[_Runner] = []
        self._draining: list[_Runner] = []
        self._lives: list[_Life] = []
        self._runner_of: dict[asyncio.Task[FinishedGroup], _Runner] = {}  # by the task of a group
        self.num_batch_bytes = 0
        """Bytes of all record batches."""

    async def sample(self, request: GroupRequest) -> FinishedGroup:
        """Sample a group like ``EnvRunnerGroup.sample``."""
        is_urgent = False
        while True:
            sampled = await self.queue.place(request, is_urgent=is_urgent)
            await asyncio.wait([sampled])
            if not sampled.cancelled():
                return sampled.result()
            is_urgent = True  # its runner died

    # -- the fleet -------------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> list[_Runner]:
        return [runner for runner in self._runners if runner.life.ready_s <= self._loop.time()]

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are trajectories."""
        return self.queue.state(len(self._runners) - len(self._ready))

    def replica_s(self) -> float:
        """Return the paid runner-seconds."""
        return sum(life.seconds(self._loop.time()) for life in self._lives)

    def scale_to(self, num_runners: int, start_s: float | None = None) -> None:
        """Start runners, which take ``start_s``, or the pace's time; or drain some, as ``EnvRunnerGroup`` does."""
        after_s = self._pace.engine.start_s if start_s is None else start_s
        while len(self._runners) < num_runners:
            self._start(after_s)
        while len(self._runners) > num_runners:
            now_s = self._loop.time()
            runner = min(reversed(self._runners), key=lambda r: (r.life.ready_s <= now_s, self.queue.num_in_flight[r]))
            self._runners.remove(runner)
            self._draining.append(runner)
            self._end_drained(runner)

    def publish(self, version: int) -> None:
        """Set the version of all engines, also of those that load."""
        self._version = version
        for runner in [*self._runners, *self._draining]:
            runner.engine.publish(version)

    def pause(self) -> None:
        """Stop all engines."""
        for runner in [*self._runners, *self._draining]:
            runner.engine.pause()

    def resume(self) -> None:
        """Continue all engines."""
        for runner in [*self._runners, *self._draining]:
            runner.engine.resume()

    def _start(self, after_s: float) -> None:
        now_s, number = self._loop.time(), len(self._lives)
        life = _Life(now_s, now_s + after_s)
        self._lives.append(life)
        query_format = search_options(self._config.environment).query_format
        engine = SimulatedEngine(self._loop, self._pace.engine, query_format, self._load_at, self._version)
        runner = EnvRunner(self._config, CountingTokenizer(), self._retrievers.client(number), engine)
        self._runners.append(_Runner(number, runner, engine, life))
        if after_s:
            self._loop.call_later(after_s, self.queue.dispatch)

    def _call(self, request: GroupRequest, runner: _Runner) -> asyncio.Task[FinishedGroup]:
        self.queue.begin(runner, request.num_trajectories)
        task = self._loop.create_task(self._sample_at(runner, request))
        self._runner_of[task] = runner
        task.add_done_callback(partial(self._end, request))
        return task

    def _end(self, request: GroupRequest, task: asyncio.Task[FinishedGroup]) -> None:
        runner = self._runner_of.pop(task)
        self.queue.end(runner, request.num_trajectories)
        if not task.cancelled():
            self.queue.num_sampled += request.num_trajectories
        self._end_drained(runner)
        self.queue.dispatch()

    async def _sample_at(self, runner: _Runner, request: GroupRequest) -> FinishedGroup:
        """Sample a group like ``EnvRunnerActor.sample_group``."""
        rng = random.Random(f"{self._config.debugging.seed} {request.group_id}")
        for index, attempt in enumerate(self._workload.attempts(rng, request.num_trajectories)):
            runner.engine.play(request.trajectory_id(index), attempt)
        group = await runner.runner.sample_group(request)
        batch: pa.RecordBatch = groups_to_record_batch([group])
        self.num_batch_bytes += batch.nbytes
        return FinishedGroup(request, summarize(group), batch)

    def _end_drained(self, runner: _Runner) -> None:
        if runner in self._draining and not self.queue.num_in_flight[runner]:
            self._draining.remove(runner)
            self._retrievers.forget(runner.index)
            runner.life.ended_s = self._loop.time()
