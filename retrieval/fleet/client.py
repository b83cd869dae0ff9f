"""RetrieverClient: searches a fleet from any process, and finds the replicas that come and go.

::

    query ──► Batcher over encoders ──► vector ┐          (only where encoders are actors of their own)
                                               ▼
    query ──► Batcher over replicas ──► shard 0, shard 1 ... ──► merge ──► Hits
                                           over channels
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from cluster.actor_fleet import find_actors, last_line
from cluster.rpc import Channel
from ragr1_actors.core.errors import ChannelError, DataError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.corpora.corpus import Corpus
from retrieval.fleet.batching import Batcher, BatcherCounts
from retrieval.fleet.pooled import PooledRetriever, PoolSettings
from retrieval.fleet.wire import RowHits, WireHits, expand, merge
from retrieval.indexes.manifest import Manifest
from retrieval.indexes.ranking import Ranking, merge_rankings, to_hits

REFRESH_S = 2.0
"""Between two looks at who is in the fleet, while anybody searches."""

_log = logging.getLogger(__name__)

Vector = NDArray[np.float32]


class RetrieverClient:
    """The retriever of an env runner: batches, routes, retries, remembers. Pickles as its arguments."""

    def __init__(
        self, fleet: str, num_shards: int, encoder_fleet: str, settings: PoolSettings, index_dir: str = ""
    ) -> None:
        """Search the fleet of that name.

        Names rather than handles: an actor that was given handles cannot be restarted once their owner's node is gone.

        Args:
            fleet: ``ActorFleet.name`` of the retrievers.
            num_shards: actors of one replica.
            encoder_fleet: of the encoders; empty where each retriever encodes.
            settings: of the pool.
            index_dir: of the fleet's index. Where this node has it too, answers bring rows and the passages are read
                here; where it has not, or this is empty, they bring the passages.

        Raises:
            RetrievalError: no whole replica is there.
        """
        self._arguments = (fleet, num_shards, encoder_fleet, settings, index_dir)
        self._corpus = _LocalCorpus.open(index_dir) if index_dir else None
        self._fleet, self._num_shards, self._encoder_fleet = fleet, num_shards, encoder_fleet
        self._encoders: Batcher[Vector] | None = None
        if encoder_fleet:
            encoders = {name: _RemoteEncoder(name) for name in find_actors(encoder_fleet)}
            if not encoders:
                raise RetrievalError(f"no actor of the fleet {encoder_fleet} runs")
            self._encoders = Batcher(encoders, timeout_s=settings.timeout_s, max_retries=settings.max_retries)
        replicas = self._find_replicas(find_actors(fleet), {})
        if not replicas:
            raise RetrievalError(f"no whole replica of the fleet {fleet} runs")
        self._replicas = replicas
        self._pool = PooledRetriever(replicas, settings, has_stages=bool(encoder_fleet))
        self._next_look = time.monotonic() + REFRESH_S
        self._looking: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[RetrieverClient], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor: what is in flight stays here."""
        return RetrieverClient, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, each a ``Hits``: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed; the message has their number and the last cause.
        """
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + REFRESH_S
            self._looking = asyncio.create_task(self._look())  # the reference keeps it alive
        return await self._pool.search(queries, k)

    async def wait_for_room(self) -> None:
        """Return once the fleet has room for more queries; see ``Batcher.wait_for_room``."""
        await self._pool.wait_for_room()

    def counts(self) -> BatcherCounts:
        """Return what was asked of the fleet so far."""
        return self._pool.counts()

    async def _look(self) -> None:
        """Take in who joined and who left."""
        names = await asyncio.to_thread(find_actors, self._fleet)
        replicas = self._find_replicas(names, self._replicas)
        if replicas and replicas.keys() != self._replicas.keys():
            self._replicas = replicas
            self._pool.batcher.set_replicas(replicas)
        if self._encoders is not None:
            found = await asyncio.to_thread(find_actors, self._encoder_fleet)
            if found and set(found) != self._encoders.replica_names:
                self._encoders.set_replicas({name: _RemoteEncoder(name) for name in found})

    def _find_replicas(self, names: Sequence[str], known: Mapping[str, _RemoteReplica]) -> dict[str, _RemoteReplica]:
        """Group shard actors ``<member>.<shard>`` by member; a member that is not whole is none."""
        members: dict[str, list[str]] = defaultdict(list)
        for name in names:
            members[name.rpartition(".")[0]].append(name)
        return {
            member: known.get(member) or _RemoteReplica(shards, self._encoders, self._corpus)
            for member, shards in members.items()
            if len(shards) == self._num_shards
        }


class _RemoteEncoder:
    """``Replica`` over an encoder actor."""

    def __init__(self, name: str) -> None:
        self._actor = _NamedActor(name)

    async def answer_batch(self, queries: list[str], k: int) -> list[Vector]:
        return list(await self._actor.call("encode", queries))

    async def ping(self) -> None:
        await self._actor.ping()


class _RemoteReplica:
    """``Replica`` over the shard actors of one copy of the index."""

    def __init__(
        self, shards: Sequence[str], encoders: Batcher[Vector] | None, corpus: _LocalCorpus | None = None
    ) -> None:
        self._shards = [_NamedActor(name) for name in sorted(shards)]
        self._encoders = encoders
        self._corpus = corpus

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
        vectors = None
        if self._encoders is not None:
            vectors = np.stack(await self._encoders.ask(queries, 0))
        if self._corpus is not None:
            found: list[RowHits] = await self._call("rank_batch", queries, k, vectors)
            if all(hits.index_version == self._corpus.index_version for hits in found):
                return self._corpus.hits(found, k)
            self._corpus = None  # the replica's node has another index under this path
        packed: list[WireHits] = await self._call("search_batch", queries, k, vectors)
        return merge([expand(hits) for hits in packed], k)

    async def ping(self) -> None:
        await asyncio.gather(*[shard.ping() for shard in self._shards])

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        if len(self._shards) == 1:
            return [await self._shards[0].call(method, *arguments)]
        return await asyncio.gather(*[shard.call(method, *arguments) for shard in self._shards])


@dataclass(frozen=True, slots=True)
class _LocalCorpus:
    """The passages of the fleet's index, mapped in this process."""

    corpus: Corpus
    index_version: str

    @classmethod
    def open(cls, index_dir: str) -> _LocalCorpus | None:
        """Map the corpus; None where this node does not have it, or not whole."""
        try:
            manifest = Manifest.read(index_dir)
            manifest.corpus.check(Path(index_dir))
            return cls(Corpus.open(index_dir), manifest.version)
        except (DataError, OSError):
            return None

    def hits(self, shards: Sequence[RowHits], k: int) -> list[Hits]:
        ranking = merge_rankings([Ranking(hits.scores, hits.rows) for hits in shards], k)
        return to_hits(ranking, self.corpus, self.index_version)


class _NamedActor:
    """An actor by name. It is called over its channel, or by Ray where that cannot be reached; errors become the one
    that a batcher knows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: Any = None
        self._channel: Channel | None = None
        self._is_unreachable = False

    async def call(self, method: str, *arguments: Any) -> Any:
        try:
            channel = self._channel or await self._connect()
            if channel is None:
                return await self._handle.call.remote(method, *arguments)
            return await channel.call(method, *arguments)
        except ChannelError as error:
            self._channel = None  # when it is started again, it will have another
            raise RetrievalError(str(error)) from error
        except (RayError, ValueError) as error:  # ValueError: no actor of that name any more
            raise RetrievalError(_reason(error)) from error

    async def ping(self) -> None:
        """Ask Ray, who knows of an actor that was started again."""
        try:
            self._handle = self._handle or ray.get_actor(self._name)
            await self._handle.ping.remote()
            self._is_unreachable = False  # it may have been started again elsewhere
        except (RayError, ValueError) as error:
            raise RetrievalError(_reason(error)) from error

    async def _connect(self) -> Channel | None:
        """Return the channel; None where there is no way, now or ever."""
        self._handle = self._handle or ray.get_actor(self._name)
        if self._is_unreachable:
            return None
        address = await self._handle.channel.remote()
        if address is not None:
            channel = Channel(address)
            try:
                await channel.connect()
            except ChannelError as error:
                _log.warning("searches go by way of Ray, which takes longer: %s", error)
            else:
                self._channel = channel
                return channel
        self._is_unreachable = True
        return None


def _reason(error: RayError | ValueError) -> str:
    return last_line(error) if isinstance(error, RayError) else str(error)
