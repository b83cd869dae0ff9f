from __future__ import annotations

import bz2
import gzip
import json
import lzma
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.tasks.files import TaskReport, load_tasks, overlap, question_key, without_overlap
from envs.tasks.formats import listed
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder ../shared/data with the public question files")


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def test_hotpotqa(tmp_path: Path) -> None:
    record = {
        "_id": "5a7a",
        "question": "Which magazine was started first?",
        "answer": "Arthur's Magazine",
        "type": "comparison",
        "supporting_facts": [["Arthur's Magazine", 0], ["First for Women", 0], ["Arthur's Magazine", 1]],
        "context": [["Arthur's Magazine", ["A sentence."]]],
    }
    loaded = load_tasks(write(tmp_path / "hotpot.json", [record]))
    assert loaded.tasks == (
        Task(
            "hotpot/5a7a",
            "Which magazine was started first?",
            ("Arthur's Magazine",),
            "comparison",
            ("Arthur's Magazine", "First for Women"),
        ),
    )
    assert loaded.report == TaskReport("hotpot.json", num_records=1, num_tasks=1, shapes=(("hotpot", "HotpotQA"),))


def test_a_task_keeps_the_fields_that_nothing_else_reads(tmp_path: Path) -> None:
    read = {"id": 1, "question": "Who?", "answer": "Ana", "type": "t", "supporting_facts": [["Ana", 0]], "context": []}
    meta = {"pass_rate": 0.3, "level": "hard", "tags": ["a", None], "rubric": {"points": 2}}
    (task,) = load_tasks(write(tmp_path / "set.json", [read | meta])).tasks
    assert task.meta == meta
    (plain,) = load_tasks(write(tmp_path / "set.json", [read])).tasks
    assert (plain.meta, plain, hash(plain)) == ({}, task, hash(task))


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"golden_answers": "Delhi"}, ("Delhi",)),
        ({"golden_answers": ["New York", "NYC", "NYC"]}, ("New York", "NYC")),
        ({"answers": ["Riga", " ", None]}, ("Riga",)),
        ({"answer": 1931}, ("1931",)),
        ({"answer": "other", "golden_answers": "Washington, D.C."}, ("Washington, D.C.",)),
    ],
)
def test_answer_keys(tmp_path: Path, fields: dict[str, Any], answers: tuple[str, ...]) -> None:
    loaded = load_tasks(write(tmp_path / "t.json", [{"question": "q?", **fields}]))
    assert loaded.tasks == (Task("t/0", "q?", answers),)


def test_an_id_of_two_questions_gets_a_suffix(tmp_path: Path) -> None:
    records = [{"id": number, "question": f"Which {n}?", "answer": "b"} for n, number in enumerate([7, 7, "7#2", 8, 7])]
    for whole in (False, True):
        loaded = load_tasks(write(tmp_path / "t.json", records), whole=whole)
        assert [task.task_id for task in loaded.tasks] == ["t/7", "t/7#2", "t/7#2#2", "t/8", "t/7#3"]
        assert "3 ids that another question had" in str(loaded.report)


def test_the_time_for_equal_ids_is_linear(tmp_path: Path) -> None:
    took_s = []
    for number in (2_000, 8_000):
        path = write(tmp_path / "t.json", [{"id": 7, "question": f"Which {n}?", "answer": "b"} for n in range(number)])
        started = time.process_time()
        assert load_tasks(path).tasks[-1].task_id == f"t/7#{number}"
        took_s.append(time.process_time() - started)
    assert took_s[1] < 10 * took_s[0]  # 4 times the records; quadratic takes 16 times as long


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_a_compressed_file_is_told_by_its_first_bytes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "t.json").write_bytes(pack(json.dumps([{"question": "q?", "answer": "b"}]).encode()))
    assert load_tasks(tmp_path / "t.json").tasks == (Task("t/0", "q?", ("b",)),)
    (tmp_path / "t.json").write_bytes(pack(b"[" + b" " * 10_000)[:-5])
    with pytest.raises(DataError, match=r"t\.json: not a whole (gzip|bzip2|xz) file"):
        load_tasks(tmp_path / "t.json")


LISTS = [
    ("['Riga', 'riga city']", ("Riga", "riga city")),  # Python's
    ('["Riga", "riga\\u0020city"]', ("Riga", "riga city")),  # JSON's
    ("['Riga' 'riga city'\n \"O'Neill\"]", ("Riga", "riga city", "O'Neill")),  # NumPy's
    ("['it\\'s', '\\xe9\\d']", ("it's", "é\\d")),
    ('["\\ud83d\\ude00 \\/"]', ("😀 /",)),
    ("[1981.0]", ("1981",)),
    ("[1981, 2.5, -3, 12345678901234567890, 1e+20]", ("1981", "2.5", "-3", "12345678901234567890", "1e+20")),
    ([1981.0, "[1, 2]"], ("1981", "[1, 2]")),  # an answer of a list is no list
    *[
        (text, (text,))
        for text in ("[60]fullerene", "[Untitled]", "[007]", "[1,,2]", "['b''c']", "['b'c]", "['b', [1]]", "[1e400]")
    ],
    *[(text, (text,)) for text in ("['b', ...]", "[nan]", "['b'", "[ ]x", f"[{'9' * 5000}]", "1981.0", "['\\x4']")],
]


@pytest.mark.parametrize(("given", "answers"), LISTS)
def test_a_list_that_was_written_as_text_is_split(tmp_path: Path, given: Any, answers: tuple[str, ...]) -> None:
    for key in ("golden_answers", "answer"):
        assert (
            load_tasks(write(tmp_path / "t.json", [{"question": "Where?", key: given}])).tasks[0].golden_answers
            == answers
        )


def test_answers_that_begin_as_a_list_does_are_counted(tmp_path: Path) -> None:
    answers = ["[Untitled]", "['Riga']", "Riga [city]"]
    records = [{"question": f"Question {index}", "answer": answer} for index, answer in enumerate(answers)]
    report = load_tasks(write(tmp_path / "t.json", records)).report
    assert 'answers that begin with "["' in str(report)
    assert report.num_answers_with_bracket == 1


@pytest.mark.parametrize(
    "text", ["'a' " * 200_000, "'" * 300_000, "\\'" * 200_000, "1 " * 200_000 + "x", " " * 300_000]
)
def test_the_time_for_a_list_is_linear(text: str) -> None:
    started = time.process_time()
    listed(f"[{text}]")
    assert time.process_time() - started < 5.0  # quadratic would be hours


def test_jsonl_with_bom_and_line_separator_in_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = ['{"id": 7, "question": "one\u2028two?", "answer": "a b"}', "", '{"question": "three?", "answer": "c"}', ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [task.task_id for task in load_tasks(path).tasks] == ["t/7", "t/1"]
    assert load_tasks(path).tasks[0].question == "one\u2028two?"


def test_report_counts_what_is_wrong(tmp_path: Path) -> None:
    records = [
        {"question": "Who wrote Faust?", "answer": "Goethe"},
        {"question": " who wrote  faust", "answer": "goethe."},
        {"question": "Who wrote Faust?", "answer": "Marlowe"},
        {"question": "Is Riga, in Latvia, a city?", "answer": "Yes"},
        {"question": "Where?", "answer": "Riga, Latvia"},
        {"question": "Unanswered?", "answer": ""},
        {"question": "Which vitamin?", "answer": "A"},
        {"question": " ? ", "answer": "x"},
    ]
    loaded = load_tasks(write(tmp_path / "t.json", records))
    assert [task.golden_answers for task in loaded.tasks] == [("Goethe",), ("Yes",), ("Riga, Latvia",)]
    assert loaded.report == TaskReport(
        source="t.json",
        num_records=8,
        num_tasks=3,
        num_duplicates=2,
        num_conflicting=1,
        num_empty_questions=1,
        num_empty_answers=2,
        num_questions_with_comma=1,
        num_answers_with_comma=1,
        num_yes_no=1,
        shapes=(("t", "question and answer"),),
    )
    assert str(loaded.report) == (
        "t.json (question and answer): 3 tasks of 8 records; "
        "2 duplicate questions left out (entry 2 in line 1, entry 3 in line 1); "
        "1 of those with another answer (entry 3 in line 1); 1 empty questions left out (entry 8 in line 1); "
        "2 without a usable answer left out (entry 6 in line 1, entry 7 in line 1); 1 questions with a comma (33%); "
        "1 answers with a comma (33%); 1 yes/no answers (33%)"
    )


def test_a_report_names_the_first_places_of_a_fault(tmp_path: Path) -> None:
    records = [{"id": index, "question": "Where?", "answer": "Riga"} for index in range(6)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, records)))
    report = str(load_tasks(tmp_path / "t.jsonl").report)
    assert report.endswith("; 5 duplicate questions left out (line 2, line 3, line 4, ...)")


def test_a_published_set_is_counted_whole(tmp_path: Path) -> None:
    records = [
        {"_id": "a", "question": "Who wrote Faust?", "answer": "Goethe"},
        {"_id": "b", "question": "who wrote Faust", "answer": "Marlowe"},
        {"_id": "c", "question": "Which band?", "golden_answers": ["The The", "The The (band)"]},
        {"_id": "d", "question": "Which vitamin?", "answer": "A"},
        {"_id": "e", "question": "Unanswered?", "answer": ""},
    ]
    loaded = load_tasks(write(tmp_path / "dev.json", records), whole=True)
    golds = [("Goethe",), ("Marlowe",), ("The The", "The The (band)"), ("A",)]
    assert [task.golden_answers for task in loaded.tasks] == golds
    assert str(loaded.report) == (
        "dev.json (question and answer, RAG-R1): 4 tasks of 5 records; "
        "1 without a usable answer left out (entry 5 in line 1)"
    )
    assert [task.golden_answers for task in load_tasks(tmp_path / "dev.json").tasks] == [
        ("Goethe",),
        ("The The (band)",),
    ]


def test_musique_has_aliases_and_evidence(tmp_path: Path) -> None:
    titles = {"Faust": True, "Riga": False, "Goethe": True}
    record = {
        "id": "2hop__1_2",
        "paragraphs": [
            {"idx": index, "title": title, "paragraph_text": "A text.", "is_supporting": is_supporting}
            for index, (title, is_supporting) in enumerate(titles.items())
        ],
        "question": "Where was the author of Faust born?",
        "question_decomposition": [{"id": 1, "question": "Faust >> author", "answer": "Goethe"}],
        "answer": "Frankfurt",
        "answer_aliases": ["Frankfurt am Main", "Frankfurt"],
        "answerable": True,
    }
    path = tmp_path / "musique.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    (task,) = load_tasks(path).tasks
    assert task.golden_answers == ("Frankfurt", "Frankfurt am Main")
    assert task.supporting_ids == ("Faust", "Goethe")
    assert task.task_id == "musique/2hop__1_2"


def test_what_a_published_record_says_of_its_answer(tmp_path: Path) -> None:
    records = [
        {"id": "a", "question": "Who?", "answer": "Ana", "golden_answers": []},
        {"id": "b", "question": "When?", "answer": "1990", "answerable": False},
        {"id": "a", "question": "Who?", "answer": "Ana"},
    ]
    (tmp_path / "t.json").write_text(json.dumps(records))
    loaded = load_tasks(tmp_path / "t.json", whole=True)
    assert [(task.task_id, task.golden_answers) for task in loaded.tasks] == [("t/a", ("Ana",)), ("t/a/3", ("Ana",))]
    assert "1 without a usable answer left out" in str(loaded.report)


def test_question_key_keeps_what_matters() -> None:
    assert question_key(" Who wrote  Faust? ") == question_key("WHO WROTE FAUST")
    assert question_key("What is C++?") != question_key("What is C#?")


GOOD = '{"question": "q?", "answer": "a"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("[]", "holds an empty list"),
        (f"{GOOD}\n{{broken\n", "line 2: not a JSON object"),
        (f"{GOOD}\n{'[' * 100_000}\n", "line 2: not a JSON object (brackets nested too deeply)"),
        (f'{GOOD}\n{{"answer": {"1" * 5000}}}', "line 2: not a JSON object (a number of thousands of digits)"),
        (f"[{GOOD},\n{'[' * 100_000}", "line 2: not valid JSON (brackets nested too deeply)"),
        (f"[{GOOD},\n{'1' * 5000}]", "line 2: not valid JSON (a number of thousands of digits)"),
        (f"{GOOD}\n" + GOOD.replace("q?", "\\ud800?"), "line 2: half a character"),
        (f"{GOOD}\n" + GOOD.replace('"a"', '"\\udc00"'), "line 2: half a character"),
        (f"{GOOD}\n3\n", "line 2: got 3, expected an object"),
        (f"[\n{GOOD},\n{{broken}}\n]", "line 3: not valid JSON"),
        (f"[\n{GOOD}\n{GOOD}\n]", "line 3: not valid JSON"),
        (f"[\n{GOOD},\n]", "line 3: not valid JSON"),
        (f"[\n{GOOD},", "line 2: not valid JSON"),
        (f"[\n{GOOD}]\n[{GOOD}]", "line 3: not valid JSON (more text after its end)"),
        (f'{{"Data": [{GOOD}]}}\n{{"Data": [{GOOD}]}}', "line 2: not valid JSON (more text after its end)"),
        (f"[\n{GOOD}\n", "line 3: not valid JSON"),
        (f'[\n{GOOD},\n{{"answer": "a"}}]', "line 3: got the keys answer, expected a question"),
        ('{"question": "q?"}', "line 1: no answer; expected one of the keys golden_answers"),
        ('{"question": "q?", "answer": {"a": 1}}', 'line 1: got answer {"a": 1}'),
        ('{"question": "q?", "answer": true}', "line 1: got answer true"),
        ('{"question": "q?", "answer": NaN}', "line 1: got answer nan"),
        ('{"question": "q?", "answer": "a", "supporting_facts": 3}', "line 1: got supporting facts 3"),
        ('{"question": "q?", "answer": "a", "id": [1]}', "line 1: got id [1]"),
        ('{"question": "q?", "answer": ""}', "no usable question among 1 records"),
    ],
)
def test_broken_files_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_tasks(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_wrong_encoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*absent\.json, expected a task file \(JSON, JSONL, CSV"):
        load_tasks(tmp_path / "absent.json")
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "caf\xe9?", "answer": "a"}')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_tasks(path)


def test_overlap() -> None:
    train = [Task("t/0", "Who?", ("a",)), Task("t/1", "Where is it?", ("b",))]
    evaluation = [Task("e/0", "Why?", ("c",)), Task("e/1", "where is  it", ("b",))]
    assert overlap(train, evaluation) == ["where is  it"]
    assert without_overlap(train, evaluation) == (train[0],)


@real_data
def test_ragr1_question_files() -> None:
    train = load_tasks(DATA / "ragr1_mq_train_6664.json")
    test = load_tasks(DATA / "ragr1_mq_test_351.json")
    assert (train.report.num_tasks, train.report.num_duplicates, train.report.num_conflicting) == (6662, 2, 0)
    assert (test.report.num_tasks, test.report.num_duplicates) == (351, 0)
    assert (train.report.num_questions_with_comma, test.report.num_questions_with_comma) == (2076, 115)  # 31 %, 33 %
    assert (train.report.num_answers_with_comma, test.report.num_answers_with_comma) == (480, 32)
    assert (train.report.num_yes_no, test.report.num_yes_no) == (331, 5)
    assert len(overlap(train.tasks, test.tasks)) == 123
    assert len(without_overlap(train.tasks, test.tasks)) == 6662 - 123


@real_data
def test_hotpotqa_file() -> None:
    loaded = load_tasks(DATA / "hotpotqa_100.json")
    corpus = json.loads((DATA / "hotpotqa_corpus_994.json").read_text(encoding="utf-8"))
    assert loaded.report.num_tasks == 100
    assert {task.category for task in loaded.tasks} == {"bridge", "comparison"}
    assert all(len(task.supporting_ids) == 2 and set(task.supporting_ids) <= set(corpus) for task in loaded.tasks)
