"""The actors of the retrieval fleet: a replica of the index or a shard of it, and an encoder without an index."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.rpc import RpcAddress, RpcServer
from retrieval.fleet.wire import PackedHits, RowHits, pack
from retrieval.indexes.manifest import Manifest

if TYPE_CHECKING:
    from retrieval.local import LocalRetriever


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """The arguments of an actor of the fleet."""

    index_dir: str
    num_threads: int
    device: str
    """``cpu`` or ``cuda``."""
    reranker: str = ""
    options: Mapping[str, Any] | None = None
    shards: tuple[int, ...] | None = None
    """Numbers of the index's shards that this actor holds; None is all."""
    encodes: bool = True
    """Whether the actor encodes queries itself."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What a ``RetrieverClient`` reports: counts since its start, and its load now."""

    queries: int
    cached: int
    """Queries answered from its cache."""
    failed_attempts: int
    """Batches that a replica did not answer."""
    waiting: int
    """Queries in its queue."""
    outstanding: int
    """Queries at replicas."""


@dataclass(frozen=True, slots=True)
class ActorLoad:
    """The load of an actor since its process started."""

    started: float
    """``time.time()`` of the process; a restarted actor has another value."""
    up_s: float
    busy_s: float
    queries: int
    batches: int
    clients: Mapping[str, tuple[float, ClientLoad]]
    """The last report of each client that reports to this actor, and its age in seconds."""


class RpcActor:
    """An actor whose methods clients call over ``RpcServer``, or by Ray where they cannot connect."""

    def __init__(self) -> None:
        """Start the thread that loads and answers. ``_serve`` lets clients connect."""
        self._server = RpcServer()
        self._started = time.time()
        self._num_queries = self._num_batches = 0
        self._busy_s = 0.0
        self._reports: dict[str, tuple[float, ClientLoad]] = {}

    def ping(self) -> None:
        """Return once everything is loaded and the calls before this one are answered."""
        self._server.run(int)

    def rpc_address(self) -> RpcAddress | None:
        """Return where clients connect, or None where this node's address cannot be listened at."""
        return self._server.address

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method that was called by Ray as one that was called over ``RpcServer``."""
        return self._server.call(method, *arguments)

    def drain(self) -> None:
        """Answer the calls that have arrived, close every connection and return."""
        self._server.drain()

    def report(self, client: str, load: ClientLoad) -> None:
        """Keep a client's report for ``load``."""
        self._reports[client] = (time.monotonic(), load)

    def load(self) -> ActorLoad:
        """Return the load of this actor, and what its clients reported."""
        now = time.monotonic()
        return ActorLoad(
            self._started,
            time.time() - self._started,
            self._busy_s,
            self._num_queries,
            self._num_batches,
            {client: (now - at, report) for client, (at, report) in self._reports.items()},
        )

    def _count(self, num_queries: int, started: float) -> None:
        self._num_queries += num_queries
        self._num_batches += 1
        self._busy_s += time.monotonic() - started


class RetrieverActor(RpcActor):
    """Holds the index or some of its shards. One search at a time, on all of the actor's threads."""

    def __init__(self, settings: ActorSettings) -> None:
        """Open the index and search once, so that the first caller finds everything loaded.

        Raises:
            DataError: no usable index on this node.
        """
        super().__init__()
        self._reranks = bool(settings.reranker)
        self._server.run(self._load_index, settings)
        self._server.open({"search_batch": self._search_batch, "rank_batch": self._rank_batch})

    def _load_index(self, settings: ActorSettings) -> None:
        self._retriever = _open(settings)
        manifest = Manifest.read(settings.index_dir)
        vectors = None
        if manifest.is_dense and not settings.encodes:
            vectors = np.eye(1, manifest.dimension, dtype=np.float32)
        self._retriever.search_rows(["warm up"], 1, vectors)

    def _search_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> PackedHits:
        """Return the passages; ``vectors`` are the encoded queries, float32 ``[len(queries), dimension]``, if any."""
        started = time.monotonic()
        if self._reranks:
            found = self._retriever.search_batch(queries, k, vectors)
            rows = np.zeros((len(queries), max(map(len, found), default=0)), np.int64)
        else:
            ranking, found = self._retriever.search_rows(queries, k, vectors)
            rows = ranking.rows
        hits = pack(found, rows, self._retriever.version)
        self._count(len(queries), started)
        return hits

    def _rank_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> RowHits:
        """Return the rows of the passages that ``_search_batch`` finds, before reranking."""
        started = time.monotonic()
        ranking = self._retriever.rank(queries, k, vectors)
        self._count(len(queries), started)
        return RowHits(self._retriever.version, ranking.scores, ranking.rows)


class EncoderActor(RpcActor):
    """Holds the encoder of an index, without the index."""

    def __init__(self, settings: ActorSettings) -> None:
        """Load the encoder and encode once.

        Raises:
            DataError: the encoder is not the one of the index.
        """
        super().__init__()
        self._server.run(self._load_encoder, settings)
        self._server.open({"encode": self._encode})

    def _load_encoder(self, settings: ActorSettings) -> None:
        from retrieval.encoders.encoder import set_encoder_threads
        from retrieval.indexes.vector_index import open_encoder

        set_encoder_threads(settings.num_threads)
        manifest = Manifest.read(settings.index_dir)
        self._encoder = open_encoder(Path(settings.index_dir), manifest, settings.device)
        self._encoder.encode_queries(["warm up"])

    def _encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the queries' vectors, float32 ``[len(queries), dimension]``."""
        started = time.monotonic()
        vectors = self._encoder.encode_queries(queries)
        self._count(len(queries), started)
        return vectors


def _open(settings: ActorSettings) -> LocalRetriever:
    from retrieval.local import LocalRetriever

    if settings.encodes:  # otherwise torch is not imported at all
        from retrieval.encoders.encoder import set_encoder_threads

        set_encoder_threads(settings.num_threads)
    return LocalRetriever(
        settings.index_dir,
        settings.num_threads,
        device=settings.device,
        reranker=settings.reranker,
        options=settings.options or {},
        shards=settings.shards,
        load_encoder=settings.encodes,
    )
