"""The bytes of an index that ``ragr1 plan`` computes, against indexes that are built here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.base import Passage
from retrieval.capacity import index_bytes, scanned_numbers, vector_bytes
from retrieval.corpora.corpus import write_corpus
from retrieval.indexes.bm25 import bm25_text, build_bm25
from retrieval.indexes.manifest import BM25, HYBRID, INDEX_TYPES
from retrieval.indexes.vector_index import VectorIndex

COUNT, DIMENSION = 20_000, 128
STOP_WORDS = ("the", "and", "of", "in", "a", "to", "was", "is", "for", "on", "as", "by", "with", "from", "at", "it")
OPTIONS: dict[str, dict[str, Any]] = {
    "ivf": {"num_lists": 16},  # as many vectors in a list as in one of 21 million
    "ivf_pq": {"num_lists": 16},
    "hnsw": {"m": 16, "ef_construction": 16},
}


def passages() -> Iterator[Passage]:
    """100 words each, as English has them: 54 different ones and 46 stop words, 16 of them different; 600 letters."""
    rng = random.Random(0)
    words = ["".join(rng.choices("bdfgklmnprtvz", k=7)) for _ in range(4000)]
    for number in range(COUNT):
        yield Passage(f"{number:08}", "Some place", " ".join([*STOP_WORDS, *rng.sample(words, 54), *["and"] * 30]))


@pytest.fixture(scope="module")
def text_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """Bytes of the passages, and of their inverted index."""
    directory = tmp_path_factory.mktemp("texts")
    write_corpus(passages(), directory)
    files = build_bm25(map(bm25_text, passages()), directory)
    return (directory / "corpus.arrow").stat().st_size, sum((directory / name).stat().st_size for name in files)


@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_vectors_of_every_type(index_type: str, text_bytes: tuple[int, int], tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((COUNT, DIMENSION), np.float32)
    options = OPTIONS.get(index_type, {})
    path = tmp_path / "shard"
    VectorIndex.build([vectors], DIMENSION, index_type, count=COUNT, options=options).save(path)
    found = path.stat().st_size
    assert vector_bytes(index_type, COUNT, DIMENSION, options, on_gpu=False) == pytest.approx(found, rel=0.05)
    assert index_bytes(index_type, index_type, COUNT, DIMENSION, options) == pytest.approx(
        found + text_bytes[0], rel=0.05
    )


def test_words(text_bytes: tuple[int, int]) -> None:
    corpus, postings = text_bytes
    assert index_bytes(BM25, BM25, COUNT, 0, {}) == pytest.approx(corpus + postings, rel=0.05)
    for vector_type in ("flat", "pq"):
        vectors = vector_bytes(vector_type, COUNT, DIMENSION, {}, on_gpu=False)
        found = index_bytes(HYBRID, vector_type, COUNT, DIMENSION, {})
        assert found == pytest.approx(vectors + corpus + postings, rel=0.05)


def test_no_more_lists_are_read_than_there_are() -> None:
    few = {"num_lists": 4}
    assert scanned_numbers("ivf", 100, 1, few) == scanned_numbers("ivf", 100, 1, {**few, "num_probes": 500}) == 104


def test_a_gpu_holds_what_is_scanned_there() -> None:
    on_gpu = {name: vector_bytes(name, 1000, 100, {}, on_gpu=True) for name in (*INDEX_TYPES, BM25)}
    assert {name for name, found in on_gpu.items() if found} == {"flat", "fp16", "ivf"}
    assert on_gpu["flat"] == pytest.approx(2 * 1000 * 100 * 1.08)
