"""Recall against supporting facts and against exact search, and latency."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from retrieval_world import PASSAGES

from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task
from retrieval import evaluation
from retrieval.base import Passage
from retrieval.build import build_index
from retrieval.corpora.text import split_passages
from retrieval.evaluation import evaluate_index

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


def test_recall_against_supporting_facts(tmp_path: Path) -> None:
    index_dir = build_index(PASSAGES, tmp_path / "index", progress=False)
    assert evaluate_index(index_dir, TASKS, ks=(1, 5)) == {"recall@1": 0.75, "recall@5": 0.75}
    assert list(evaluate_index(index_dir, TASKS)) == ["recall@2", "recall@3", "recall@5", "recall@10"]
    for tasks in (TASKS[2:], []):
        with pytest.raises(DataError, match="supporting"):
            evaluate_index(index_dir, tasks)
    assert evaluate_index(index_dir, TASKS, ks=(1,), exact=None) == {"recall@1": 0.75}
    asked = evaluate_index(index_dir, TASKS[:1], ks=(1,), exact=True)
    assert asked == {"recall@1": 1.0, "exact_recall@1": 1.0, "exact_queries": 1, "exact_vectors": "of the index"}


def test_any_piece_of_a_split_passage_is_its_evidence(tmp_path: Path) -> None:
    text = "Ana Bell was born in town0 . The town lies by the sea"
    others = [Passage("Ana", "Ana", "one"), Passage("Ana#2", "Ana", "Ana of the hills")]  # one title, two passages
    passages = split_passages([Passage("p0", "Ana Bell", text), *others], 7)
    index_dir = build_index(passages, tmp_path / "index", index_type="bm25", progress=False)
    tasks = [Task("a", "Ana Bell town0", ("x",), supporting_ids=("p0",))]
    assert evaluate_index(index_dir, tasks, ks=(1,)) == {"recall@1": 1.0}
    tasks = [Task("b", "the hills", ("x",), supporting_ids=("Ana",))]
    assert evaluate_index(index_dir, tasks, ks=(1,)) == {"recall@1": 0.0}


def test_recall_against_exact_search_says_where_the_vectors_are_from(towns: Path) -> None:
    found = {name: evaluate_index(towns / name, QUESTIONS, exact=None) for name in ("sq8", "ivf", "hnsw", "hybrid")}
    assert found["sq8"]["exact_vectors"] == "400 passages encoded again"
    assert found["sq8"]["exact_queries"] == len(QUESTIONS)
    assert 0.9 < found["sq8"]["exact_recall@3"] <= 1
    assert found["hybrid"] == found["sq8"]
    assert found["ivf"]["exact_vectors"] == "of the index"
    assert found["ivf"]["exact_recall@10"] < 0.9
    assert found["hnsw"]["exact_recall@10"] > 0.9
    probed = evaluate_index(towns / "ivf", QUESTIONS, exact=None, options={"num_probes": 30})
    assert probed["exact_recall@10"] == 1


def test_large_corpora_are_encoded_again_only_when_asked(towns: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "EXACT_UP_TO", 399)
    with pytest.raises(DataError, match="no task names its supporting"):
        evaluate_index(towns / "sq8", QUESTIONS, exact=None)
    assert "exact_recall@3" in evaluate_index(towns / "sq8", QUESTIONS, exact=True)
    assert "exact_recall@3" in evaluate_index(towns / "ivf", QUESTIONS, exact=None)


def test_latency_is_plain_json(towns: Path) -> None:
    found = evaluate_index(towns / "sq8", QUESTIONS, latency=True, num_threads=1)
    assert list(found) == ["latency_p50_ms", "latency_p95_ms", "queries_per_s", "threads"]
    assert 0 < found["latency_p50_ms"] <= found["latency_p95_ms"]
    assert found["queries_per_s"] > 0
    assert json.loads(json.dumps(found)) == found
