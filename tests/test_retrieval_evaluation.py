"""Recall against supporting facts and against exact search, and latency."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from retrieval_world import PASSAGES

from ragr1_actors.core.types import Task
from retrieval import evaluation
from retrieval.base import Passage
from retrieval.build import build_index
from retrieval.corpora.text import split_passages
from retrieval.evaluation import audit_corpus, evaluate_index, supporting_recall
from retrieval.local import LocalRetriever

TASKS = [
    Task("a", "Where was Ana Bell born?", ("x",), supporting_ids=("p0",)),
    Task("b", "bo cole", ("x",), supporting_ids=("p1", "absent")),
    Task("c", "no evidence known", ("x",)),
]
TOWNS = [Passage(f"t{i}", f"Town {i % 97}", " ".join(f"w{(i * j) % 211}" for j in range(1, 9))) for i in range(400)]
QUESTIONS = [Task(f"q{i}", f"town {i} w{3 * i} w{5 * i % 211}", ("x",)) for i in range(40)]


@pytest.fixture(scope="module")
def towns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("towns")
    for name, options in (("sq8", {}), ("ivf", {"num_lists": 20, "num_probes": 1}), ("hnsw", {"m": 8}), ("hybrid", {})):
        build_index(
            TOWNS, directory / name, index_type=name, vector_type="sq8", options=options, progress=False, num_shards=2
        )
    return directory


def recalls(index_dir: Path, tasks: list[Task]) -> dict[str, float]:
    retriever = LocalRetriever(index_dir)
    return asyncio.run(supporting_recall(retriever, retriever.corpus, tasks))


def test_recall_against_supporting_facts(tmp_path: Path) -> None:
    index_dir = build_index(PASSAGES, tmp_path / "index", progress=False)
    expected = {"recall@2": 0.75, "recall@3": 0.75, "recall@5": 0.75, "recall@10": 0.75}
    assert recalls(index_dir, TASKS) == expected
    found = evaluate_index(index_dir, TASKS)
    assert {key: found[key] for key in expected} == expected
    assert "exact_vectors" not in found
    counted: list[tuple[str, int, int]] = []
    asked = evaluate_index(index_dir, TASKS[:1], exact=True, count=lambda *told: counted.append(told))
    assert counted == [("questions", 1, 1), ("searched exactly", len(PASSAGES), len(PASSAGES))]
    assert (asked["recall@2"], asked["exact_recall@2"]) == (1, 1)
    assert (asked["exact_queries"], asked["exact_vectors"]) == (1, "of the index")


def test_any_piece_of_a_split_passage_is_its_evidence(tmp_path: Path) -> None:
    text = "Ana Bell was born in town0 . The town lies by the sea"
    others = [Passage("Ana", "Ana", "one"), Passage("Ana#2", "Ana", "Ana of the hills")]  # one title, two passages
    passages = split_passages([Passage("p0", "Ana Bell", text), *others], 7)
    index_dir = build_index(passages, tmp_path / "index", index_type="bm25", progress=False)
    assert recalls(index_dir, [Task("a", "town0", ("x",), supporting_ids=("p0",))])["recall@2"] == 1
    assert recalls(index_dir, [Task("b", "the hills", ("x",), supporting_ids=("Ana",))])["recall@2"] == 0


def test_evidence_may_be_named_by_its_title(tmp_path: Path) -> None:
    passages = [Passage("8113", "Riga", "one in town0"), Passage("17", "Oslo", "two")]  # as in wiki-18
    index_dir = build_index(passages, tmp_path / "index", index_type="bm25", progress=False)
    task = Task("a", "town0", ("x",), supporting_ids=("Riga", "Bonn"))
    assert recalls(index_dir, [task])["recall@2"] == 0.5
    assert audit_corpus(passages, [task]).missing_support[0].missing == ("Bonn",)


def test_recall_against_exact_search_says_where_the_vectors_are_from(towns: Path) -> None:
    found = {name: evaluate_index(towns / name, QUESTIONS) for name in ("sq8", "ivf", "hnsw", "hybrid")}
    assert found["sq8"]["exact_vectors"] == "400 passages encoded again"
    assert found["sq8"]["exact_queries"] == len(QUESTIONS)
    assert 0.9 < found["sq8"]["exact_recall@3"] <= 1
    exact = [key for key in found["sq8"] if key.startswith("exact")]
    assert [found["hybrid"][key] for key in exact] == [found["sq8"][key] for key in exact]
    assert found["ivf"]["exact_vectors"] == "of the index"
    assert found["ivf"]["exact_recall@10"] < 0.9
    assert found["hnsw"]["exact_recall@10"] > 0.9
    probed = evaluate_index(towns / "ivf", QUESTIONS, options={"num_probes": 30})
    assert probed["exact_recall@10"] == 1


def test_large_corpora_are_encoded_again_only_when_asked(towns: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "EXACT_UP_TO", 399)
    assert "exact_recall@3" not in evaluate_index(towns / "sq8", QUESTIONS)
    assert "exact_recall@3" in evaluate_index(towns / "sq8", QUESTIONS, exact=True)
    assert "exact_recall@3" in evaluate_index(towns / "ivf", QUESTIONS)


def test_latency_is_plain_json(towns: Path) -> None:
    found = evaluate_index(towns / "sq8", QUESTIONS)
    assert list(found)[-4:] == ["latency_p50_ms", "latency_p95_ms", "queries_per_s", "threads"]
    assert 0 < found["latency_p50_ms"] <= found["latency_p95_ms"]
    assert found["queries_per_s"] > 0
    assert json.loads(json.dumps(found)) == found
