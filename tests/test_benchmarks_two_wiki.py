"""The files of 2WikiMultihopQA for the recipe of the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real import two_wiki
from envs.teacher import load_demonstrations
from ragr1_actors.core.config import QueryFormat
from ragr1_actors.core.errors import DataError

COMPARISON = {
    "_id": "a",
    "type": "bridge_comparison",
    "question": "Which film has the director who died first, Salt or The Cup (film)?",
    "answer": "Salt",
    "supporting_facts": [["Salt", 0], ["The Cup (film)", 0], ["Ana Bell (director)", 0], ["Bo Cole", 0]],
    "evidences": [
        ["Salt", "director", "Ana Bell"],
        ["The Cup", "director", "Bo Cole"],
        ["Ana Bell", "date of death", "9 June 1956"],
        ["Bo Cole", "date of death", "October 26, 1993"],
    ],
}
FILMS = "Salt , director , Ana Bell ; The Cup , director , Bo Cole"
DEATHS = "Ana Bell , date of death , 9 June 1956 ; Bo Cole , date of death , October 26, 1993"
SEVERAL = (
    "<think> find evidence</think><search> Salt\n The Cup (film)</search>",
    f"<think> {FILMS}</think><search> Ana Bell\n Bo Cole</search>",
    f"<think> {DEATHS}</think><answer> Salt</answer>",
)
SINGLE = (
    "<think> find evidence</think><search> Salt</search>",
    "<think> next</think><search> The Cup (film)</search>",
    f"<think> {FILMS}</think><search> Ana Bell</search>",
    "<think> next</think><search> Bo Cole</search>",
    f"<think> {DEATHS}</think><answer> Salt</answer>",
)


def write(folder: Path, train: list[dict[str, object]]) -> None:
    for name, content in {"train_5": train, "test_1": train[:1], "corpus_2": [{"title": "Salt", "text": "A"}]}.items():
        (folder / f"2wiki_{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("query_format", "turns"), [("lines", SEVERAL), ("single", SINGLE)])
def test_a_demonstration_repeats_what_it_read(tmp_path: Path, query_format: QueryFormat, turns: tuple[str]) -> None:
    path = tmp_path / "demonstrations.json"
    path.write_text(json.dumps([two_wiki.demonstration(COMPARISON, query_format)]))
    loaded, turns_of = load_demonstrations(path, query_format)
    assert list(turns_of.values()) == [turns]
    assert loaded.tasks[0].golden_answers == ("Salt",)
    assert loaded.tasks[0].supporting_ids == ("Salt", "The Cup (film)", "Ana Bell (director)", "Bo Cole")


def test_a_comparison_in_one_round_repeats_all_that_it_read() -> None:
    record = COMPARISON | {
        "question": "Who died first, Ana Bell or Bo Cole?",
        "answer": "Ana Bell",
        "supporting_facts": [["Ana Bell", 0], ["Bo Cole", 0]],
        "evidences": COMPARISON["evidences"][2:],  # type: ignore[index]
    }
    assert two_wiki.demonstration(record, "lines")["output"] == (
        "<think> find evidence</think><search> Ana Bell\n Bo Cole</search>"
        f"<think> {DEATHS}</think><answer> Ana Bell</answer>"
    )


def test_the_files_of_the_recipe(tmp_path: Path) -> None:
    answers = ["yes", "no", "Yes", *["Riga"] * 9]
    write(tmp_path, [COMPARISON | {"question": f"{number}?", "answer": a} for number, a in enumerate(answers)])
    two_wiki.main(tmp_path, tmp_path / "out")
    read = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    for name in two_wiki.DEMONSTRATIONS:
        demonstrated = {one["question"] for one in read[name]}
        others = {one["question"] for one in read["train.json"]}
        assert (len(demonstrated), len(others), len(demonstrated | others)) == (3, 7, 10)
    assert [one["answer"] for one in read["train.json"] + read["demonstrations.json"]].count("Riga") == 9
    assert (tmp_path / "out" / "test.json").read_bytes() == (tmp_path / "2wiki_test_1.json").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of 2WikiMultihopQA like \*train\*.json in"):
        two_wiki.main(tmp_path, tmp_path / "out")
