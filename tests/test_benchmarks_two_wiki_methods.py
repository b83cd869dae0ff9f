"""The files of 2WikiMultihopQA for single methods."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import two_wiki, two_wiki_methods
from envs.checker import made_up
from envs.tasks.demonstrations import load_demonstrations
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import Record, ToolCall, TrajectoryGroup
from ragr1_actors.recipes.frugal_rag.frugal_rag import RECALL_FIELD
from ragr1_actors.recipes.rank_r1.rank_r1 import shown

RECORD: dict[str, Any] = {
    "_id": "a",
    "type": "compositional",
    "question": "Where was the director of Salt born?",
    "answer": "Riga",
    "supporting_facts": [["Salt", 0], ["Ana Bell", 0]],
    "evidences": [["Salt", "director", "Ana Bell"], ["Ana Bell", "place of birth", "Riga"]],
    "context": [["Salt", ["."]], ["Bo Cole", ["."]], ["Ana Bell", ["."]]],
}
CORPUS = [
    {"title": "Salt", "text": "Salt is a film by the director Ana Bell."},
    {"title": "Ana Bell", "text": f"Ana Bell is a director. {'She works. ' * 20} She was born in Riga."},
    {"title": "Bo Cole", "text": "Bo Cole was a director of films, born in Oslo."},
    {"title": "Ivo Reyes", "text": "Ivo Reyes, a director, was born in Turin."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The set's own files, and those of the recipe in ``out``."""
    train = [RECORD | {"question": f"Where was the director of Salt {number} born?"} for number in range(30)]
    train[3]["type"] = "comparison"
    for name, content in {"train_5": train, "test_1": [RECORD], "corpus_2": CORPUS}.items():
        (tmp_path / f"2wiki_{name}.json").write_text(json.dumps(content))
    two_wiki.main(tmp_path, tmp_path / "out")
    return tmp_path


def test_the_answer_is_in_one_of_the_paragraphs_that_are_ranked(folder: Path) -> None:
    two_wiki_methods.main(folder, target=folder / "out")
    read = {path.stem: json.loads(path.read_text()) for path in (folder / "out").glob("rank_*.json")}
    (task,) = read["rank_test"]
    assert (task["supporting_ids"], set(task["candidates"])) == (["Ana Bell"], {"Salt", "Ana Bell", "Bo Cole"})
    assert len(read["rank_train"]) + len(read["rank_demonstrations"]) == 29, "a comparison is no task of ranking"
    assert max(len(passage["text"].split()) for passage in read["rank_corpus"]) == two_wiki_methods.NUM_WORDS
    loaded, turns_of = load_demonstrations(folder / "out" / "rank_demonstrations.json")
    for one in loaded.tasks:
        label = 1 + shown(one, one.meta["candidates"]).index("Ana Bell")
        assert turns_of[one.task_id] == (f"<think> Salt , director , Ana Bell</think><answer>[{label}]</answer>",)
        assert one.golden_answers == (str(label),), (
            "a demonstration that is not right by exact match is not learned from"
        )


def test_most_demonstrations_search_until_no_search_is_left(folder: Path) -> None:
    path = folder / "out" / "demonstrations_single.json"
    (one, *_) = two_wiki_methods.explore(path, random.Random(1))
    assert one["output"].split("</search>")[1:] == [
        "<think> Salt , director , Ana Bell</think><search> Ana Bell",
        "<think> again Salt</think><search> Salt",
        "<think> again Ana Bell</think><search> Ana Bell",
        "<think> Ana Bell , place of birth , Riga</think><answer> Riga</answer>",
    ]
    drawn = [one for seed in range(5) for one in two_wiki_methods.explore(path, random.Random(seed))]
    num_turns = [one["output"].count("<think>") for one in drawn]
    assert set(num_turns) == {3, 5}


def test_a_question_has_the_recall_that_the_explorer_reached(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(
        json.dumps([{"question": " Who? ", "answer": "B"}, {"question": "When?", "answer": "C"}])
    )
    attempt = made_up("B")
    task = replace(attempt.task, question="Who?", supporting_ids=("Salt", "Riga"))
    calls = (ToolCall("search", {"query": "x"}, records=(Record("Salt", "Salt", "."),)),)
    attempt = replace(attempt, task=task, turns=(replace(attempt.turns[0], calls=calls),))
    path = tmp_path / "trajectories" / "eval_rl.arrow"
    path.parent.mkdir()
    write_trajectories(path, [groups_to_record_batch([TrajectoryGroup(task, (attempt,))])])
    (record,) = two_wiki_methods.explored(tmp_path / "train.json", tmp_path)
    assert record == {"question": " Who? ", "answer": "B", RECALL_FIELD: 0.5}
