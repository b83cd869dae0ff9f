"""DenseRanker: shards answer as one index, zero vectors find nothing, and what is no vector is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from retrieval_world import NAMES, PASSAGES, hard_vectors

from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError
from retrieval.build import build_index
from retrieval.indexes.manifest import FileRecord, Manifest, Shard
from retrieval.indexes.ranking import ABSENT, merge_rankings
from retrieval.indexes.vector_index import DenseRanker, VectorIndex

COUNT, DIMENSION = 600, 32


def write_shards(directory: Path, vectors: NDArray[np.float32], sizes: list[int], name: str = "flat") -> Manifest:
    """Vectors alone: a ranker that is handed vectors needs neither corpus nor encoder."""
    directory.mkdir()
    shards, start = [], 0
    for number, size in enumerate(sizes):
        file = f"shard-{number:04}.faiss"
        VectorIndex.build([vectors[start : start + size]], vectors.shape[1], name).save(directory / file)
        shards.append(Shard(start, size, FileRecord.of(directory, file)))
        start += size
    fields: dict[str, Any] = {"vector_type": name, "dimension": vectors.shape[1], "shards": tuple(shards)}
    return Manifest(name, len(vectors), FileRecord("corpus.arrow", 0, ""), (), **fields)


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(PASSAGES, tmp_path_factory.mktemp("dense") / "index", num_shards=2, progress=False)


def test_shards_answer_as_one_index(tmp_path: Path) -> None:
    vectors, queries = hard_vectors(COUNT, DIMENSION, 40)
    vectors[500:520] = vectors[:20]  # ties across shards
    whole = DenseRanker(tmp_path / "1", write_shards(tmp_path / "1", vectors, [COUNT]), load_encoder=False)
    manifest = write_shards(tmp_path / "3", vectors, [7, 400, 193])
    parts = DenseRanker(tmp_path / "3", manifest, load_encoder=False)
    assert parts.is_lossless
    rows, blocks = map(np.concatenate, zip(*parts.blocks(), strict=True))
    assert np.array_equal(rows, np.arange(COUNT))
    assert np.array_equal(blocks, vectors)
    for k in (1, 10, 2 * COUNT):
        expected, found = (ranker.rank([""] * 40, k, queries) for ranker in (whole, parts))
        assert np.array_equal(expected.rows, found.rows)
        assert np.array_equal(expected.scores, found.scores)
    each = [DenseRanker(tmp_path / "3", manifest, shards=[number], load_encoder=False) for number in range(3)]
    merged = merge_rankings([ranker.rank([""] * 40, 10, queries) for ranker in each], 10)
    assert np.array_equal(merged.rows, whole.rank([""] * 40, 10, queries).rows)
    ties = whole.rank([""] * 20, 2, vectors[:20])
    assert ties.rows.tolist() == [[row, row + 500] for row in range(20)]


def test_zero_vectors_find_nothing_and_bad_ones_are_refused(tmp_path: Path) -> None:
    vectors, queries = hard_vectors(COUNT, DIMENSION, 3)
    ranker = DenseRanker(tmp_path / "1", write_shards(tmp_path / "1", vectors, [COUNT]), load_encoder=False)
    queries[1] = 0
    found = ranker.rank(["", "", ""], 4, queries)
    assert found.rows[1].tolist() == [ABSENT] * 4
    assert (found.scores[1] == -np.inf).all()
    assert (found.rows[[0, 2]] >= 0).all()
    assert ranker.rank([], 4).rows.shape == (0, 0)
    with pytest.raises(RetrievalError, match=r"shape \(2, 32\), expected \(3, 32\)"):
        ranker.rank(["", "", ""], 4, queries[:2])
    queries[2, 5] = np.nan
    with pytest.raises(RetrievalError, match="NaN or infinity"):
        ranker.rank(["", "", ""], 4, queries)
    with pytest.raises(ValueError, match="without an encoder"):
        ranker.rank(["a"], 4)


def test_shards_and_options_that_are_not_there(tmp_path: Path) -> None:
    vectors, _ = hard_vectors(COUNT, DIMENSION, 1)
    manifest = write_shards(tmp_path / "2", vectors, [300, 300])
    for shards in ([2], [-1], []):
        with pytest.raises(DataError, match=r"the index has 2, numbered from 0"):
            DenseRanker(tmp_path / "2", manifest, shards=shards, load_encoder=False)
    with pytest.raises(ConfigError, match=r"unknown key options\.ef_search"):
        DenseRanker(tmp_path / "2", manifest, options={"ef_search": 3}, load_encoder=False)


def test_queries_are_encoded_by_the_encoder_of_the_index(index_dir: Path) -> None:
    ranker = DenseRanker(index_dir, Manifest.read(index_dir))
    vectors = ranker.encoder.encode_queries([*NAMES, "xyzzy"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), [1] * 5 + [0])
    found = ranker.rank([*NAMES, "xyzzy"], 2)
    assert found.rows[:, 0].tolist() == [0, 1, 2, 3, 4, ABSENT]
    assert np.array_equal(found.rows, ranker.rank([""] * 6, 2, vectors).rows)
    kept = np.concatenate([block for _, block in ranker.blocks()])
    assert np.allclose(ranker.encoder.encode_passages(PASSAGES), kept, atol=1e-6)


def test_an_encoder_that_was_not_copied_along_is_named(index_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(index_dir, copy, ignore=shutil.ignore_patterns("encoder"))
    with pytest.raises(DataError, match=r"^no .*/copy/encoder; copy the index as a whole"):
        DenseRanker(copy, Manifest.read(copy))
