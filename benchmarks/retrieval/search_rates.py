"""``python -m benchmarks.retrieval.search_rates [NUM_VECTORS [TYPE ...]]``: rates of a core for ``retrieval.capacity``.

One thread (set ``OMP_NUM_THREADS=1``) searches batches of 64 queries through ``VectorIndex`` in a saved and mapped
index of each type, and through ``BM25Ranker``; the best of many batches counts. Prints a JSON object per type: the
bytes and the rate that were measured, and those that ``retrieval.capacity`` computes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measurement import log
from benchmarks.retrieval import evidence
from retrieval import capacity
from retrieval.corpora.corpus import CORPUS_FILE, write_corpus
from retrieval.indexes.bm25 import BM25Ranker, bm25_text, build_bm25
from retrieval.indexes.manifest import BM25, INDEX_TYPES, FileRecord, Manifest, Shard
from retrieval.indexes.vector_index import VectorIndex

NUM_VECTORS = 100_000
NUM_QUERIES = 64
TOP_K = 3
LISTS = {"num_lists": 96, "num_probes": 6}
"""A sixteenth of lists of about 1,000 vectors, as over 21 million."""
OPTIONS = {"ivf": LISTS, "ivf_pq": LISTS, "hnsw": {"ef_construction": 40}}
"""A graph that is built faster is searched by as many steps."""
MEASURED_S = 10.0
"""Time limit per index type; three batches are searched in any case."""


def main(num_vectors: int = NUM_VECTORS, *types: str) -> None:
    """Measure some types or all, and print a line for each."""
    types = types or (*INDEX_TYPES, BM25)
    vectors, queries = evidence.vectors(num_vectors, seed=0), evidence.vectors(NUM_QUERIES, seed=99)
    for index_type in (name for name in types if name != BM25):
        log(f"building {index_type}")
        with tempfile.TemporaryDirectory(prefix="ragr1-rates-") as directory:
            path = Path(directory) / "shard-0000.faiss"
            options = OPTIONS.get(index_type, {})
            VectorIndex.build([vectors], evidence.DIMENSION, index_type, count=num_vectors, options=options).save(path)
            shard = Shard(0, num_vectors, FileRecord.of(path.parent, path.name))
            index = VectorIndex.load(path.parent, shard, index_type, evidence.DIMENSION)
            seconds = _best_s(lambda found=index: found.search(queries, TOP_K, 1))
            numbers = NUM_QUERIES * capacity.scanned_numbers(index_type, num_vectors, evidence.DIMENSION, options)
            _show(index_type, num_vectors, path.stat().st_size, numbers, seconds)
    if BM25 not in types:
        return
    with tempfile.TemporaryDirectory(prefix="ragr1-rates-") as directory:
        folder = Path(directory)
        count = write_corpus(evidence.passages(num_vectors), folder)
        files = build_bm25(map(bm25_text, evidence.passages(num_vectors)), folder)
        records = tuple(FileRecord.of(folder, name) for name in files)
        manifest = Manifest(BM25, count, FileRecord.of(folder, CORPUS_FILE), records)
        ranker, asked = BM25Ranker(folder, manifest), evidence.queries(NUM_QUERIES)
        num_bytes = sum((folder / name).stat().st_size for name in files)
        _show(BM25, count, num_bytes, NUM_QUERIES * count, _best_s(lambda: ranker.rank(asked, TOP_K)))


def _best_s(search: Callable[[], Any]) -> float:
    """Return the least seconds of the core that a call takes; those of other programs do not count."""
    times = []
    while len(times) < 3 or sum(times) < MEASURED_S:
        started = time.process_time()
        search()
        times.append(time.process_time() - started)
    return min(times)


def _show(index_type: str, count: int, num_bytes: int, numbers: float, seconds: float) -> None:
    modelled = capacity.vector_bytes(index_type, count, evidence.DIMENSION, {}, on_gpu=False)
    modelled_s = capacity.scan_s(
        index_type, index_type, count, evidence.DIMENSION, NUM_QUERIES, OPTIONS.get(index_type, {}), 1
    )
    found = {
        "type": index_type,
        "bytes": num_bytes,
        "modelled_bytes": modelled,
        "numbers_per_core_s": numbers / seconds,
        "modelled_numbers_per_core_s": numbers / modelled_s,
        "queries_per_s": NUM_QUERIES / seconds,
    }
    print(
        json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()})
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
