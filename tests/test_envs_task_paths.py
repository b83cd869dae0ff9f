"""What names task files: a file, several, a folder of shards, a pattern; and what their tasks are called."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.tasks.files import load_tasks
from envs.tasks.paths import TaskFile, task_files
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.corpora.readers import read_passages


def write(path: Path, *numbers: int) -> Path:
    """Write a question for each number; those of a file that ends in .parquet as verl's scripts do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"Question {number}?", "answer": f"Answer {number}"} for number in numbers]
    if path.suffix == ".parquet":
        made = [
            {"extra_info": {"question": row["question"]}, "reward_model": {"ground_truth": [row["answer"]]}}
            for row in rows
        ]
        pq.write_table(pa.Table.from_pylist(made), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    elif path.suffix == ".tsv":
        path.write_text("\n".join(["question\tanswer", *(f"{row['question']}\t{row['answer']}" for row in rows)]))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_folder_of_shards_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "part-1.parquet", 2, 3)
    write(tmp_path / "part-0.jsonl", 0, 1)
    write(tmp_path / "part-2.jsonl.gz", 4)
    write(tmp_path / "part-3.tsv", 5)
    for other in ("README.md", ".part-0.jsonl", "id_aliases.json", "more/part-4.jsonl"):
        write(tmp_path / other, 9)
    loaded = load_tasks(tmp_path)
    ids = ["part-0/0", "part-0/1", "part-1/0", "part-1/1", "part-2/0", "part-3/0"]
    assert [(task.task_id, task.golden_answers) for task in loaded.tasks] == [
        (task_id, (f"Answer {number}",)) for number, task_id in enumerate(ids)
    ]
    assert str(loaded.report) == (
        f"{tmp_path}, 4 files: 6 tasks of 6 records; 3 of question and answer (part-0, part-2, part-3); "
        "1 of verl rows (part-1)"
    )


def test_a_compressed_table_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "popqa.tsv.gz").write_bytes(gzip.compress(b'id\tquestion\tpossible_answers\n7\tWhat?\t["poet"]\n'))
    (task,) = load_tasks(tmp_path / "popqa.tsv.gz").tasks
    assert (task.task_id, task.golden_answers) == ("popqa/7", ("poet",))


def test_a_pattern_and_a_list_and_what_is_wrong_in_which_file(tmp_path: Path) -> None:
    first, second = write(tmp_path / "nq/train.jsonl", 0, 1), write(tmp_path / "popqa/train.jsonl", 1, 2)
    by_pattern = load_tasks(str(tmp_path / "*/train.jsonl"))
    assert [task.task_id for task in by_pattern.tasks] == ["nq/train/0", "nq/train/1", "popqa/train/1"]
    assert by_pattern.report.places == {"num_duplicates": ("line 1 of popqa/train",)}
    assert "1 duplicate questions left out (line 1 of popqa/train)" in str(by_pattern.report)
    assert load_tasks([str(first), tmp_path / "popqa"]).tasks == by_pattern.tasks
    assert load_tasks([second, first]).tasks != by_pattern.tasks, "the order of a list is kept"
    (tmp_path / "popqa/train.jsonl").write_text('{"question": \n')
    with pytest.raises(DataError, match=r"popqa/train\.jsonl, line 1: not a JSON object"):
        load_tasks(str(tmp_path / "*/train.jsonl"))


def test_one_file_has_the_same_ids_however_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train[1].jsonl", 0)
    for named in (path, str(path), [str(path)], tmp_path, str(tmp_path / "train*")):
        assert task_files(named) == [TaskFile(path, "train[1]")]


def test_files_that_only_their_endings_tell_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, 0) for name in ("a.json", "a.jsonl")]
    assert [file.source for file in task_files(paths)] == ["a.json", "a.jsonl"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("absent.jsonl", "there is no file absent.jsonl, expected a task file (JSON, JSONL, CSV, TSV or Parquet), a"),
        ("", "got nothing, expected a task file"),
        (["t.jsonl", ""], "got nothing, expected a task file"),
        ("absent-*.jsonl", "no file fits absent-*.jsonl; expected a task file"),
        ("empty", "the folder empty holds no file that ends in .json, .jsonl, .csv, .tsv, .parquet; expected"),
        ("sets", "sets has files of the splits dev, test, train; name those of one, such as sets/*train*, or a list"),
        ("sets/*", "sets/* has files of the splits dev, test, train"),
        (["t.jsonl", "./t.jsonl"], "t.jsonl is named twice in t.jsonl, ./t.jsonl; name it once"),
        (["sets/nq-train-0.jsonl", "sets/*train*"], "sets/nq-train-0.jsonl is named twice in"),
        ("x" * 5000, "File name too long; expected a task file"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("t.jsonl"), 0)
    for name in ("nq-train-0", "nq-train-1", "validation", "test"):
        write(Path(f"sets/{name}.jsonl"), 0)
    Path("empty").mkdir()
    with pytest.raises(DataError) as caught:
        load_tasks(named)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_recipe_takes_a_list_and_refuses_what_is_none() -> None:
    config = AlgorithmConfig().override(["environment.tasks=[a.json, b/*.jsonl]"]).freeze()
    assert config.environment.tasks == ["a.json", "b/*.jsonl"]
    assert AlgorithmConfig.from_recipe("quickstart").freeze().environment.tasks == "world"
    with pytest.raises(ConfigError, match=r"^environment\.tasks: got .*unknown key environment\.tasks\.a"):
        AlgorithmConfig().environment(tasks={"a": "b"}).freeze()
    for wrong in (3, [], [3], None):
        with pytest.raises(ConfigError, match=r"^environment\.tasks: got .*expected the path of a task file, a source"):
            AlgorithmConfig().environment(tasks=wrong).freeze()


def test_a_folder_with_files_for_evaluation_is_of_two_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", 0)
    write(tmp_path / "eval.jsonl", 1)
    with pytest.raises(DataError, match="has files of the splits eval, train"):
        task_files(tmp_path)


def test_no_file_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="got nothing, expected a task file"):
        load_tasks([])


FOREIGN = {
    "a Git LFS pointer .* `git lfs pull`": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 64\n",
    "compressed with zstd": b"\x28\xb5\x2f\xfd\0\xff",
    "a zip archive": b"PK\x03\x04\x14\xff",
    "an Arrow file": b"ARROW1\0\0\xff",
    "a stream of Arrow": b"\xff\xff\xff\xff\x10\0",
    "text in UTF-16; save it as UTF-8": '[{"question": "Who?"}]'.encode("utf-16"),
    "a Parquet table that is compressed as a whole": gzip.compress(b"PAR1 and so on"),
}


@pytest.mark.parametrize("problem", FOREIGN)
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "tsv"])
def test_what_no_reader_knows_is_named_by_its_first_bytes(ending: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{ending}"
    path.write_bytes(FOREIGN[problem])
    with pytest.raises(DataError, match=problem):
        load_tasks(path)
    with pytest.raises(DataError, match=problem):
        list(read_passages(path))
