"""What a VectorIndex searches with: candidates from one place, and vectors that score them again. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.indexes.ranking import Ranking

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

BLOCK_ROWS = 8192
"""Vectors decoded at once; in float32 they stay in the processor's cache."""
_RESCORED_NUMBERS = 2**20
"""Decoded at once when candidates are scored again: 12 MB, whatever batch and ``k`` are."""


class Scanner(Protocol):
    """What finds candidates, and keeps vectors that score them."""

    is_lossless: bool
    """Whether ``vectors`` are those that were given."""
    rescores: bool
    """Whether ``find``'s scores are only good enough to choose candidates."""

    def turn(self, queries: Floats) -> Floats:
        """Return queries as ``find`` and ``vectors`` have them: some types turn the space first."""
        ...

    def find(self, queries: Floats, k: int) -> Ranking:
        """Return at least ``k`` candidates of each query where there are so many, absent ones anywhere."""
        ...

    def vectors(self, rows: Rows) -> Floats:
        """Return the vectors of rows, float32 ``[len(rows), dimension]``."""
        ...


class Unturned:
    """A scanner in the space that the vectors were given in."""

    def turn(self, queries: Floats) -> Floats:
        """Return them as they are."""
        return queries


def scan_blocks(scanner: Scanner, count: int, num_rows: int) -> Iterator[Floats]:
    """Yield the vectors of rows 0 to ``count - 1`` as a scanner keeps them."""
    for start in range(0, count, num_rows):
        yield scanner.vectors(np.arange(start, min(start + num_rows, count)))


def rescore(scanner: Scanner, queries: Floats, rows: Rows) -> Floats:
    """Score candidates again: float32 ``[num_queries, num_candidates]``, as ``rows``.

    Scans and matrix products of different sizes round differently; one more sum in double precision does not.
    """
    scores = np.empty(rows.shape, np.float32)
    dimension = queries.shape[1]
    step = max(1, _RESCORED_NUMBERS // (rows.shape[1] * dimension))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        # Row 0 in place of absent ones, which lose whatever their score is.
        vectors = scanner.vectors(np.maximum(some, 0).ravel()).reshape(*some.shape, dimension)
        wide = queries[start : start + step].astype(np.float64)
        scores[start : start + step] = np.einsum("qcd,qd->qc", vectors.astype(np.float64), wide)
    return scores
