"""What travels between a retrieval actor and its clients: each passage once, and columns instead of objects."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from retrieval.base import Hits, Passage

COMPRESS_FROM_BYTES = 2**16
_CODEC = pa.Codec("zstd", compression_level=1)


class PackedHits(NamedTuple):
    """The hits of a batch. A passage that several queries found travels once."""

    index_version: str
    passages: tuple[list[str], list[str], list[str]]
    """Ids, titles and texts, each ``[num_passages]``."""
    positions: NDArray[np.int32]
    """``[num_queries, depth]`` into ``passages``; -1 where fewer were found, always a suffix."""
    scores: NDArray[np.float32]
    """``[num_queries, depth]``"""
    rows: NDArray[np.int64]
    """``[num_queries, depth]``, of the corpus: what orders equal scores when shards are merged."""


class CompressedHits(NamedTuple):
    """A pickled ``PackedHits``, compressed. Only actors of one job exchange it."""

    num_bytes: int
    """Before compression."""
    data: bytes


class RowHits(NamedTuple):
    """Where the hits of a batch stand, for a client whose node has the corpus too: nothing else has to travel."""

    index_version: str
    scores: NDArray[np.float32]
    """``[num_queries, depth]``"""
    rows: NDArray[np.int64]
    """``[num_queries, depth]``, of the corpus; ``ABSENT`` where fewer were found."""


WireHits = PackedHits | CompressedHits


def pack(found: Sequence[Sequence[Passage]], rows: NDArray[np.int64], index_version: str) -> PackedHits:
    """Pack the passages found for each query.

    Args:
        found: ``[num_queries][<= depth]``
        rows: ``[num_queries, depth]``, the passages' corpus rows, or any numbers that order equal scores.
        index_version: of the index they were found in.
    """
    positions = np.full(rows.shape, -1, np.int32)
    scores = np.zeros(rows.shape, np.float32)
    position_of: dict[str, int] = {}
    unique: list[Passage] = []
    for query, passages in enumerate(found):
        for rank, passage in enumerate(passages):
            position = position_of.setdefault(passage.id, len(unique))
            if position == len(unique):
                unique.append(passage)
            positions[query, rank] = position
            scores[query, rank] = passage.score
    columns = [p.id for p in unique], [p.title for p in unique], [p.text for p in unique]
    return PackedHits(index_version, columns, positions, scores, rows)


def compress(packed: PackedHits) -> WireHits:
    """Return a large batch compressed.

    Ray carries up to 100 KB with the answer itself; more goes by way of the object store, which takes longer than
    compressing 64 queries' passages does.
    """
    data = pickle.dumps(packed, protocol=5)
    if len(data) < COMPRESS_FROM_BYTES:
        return packed
    return CompressedHits(len(data), _CODEC.compress(data, asbytes=True))


def expand(hits: WireHits) -> PackedHits:
    """Undo ``compress``."""
    if isinstance(hits, PackedHits):
        return hits
    packed: PackedHits = pickle.loads(_CODEC.decompress(hits.data, hits.num_bytes, asbytes=True))
    return packed


def unpack(packed: PackedHits) -> list[Hits]:
    """Undo ``pack``."""
    ids, titles, texts = packed.passages
    answers = []
    for positions, scores in zip(packed.positions.tolist(), packed.scores.tolist(), strict=True):
        passages = [
            Passage(ids[position], titles[position], texts[position], score)
            for position, score in zip(positions, scores, strict=True)
            if position >= 0
        ]
        answers.append(Hits(passages, index_version=packed.index_version))
    return answers


def merge(shards: Sequence[PackedHits], k: int) -> list[Hits]:
    """Make one answer of those of disjoint shards: the ``k`` best, equal scores by row, as one index would give."""
    if len(shards) == 1:
        return unpack(shards[0])
    version = shards[0].index_version
    answers: list[Hits] = []
    for query, parts in enumerate(zip(*(unpack(shard) for shard in shards), strict=True)):
        candidates = [
            (-passage.score, row, passage)
            for shard, passages in zip(shards, parts, strict=True)
            # as many rows as the ranking is deep, of which the last may be absent
            for row, passage in zip(shard.rows[query].tolist(), passages, strict=False)
        ]
        ranked = sorted(candidates, key=lambda candidate: candidate[:2])
        answers.append(Hits((passage for _, _, passage in ranked[:k]), index_version=version))
    return answers
