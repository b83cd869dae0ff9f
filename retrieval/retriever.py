"""LocalRetriever: encoder, index and corpus in this process. Knows nothing of Ray."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base import Passage
from retrieval.corpus import CORPUS_FILE, Corpus
from retrieval.encoder import Encoder
from retrieval.index import Manifest, VectorIndex


class LocalRetriever:
    """Searches one index directory in the process that asks.

    The memory maps are shared by all processes of a node, so a second retriever takes little more than its encoder.
    Pickles as its directory: the receiving process opens the index itself.
    """

    def __init__(self, index_dir: str | Path, num_threads: int = 1) -> None:
        """Open an index.

        Args:
            index_dir: made by ``build_index``.
            num_threads: of faiss. Torch's threads are the host process's own affair.

        Raises:
            DataError: the directory holds no index, or parts that do not belong together.
        """
        self._directory = Path(index_dir)
        self._num_threads = num_threads
        self._manifest = Manifest.read(self._directory)
        self._corpus = Corpus.open(self._directory)
        self._manifest.check_corpus(self._directory / CORPUS_FILE, len(self._corpus))
        self._encoder = load_encoder(self._directory, self._manifest)
        self._index = VectorIndex.load(self._directory, self._manifest)

    def __reduce__(self) -> tuple[type[LocalRetriever], tuple[Path, int]]:
        """Pickle as the arguments of the constructor."""
        return LocalRetriever, (self._directory, self._num_threads)

    def info(self) -> dict[str, Any]:
        """Return the manifest."""
        return asdict(self._manifest)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Search, here and now; see ``search_batch``.

        The event loop waits: with nothing running beside it, the order of a run in one process is always the same.
        """
        return self.search_batch(queries, k)

    def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first: ``[len(queries)][min(k, corpus)]``.

        A query of which the encoder knows no word finds nothing: no evidence is better than the first ``k`` rows.

        Raises:
            ValueError: ``k`` is less than 1.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        if not queries:
            return []
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self._index.search(vectors, k, self._num_threads)
        unique, positions = np.unique(rows, return_inverse=True)
        passages = self._corpus.take(unique.tolist())
        is_known = np.any(vectors != 0, axis=1).tolist()
        found: list[list[Passage]] = []
        for known, query_positions, query_scores in zip(is_known, positions.tolist(), scores.tolist(), strict=True):
            best = zip(query_positions, query_scores, strict=True) if known else ()
            found.append([replace(passages[position], score=score) for position, score in best])
        return found


def load_encoder(directory: Path, manifest: Manifest) -> Encoder:
    """Load the encoder an index was built with: a folder inside the index directory, or one elsewhere.

    Raises:
        DataError: it is not there, or not the one of the manifest.
    """
    inside = directory / manifest.encoder
    encoder = Encoder.load(inside if inside.is_dir() else manifest.encoder)
    manifest.check_encoder(encoder.name, encoder.fingerprint, encoder.dimension)
    return encoder
