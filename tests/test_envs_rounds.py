"""In which order evidence can be asked for, by what published sets say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.grammars.tags import Answer, Search, parse_action
from envs.options import QueryFormat
from envs.search import clean_queries
from envs.tasks.demonstrations import evidence_demonstration
from envs.tasks.files import load_tasks
from envs.tasks.formats import search_rounds
from ragr1_actors.core.types import Task

FILMS = ["Red Dawn (1999 film)", "The Cup", "Ana Bell (director)", "Bo Cole"]
WHO = "Which film has the director born first, Red Dawn (1999 Film) or The Cup?"
DIRECTORS = [
    ["Red Dawn", "director", "Ana Bell"],
    ["The Cup", "director", "Bo Cole"],
    ["Ana Bell", "date of birth", "1931"],
    ["Bo Cole", "date of birth", "1953"],
]


def step(question: str, title: str) -> dict[str, Any]:
    return {"question": question, "support_paragraph": {"title": title}}


@pytest.mark.parametrize(
    ("question", "titles", "fields", "expected"),
    [
        (
            WHO,
            FILMS,
            {"evidences": DIRECTORS},
            (("Red Dawn (1999 film)", "The Cup"), ("Ana Bell", "Bo Cole")),
        ),
        # the names of triples differ from the titles: only the question tells
        (
            WHO,
            FILMS,
            {"evidences": [[one.replace("Ana", "A."), relation, two] for one, relation, two in DIRECTORS]},
            (("Red Dawn (1999 film)", "The Cup"), ("Ana Bell", "Bo Cole")),
        ),
        (WHO, FILMS, {}, (("Red Dawn (1999 film)", "The Cup"), ("Ana Bell", "Bo Cole"))),
        ("Which came first, Red Dawn or The Cup?", FILMS[:2], {"evidences": DIRECTORS[:2]}, ()),
        ("Who is it?", ["Ana Bell", "Bo Cole"], {}, ()),  # the question has no name: no order is known
        ("Who is it?", [], {"evidences": DIRECTORS}, ()),
        # three steps, each known from the one before; the question names all of them
        (
            "a b c",
            ["c", "b", "a"],
            {"evidences": [["a", "x", "b"], ["b", "x", "c"], ["c", "x", "d"]]},
            (("a",), ("b",), ("c",)),
        ),
        # a circle ends
        ("a b", ["a", "b"], {"evidences": [["a", "spouse", "b"], ["b", "spouse", "a"]]}, ()),
        # MuSiQue: step 3 needs both before it
        (
            "a b c",
            ["P", "Q", "R"],
            {"question_decomposition": [step("a >> x", "P"), step("b >> y", "Q"), step("who knows #1 and #2", "R")]},
            (("P", "Q"), ("R",)),
        ),
        # a step without its passage: only the question tells
        ("about Q", ["P", "Q"], {"question_decomposition": [{"question": "a", "answer": "b"}]}, (("Q",), ("P",))),
        ("about Q", ["P", "Q"], {"evidences": "none", "question_decomposition": [7]}, (("Q",), ("P",))),
    ],
    ids=[
        "films and directors",
        "other names in triples",
        "no triples",
        "one round",
        "no name",
        "no titles",
        "three rounds",
        "circle",
        "MuSiQue",
        "steps without passages",
        "odd fields",
    ],
)
def test_rounds_of_evidence(
    question: str, titles: list[str], fields: dict[str, Any], expected: tuple[tuple[str, ...], ...]
) -> None:
    assert search_rounds(question, titles, fields) == expected


def test_a_name_is_found_whatever_its_case_and_marks() -> None:
    assert search_rounds("who sang dont stop!", ["Ana Bell", "Don't Stop"], {}) == (("Don't Stop",), ("Ana Bell",))


def test_a_demonstration_of_a_file_asks_round_by_round(tmp_path: Path) -> None:
    record = {
        "_id": "1",
        "question": WHO,
        "answer": "Red Dawn",
        "type": "bridge_comparison",
        "supporting_facts": [[title, 0] for title in FILMS],
        "evidences": DIRECTORS,
    }
    path = tmp_path / "wiki.json"
    stored = {name: json.dumps(record[name]) for name in ("supporting_facts", "evidences")}  # as the hub has it
    for one in (record | stored, record):
        path.write_text(json.dumps([one]))
        (task,) = load_tasks(path).tasks
        assert (task.supporting_ids, len(task.plan)) == (tuple(FILMS), 2)
    turns = evidence_demonstration(task, 3)
    assert asked(turns) == [["Red Dawn (1999 film)", "The Cup"], ["Ana Bell", "Bo Cole"]]
    assert parse_action(turns[-1]) == Answer("Red Dawn")
    assert turns[1].startswith("<think> found Ana Bell , Bo Cole</think>")  # what it learned from the first round
    assert len(evidence_demonstration(task, 1)) == 5  # a query a turn
    single = evidence_demonstration(task, 3, "single")
    assert asked(single, "single") == [["Red Dawn (1999 film)"], ["The Cup"], ["Ana Bell"], ["Bo Cole"]]


def asked(turns: list[str], query_format: QueryFormat = "lines") -> list[list[str]]:
    """The queries of every turn but the last, as the environment executes them."""
    actions = [parse_action(turn, query_format) for turn in turns[:-1]]
    return [list(clean_queries(action.queries, 3).queries) for action in actions if isinstance(action, Search)]


def test_without_a_plan_all_evidence_is_asked_for_at_once() -> None:
    task = Task("a/1", "Who?", ("x",), supporting_ids=("P", "Q"))
    assert asked(evidence_demonstration(task, 3)) == [["P", "Q"]]
