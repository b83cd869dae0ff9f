"""Merging and fusing rankings, against the plain definitions of both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.indexes.ranking import ABSENT, Ranking, best_of, fuse_rankings, merge_rankings


def ranking(*queries: list[tuple[int, float]]) -> Ranking:
    """One list of (row, score) a query, padded as a ranking is."""
    depth = max(map(len, queries))
    padded = [found + [(ABSENT, -np.inf)] * (depth - len(found)) for found in queries]
    return Ranking(
        np.array([[score for _, score in found] for found in padded], np.float32).reshape(len(queries), depth),
        np.array([[row for row, _ in found] for found in padded], np.int64).reshape(len(queries), depth),
    )


def content(found: Ranking) -> list[list[tuple[int, float]]]:
    return [
        list(zip(rows, scores, strict=True))
        for rows, scores in zip(found.rows.tolist(), found.scores.tolist(), strict=True)
    ]


def test_best_of_orders_by_score_then_row_and_puts_absent_rows_last() -> None:
    scores = np.array([[0.5, 9.0, 0.5, 1.0, -np.inf]], np.float32)
    rows = np.array([[7, ABSENT, 3, 4, 5]])
    found = best_of(scores, rows, 9)
    assert found.rows.tolist() == [[4, 3, 7, 5, ABSENT]]
    assert found.scores.tolist() == [[1.0, 0.5, 0.5, -np.inf, -np.inf]]
    assert best_of(scores, rows, 2).rows.tolist() == [[4, 3]]


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30),
    st.integers(1, 4), st.integers(1, 40), st.randoms(),
)  # fmt: skip
def test_merged_shards_answer_as_one_index(scores: list[float], num_shards: int, k: int, random: object) -> None:
    def search(rows: range | list[int]) -> Ranking:
        return ranking(sorted(((row, scores[row]) for row in rows), key=lambda found: (-found[1], found[0]))[:k])

    bounds = np.linspace(0, len(scores), num_shards + 1).astype(int)
    shards = [search(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
    shards = [shard for shard in shards if shard.rows.size] or shards[:1]
    random.shuffle(shards)  # type: ignore[attr-defined]
    assert content(merge_rankings(shards, k)) == content(search(range(len(scores))))


def test_shards_that_found_less_are_merged_too() -> None:
    merged = merge_rankings([ranking([(3, 0.5)], [], [(0, 0.25), (2, 0.25)]), ranking([(9, 0.5)], [], [(8, 0.5)])], 2)
    assert content(merged) == [
        [(3, 0.5), (9, 0.5)],
        [(ABSENT, -np.inf)] * 2,
        [(8, 0.5), (0, 0.25)],
    ]


@given(st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8), min_size=1, max_size=4), st.integers(1, 20))
def test_fusion_is_the_sum_of_reciprocal_ranks(lists: list[list[int]], k: int) -> None:
    other = [(20, 3.0), (21, 2.0)]  # a second query, so that depths differ
    rankings = [ranking([(row, 0.0) for row in rows], other) for rows in lists]
    totals: dict[int, float] = {}
    for rows in lists:
        for rank, row in enumerate(rows, 1):
            totals[row] = totals.get(row, 0.0) + 1 / (60 + rank)
    expected = sorted(totals, key=lambda row: (-np.float32(totals[row]), row))[:k]
    fused = fuse_rankings(rankings, k)
    first = [row for row in fused.rows[0].tolist() if row != ABSENT]
    assert first == expected
    assert fused.scores[0, : len(expected)] == pytest.approx([totals[row] for row in expected])
    assert fused.rows[0, len(first) :].tolist() == [ABSENT] * (fused.rows.shape[1] - len(first))
    assert fused.rows[1].tolist()[: min(2, k)] == [20, 21][:k]


def test_fusing_nothing_finds_nothing() -> None:
    fused = fuse_rankings([ranking([], []), ranking([], [])], 5)
    assert fused.rows.shape == fused.scores.shape == (2, 0)
    assert content(fuse_rankings([ranking([(4, 0.1)], []), ranking([], [])], 5)) == [
        [(4, pytest.approx(1 / 61))], [(ABSENT, -np.inf)],
    ]  # fmt: skip
