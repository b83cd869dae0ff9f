"""DenseRanker: queries to vectors, vectors to rows, over one or several shards of an index directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, RetrievalError
from retrieval.base import Passage
from retrieval.indexes.manifest import ENCODER_FOLDER, Manifest
from retrieval.indexes.ranking import ABSENT, Ranking, merge_rankings
from retrieval.indexes.vector_index import VectorIndex

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder


@dataclass(frozen=True)
class _OpenShard:
    start: int
    """Row of its first vector in the corpus."""
    index: VectorIndex


class DenseRanker:
    """Ranks rows by the inner product of their vectors with the query's. A ``Ranker``."""

    def __init__(
        self,
        directory: str | Path,
        manifest: Manifest,
        *,
        num_threads: int = 1,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        shards: Sequence[int] | None = None,
        load_encoder: bool = True,
    ) -> None:
        """Open shards, and the encoder the index was built with.

        Args:
            directory: made by ``build_index``.
            manifest: of the directory.
            num_threads: of the search. Torch's threads are set by the host process.
            device: ``cpu`` or ``cuda``, of encoder and index.
            options: of the index type; see ``INDEX_TYPES``.
            shards: numbers of the manifest's shards to open; by default all.
            load_encoder: without one, ``rank`` needs vectors.

        Raises:
            DataError: a shard or the encoder is missing, damaged or replaced.
            ConfigError: an unknown option.
        """
        directory = Path(directory)
        numbers = range(len(manifest.shards)) if shards is None else shards
        if not numbers or not all(0 <= number < len(manifest.shards) for number in numbers):
            raise DataError(
                f"{directory}: got shards {list(numbers)}, but the index has {len(manifest.shards)}, numbered from 0; "
                "build it with more shards or ask for fewer"
            )
        if sum(shard.count for shard in manifest.shards) != manifest.count:
            raise DataError(f"{directory}: its shards do not hold {manifest.count} vectors; build the index again")
        self._num_threads = num_threads
        self._dimension = manifest.dimension
        self._shards = [
            _OpenShard(
                shard.start,
                VectorIndex.load(
                    directory / shard.file.name, shard, manifest.dimension, device=device, options=options or {}
                ),
            )
            for shard in (manifest.shards[number] for number in numbers)
        ]
        self._encoder = open_encoder(directory, manifest, device) if load_encoder else None

    @property
    def count(self) -> int:
        """Rows that are ranked."""
        return sum(shard.index.count for shard in self._shards)

    def encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the vectors of queries, float32 ``[len(queries), dimension]``, zero where no word is known.

        Raises:
            ValueError: the ranker was opened without an encoder.
        """
        return self._open_encoder().encode_queries(queries)

    def encode_passages(self, passages: list[Passage]) -> NDArray[np.float32]:
        """Return the vectors of passages, as they were encoded for the index: float32 ``[len(passages), dimension]``.

        Raises:
            ValueError: the ranker was opened without an encoder.
        """
        return self._open_encoder().encode_passages(passages)

    @property
    def is_lossless(self) -> bool:
        """Whether the index keeps the vectors as they were given."""
        return all(shard.index.is_lossless for shard in self._shards)

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of a lossless index, float32 ``[n, dimension]`` each, in row order."""
        for shard in self._shards:
            yield from shard.index.blocks()

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return the best ``min(k, count)`` rows of each query, numbered as in the whole corpus; see ``Ranker.rank``.

        Raises:
            RetrievalError: vectors of another shape, or with NaN or infinity.
        """
        if not queries:
            return Ranking(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))
        vectors = self._check(self.encode(queries) if vectors is None else vectors, len(queries))
        found = [_search(shard, vectors, k, self._num_threads) for shard in self._shards]
        ranking = merge_rankings(found, k)
        # Of the zero vector every row is as near as any other: no evidence is better than the first k rows.
        unknown = ~np.any(vectors, axis=1)
        if unknown.any():
            ranking.rows[unknown] = ABSENT
            ranking.scores[unknown] = -np.inf
        return ranking

    def _open_encoder(self) -> Encoder:
        if self._encoder is None:
            raise ValueError("the ranker was opened without an encoder; hand it the vectors of the queries")
        return self._encoder

    def _check(self, vectors: NDArray[np.float32], num_queries: int) -> NDArray[np.float32]:
        expected = (num_queries, self._dimension)
        if vectors.shape != expected:
            raise RetrievalError(
                f"got query vectors of shape {vectors.shape}, expected {expected}; encode with the index's encoder"
            )
        if not np.isfinite(vectors).all():
            raise RetrievalError("a query's vector holds NaN or infinity; the encoder is broken, so check its files")
        return vectors


def _search(shard: _OpenShard, vectors: NDArray[np.float32], k: int, num_threads: int) -> Ranking:
    scores, rows = shard.index.search(vectors, k, num_threads)
    return Ranking(scores, np.where(rows == ABSENT, ABSENT, rows + shard.start))


def open_encoder(directory: Path, manifest: Manifest, device: str = "cpu") -> Encoder:
    """Load the encoder an index was built with: a folder inside the index directory, or one elsewhere.

    Raises:
        DataError: it is not there, or not the one of the manifest.
    """
    from retrieval.encoders.encoder import (
        Encoder,  # torch and sentence-transformers take seconds to import
    )

    inside = directory / manifest.encoder
    if manifest.encoder == ENCODER_FOLDER and not inside.is_dir():
        raise DataError(f"no {inside}; copy the index as a whole or build it again")
    encoder = Encoder.load(inside if inside.is_dir() else manifest.encoder, device=device)
    manifest.check_encoder(encoder.name, encoder.fingerprint, encoder.dimension)
    return encoder
