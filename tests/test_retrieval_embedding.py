"""The store of vectors: whole shards or none, the same blocks however they were cut, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError
from retrieval.encoders.embedding import EmbeddingStore, StoredVectors, StoreHeader

HEADER = StoreHeader("corpus", "encoder", dimension=3, count=10, rows_per_shard=4)
VECTORS = np.arange(30, dtype=np.float32).reshape(10, 3)


def filled(directory: Path, header: StoreHeader = HEADER, numbers: tuple[int, ...] = (0, 1, 2)) -> EmbeddingStore:
    store = EmbeddingStore.create(directory, header)
    for number in numbers:
        rows = store.rows(number)
        store.write(number, VECTORS[rows.start : rows.stop])
    return store


def joined(blocks: Any) -> NDArray[np.float32]:
    return np.concatenate([np.zeros((0, 3), np.float32), *blocks])


def test_a_store_is_filled_shard_by_shard_and_continued(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", numbers=(1,))
    assert (store.missing(), store.rows(2)) == ([0, 2], range(8, 10))
    (tmp_path / "s/.writing_ab12_shard-000002.npy").write_bytes(b"half")  # of a process that was killed
    again = filled(tmp_path / "s", numbers=(0, 2))
    assert again.missing() == []
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "shard-000000.npy", "shard-000001.npy", "shard-000002.npy", "store.json",
    ]  # fmt: skip
    blocks = StoredVectors(again, 0, 10)
    for _ in range(2):  # an index that learns from its vectors reads them twice
        assert np.array_equal(joined(blocks), VECTORS)
    assert all(block.dtype == np.float32 for block in blocks)


@given(start=st.integers(0, 10), length=st.integers(0, 10))
def test_any_rows_come_back(tmp_path_factory: pytest.TempPathFactory, start: int, length: int) -> None:
    directory = tmp_path_factory.getbasetemp() / "rows"
    store = EmbeddingStore.create(directory, HEADER) if directory.exists() else filled(directory)
    stop = min(start + length, 10)
    assert np.array_equal(joined(StoredVectors(store, start, stop)), VECTORS[start:stop])


def test_half_precision_takes_half_the_bytes(tmp_path: Path) -> None:
    header = replace(HEADER, dtype="float16", count=4)
    store = EmbeddingStore.create(tmp_path, header)
    vectors = np.full((4, 3), 1 / 3, np.float32)
    store.write(0, vectors)
    (block,) = StoredVectors(store, 0, 4)
    assert block.dtype == np.float32
    assert np.allclose(block, vectors, atol=1e-3)
    shard = store.read(0)
    assert shard is not None
    assert shard.nbytes == 24


@pytest.mark.parametrize(
    "other",
    [{"corpus_fingerprint": "x"}, {"encoder_fingerprint": "x"}, {"dtype": "float16"}, {"count": 11}, {"dimension": 4}],
)
def test_vectors_of_something_else_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    filled(tmp_path)
    (name,) = other
    with pytest.raises(DataError, match=f"holds vectors of another corpus or encoder .*{name}.* differs"):
        EmbeddingStore.create(tmp_path, replace(HEADER, **other))


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"count": 3})])
def test_a_damaged_header_is_refused(tmp_path: Path, content: str) -> None:
    filled(tmp_path)
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(DataError, match=r"store\.json .*; remove the directory"):
        EmbeddingStore.create(tmp_path, HEADER)


@pytest.mark.parametrize("damage", ["cut", "foreign", "other shape", "empty"])
def test_a_damaged_shard_is_missing(tmp_path: Path, damage: str) -> None:
    store = filled(tmp_path)
    path = tmp_path / "shard-000001.npy"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "other shape":
        np.save(path, VECTORS[:3])
    else:
        path.write_bytes(b"" if damage == "empty" else b"x" * 200)
    assert store.missing() == [1]
    with pytest.raises(DataError, match=r"shard 1 of .* is missing or damaged; run the build again"):
        list(StoredVectors(store, 0, 10))
