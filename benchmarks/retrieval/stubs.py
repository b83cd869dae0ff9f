"""Retrieval actors that search nothing: for the cost of the calls to them, and for fleets of a fixed service time."""

from __future__ import annotations

import random
import time
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.retrieval.evidence import NUM_PASSAGES_QUICK, PASSAGE_WORDS, passages, words
from retrieval.base import Passage
from retrieval.corpora.corpus import CORPUS_FILE, write_corpus
from retrieval.indexes.manifest import FileRecord, Manifest
from retrieval.replicas.replica_set import RowHits, RpcActor


def stub_passages(query: str, k: int) -> list[Passage]:
    """``k`` passages of 100 words that are the query's own: nothing travels once for several queries."""
    return [Passage(f"{query}/{rank}", f"title {rank}", _text(query, rank), 1.0 - rank / 10) for rank in range(k)]


@lru_cache(maxsize=4096)
def _text(query: str, rank: int) -> str:
    rng = random.Random(f"{rank} {query}")
    return " ".join(rng.choices(_known_words(), k=PASSAGE_WORDS))


@lru_cache(maxsize=1)
def _known_words() -> list[str]:
    return words()


class StubActor(RpcActor):
    """A ``RetrieverActor`` in all but the search: a query takes a fixed time and finds some rows of its index."""

    def __init__(self, index_dir: str, service_s: float) -> None:
        super().__init__()
        manifest = Manifest.read(index_dir)
        self._count, self._version = manifest.count, manifest.version
        self._service_s = service_s
        self.serve(self.rank_batch)

    def rank_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> RowHits:
        if self._service_s:
            time.sleep(self._service_s * len(queries))
        firsts = np.array([zlib.crc32(query.encode()) for query in queries])
        rows = (firsts[:, None] + np.arange(k)) % self._count
        return RowHits(self._version, np.tile(1 - np.arange(k, dtype=np.float32) / 10, (len(queries), 1)), rows)


def make_stub_index(directory: Path) -> Path:
    """Write an index of passages without anything to search them by: it is the stubs that find."""
    out = directory / "stub"
    out.mkdir()
    count = write_corpus(passages(NUM_PASSAGES_QUICK), out)
    Manifest(index_type="bm25", count=count, corpus=FileRecord.of(out, CORPUS_FILE), files=()).write(out)
    return out


def start_stubs(index_dir: Path, num_actors: int, service_s: float) -> Any:
    """Return an ``ReplicaSet`` of stubs that a ``RetrieverClient`` searches as any other."""
    from retrieval.replicas.replica_set import ReplicaSet

    fleet = ReplicaSet(StubActor, [(str(index_dir), service_s)])
    fleet.scale_to(num_actors)
    fleet.fleet.wait_until_up(300)
    return fleet
