"""Task files: questions with their answers, read from the formats they are published in.

==================  ======================================================================================
HotpotQA, 2Wiki     ``[{"_id", "question", "answer", "type", "supporting_facts": [[title, sentence], ...]}]``;
                    2Wiki's ``answer_id`` with the other names in ``id_aliases.json`` beside the file
MuSiQue             ``{"id", "question", "answer", "answer_aliases", "paragraphs": [{"title", "is_supporting"}, ...]}``
other sets          NQ, TriviaQA, PopQA, Bamboogle, FlashRAG and Search-R1: see ``envs/tasks/formats.py``
RAG-R1              ``[{"question", "golden_answers": "Delhi"}]``, or a list of answers
anything else       a JSON list, or one JSON object per line, with ``question`` and one of ``golden_answers``,
                    ``answers``, ``answer``; optionally ``id``, ``category``, ``supporting_ids``. A list of answers
                    may be written as text, as JSON, Python or NumPy prints it
==================  ======================================================================================

Published files have faults. A task that cannot be trained on is left out and counted; an odd one is kept and counted.
An evaluation set is read ``whole``, so that its figures compare with published ones::

    loaded = load_tasks("ragr1_mq_train_6664.json")
    print(loaded.report)  # ragr1_mq_train_6664.json (RAG-R1): 6,662 tasks of 6,664 records; 2 duplicate questions ...
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from envs.tasks.formats import (
    READ_FIELDS,
    listed,
    plain_fields,
    read_aliases,
    search_rounds,
    shape_of,
    squad_questions,
    table_rows,
)
from envs.tasks.paths import NamedTasks, TaskFile, shown, task_files
from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.disk.data_files import MAX_PLACES, FaultCounts, described, described_faults, opened
from ragr1_actors.core.errors import DataError, shortened
from ragr1_actors.core.types import Task

_ID_KEYS = ("_id", "id")
ANSWER_KEYS = ("golden_answers", "answers", "answer")
_CATEGORY_KEYS = ("category", "type")
_NOT_META = {
    *("question", *_ID_KEYS, *ANSWER_KEYS, *_CATEGORY_KEYS, "answer_id", "answer_aliases", "answerable"),
    *("supporting_ids", "supporting_facts", "paragraphs", "question_decomposition", "evidences", "search_rounds"),
    *READ_FIELDS,
    "context",  # the ten paragraphs of HotpotQA and 2Wiki, which would be held and sent with every task
}
"""Fields that are not kept in ``Task.meta``, because a task has them already or they are large."""
_SPACE = " \t\r\n"
_MAX_WHOLE = 1e15
"""Largest float that is written without an exponent; Python writes larger ones as 1e+20."""


_LEFT_OUT = {
    "num_duplicates": "duplicate questions left out",
    "num_conflicting": "of those with another answer",
    "num_empty_questions": "empty questions left out",
    "num_empty_answers": "without a usable answer left out",
}
_KEPT = {
    "num_repeated_ids": "ids that another question had, with #2 behind them",
    "num_questions_with_comma": "questions with a comma",
    "num_answers_with_comma": "answers with a comma",
    "num_yes_no": "yes/no answers",
    "num_answers_with_bracket": 'answers that begin with "["',
    "num_with_aliases": "answers with other names",
}


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Counts over task files; ``str`` makes one line of those that are not zero."""

    source: str
    """Name of the file, or of several files the name that selected them."""
    num_records: int
    num_tasks: int
    """Records kept."""
    num_duplicates: int = 0
    """Records left out because their question was read before."""
    num_conflicting: int = 0
    """Duplicates whose answers differ from those that were kept."""
    num_empty_questions: int = 0
    """Records left out because they have no question."""
    num_empty_answers: int = 0
    """Records left out: no answer, or only articles and punctuation, for which any other such one would be rewarded."""
    num_repeated_ids: int = 0
    """Records kept with ``#2`` after the id, because another question has the id."""
    num_questions_with_comma: int = 0
    """Kept tasks whose question has a comma, at which a policy that separates queries by commas splits it."""
    num_answers_with_comma: int = 0
    num_yes_no: int = 0
    """Kept tasks whose every answer is yes or no, so that a guess is right half of the time."""
    num_answers_with_bracket: int = 0
    """Kept tasks with an answer that begins with "[" but is not a list: a list may be damaged."""
    num_with_aliases: int = 0
    """Kept tasks with other names of the answer, from 2Wiki's ``id_aliases.json``."""
    shapes: tuple[tuple[str, str], ...] = ()
    """Shape that was recognised in each file: ``(("train", "verl rows"),)``, by ``TaskFile.source``."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """Places of the first records with each fault, by its count: ``{"num_duplicates": ("line 2", "line 9")}``."""

    def __str__(self) -> str:
        """Return the counts in one line."""
        by_shape: dict[str, list[str]] = {}
        for source, shape in self.shapes:
            by_shape.setdefault(shape, []).append(source)
        if len(self.shapes) == 1:
            head, parts = f"{self.source} ({self.shapes[0][1]})", []
        else:
            head = f"{self.source}, {len(self.shapes)} files" if self.shapes else self.source
            parts = [described(len(files), f"of {shape}", files[:MAX_PLACES]) for shape, files in by_shape.items()]
        counts = {name: getattr(self, name) for name in (*_LEFT_OUT, *_KEPT)}
        parts += described_faults(counts, _LEFT_OUT, self.places)
        parts += described_faults(counts, _KEPT, self.places, total=self.num_tasks)
        return "; ".join([f"{head}: {self.num_tasks:,} tasks of {self.num_records:,} records", *parts])


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks of some files, in their order."""

    tasks: tuple[Task, ...]
    report: TaskReport


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a file, with its place for messages."""

    fields: dict[str, Any]
    where: str  # "questions.jsonl, line 3", "questions.json, entry 2 in line 5"


def load_tasks(named: NamedTasks, *, whole: bool = False) -> LoadedTasks:
    """Read the tasks of one or several files (see ``task_files``); ids are ``<source>/<id>``.

    A record without an id has its position in its file, from 0. A question of an earlier file counts as read before.

    With ``whole``, for evaluation, repeated questions and answers of articles and punctuation ("The The", "A") are
    kept; only records without a question or without any answer are left out.

    Raises:
        DataError: a file is missing or empty, a line is broken (the message names file and line), or no task is left.
    """
    return read_files(task_files(named), shown(named), whole=whole)


def read_files(files: Sequence[TaskFile], named: str, *, whole: bool) -> LoadedTasks:
    """Read the tasks of files as ``load_tasks`` does; ``named`` is for messages and for the report on several."""
    reading = _Reading(whole)
    for file in files:
        reading.read(file, f" of {file.source}" if len(files) > 1 else "")
    faults, tasks = reading.faults, reading.tasks
    counts = faults.counts
    if not tasks:
        raise DataError(
            f"{named}: no usable question among {reading.num_records} records "
            f"({counts['num_empty_questions']} empty questions, {counts['num_empty_answers']} without a usable answer)"
        )
    report = TaskReport(
        source=files[0].path.name if len(files) == 1 else named,
        num_records=reading.num_records,
        num_tasks=len(tasks),
        num_questions_with_comma=sum("," in task.question for task in tasks),
        num_answers_with_comma=sum(any("," in answer for answer in task.golden_answers) for task in tasks),
        num_yes_no=sum(_answer_keys(task) <= {"yes", "no"} for task in tasks),
        shapes=tuple(reading.shapes.items()),
        places=faults.places,
        **counts,
    )
    return LoadedTasks(tuple(tasks), report)


class _Reading:
    """Tasks that were read so far, and the faults in their files."""

    def __init__(self, whole: bool) -> None:
        self.tasks: list[Task] = []
        self.faults = FaultCounts()
        self.num_records = 0
        self.shapes: dict[str, str] = {}
        """Shapes by ``TaskFile.source``."""
        self._whole = whole
        self._first_of: dict[str, Task] = {}  # by question key
        self._ids: set[str] = set()
        self._numbers: dict[str, Iterator[int]] = {}  # behind an id, each tried once

    def read(self, file: TaskFile, of_file: str) -> None:
        """Read one file; ``of_file`` ends the places of its faults."""
        aliases: dict[str, list[str]] | None = None  # read for the first record that has an ``answer_id``
        shapes: Counter[str] = Counter()
        for position, record in enumerate(read_records(file.path)):
            place = record.where.removeprefix(f"{file.path}, ") + of_file
            shapes[shape_of(record.fields)] += 1
            if "answer_id" in record.fields:
                aliases = read_aliases(file.path.parent) if aliases is None else aliases
                self.faults.counts["num_with_aliases"] += _add_aliases(record, aliases)
            self._add(make_task(record, file.source, position, self._whole), place, position + 1)
        self.shapes[file.source] = ", ".join(name for name, _ in shapes.most_common())
        self.num_records += shapes.total()

    def _add(self, task: Task, place: str, number: int) -> None:
        key, faults = question_key(task.question), self.faults
        if not key:
            faults.add("num_empty_questions", place)
        elif not task.golden_answers:
            faults.add("num_empty_answers", place)
        elif key in self._first_of and not self._whole:
            faults.add("num_duplicates", place)
            if _answer_keys(task) != _answer_keys(self._first_of[key]):
                faults.add("num_conflicting", place)
        elif key in self._first_of and task.task_id in self._ids:  # a repeated record of a published set
            self._keep(replace(task, task_id=f"{task.task_id}/{number}"), place)
        else:
            if task.task_id in self._ids:
                faults.add("num_repeated_ids", place)
                task = replace(task, task_id=self._unused(task.task_id))
            self._keep(task, place)
            self._first_of[key] = task
            self._ids.add(task.task_id)

    def _keep(self, task: Task, place: str) -> None:
        self.tasks.append(task)
        if any(answer[0] == "[" for answer in task.golden_answers):
            self.faults.add("num_answers_with_bracket", place)

    def _unused(self, task_id: str) -> str:
        """Return ``"t/7#2"`` for a second ``"t/7"``, and so on."""
        numbers = self._numbers.setdefault(task_id, count(2))
        return next(name for number in numbers if (name := f"{task_id}#{number}") not in self._ids)


def _add_aliases(record: Record, aliases: dict[str, list[str]]) -> bool:
    """Add the other names of the answer of a 2Wiki record; return False if there are none."""
    answer_id = record.fields["answer_id"]
    names = aliases.get(answer_id, []) if isinstance(answer_id, str) else []
    if names:
        record.fields["answer_aliases"] = [*_as_list(record.fields.get("answer_aliases", [])), *names]
    return bool(names)


def question_key(question: str) -> str:
    """Return a key without case, extra spaces and closing punctuation: ``"who wrote faust"`` for " Who wrote Faust? ".

    Punctuation inside is kept: "C++" is not "C#".
    """
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split()).strip("?.! ")


def overlap(train: Iterable[Task], evaluation: Iterable[Task]) -> list[str]:
    """Return the evaluation questions that are also in ``train``, in the order of ``evaluation``."""
    seen = {question_key(task.question) for task in train}
    return [task.question for task in evaluation if question_key(task.question) in seen]


def without_overlap(train: Iterable[Task], evaluation: Iterable[Task]) -> tuple[Task, ...]:
    """Return the training tasks whose question is not in ``evaluation``.

    The training tasks are dropped, so that figures on a published evaluation set stay comparable.
    """
    held_out = {question_key(task.question) for task in evaluation}
    return tuple(task for task in train if question_key(task.question) not in held_out)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON list, of one JSON object per line, or of a table.

    It also reads TriviaQA's ``{"Data": [...]}``, and the questions of SQuAD's ``{"data": [article, ...]}``.

    Raises:
        DataError: the file is missing or empty, or a line is broken; the message names file and line.
    """
    if not path.is_file():
        raise DataError(f"no task file {path}; give an existing one")
    if (rows := table_rows(path)) is not None:
        yield from (Record(fields, f"{path}, row {number}") for number, fields in enumerate(rows, start=1))
        return
    text = _read(path)
    if not text.strip():
        raise DataError(f"{path} is empty; expected a JSON list or one JSON object per line, each with a question")
    is_list = text.lstrip()[0] == "["
    entries = _list_entries(text, path) if is_list else _data_entries(text, path) or _line_entries(text, path)
    empty = True
    for entry, where in entries:
        if not isinstance(entry, dict):
            raise DataError(f"{where}: got {_shown(entry)}, expected an object with a question and its answer")
        yield Record(entry, where)
        empty = False
    if empty:
        raise DataError(f"{path} holds an empty list; expected at least one question")


def _read(path: Path) -> str:
    with opened(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error


def _data_entries(text: str, path: Path) -> Iterator[tuple[Any, str]] | None:
    """Return the entries of an object with a list ``Data`` (TriviaQA's) or ``data`` (SQuAD's), or one of several lines.

    Return None for other files.
    """
    try:
        first, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None  # the reader of lines says which line is wrong
    key = "data" if isinstance(first, dict) and isinstance(first.get("data"), list) else "Data"
    data = first.get(key) if isinstance(first, dict) else None
    if not isinstance(data, list):
        is_whole = "\n" in text[:end].strip() and not text[end:].strip()
        return iter([(first, f"{path}, its one object")]) if is_whole else None
    _check_end(text, end, path)
    places = ((entry, f"entry {number} of {key}") for number, entry in enumerate(data, start=1))
    return ((found, f"{path}, {place}") for entry, where in places for found, place in _questions(entry, where))


def _questions(entry: Any, where: str) -> list[tuple[Any, str]]:
    """Return the questions of an article of SQuAD, or the entry itself."""
    return [(question, f"{place} of {where}") for question, place in squad_questions(entry)] or [(entry, where)]


def _line_entries(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    # not str.splitlines: it splits at U+2028, which JSON strings may hold
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield json.loads(line), where
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not a JSON object ({_reason(error)})") from error


def _list_entries(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    # entry by entry: json.loads would not tell the line of an entry
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
    line, counted_to, number = 1, 0, 0
    while text[position : position + 1] != "]":
        line, counted_to = line + text.count("\n", counted_to, position), position
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {line}: not valid JSON ({_reason(error)})") from error
        number += 1
        yield entry, f"{path}, entry {number} in line {line}"
        position = _skip_space(text, position)
        if text[position : position + 1] not in (",", "]"):
            line += text.count("\n", counted_to, position)
            raise DataError(f"{path}, line {line}: not valid JSON (expected a comma or the end of the list)")
        if text[position] == ",":
            position = _skip_space(text, position + 1)
            if text[position : position + 1] == "]":
                line += text.count("\n", counted_to, position)
                raise DataError(f"{path}, line {line}: not valid JSON (a comma before the end of the list)")
    _check_end(text, position + 1, path)


def _check_end(text: str, position: int, path: Path) -> None:
    """Refuse text after the one JSON value of a file, because it would not be read."""
    if rest := text[position:].lstrip():
        line = 1 + text.count("\n", 0, len(text) - len(rest))
        raise DataError(f"{path}, line {line}: not valid JSON (more text after its end); keep one list in a file")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def make_task(record: Record, source: str, position: int, whole: bool) -> Task:
    """Read the task of a record of the file ``source``; ``position`` is the id of a record without one.

    Raises:
        DataError: a field has the wrong type, or half of a surrogate pair.
    """
    record = Record(plain_fields(record.fields, record.where), record.where)
    fields = record.fields
    question = fields.get("question")
    if "question" not in fields:
        raise DataError(f"{record.where}: got the keys {', '.join(map(str, fields))}, expected a question")
    if not isinstance(question, str):
        raise DataError(f"{record.where}: got question {_shown(question)}, expected text")
    local_id = next((fields[key] for key in _ID_KEYS if fields.get(key) is not None), position)
    if isinstance(local_id, float) and local_id.is_integer():  # of a table in which another row has none
        local_id = int(local_id)
    if not isinstance(local_id, str | int):
        raise DataError(f"{record.where}: got id {_shown(local_id)}, expected text or a whole number")
    category = next((fields[key] for key in _CATEGORY_KEYS if isinstance(fields.get(key), str)), "")
    titles = supporting_ids(record)
    task = Task(
        task_id=f"{source}/{local_id}",
        question=question.strip(),
        golden_answers=_answers(record, whole),
        category=category,
        supporting_ids=titles,
        plan=search_rounds(question, titles, fields),
        meta=meta_of(fields),
    )
    try:
        "".join((task.task_id, question, *task.golden_answers, category, *task.supporting_ids)).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{record.where}: half a character, a lone \\ud800 escape or the like; mend the text"
        ) from error
    return task


def meta_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that become ``Task.meta``: small ones that are not read otherwise."""
    return {name: value for name, value in fields.items() if name not in _NOT_META}


def _answers(record: Record, whole: bool) -> tuple[str, ...]:
    """Return the unique answers in their order; answers of only articles and punctuation are kept if ``whole``."""
    given = [record.fields[key] for key in ANSWER_KEYS if key in record.fields]
    if not given:
        raise DataError(f"{record.where}: no answer; expected one of the keys {', '.join(ANSWER_KEYS)}")
    if record.fields.get("answerable") is False:  # MuSiQue's key; the answer of such a record is a guess
        return ()
    given.sort(key=lambda value: all(one in ("", None) for one in _as_list(value)))  # an empty value hides no answer
    aliases = record.fields.get("answer_aliases", [])  # MuSiQue's key
    values = [*_items(given[0]), *_items(aliases)]
    answers: dict[str, None] = {}
    for value in values:
        if isinstance(value, bool) or not (value is None or isinstance(value, str | int | float)):
            raise DataError(f"{record.where}: got answer {_shown(value)}, expected text or a list of texts")
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{record.where}: got answer {value}, expected text or a finite number")
        answer = _text(value).strip()
        if normalize_answer(answer) or (whole and answer):
            answers[answer] = None
    return tuple(answers)


def supporting_ids(record: Record) -> tuple[str, ...]:
    """Return the titles of the supporting facts: the passage ids of a corpus keyed by title. Needs ``plain_fields``."""
    facts = record.fields.get("supporting_facts")
    facts = record.fields.get("supporting_ids") if facts is None else facts
    if facts is None:
        paragraphs = record.fields.get("paragraphs")  # MuSiQue's key
        paragraphs = [p for p in paragraphs if isinstance(p, dict)] if isinstance(paragraphs, list) else []
        facts = [paragraph.get("title") for paragraph in paragraphs if paragraph.get("is_supporting")]
    if isinstance(facts, dict):  # as the hub stores it: {"title": [...], "sent_id": [...]}
        facts = facts.get("title")
    if isinstance(facts, list):
        titles = [fact[0] if isinstance(fact, list) and fact else fact for fact in facts]
        titles = [str(title) if type(title) is int else title for title in titles]  # some ids are numbers
        if all(isinstance(title, str) for title in titles):
            return tuple(dict.fromkeys(titles))
    raise DataError(f"{record.where}: got supporting facts {_shown(facts)}, expected [[title, sentence number], ...]")


def _text(value: str | float | None) -> str:
    """Return an answer as text: 1981 and 1981.0 are both "1981"."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return str(int(value))
    return "" if value is None else str(value)


def _items(value: Any) -> list[Any]:
    """Return the items of a list, also of one written as text; any other value is the only item."""
    found = listed(value) if isinstance(value, str) else None
    return _as_list(value) if found is None else list(found)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _answer_keys(task: Task) -> set[str]:
    return {normalize_answer(answer) for answer in task.golden_answers}


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "brackets nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    return "a number of thousands of digits"  # json raises no other ValueError here


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates, bytes and decimals
    except RecursionError:
        return "brackets nested deeply"
    return shortened(text, 60)
