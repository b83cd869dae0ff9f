"""Exact search by faiss's BLAS against torch's product: milliseconds per query, for batches of some sizes.

::

    python -m benchmarks.retrieval.flat_products

prints one JSON object per size: ``{"queries": 64, "faiss_ms": 2.76, "torch_ms": 1.1}``. Both use all cores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import faiss
import numpy as np
import torch

from retrieval.indexes.vector_index import VectorIndex

COUNT, DIMENSION, K = 200_000, 384, 3
SIZES = (1, 4, 16, 64)
SECONDS = 2.0
"""How long each side searches per batch size."""


def main() -> None:
    """Measure both sides."""
    num_threads = os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    faiss.omp_set_num_threads(num_threads)
    vectors = np.random.default_rng(0).standard_normal((COUNT, DIMENSION), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    theirs = faiss.IndexFlatIP(DIMENSION)
    theirs.add(vectors)
    faiss.cvar.distance_compute_blas_threshold = 1
    ours = VectorIndex.build([vectors], DIMENSION, count=COUNT)
    for size in SIZES:
        queries = np.ascontiguousarray(vectors[:size])
        by_faiss = _ms(lambda queries=queries: theirs.search(queries, K), size)
        by_torch = _ms(lambda queries=queries: ours.search(queries, K, num_threads), size)
        sys.stdout.write(json.dumps({"queries": size, "faiss_ms": by_faiss, "torch_ms": by_torch}) + "\n")


def _ms(search: Callable[[], object], num_queries: int) -> float:
    search()
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        search()
        done += num_queries
    return round(1e3 * (time.perf_counter() - started) / done, 2)


if __name__ == "__main__":
    main()
