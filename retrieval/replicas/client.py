"""RetrieverClient: searches a fleet of retrieval actors from any process, and follows replicas that come and go.

::

    query ──► Batcher over encoders ──► vector ┐          (only where encoders are separate actors)
                                               ▼
    query ──► Batcher over replicas ──► shard 0, shard 1 ... ──► merge ──► Hits
                                         over RpcClient
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from cluster.metrics import count, observe
from cluster.rpc import RpcClient, decode
from cluster.supervision.fleet import last_line
from ragr1_actors.core.errors import DataError, RetrievalError, RpcError
from retrieval.base import Hits, Page, Passage
from retrieval.corpora.corpus import Corpus
from retrieval.indexes.manifest import Manifest
from retrieval.indexes.ranking import Ranking, merge_rankings, to_hits
from retrieval.replicas.batching import Batcher, ClientLoad, PoolArguments, PooledRetriever, Refusal
from retrieval.replicas.replica_set import CODEC, REFRESH_S, PackedHits, RowHits, find_actors

_log = logging.getLogger(__name__)

Vector = NDArray[np.float32]
_OPEN = 0
"""Value of ``k`` that marks a request to open pages, whose queries are titles."""


class RetrieverClient:
    """Retriever of an env runner: it caches, batches, routes and retries. It pickles as its arguments."""

    def __init__(
        self, fleet: str, num_shards: int, encoder_fleet: str, settings: PoolArguments, index_dir: str = ""
    ) -> None:
        """Find the actors of a fleet by name, since handles would bind a client to the node of their owner.

        Args:
            fleet: ``ReplicaSet.name`` of the retrievers.
            num_shards: number of actors per replica.
            encoder_fleet: ``ReplicaSet.name`` of the encoders; empty if each retriever encodes.
            settings: timeout, retries and cache size.
            index_dir: directory of the fleet's index. If this node has it too, actors answer with rows and the passages
                are read here; if not, or if it is empty, actors answer with the passages.

        Raises:
            RetrievalError: the fleet has no complete replica.
        """
        self._arguments = (fleet, num_shards, encoder_fleet, settings, index_dir)
        self._timeout_s = settings.timeout_s
        self._corpus = _open_corpus(index_dir) if index_dir else None
        self._fleet, self._num_shards, self._encoder_fleet = fleet, num_shards, encoder_fleet
        self._encoders: Batcher[Vector] | None = None
        if encoder_fleet:
            encoders = {name: _RemoteEncoder(name) for name in find_actors(encoder_fleet, only_running=True)}
            if not encoders:
                raise RetrievalError(f"the fleet {encoder_fleet} has no actor that runs")
            self._encoders = Batcher(encoders, settings)
            self._first_encoder = min(encoders)
        replicas = self._find_replicas(find_actors(fleet, only_running=True), {})
        if not replicas:
            raise RetrievalError(f"the fleet {fleet} has no complete replica that runs")
        self._replicas = replicas
        self._pool = PooledRetriever(replicas, settings, has_stages=bool(encoder_fleet))
        self._num_failed = 0
        """Number of failed attempts that are counted in Prometheus."""
        self._seen_at = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._id = uuid.uuid4().hex

    def __reduce__(self) -> tuple[type[RetrieverClient], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor; queries in flight stay with the original."""
        return RetrieverClient, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages per query, each list a ``Hits``: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed; the message has the number of attempts and the last cause.
        """
        started = time.monotonic()
        await self._refresh()
        found = await self._pool.search(queries, k)
        observe("search_seconds", time.monotonic() - started)
        count("queries", len(queries))
        count("cached_queries", sum(isinstance(hits, Hits) and hits.is_cached for hits in found))
        return found

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the page of each title, as any replica finds it; see ``PageRetriever``."""
        await self._refresh()
        answers = await self._pool.batcher.ask(titles, _OPEN)
        return [page for page in answers if isinstance(page, Page)]  # all answers are pages

    async def _refresh(self) -> None:
        """Look for replicas again from time to time."""
        age_s = time.monotonic() - self._seen_at
        if age_s >= REFRESH_S:
            if not _is_running(self._looking):
                self._looking = asyncio.create_task(self._look())
            if age_s >= 2 * REFRESH_S:  # replicas that were removed meanwhile may have ended
                await asyncio.wait([self._looking], timeout=self._timeout_s)

    async def wait_for_room(self) -> None:
        """Return once the replicas have room for more queries; see ``Batcher.wait_for_room``."""
        await self._pool.batcher.wait_for_room()

    async def _look(self) -> None:
        """Update the replicas and encoders in use, and report the load of this client to the fleets."""
        replicas = self._find_replicas(await asyncio.to_thread(find_actors, self._fleet), self._replicas)
        if replicas:
            self._replicas = replicas
            self._pool.batcher.set_replicas(replicas)
        if self._encoders is not None:
            found = await asyncio.to_thread(find_actors, self._encoder_fleet)
            if found:
                self._first_encoder = found[0]
                self._encoders.set_replicas({name: _RemoteEncoder(name) for name in found})
        self._seen_at = time.monotonic()
        if not _is_running(self._reporting):
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        """Send the load of this client to one actor of each fleet, which keeps all its reports."""
        load = self._pool.load()
        count("failed_attempts", load.failed_attempts - self._num_failed)
        self._num_failed = load.failed_attempts
        with contextlib.suppress(RetrievalError):
            await self._replicas[min(self._replicas)].report(self._id, load)
            if self._encoders is not None:
                await _NamedActor(self._first_encoder).ray_call("report", self._id, self._encoders.load(0))

    def _find_replicas(self, names: Sequence[str], known: Mapping[str, _RemoteReplica]) -> dict[str, _RemoteReplica]:
        """Group shard actors ``<member>.<shard>`` by member; drop incomplete members."""
        members: dict[str, list[str]] = defaultdict(list)
        for name in names:
            members[name.rpartition(".")[0]].append(name)
        return {
            member: known.get(member) or _RemoteReplica(shards, self._encoders, self._corpus)
            for member, shards in members.items()
            if len(shards) == self._num_shards
        }


class _NamedActor:
    """Actor that is found by name; all errors of its calls become ``RetrievalError``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: Any = None
        self._client: RpcClient | None = None
        self._is_unreachable = False

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method over ``RpcClient``, or by Ray if it cannot connect."""
        try:
            client = self._client or await self._connect()
            if client is not None:
                return await client.call(method, *arguments)
        except RpcError as error:
            self._client = None  # an actor that restarts has another address
            raise RetrievalError(str(error)) from error
        return await self.ray_call("call", method, *arguments)

    async def ping(self) -> None:
        """Ask the actor by Ray, which also finds an actor that was restarted."""
        await self.ray_call("ping")
        self._is_unreachable = False  # it may have been restarted on another node

    async def ray_call(self, method: str, *arguments: Any) -> Any:
        try:
            self._handle = self._handle or ray.get_actor(self._name)
            return await getattr(self._handle, method).remote(*arguments)
        except (RayError, ValueError) as error:  # ValueError: no actor has that name any more
            raise RetrievalError(last_line(error)) from error

    async def _connect(self) -> RpcClient | None:
        """Return a connected client; None if it cannot connect."""
        if self._is_unreachable:
            return None
        address = await self.ray_call("rpc_address")
        if address is not None:
            client = RpcClient(address)
            try:
                await client.connect()
            except RpcError as error:
                _log.warning("searches use Ray calls, which take longer: %s", error)
            else:
                self._client = client
                return client
        self._is_unreachable = True
        return None


class _RemoteEncoder(_NamedActor):
    """``Replica`` with one encoder actor."""

    async def answer_batch(self, queries: list[str], k: int) -> list[Vector]:
        return list(await self.call("encode", queries))


class _RemoteReplica:
    """``Replica`` with the shard actors of one copy of the index."""

    def __init__(
        self, shards: Sequence[str], encoders: Batcher[Vector] | None, corpus: tuple[Corpus, str] | None
    ) -> None:
        self._shards = [_NamedActor(name) for name in sorted(shards)]
        self._encoders = encoders
        self._corpus = corpus

    async def answer_batch(self, queries: list[str], k: int) -> Sequence[Hits | Refusal]:
        if k == _OPEN:
            return await self._open(queries)
        vectors = None
        if self._encoders is not None:
            try:
                vectors = np.stack(await self._encoders.ask(queries, 0))
            except RetrievalError as error:  # all attempts at encoders; another replica would ask the same ones
                return [Refusal(f"encoders: {error}")] * len(queries)
        if self._corpus is not None:
            corpus, version = self._corpus
            found = [RowHits(*hits) for hits in await self._call("rank_batch", queries, k, vectors)]
            if all(hits.index_version == version for hits in found):
                ranking = merge_rankings([Ranking(hits.scores, hits.rows) for hits in found], k)
                return to_hits(ranking, corpus.fields, version)
            self._corpus = None  # the replica's node has another index at this path
        return unpack([PackedHits(*hits) for hits in await self._call("search_batch", queries, k, vectors)], k)

    async def _open(self, titles: list[str]) -> list[Hits]:
        packed, near = await self._shards[0].call("open_batch", titles)  # each shard's actor has all passages
        found = zip(unpack([PackedHits(*packed)], None), near, strict=True)
        return [Page(hits, near=names, index_version=hits.index_version) for hits, names in found]

    async def ping(self) -> None:
        await asyncio.gather(*[shard.ping() for shard in self._shards])

    async def report(self, client: str, load: ClientLoad) -> None:
        await self._shards[0].ray_call("report", client, load)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        if len(self._shards) == 1:
            return [await self._shards[0].call(method, *arguments)]
        return await asyncio.gather(*[shard.call(method, *arguments) for shard in self._shards])


def unpack(shards: Sequence[PackedHits], k: int | None) -> list[Hits]:
    """Return the ``k`` best hits per query from disjoint shards, equal scores by row, as one index would answer.

    If ``k`` is None, return all hits of one shard in their order.
    """
    parts = [decode(CODEC.decompress(shard.data, shard.num_bytes, asbytes=True)) for shard in shards]
    version, *others = {shard.index_version: None for shard in shards}
    if others:
        raise RetrievalError(f"the shards have the indexes {version} and {', '.join(others)}; start the run again")
    answers = []
    for lists in zip(*parts, strict=True):
        found = lists[0] if len(lists) == 1 else heapq.merge(*lists, key=lambda fields: (-fields[-1], fields[0]))
        passages = [Passage(name, title, text, score) for _, name, title, text, score in islice(found, k)]
        answers.append(Hits(passages, index_version=version))
    return answers


def _is_running(task: asyncio.Task[None] | None) -> TypeGuard[asyncio.Task[None]]:
    """Return whether a task runs in this event loop; a task of an earlier loop was abandoned with it."""
    return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()


def _open_corpus(index_dir: str) -> tuple[Corpus, str] | None:
    """Map the passages of the fleet's index; return them and its version. None: this node has no complete copy."""
    try:
        manifest = Manifest.read(index_dir)
        manifest.corpus.check(Path(index_dir))
        return Corpus.open(index_dir), manifest.version
    except (DataError, OSError):
        return None
