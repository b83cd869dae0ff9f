"""Which gold answers and which evidence a corpus contains."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tasks.files import load_tasks
from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.types import Task
from retrieval.base import Passage
from retrieval.corpora.readers import read_passages
from retrieval.evaluation import NUM_EXAMPLES, MissingTask, audit_corpus

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder ../shared/data with the public questions")

CORPUS = [
    Passage("Riga", "Riga", "The capital of Latvia lies at the U.S. Embassy, they say; no party."),
    Passage("Oslo", "New", "York is elsewhere."),
]


def task(*answers: str, support: tuple[str, ...] = (), name: str = "t") -> Task:
    return Task(name, "Where?", answers, supporting_ids=support)


@pytest.mark.parametrize(
    ("answer", "is_found"),
    [
        ("riga", True),  # in the title
        ("The Capital, of LATVIA!", True),
        ("capital of a Latvia", True),  # articles do not count
        ("US embassy", True),
        ("Latvia", True),
        ("art", False),  # in "party"
        ("capital Latvia", False),
        ("party party", False),
        ("New York", False),  # half in the title
        ("elsewhere", True),
        ("elsewhere.", True),
        ("?!", False),
    ],
)
def test_answers_are_found_as_whole_words(answer: str, is_found: bool) -> None:
    audit = audit_corpus(CORPUS, [task(answer)])
    assert (audit.num_answers_found, audit.num_answers_missing) == (int(is_found), int(not is_found))
    assert audit.missing_answers == (() if is_found else (MissingTask("t", "Where?", (answer,)),))


def test_a_supporting_passage_that_was_split_is_there() -> None:
    pieces = [Passage("Riga#0", "Riga", "one"), Passage("Riga#1", "Riga", "two"), Passage("Oslo", "Oslo", "three")]
    audit = audit_corpus(pieces, [task("one", support=("Riga", "Oslo")), task("one", support=("Riga#1", "Rome"))])
    assert (audit.num_support_all, audit.num_support_partly) == (1, 1)


def test_any_gold_answer_counts_and_yes_and_no_are_counted_apart() -> None:
    tasks = [task("Paris", "Riga"), task("Yes."), task("no", "yes"), task("no", "Paris"), task("yes", "Riga"), task()]
    audit = audit_corpus(CORPUS, tasks)
    assert (audit.num_tasks, audit.num_yes_no) == (6, 2)
    assert (audit.num_answers_found, audit.num_answers_missing) == (2, 2)
    assert [missing.missing for missing in audit.missing_answers] == [("no", "Paris"), ()]


def test_evidence_is_there_in_whole_in_part_or_not() -> None:
    supports = [("Riga",), ("Riga", "Oslo"), ("Riga", "Bonn"), ("Bonn", "Lyon"), ()]
    audit = audit_corpus(CORPUS, [task("Riga", support=support, name=str(i)) for i, support in enumerate(supports)])
    assert (audit.num_support_all, audit.num_support_partly, audit.num_support_none) == (2, 1, 1)
    assert audit.num_support_unknown == 1
    assert [(missing.task_id, missing.missing) for missing in audit.missing_support] == [
        ("2", ("Bonn",)),
        ("3", ("Bonn", "Lyon")),
    ]


def test_it_is_json_and_a_few_lines() -> None:
    tasks = [task("Bonn", support=("Riga", "Bonn"), name=str(i)) for i in range(50)]
    audit = audit_corpus(iter(CORPUS), [*tasks, task("Riga"), task("yes")])
    assert len(audit.missing_answers) == len(audit.missing_support) == NUM_EXAMPLES
    content = json.loads(json.dumps(asdict(audit)))
    assert content["num_passages"] == 2
    assert content["missing_answers"][0] == {"task_id": "0", "question": "Where?", "missing": ["Bonn"]}
    assert str(audit).splitlines() == [
        "2 passages, 52 tasks",
        "gold answer in the corpus: 1 of 51 (2.0%)",
        "yes/no answers, not looked for: 1",
        "supporting passages in the corpus: all for 0 of 50 (0.0%), some for 50, none for 0",
    ]
    assert str(audit_corpus([], [])) == "0 passages, 0 tasks"


WORDS = st.lists(st.sampled_from(["a", "the", "b", "B.", "c", "c-d", "cd", "é", "  ", "yes"]), max_size=8).map(" ".join)


@given(texts=st.lists(WORDS, max_size=4), answers=st.lists(WORDS, max_size=4))
def test_it_agrees_with_a_plain_search(texts: list[str], answers: list[str]) -> None:
    audit = audit_corpus([Passage("p", "", text) for text in texts], [task(answer) for answer in answers])
    wanted = [f" {normalize_answer(answer)} " for answer in answers if normalize_answer(answer) not in ("", "yes")]
    assert audit.num_answers_found == sum(
        any(answer in f" {normalize_answer(text)} " for text in texts) for answer in wanted
    )


@real_data
def test_real_questions_against_their_own_corpus() -> None:
    tasks = load_tasks(DATA / "hotpotqa_100.json").tasks
    audit = audit_corpus(read_passages(DATA / "hotpotqa_corpus_994.json"), tasks)
    print(audit)
    assert (audit.num_passages, audit.num_tasks) == (994, 100)
    assert audit.num_support_all == 100
    assert audit.num_answers_found + audit.num_yes_no >= 97
    elsewhere = audit_corpus(read_passages(DATA / "2wikimultihopqa_corpus_6119.json"), tasks)
    print(elsewhere)
    assert elsewhere.num_answers_found < audit.num_answers_found
    assert elsewhere.num_support_all == 0
