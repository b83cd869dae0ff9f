"""Task files whose values are of other types than a person would write: tables, empty values, numbers as ids."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.tasks.files import load_tasks
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task


def tasks_of(path: Path, *records: dict[str, Any]) -> tuple[Task, ...]:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return load_tasks(path).tasks


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_ids_that_other_rows_lack(name: str, tmp_path: Path) -> None:
    """A column of whole numbers becomes one of floats where a row has none."""
    rows = [{"id": number, "question": f"Q{row}?", "answer": "Riga"} for row, number in enumerate((7.0, None, 9.0))]
    assert [task.task_id for task in tasks_of(tmp_path / name, *rows)] == ["t/7", "t/1", "t/9"]
    with pytest.raises(DataError, match=r"got id 1\.5, expected text or a whole number"):
        tasks_of(tmp_path / name, {"id": 1.5, "question": "Q?", "answer": "Riga"})


def test_rows_of_two_shapes_in_one_table(tmp_path: Path) -> None:
    """Each row has the columns of both, null where they are not its own."""
    trainers = {
        "prompt": [{"role": "user", "content": "Answer it. Question: Where?"}],
        "reward_model": {"ground_truth": {"target": ["Riga"]}},
    }
    own = {"question": "Who?", "golden_answers": ["Ana"]}
    rows = [trainers | dict.fromkeys(own), own | dict.fromkeys(trainers)]
    found = tasks_of(tmp_path / "t.parquet", *rows)
    assert [(task.question, task.golden_answers) for task in found] == [("Where?", ("Riga",)), ("Who?", ("Ana",))]


@pytest.mark.parametrize("truth", ['{"target": ["Riga", "Rigan"]}', " {\"target\": \"['Riga', 'Rigan']\"}"])
def test_a_ground_truth_written_as_text(truth: str, tmp_path: Path) -> None:
    (task,) = tasks_of(
        tmp_path / "t.jsonl", {"extra_info": {"question": "Where?"}, "reward_model": {"ground_truth": truth}}
    )
    assert (task.question, task.golden_answers) == ("Where?", ("Riga", "Rigan"))


def test_an_answer_that_looks_like_an_object_stays(tmp_path: Path) -> None:
    (task,) = tasks_of(tmp_path / "t.jsonl", {"question": "Which set?", "reward_model": {"ground_truth": "{a, b}"}})
    assert task.golden_answers == ("{a, b}",)


@pytest.mark.parametrize("empty", [[], "", None, [""], [None], ["", None]])
def test_an_empty_answer_hides_none(empty: Any, tmp_path: Path) -> None:
    (task,) = tasks_of(tmp_path / "t.jsonl", {"question": "Where?", "golden_answers": empty, "answer": "Riga"})
    assert task.golden_answers == ("Riga",)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(b"Riga", "\"b'Riga'\""), (datetime.date(1981, 2, 3), '"1981-02-03"'), (Decimal("1.50"), '"1.50"')],
)
def test_other_types_of_a_table_are_shown(value: Any, shown: str, tmp_path: Path) -> None:
    for key, record in (("answer", {"question": "Q?"}), ("question", {"answer": "Riga"})):
        with pytest.raises(DataError) as caught:
            tasks_of(tmp_path / "t.parquet", record | {key: value})
        assert f"row 1: got {key} {shown}, expected text" in str(caught.value)


def test_evidence_by_numbers(tmp_path: Path) -> None:
    found = tasks_of(
        tmp_path / "t.jsonl",
        {"question": "A?", "answer": "Riga", "supporting_ids": [12, 15]},
        {"question": "B?", "answer": "Riga", "supporting_ids": ["12"], "supporting_facts": None},
    )
    assert [task.supporting_ids for task in found] == [("12", "15"), ("12",)]
    with pytest.raises(DataError, match=r"got supporting facts \[true\]"):
        tasks_of(tmp_path / "t.jsonl", {"question": "A?", "answer": "Riga", "supporting_ids": [True]})


def test_one_object_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"question": "Where?", "answer": "Riga"}, indent=2))
    assert load_tasks(path).tasks[0].golden_answers == ("Riga",)
    path.write_text(json.dumps({"train": [{"question": "Where?", "answer": "Riga"}]}, indent=2))
    with pytest.raises(DataError, match=r"t\.json, its one object: got the keys train, expected a question"):
        load_tasks(path)
