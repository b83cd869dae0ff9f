"""Messages between a retrieval actor and its clients: rows of the corpus, or the passages themselves, compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.rpc import decode, encode
from retrieval.base import Hits, Passage

_CODEC = pa.Codec("zstd", compression_level=1)


class RowHits(NamedTuple):
    """The rows that a batch of queries found, for a client whose node has the corpus too."""

    index_version: str
    scores: NDArray[np.float32]
    """``[num_queries, depth]``"""
    rows: NDArray[np.int64]
    """``[num_queries, depth]``, of the corpus; ``ABSENT`` where fewer were found."""


class PackedHits(NamedTuple):
    """The passages that a batch of queries found: ``_Columns`` as a compressed message."""

    num_bytes: int
    """Before compression."""
    data: bytes


class _Columns(NamedTuple):
    """Passages as columns. A passage that several queries found is sent once."""

    index_version: str
    passages: tuple[list[str], list[str], list[str]]
    """Ids, titles and texts, each ``[num_passages]``."""
    positions: NDArray[np.int32]
    """``[num_queries, depth]`` into ``passages``; -1 where fewer were found, always a suffix."""
    scores: NDArray[np.float32]
    """``[num_queries, depth]``"""
    rows: NDArray[np.int64]
    """``[num_queries, depth]``, of the corpus: the order of equal scores when shards are merged."""


def pack(found: Sequence[Sequence[Passage]], rows: NDArray[np.int64], index_version: str) -> PackedHits:
    """Pack the passages found for each query.

    Args:
        found: ``[num_queries][<= depth]``
        rows: ``[num_queries, depth]``, the passages' corpus rows, or any numbers that order equal scores.
        index_version: of the index that was searched.
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
    message = encode(_Columns(index_version, columns, positions, scores, rows))
    return PackedHits(len(message), _CODEC.compress(message, asbytes=True))


def merge(shards: Sequence[PackedHits], k: int) -> list[Hits]:
    """Return the ``k`` best hits per query of disjoint shards, equal scores by row: what one index would answer."""
    parts = [_Columns(*decode(_CODEC.decompress(shard.data, shard.num_bytes, asbytes=True))) for shard in shards]
    if len(parts) == 1:
        return _unpack(parts[0])
    answers: list[Hits] = []
    for query, lists in enumerate(zip(*map(_unpack, parts), strict=True)):
        candidates = [
            (-passage.score, row, passage)
            for part, passages in zip(parts, lists, strict=True)
            # the last rows may be absent
            for row, passage in zip(part.rows[query].tolist(), passages, strict=False)
        ]
        ranked = sorted(candidates, key=lambda candidate: candidate[:2])
        answers.append(Hits((passage for _, _, passage in ranked[:k]), index_version=parts[0].index_version))
    return answers


def _unpack(columns: _Columns) -> list[Hits]:
    ids, titles, texts = columns.passages
    answers = []
    for positions, scores in zip(columns.positions.tolist(), columns.scores.tolist(), strict=True):
        passages = [
            Passage(ids[position], titles[position], texts[position], score)
            for position, score in zip(positions, scores, strict=True)
            if position >= 0
        ]
        answers.append(Hits(passages, index_version=columns.index_version))
    return answers
