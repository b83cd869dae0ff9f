"""Every index type behind a fleet: the client answers what the same index answers in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_retrieval_reranker import config, save_tokenizer
from transformers import BertForSequenceClassification

from ragr1_actors.core.config import RetrievalSettings
from retrieval.base import Hits, Passage
from retrieval.build import build_index
from retrieval.local import LocalRetriever
from retrieval.replicas.retriever_group import RetrieverGroup

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NAMES = [f"Person{i} Family{i % 7}" for i in range(400)]
WORDS = ["riga", "oslo", "bonn", "lamp", "coin"]  # that the reranker knows
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}, {WORDS[i % 5]}.") for i, name in enumerate(NAMES)]
QUERIES = [*NAMES[:30], "town7", "nonsense", ""]


@pytest.fixture(scope="module")
def reranker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross")
    save_tokenizer(folder, pad_token="[PAD]")
    BertForSequenceClassification(config()).save_pretrained(folder)
    return folder


def check(index_dir: Path, local: LocalRetriever, **settings: Any) -> list[list[str]]:
    """Answer ``QUERIES`` through a fleet; compare with ``local``, and return the ids that were found."""
    group = RetrieverGroup(index_dir, RetrievalSettings(num_cpus_per_retriever=0.1, **settings))
    try:
        group.wait_until_ready()
        client = group.retriever()
        found = asyncio.run(client.search(QUERIES, 4))
    finally:
        group.stop()
    expected = local.search_batch(QUERIES, 4)
    assert [[p.id for p in hits] for hits in found] == [[p.id for p in hits] for hits in expected]
    for hits, expected_hits in zip(found, expected, strict=True):
        assert isinstance(hits, Hits) and hits.index_version == local.version
        assert [p.score for p in hits] == pytest.approx([p.score for p in expected_hits], abs=1e-5)
    return [[p.id for p in hits] for hits in found]


@pytest.mark.parametrize("index_type", ["ivf_pq", "hnsw", "hybrid"])
def test_a_fleet_answers_as_this_process_does(ray_local: ModuleType, tmp_path: Path, index_type: str) -> None:
    directory = build_index(PASSAGES, tmp_path / "index", index_type=index_type, progress=False)
    found = check(directory, LocalRetriever(directory), type=index_type)
    exact = sum(ids[:1] == [f"p{i}"] for i, ids in enumerate(found[:30]))
    assert exact >= 20, f"{exact} of 30 names found first"


def test_encoders_apart_and_shards_of_codes(ray_local: ModuleType, tmp_path: Path) -> None:
    directory = build_index(PASSAGES, tmp_path / "index", index_type="pq", num_shards=2, progress=False)
    check(directory, LocalRetriever(directory), type="pq", num_shards=2, encoders={"num_encoders": 1, "num_cpus": 0.1})


def test_encoders_apart_and_words(ray_local: ModuleType, tmp_path: Path) -> None:
    directory = build_index(PASSAGES, tmp_path / "index", index_type="hybrid", progress=False)
    check(directory, LocalRetriever(directory), type="hybrid", encoders={"num_encoders": 1, "num_cpus": 0.1})


def test_a_reranker_behind_a_fleet(ray_local: ModuleType, tmp_path: Path, reranker_dir: Path) -> None:
    directory = build_index(PASSAGES, tmp_path / "index", progress=False)
    options = {"rerank_candidates": 8}
    local = LocalRetriever(directory, reranker=str(reranker_dir), options=options)
    found = check(directory, local, reranker=str(reranker_dir), options=options)
    assert found != [[p.id for p in hits] for hits in LocalRetriever(directory).search_batch(QUERIES, 4)]
