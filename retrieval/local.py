"""LocalRetriever: an index directory, searched in this process, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.base import Hits, Passage
from retrieval.corpora.corpus import Corpus
from retrieval.indexes.manifest import Manifest, parse_options
from retrieval.indexes.ranking import Ranker, Ranking, to_hits

if TYPE_CHECKING:
    from retrieval.encoders.reranker import Reranker
    from retrieval.indexes.vector_index import DenseRanker


class LocalRetriever:
    """Searches one index directory in the process that asks.

    The memory maps are shared by all processes of a node, so a second retriever takes little more than its encoder.
    Pickles as its arguments: the receiving process opens the index itself.
    """

    def __init__(
        self,
        index_dir: str | Path,
        num_threads: int = 1,
        *,
        device: str = "cpu",
        reranker: str = "",
        options: Mapping[str, Any] | None = None,
        shards: Sequence[int] | None = None,
        load_encoder: bool = True,
    ) -> None:
        """Open an index: vectors, inverted index or both, as its manifest says.

        Args:
            index_dir: made by ``build_index``.
            num_threads: of the search among vectors; words are scored by one thread, so there more replicas use more
                cores. Torch's threads are set by the host process.
            device: ``cpu`` or ``cuda``, of encoder, vectors and reranker.
            reranker: a cross-encoder, folder or hub name, that sorts the passages again; empty: none.
            options: of the index type, and ``rerank_candidates`` and ``fusion_depth``; see ``INDEX_TYPES``.
            shards: numbers of the shards to search, by default all.
            load_encoder: without one, ``search_rows`` needs vectors.

        Raises:
            DataError: the directory holds no index, or parts that do not belong together.
            ConfigError: an unknown option, or shards given for an index that is not dense.
        """
        self._directory = Path(index_dir)
        self._num_threads = num_threads
        self._reranker_name = reranker
        self._dense_arguments: dict[str, Any] = {
            "device": device,
            "options": dict(options or {}),
            "shards": None if shards is None else tuple(shards),
            "load_encoder": load_encoder,
        }
        self._manifest = manifest = Manifest.read(self._directory)
        self._options = parse_options(manifest.vector_type or manifest.index_type, options or {})
        if shards is not None and manifest.has_bm25:
            raise ConfigError(
                f"{index_dir}: an index of type {manifest.index_type!r} cannot be searched by shards; search it whole"
            )
        manifest.check_files(self._directory)
        self._corpus = Corpus.open(self._directory)
        if len(self._corpus) != manifest.count:
            raise DataError(
                f"{index_dir}: got {len(self._corpus)} passages, but the index was built over {manifest.count}; build "
                "the index again"
            )
        self.dense = self._open_dense()
        """The ranker of the vectors; None for an index without vectors."""
        self._ranker = self._open_ranker()
        self._reranker = _open_reranker(reranker, device) if reranker else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the constructor."""
        make = partial(LocalRetriever, reranker=self._reranker_name, **self._dense_arguments)
        return make, (self._directory, self._num_threads)

    @property
    def version(self) -> str:
        """Name of the evidence: ``Manifest.version``, and the reranker's name behind it."""
        version = self._manifest.version
        return f"{version}+{Path(self._reranker_name).name}" if self._reranker_name else version

    def info(self) -> dict[str, Any]:
        """Return the manifest, and its ``version``."""
        return {**asdict(self._manifest), "version": self.version}

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Call ``search_batch``. The event loop waits meanwhile, so that a run in one process has one order."""
        return self.search_batch(queries, k)

    def search_batch(
        self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None
    ) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first, as ``Hits``: ``[len(queries)][<= min(k, corpus)]``.

        A query without one word that encoder or inverted index know finds nothing. ``vectors`` are the queries,
        float32 ``[len(queries), dimension]``, where something else has encoded them.

        Raises:
            ValueError: ``k`` is less than 1, or there is neither a vector nor an encoder.
            RetrievalError: encoder or reranker returned NaN or infinity.
        """
        if self._reranker is None:
            return self.search_rows(queries, k, vectors)[1]
        _, found = self.search_rows(queries, max(_check_depth(k), self._options["rerank_candidates"]), vectors)
        return [Hits(passages, index_version=self.version) for passages in self._reranker.rerank(queries, found, k)]

    def search_rows(
        self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None
    ) -> tuple[Ranking, list[list[Passage]]]:
        """Return the best ``k`` rows of each query, before any reranking, and their passages.

        Rows are numbered as in the whole corpus. The passages, as ``Hits``, are those of the rows that are not absent,
        scored as in the ranking. ``vectors``: float32 ``[len(queries), dimension]``, the queries encoded elsewhere.

        Raises:
            ValueError: ``k`` is less than 1, or there is neither a vector nor an encoder.
            RetrievalError: vectors with NaN or infinity.
        """
        ranking = self.rank(queries, k, vectors)
        return ranking, list(to_hits(ranking, self._corpus.fields, self.version))

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return what ``search_rows`` does, without the passages."""
        return self._ranker.rank(queries, _check_depth(k), vectors)

    def encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the vectors of queries: float32 ``[len(queries), dimension]``; ``ValueError`` without an encoder."""
        if self.dense is None:
            raise ValueError(f"an index of type {self._manifest.index_type!r} has no encoder")
        return self.dense.encoder.encode_queries(queries)

    def _open_dense(self) -> DenseRanker | None:
        if not self._manifest.is_dense:
            return None
        from retrieval.indexes.vector_index import DenseRanker  # with faiss; a client of a fleet needs neither

        return DenseRanker(self._directory, self._manifest, num_threads=self._num_threads, **self._dense_arguments)

    def _open_ranker(self) -> Ranker:
        if not self._manifest.has_bm25:
            if self.dense is None:
                raise DataError(f"{self._directory}: its manifest names no vectors and no words; build the index again")
            return self.dense
        from retrieval.indexes.bm25 import BM25Ranker, HybridRanker

        words = BM25Ranker(self._directory, self._manifest)
        if self.dense is None:
            return words
        return HybridRanker([self.dense, words], depth=self._options["fusion_depth"])


def _open_reranker(name: str, device: str) -> Reranker:
    from retrieval.encoders.reranker import Reranker  # with torch

    return Reranker.load(name, device=device)


def _check_depth(k: int) -> int:
    if k < 1:
        raise ValueError(f"got k={k}, expected at least 1")
    return k
