"""Rankings: scores and corpus rows that rankers found, functions that merge and fuse them, and their passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.base import Hits, Passage

ABSENT = -1
"""Row number that fills a ranking if fewer passages were found than it is deep; its score is ``-inf``."""
SPARE = 8
"""Number of candidates beyond ``k`` that are scored again, so that rounding cannot push one of the best ``k`` out."""
RRF_CONSTANT = 60
"""Constant of reciprocal rank fusion, from Cormack et al. (2009)."""


class Ranking(NamedTuple):
    """Best rows for each query, best first, equal scores by row."""

    scores: NDArray[np.float32]
    """Scores, ``[num_queries, depth]``; ``-inf`` if fewer were found."""
    rows: NDArray[np.int64]
    """Corpus rows, ``[num_queries, depth]``; ``ABSENT``, always at the end, if fewer were found."""


Rank = Callable[[list[str], int, NDArray[np.float32] | None], Ranking]
"""Function that returns the best ``min(k, count)`` rows of each query, which may be empty; ``k`` is at least 1.

The vectors, float32 ``[len(queries), dimension]``, are the queries encoded elsewhere; without them a ranker that needs
vectors encodes. A zero vector is a query without a known word and finds nothing."""


def best_of(scores: NDArray[np.float32], rows: NDArray[np.int64], k: int) -> Ranking:
    """Order candidates, best first and equal scores by row, and keep ``k``.

    Both arrays are ``[num_queries, num_candidates]``; no row occurs twice for a query, and ``ABSENT`` may be anywhere.
    The ranking is ``min(k, num_candidates)`` deep.
    """
    scores = np.where(rows == ABSENT, np.float32(-np.inf), scores)
    # Absent rows come last, even after other rows with -inf; np.lexsort sorts by its last key first.
    order = np.lexsort((rows, -scores, rows == ABSENT), axis=-1)[:, :k]
    return Ranking(np.take_along_axis(scores, order, axis=-1), np.take_along_axis(rows, order, axis=-1))


def merge_rankings(rankings: Sequence[Ranking], k: int) -> Ranking:
    """Merge the rankings of disjoint shards into the ranking that one index over all rows would give.

    There is at least one ranking; all have the same queries and kind of scores, and are ``k`` deep or as deep as their
    shard. The result is as deep as ``k`` and the candidates allow.
    """
    if len(rankings) == 1:
        return Ranking(rankings[0].scores[:, :k], rankings[0].rows[:, :k])
    scores = np.concatenate([ranking.scores for ranking in rankings], axis=1)
    return best_of(scores, np.concatenate([ranking.rows for ranking in rankings], axis=1), k)


def without_rows(ranking: Ranking, rows: NDArray[np.int64], k: int) -> Ranking:
    """Remove some rows, given ascending, from a ranking; its depth is at most ``k`` and at most the ranking's."""
    if not rows.size:
        return Ranking(ranking.scores[:, :k], ranking.rows[:, :k])
    return best_of(ranking.scores, np.where(np.isin(ranking.rows, rows), ABSENT, ranking.rows), k)


def fused(
    ranks: Sequence[Rank], depth: int, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None
) -> Ranking:
    """Return up to ``k`` rows of each query, fused from the best ``depth``, or ``k`` if that is more, of each rank.

    If a rank finds nothing for a query, the others decide.
    """
    depth = max(k, depth)
    return fuse_rankings([rank(queries, depth, vectors) for rank in ranks], k)


def fuse_rankings(rankings: Sequence[Ranking], k: int) -> Ranking:
    """Fuse rankings over the same rows into one by reciprocal rank fusion, which does not use their scores.

    A row scores the sum of ``1 / (RRF_CONSTANT + rank)`` over the rankings that hold it, ranks from 1. A ranking that
    found nothing for a query adds nothing. The result is as deep as ``k`` and the longest union of rows allow.
    """
    rows = np.concatenate([ranking.rows for ranking in rankings], axis=1)
    ranks = np.concatenate([np.arange(1, ranking.rows.shape[1] + 1) for ranking in rankings])
    order = np.argsort(rows, axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    parts = np.where(rows == ABSENT, 0.0, 1.0 / (RRF_CONSTANT + ranks[order]))
    is_first = np.ones(rows.shape, bool)
    is_first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    # The sums are over runs of equal rows: a ranking has a row once, so a run has at most len(rankings). Stable
    # sorting keeps the order of the rankings, hence the order of the additions and the last bit of the sum.
    totals = parts.copy()
    for distance in range(1, len(rankings)):
        same = rows[:, distance:] == rows[:, :-distance]
        totals[:, :-distance] += np.where(same, parts[:, distance:], 0.0)
    fused = best_of(totals.astype(np.float32), np.where(is_first, rows, ABSENT), k)
    depth = int((fused.rows != ABSENT).sum(axis=1).max(initial=0))
    return Ranking(fused.scores[:, :depth], fused.rows[:, :depth])


def to_hits(ranking: Ranking, fields: Callable[[list[int]], Sequence[list[str]]], index_version: str) -> list[Hits]:
    """Return the passages of the rows that are not absent, scored as in the ranking: ``[num_queries][<= depth]``.

    ``fields`` returns ids, titles and texts of rows, as ``Corpus.fields`` does.
    """
    if not ranking.rows.size:
        return [Hits(index_version=index_version) for _ in ranking.rows]
    unique, inverse = np.unique(ranking.rows, return_inverse=True)
    num_absent = int(unique[0] == ABSENT)
    ids, titles, texts = fields(unique[num_absent:].tolist())
    places: Any = (inverse.reshape(ranking.rows.shape) - num_absent).tolist()
    scores: list[list[float]] = ranking.scores.tolist()
    return [
        Hits(
            [
                Passage(ids[place], titles[place], texts[place], score)
                for place, score in zip(row_places, row_scores, strict=True)
                if place >= 0
            ],
            index_version=index_version,
        )
        for row_places, row_scores in zip(places, scores, strict=True)
    ]
