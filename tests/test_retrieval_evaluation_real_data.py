"""Real corpora and questions: formats are read, and the static encoder finds enough to learn from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from envs.tasks.files import load_tasks
from ragr1_actors.core.types import StopReason, Task, ToolCall, Trajectory, Turn
from ragr1_actors.runs.scores import score
from retrieval.build import build_index
from retrieval.corpora.readers import read_passages
from retrieval.evaluation import supporting_recall
from retrieval.local import LocalRetriever

DATA = Path(__file__).resolve().parents[1].parent / "shared/data"
HOTPOTQA, WIKI = DATA / "hotpotqa_corpus_994.json", DATA / "2wikimultihopqa_corpus_6119.json"

pytestmark = pytest.mark.skipif(not HOTPOTQA.is_file(), reason=f"no real data in {DATA}")


@pytest.fixture(scope="module")
def hotpotqa_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(read_passages(HOTPOTQA), tmp_path_factory.mktemp("real") / "index", progress=False)


def test_recall_of_the_static_encoder_on_hotpotqa(hotpotqa_index: Path) -> None:
    records = json.loads((DATA / "hotpotqa_100.json").read_text(encoding="utf-8"))
    tasks = [
        Task(
            str(i),
            r["question"],
            (r["answer"],),
            supporting_ids=tuple({title: 0 for title, _ in r["supporting_facts"]}),
        )
        for i, r in enumerate(records)
    ]
    retriever = LocalRetriever(hotpotqa_index)
    recall = asyncio.run(supporting_recall(retriever, retriever.corpus, tasks))
    print(recall)
    # Exact tf-idf over the same words has .66 at 3 and .74 at 5.
    assert recall["recall@3"] >= 0.62
    assert recall["recall@5"] >= 0.70


@pytest.mark.parametrize("k", [2, 3, 5, 10])
def test_recall_is_the_share_of_titles_counted_by_hand_to_the_last_digit(hotpotqa_index: Path, k: int) -> None:
    """Counted from the file's own records and the passages' titles; nothing of the project's reader or measure."""
    records = json.loads((DATA / "hotpotqa_100.json").read_text(encoding="utf-8"))
    retriever = LocalRetriever(hotpotqa_index)
    found = retriever.search_batch([record["question"] for record in records], 10)
    shares, scored = [], []
    tasks = load_tasks(DATA / "hotpotqa_100.json", whole=True).tasks
    for task, record, passages in zip(tasks, records, found, strict=True):
        gold = {title for title, _ in record["supporting_facts"]}
        titles = [passage.title for passage in passages[:k]]
        shares.append(sum(title in titles for title in gold) / len(gold))
        kept = ToolCall("search", {"query": "q", "k": k}, records=tuple(passages[:k]))
        none = np.zeros(0, np.int32)
        turns = (Turn("", 1, "search", (kept,)),)
        scored.append(score(Trajectory("x", task, none, none, none, none, turns, StopReason.ANSWERED, 0.0)).recall)
    assert scored == shares
    measured = asyncio.run(supporting_recall(retriever, retriever.corpus, tasks))
    assert measured[f"recall@{k}"] == np.mean(shares)


def test_a_title_finds_its_own_passage(hotpotqa_index: Path) -> None:
    titles = [passage.title for passage in read_passages(HOTPOTQA)]
    found = LocalRetriever(hotpotqa_index).search_batch(titles, 3)
    at_1 = sum(passages[0].title == title for passages, title in zip(found, titles, strict=True))
    at_3 = sum(title in [p.title for p in passages] for passages, title in zip(found, titles, strict=True))
    print(f"title queries: {at_1 / len(titles):.3f} at 1, {at_3 / len(titles):.3f} at 3")
    assert at_1 >= 0.85 * len(titles)
    assert at_3 >= 0.97 * len(titles)


def test_2wikimultihopqa_is_read_whole() -> None:
    passages = list(read_passages(WIKI))
    assert len(passages) == 6119
    assert len({passage.id for passage in passages}) == 6119
    assert (passages[0].id, passages[0].title) == ("Teutberga", "Teutberga")
