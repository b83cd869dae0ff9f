"""The actors of the retrieval fleet: a replica of the index or a shard of it, and an encoder without an index."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.metrics import observe
from cluster.rpc import RpcAddress, RpcServer, encode
from cluster.supervision.fleet import Process, Pulse
from cluster.supervision.watchdog import beating
from ragr1_actors.core.disk.folders import AnyFolder, on_this_node
from retrieval.base import Passage
from retrieval.indexes.manifest import FLAT, Manifest
from retrieval.replicas.batching import ClientLoad

CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True, slots=True)
class ActorArguments:
    """Arguments of an actor of the fleet."""

    index: AnyFolder
    num_threads: int
    device: str
    """Device of encoder, vectors and reranker: ``cpu`` or ``cuda``."""
    encoder: AnyFolder = ""
    """Folder of the index's encoder, if it is not in the index."""
    reranker: AnyFolder = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] | None = None
    """Numbers of the index's shards that this actor holds; None means all."""
    encodes: bool = True
    """Whether the actor encodes queries itself."""
    shard_files: AnyFolder = ""
    """Folder with the files of these shards, apart from the rest of the index, which the actors of a node share."""


class RowHits(NamedTuple):
    """Rows that a batch of queries found, for a client whose node also has the corpus."""

    index_version: str
    scores: NDArray[np.float32]
    """Scores, ``[num_queries, depth]``."""
    rows: NDArray[np.int64]
    """Corpus rows, ``[num_queries, depth]``; ``ABSENT`` if fewer were found."""


class PackedHits(NamedTuple):
    """Passages that a batch of queries found, for a client without the corpus."""

    index_version: str
    num_bytes: int
    """Number of bytes before compression."""
    data: bytes
    """Rows, ids, titles, texts and scores, ``[num_queries][<= depth]``: an ``rpc`` message, compressed by ``CODEC``."""


def pack(found: Sequence[Sequence[Passage]], rows: NDArray[np.int64], index_version: str) -> PackedHits:
    """Pack the passages found for each query.

    Args:
        found: ``[num_queries][<= depth]``
        rows: ``[num_queries, depth]``, the passages' corpus rows, or any numbers that order equal scores.
        index_version: version of the searched index.
    """
    message = encode(
        [
            [(row, p.id, p.title, p.text, p.score) for row, p in zip(query_rows, passages, strict=False)]
            for query_rows, passages in zip(rows.tolist(), found, strict=True)
        ]
    )
    return PackedHits(index_version, len(message), CODEC.compress(message, asbytes=True))


@dataclass(frozen=True, slots=True)
class ActorLoad(Pulse):
    """Load of an actor since its process started."""

    up_s: float
    busy_s: float
    queries: int
    batches: int
    clients: Mapping[str, tuple[float, ClientLoad]]
    """Last report of each client that reports to this actor, with its age in seconds."""


class RpcActor(RpcServer):
    """Actor whose methods clients call over ZeroMQ, or by Ray if they cannot connect."""

    fleet = "retriever"
    """Name of its fleet in Prometheus: the label of ``batch_seconds`` and ``batch_queries``."""

    def __init__(self) -> None:
        """Start the thread that loads and answers; clients can connect after ``open``."""
        super().__init__()
        self._started = time.monotonic()
        self._num_queries = self._num_batches = 0
        self._busy_s = 0.0
        self._reports: dict[str, tuple[float, ClientLoad]] = {}

    def ping(self) -> None:
        """Return once everything is loaded and the calls before this one are answered."""
        self.run(int)

    def rpc_address(self) -> RpcAddress | None:
        """Return the address at which clients connect, or None if the actor cannot listen at this node's address."""
        return self.address

    def report(self, client: str, load: ClientLoad) -> None:
        """Keep a client's report; ``load`` returns it."""
        self._reports[client] = (time.monotonic(), load)

    def load(self) -> ActorLoad:
        """Return the load of this actor, and the reports of its clients."""
        now = time.monotonic()
        return ActorLoad(
            Process.current(),
            time.monotonic() - self._started,
            self._busy_s,
            self._num_queries,
            self._num_batches,
            {client: (now - at, report) for client, (at, report) in self._reports.copy().items()},
        )

    def serve(self, *methods: Callable[..., Any]) -> None:
        """Let clients connect and call ``methods``, whose first argument is a batch of queries; count their load."""
        self.open({method.__name__: partial(self._run_batch, method) for method in methods})

    def _run_batch(self, method: Callable[..., Any], queries: list[str], *arguments: Any) -> Any:
        started = time.monotonic()
        found = method(queries, *arguments)
        took_s = time.monotonic() - started
        self._num_queries += len(queries)
        self._num_batches += 1
        self._busy_s += took_s
        observe("batch_seconds", took_s, fleet=self.fleet)
        observe("batch_queries", len(queries), fleet=self.fleet)
        return found


class RetrieverActor(RpcActor):
    """Holds the index or some of its shards. One search at a time, on all of the actor's threads."""

    def __init__(self, settings: ActorArguments) -> None:
        """Open the index and search once, so that the first caller finds everything loaded.

        Raises:
            DataError: this node has no usable index.
        """
        super().__init__()
        self._reranks = bool(settings.reranker)
        with beating():
            self.run(self._load_index, settings)
        self.serve(self.search_batch, self.rank_batch, self.open_batch)

    def _load_index(self, settings: ActorArguments) -> None:
        from retrieval.local import LocalRetriever

        index_dir = on_this_node(settings.index)
        if settings.encodes or Manifest.read(Path(index_dir)).vector_type == FLAT:  # else torch is not imported
            import torch

            torch.set_num_threads(settings.num_threads)
        self._retriever = LocalRetriever(
            index_dir,
            settings.num_threads,
            device=settings.device,
            encoder_dir=_path_or_name(settings.encoder) if settings.encodes else "",
            reranker=_path_or_name(settings.reranker),
            options=settings.options,
            shards=settings.shards,
            load_encoder=settings.encodes,
            shards_dir=_path_or_name(settings.shard_files),
        )
        manifest = self._retriever.manifest
        vectors = None
        if manifest.is_dense and not settings.encodes:
            vectors = np.eye(1, manifest.dimension, dtype=np.float32)
        self._retriever.search_rows(["warm up"], 1, vectors)

    def search_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> PackedHits:
        """Return the passages; ``vectors`` are the encoded queries, float32 ``[len(queries), dimension]``, or None."""
        if self._reranks:
            found = self._retriever.search_batch(queries, k, vectors)
            rows = np.zeros((len(queries), max(map(len, found), default=0)), np.int64)
        else:
            ranking, found = self._retriever.search_rows(queries, k, vectors)
            rows = ranking.rows
        return pack(found, rows, self._retriever.version)

    def rank_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> RowHits:
        """Return the rows of the passages that ``search_batch`` finds, before reranking."""
        return RowHits(self._retriever.version, *self._retriever.rank(queries, k, vectors))

    def open_batch(self, titles: list[str]) -> tuple[PackedHits, list[tuple[str, ...]]]:
        """Return the passages of the page of each title, and the ``Page.near`` of each."""
        pages = self._retriever.open_batch(titles)
        rows = np.zeros((len(pages), max(map(len, pages), default=0)), np.int64)
        return pack(pages, rows, self._retriever.version), [page.near for page in pages]


class EncoderActor(RpcActor):
    """Holds the encoder of an index, without the index."""

    fleet = "encoder"

    def __init__(self, settings: ActorArguments) -> None:
        """Load the encoder and encode once.

        Raises:
            DataError: the encoder is not the one of the index.
        """
        super().__init__()
        with beating():
            self.run(self._load_encoder, settings)
        self.serve(self.encode)

    def _load_encoder(self, settings: ActorArguments) -> None:
        import torch

        from retrieval.indexes.vector_index import open_encoder

        index_dir = Path(on_this_node(settings.index))
        torch.set_num_threads(settings.num_threads)
        manifest = Manifest.read(index_dir)
        self._encoder = open_encoder(index_dir, manifest, settings.device, _path_or_name(settings.encoder))
        self._encoder.encode_queries(["warm up"])

    def encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the vectors of the queries, float32 ``[len(queries), dimension]``."""
        return self._encoder.encode_queries(queries)


def _path_or_name(folder: AnyFolder) -> str:
    return str(on_this_node(folder))
