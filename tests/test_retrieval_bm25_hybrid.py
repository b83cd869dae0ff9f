"""Words and vectors fused: the sums of reciprocal ranks, over a real inverted index and a real vector index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.indexes.bm25 import BM25Ranker, build_bm25
from retrieval.indexes.manifest import FileRecord, Manifest, Shard
from retrieval.indexes.ranking import ABSENT, Ranking, fused
from retrieval.indexes.vector_index import DenseRanker, VectorIndex

WORDS = ["riga", "oslo", "bonn", "lyon", "paris", "rome", "turin", "genoa"]
TEXTS = [f"{WORDS[i % 8]} {WORDS[i * 3 % 7]} {WORDS[i * 5 % 8]}" for i in range(60)]
QUERIES = ["riga oslo", "xyzzy", "bonn", "genoa turin rome", "lyon"]


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.ascontiguousarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


@pytest.fixture(scope="module")
def rankers(tmp_path_factory: pytest.TempPathFactory) -> tuple[BM25Ranker, DenseRanker]:
    directory = tmp_path_factory.mktemp("hybrid")
    vectors = unit(np.random.default_rng(0).standard_normal((len(TEXTS), 16)))
    VectorIndex.build([vectors], 16, "flat", count=len(TEXTS)).save(directory / "shard-0000.faiss")
    shard = Shard(0, len(TEXTS), FileRecord.of(directory, "shard-0000.faiss"))
    files = tuple(FileRecord.of(directory, name) for name in build_bm25(TEXTS, directory))
    manifest = Manifest(
        "hybrid", len(TEXTS), files[0], files, metric="inner_product", vector_type="flat", dimension=16, shards=(shard,)
    )
    return BM25Ranker(directory, manifest), DenseRanker(directory, manifest, load_encoder=False)


@pytest.fixture(scope="module")
def query_vectors() -> NDArray[np.float32]:
    vectors = unit(np.random.default_rng(1).standard_normal((len(QUERIES), 16)))
    vectors[1] = vectors[2] = 0
    return vectors


def hybrid(
    rankers: Sequence[BM25Ranker | DenseRanker], queries: list[str], k: int, vectors: NDArray[np.float32]
) -> Ranking:
    return fused([ranker.rank for ranker in rankers], 100, queries, k, vectors)


@pytest.mark.parametrize(("k", "depth"), [(1, 100), (5, 3), (5, 10), (60, 100), (200, 1)])
def test_a_row_scores_the_sum_of_its_reciprocal_ranks(
    rankers: tuple[BM25Ranker, DenseRanker], query_vectors: NDArray[np.float32], k: int, depth: int
) -> None:
    found = fused([ranker.rank for ranker in rankers], depth, QUERIES, k, query_vectors)
    for i, query in enumerate(QUERIES):
        sums: dict[int, float] = {}
        for ranker in rankers:
            ranking = ranker.rank([query], max(k, depth), query_vectors[i : i + 1])
            for rank, row in enumerate(ranking.rows[0].tolist(), 1):
                if row != ABSENT:
                    sums[row] = sums.get(row, 0) + 1 / (60 + rank)
        expected = sorted(sums, key=lambda row: (-np.float32(sums[row]), row))[:k]
        rows = found.rows[i][found.rows[i] != ABSENT].tolist()
        assert rows == expected
        np.testing.assert_allclose(found.scores[i][: len(rows)], [sums[row] for row in rows], rtol=1e-6)


def test_a_query_without_a_vector_falls_to_the_words_and_one_without_words_to_the_vectors(
    rankers: tuple[BM25Ranker, DenseRanker], query_vectors: NDArray[np.float32]
) -> None:
    words, dense = rankers
    found = hybrid(rankers, ["xyzzy", "bonn", "xyzzy"], 4, query_vectors[[1, 2, 3]])
    assert found.rows[0].tolist() == [ABSENT] * 4
    assert np.isneginf(found.scores[0]).all()
    assert found.rows[1].tolist() == words.rank(["bonn"], 4).rows[0].tolist()
    assert found.rows[2].tolist() == dense.rank(["xyzzy"], 4, query_vectors[[3]]).rows[0].tolist()


def test_a_query_is_answered_alike_in_any_batch(
    rankers: tuple[BM25Ranker, DenseRanker], query_vectors: NDArray[np.float32]
) -> None:
    together = hybrid(rankers, QUERIES, 5, query_vectors)
    for i, query in enumerate(QUERIES):
        alone = hybrid(rankers, [query], 5, query_vectors[i : i + 1])
        depth = alone.rows.shape[1]
        assert together.rows[i, :depth].tolist() == alone.rows[0].tolist()
        assert together.scores[i, :depth].tobytes() == alone.scores[0].tobytes()
        assert (together.rows[i, depth:] == ABSENT).all()
    assert hybrid(rankers, [], 5, query_vectors[:0]).rows.shape[0] == 0
