"""The index for GPUs without faiss, on a CPU: exact in any block size; missing vectors and a missing GPU are errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from retrieval_world import hard_vectors
from tensor_bytes import TensorBytes

import retrieval.indexes.torch_index as torch_index
from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.indexes.ranking import best_of
from retrieval.indexes.torch_index import TorchFlatIndex


@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 300), k=st.integers(1, 400), size=st.integers(1, 20),
    extra=st.sampled_from([1, 3000, 2**24]), repeats=st.booleans(),
)  # fmt: skip
def test_search_is_exact_in_any_block_size(seed: int, count: int, k: int, size: int, extra: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors, queries = hard_vectors(count, 16, size, seed)
    if repeats:
        vectors = vectors[rng.integers(0, min(count, 7), count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_index, "_LEAST_EXTRA_BYTES", extra)
        index = TorchFlatIndex(np.array_split(vectors, 3), count, 16, device="cpu")
        scores, rows = best_of(*index.find(queries, min(k, count)), k)
    assert rows.shape == scores.shape == (size, min(k, count))
    truth = queries @ vectors.T
    assert np.allclose(scores, -np.sort(-truth, axis=1)[:, :k], atol=1e-5)
    assert np.allclose(np.take_along_axis(truth, rows, axis=1), scores, atol=1e-5)
    assert (np.diff(np.sort(rows, axis=1), axis=1) > 0).all()
    ties = np.diff(scores, axis=1) == 0
    assert (np.diff(rows, axis=1)[ties] > 0).all()


def test_half_precision_keeps_the_best_and_takes_half_the_bytes() -> None:
    vectors, queries = hard_vectors(2000, 64, 50)
    with TensorBytes() as made:
        index = TorchFlatIndex([vectors], 2000, 64, device="cpu", dtype=torch.float16)
    assert made.now == 2000 * 64 * 2
    scores, rows = best_of(*index.find(queries, 3), 3)
    truth = np.argsort(-(queries @ vectors.T), axis=1)[:, :3]
    assert np.mean([len(set(a) & set(b)) / 3 for a, b in zip(rows.tolist(), truth.tolist(), strict=True)]) > 0.98
    exact = (vectors.astype(np.float16).astype(np.float64)[rows] * queries[:, None, :]).sum(-1)
    assert np.allclose(scores, exact, atol=1e-6)


def test_many_queries_are_searched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = hard_vectors(500, 16, 100)
    index = TorchFlatIndex([vectors], 500, 16, device="cpu")
    whole = index.find(queries, 5)
    monkeypatch.setattr(torch_index, "_MAX_QUERIES", 7)
    assert np.array_equal(index.find(queries, 5).rows, whole.rows)


def test_missing_vectors_and_a_missing_gpu_are_errors() -> None:
    with pytest.raises(DataError, match="got 4 or more vectors, expected 5"):
        TorchFlatIndex([np.ones((4, 2), np.float32)], 5, 2, device="cpu")
    with pytest.raises(DataError, match="expected 3"):
        TorchFlatIndex([np.ones((4, 2), np.float32)], 3, 2, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            TorchFlatIndex([np.ones((4, 2), np.float32)], 4, 2)
