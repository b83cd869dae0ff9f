"""The actors of the retrieval fleet: a replica of the index, or a shard of one, and an encoder on its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.rpc import ChannelAddress, ChannelServer
from retrieval.fleet.wire import RowHits, WireHits, compress, pack
from retrieval.indexes.manifest import Manifest

if TYPE_CHECKING:
    from retrieval.local import LocalRetriever


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """What an actor of the fleet is made with."""

    index_dir: str
    num_threads: int
    device: str
    """``cpu`` or ``cuda``."""
    reranker: str = ""
    options: Mapping[str, Any] | None = None
    shards: tuple[int, ...] | None = None
    """Numbers of the index's shards that this actor holds; None is all."""
    encodes: bool = True
    """Whether it encodes queries itself."""


class _Meter:
    """How busy an actor is."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._num_queries = self._num_batches = 0
        self._busy_s = 0.0

    def add(self, num_queries: int, busy_s: float) -> None:
        self._num_queries += num_queries
        self._num_batches += 1
        self._busy_s += busy_s

    def read(self) -> dict[str, float]:
        return {
            "queries": float(self._num_queries),
            "batches": float(self._num_batches),
            "busy_s": self._busy_s,
            "up_s": time.monotonic() - self._started,
        }


class ChannelActor:
    """An actor that is called over a channel, or by Ray's calls where there is no way to it."""

    def __init__(self) -> None:
        """Start the thread that loads and answers; ``_server.open`` lets clients in."""
        self._server = ChannelServer()
        self._meter = _Meter()

    def ping(self) -> None:
        """Answer; that this call runs at all says that everything is loaded and no call before it hangs."""
        self._server.run(int)

    def channel(self) -> ChannelAddress | None:
        """Return where to connect, if anywhere."""
        return self._server.address

    def call(self, method: str, *arguments: Any) -> Any:
        """Answer a call that came by Ray as one that came over the channel."""
        return self._server.call(method, *arguments)

    def drain(self) -> None:
        """Return once what was asked is answered, and every connection closed."""
        self._server.drain()

    def load(self) -> dict[str, float]:
        """Return the queries and batches answered, and the seconds it took, of the seconds since the start."""
        return self._meter.read()


class RetrieverActor(ChannelActor):
    """What ``ray.remote`` makes an actor of. One call at a time: one search takes all of its threads."""

    def __init__(self, settings: ActorSettings) -> None:
        """Open the index and search once, so that the first caller finds everything loaded.

        Raises:
            DataError: no usable index on this node.
        """
        super().__init__()
        self._reranks = bool(settings.reranker)
        self._server.run(self._load_index, settings)
        self._server.open({"search_batch": self._search_batch, "rank_batch": self._rank_batch})

    def info(self) -> dict[str, Any]:
        """Return the index's manifest."""
        return self._retriever.info()

    def _load_index(self, settings: ActorSettings) -> None:
        self._retriever = _open(settings)
        manifest = Manifest.read(settings.index_dir)
        vectors = None
        if manifest.is_dense and not settings.encodes:
            vectors = np.eye(1, manifest.dimension, dtype=np.float32)
        self._retriever.search_rows(["warm up"], 1, vectors)

    def _search_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> WireHits:
        """Search; ``vectors`` are the queries, float32 ``[len(queries), dimension]``, where they are encoded."""
        started = time.monotonic()
        if self._reranks:
            found = self._retriever.search_batch(queries, k, vectors)
            rows = np.zeros((len(queries), max(map(len, found), default=0)), np.int64)
        else:
            ranking, found = self._retriever.search_rows(queries, k, vectors)
            rows = ranking.rows
        hits = compress(pack(found, rows, self._retriever.version))
        self._meter.add(len(queries), time.monotonic() - started)
        return hits

    def _rank_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> RowHits:
        """Return where ``_search_batch`` finds its passages, before any reranking."""
        started = time.monotonic()
        ranking = self._retriever.rank(queries, k, vectors)
        self._meter.add(len(queries), time.monotonic() - started)
        return RowHits(self._retriever.version, ranking.scores, ranking.rows)


class EncoderActor(ChannelActor):
    """An index's encoder without the index."""

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
        from retrieval.indexes.dense import open_encoder

        set_encoder_threads(settings.num_threads)
        manifest = Manifest.read(settings.index_dir)
        self._encoder = open_encoder(Path(settings.index_dir), manifest, settings.device)
        self._encoder.encode_queries(["warm up"])

    def _encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the queries' vectors, float32 ``[len(queries), dimension]``."""
        started = time.monotonic()
        vectors = self._encoder.encode_queries(queries)
        self._meter.add(len(queries), time.monotonic() - started)
        return vectors


def _open(settings: ActorSettings) -> LocalRetriever:
    from retrieval.local import LocalRetriever

    if settings.encodes:  # else torch is not even imported
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
