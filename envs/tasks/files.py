"""Task files: questions with their answers, read from the formats they are published in.

==================  ======================================================================================
HotpotQA, 2Wiki     ``[{"_id", "question", "answer", "type", "supporting_facts": [[title, sentence], ...]}]``;
                    2Wiki's ``answer_id`` with the other names in ``id_aliases.json`` beside the file
MuSiQue             ``{"id", "question", "answer", "answer_aliases", "paragraphs": [{"title", "is_supporting"}, ...]}``
other sets          NQ, TriviaQA, PopQA, Bamboogle, FlashRAG and Search-R1: see ``envs/tasks/formats.py``
RAG-R1, Search-R1   ``[{"question", "golden_answers": "Delhi"}]``, or a list of answers
anything else       a JSON list, or one JSON object per line, with ``question`` and one of ``golden_answers``,
                    ``answers``, ``answer``; optionally ``id``, ``category``, ``supporting_ids``. A list of answers
                    may be written as text, as JSON, Python or NumPy prints it
==================  ======================================================================================

Published files have faults. A task that cannot be trained on is left out and counted; an odd one is kept and counted.
An evaluation set is read ``whole``, so that its figures compare with published ones::

    loaded = load_tasks(Path("ragr1_mq_train_6664.json"))
    print(loaded.report)  # ragr1_mq_train_6664.json: 6,662 tasks of 6,664 records; 2 duplicate questions left out; ...
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from envs.tasks.formats import TABLES, listed, plain_fields, read_aliases, read_table
from ragr1_actors.core.errors import DataError, shortened
from ragr1_actors.core.files import is_parquet, opened
from ragr1_actors.core.types import Task, normalize_answer

_ID_KEYS = ("_id", "id")
ANSWER_KEYS = ("golden_answers", "answers", "answer")
_CATEGORY_KEYS = ("category", "type")
_SPACE = " \t\r\n"
_MAX_WHOLE = 1e15
"""Larger floats are written as Python does: 1e+20."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Counts over a task file; ``str`` makes one line of those that are not zero."""

    source: str
    """File name."""
    num_records: int
    num_tasks: int
    """Records kept."""
    num_duplicates: int = 0
    """Left out: the question was read before."""
    num_conflicting: int = 0
    """Duplicates whose answers differ from those that were kept."""
    num_empty_questions: int = 0
    """Left out."""
    num_empty_answers: int = 0
    """Left out: no answer, or only articles and punctuation, for which any other such answer would be rewarded."""
    num_repeated_ids: int = 0
    """Kept, with ``#2`` behind the id: another question had it."""
    num_questions_with_comma: int = 0
    """Counted over the tasks kept, like the next three. A policy that separates queries by commas splits it."""
    num_answers_with_comma: int = 0
    num_yes_no: int = 0
    """Every answer is yes or no, so a guess is right half of the time."""
    num_answers_with_bracket: int = 0
    """Answers that begin with "[" and are no list: a list may be damaged."""
    num_with_aliases: int = 0
    """Other names of the answer count as well, from 2Wiki's ``id_aliases.json``."""

    def __str__(self) -> str:
        """One line."""
        left_out = [
            (self.num_duplicates, "duplicate questions left out"),
            (self.num_conflicting, "of those with another answer"),
            (self.num_empty_questions, "empty questions left out"),
            (self.num_empty_answers, "without a usable answer left out"),
        ]
        kept = [
            (self.num_repeated_ids, "ids that another question had, with #2 behind them"),
            (self.num_questions_with_comma, "questions with a comma"),
            (self.num_answers_with_comma, "answers with a comma"),
            (self.num_yes_no, "yes/no answers"),
            (self.num_answers_with_bracket, 'answers that begin with "["'),
            (self.num_with_aliases, "answers with other names"),
        ]
        parts = [f"{count:,} {what}" for count, what in left_out if count]
        parts += [f"{count:,} {what} ({count / self.num_tasks:.0%})" for count, what in kept if count]
        return "; ".join([f"{self.source}: {self.num_tasks:,} tasks of {self.num_records:,} records", *parts])


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks of a file, in its order."""

    tasks: tuple[Task, ...]
    report: TaskReport


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a file, and its place for messages."""

    fields: dict[str, Any]
    where: str  # "questions.jsonl, line 3"


def load_tasks(path: str | Path, *, whole: bool = False, source: str = "") -> LoadedTasks:
    """Read a task file; ids are ``<source>/<id>``, or ``<source>/<position>`` from 0 where the file has no ids.

    ``source`` is the file's stem unless it is given.

    With ``whole``, for evaluation, repeated questions and answers of articles and punctuation ("The The", "A") are
    kept; only records without a question or without any answer are left out.

    Raises:
        DataError: the file is missing or empty, a line is broken (the message names file and line), or no task is left.
    """
    path = Path(path)
    source = source or path.stem
    tasks: list[Task] = []
    first_of: dict[str, Task] = {}  # by question key
    ids: set[str] = set()
    counts: Counter[str] = Counter()
    num_records = 0
    aliases: dict[str, list[str]] | None = None  # read for the first record that has an ``answer_id``
    for num_records, record in enumerate(read_records(path), start=1):
        if "answer_id" in record.fields:
            aliases = read_aliases(path.parent) if aliases is None else aliases
            counts["num_with_aliases"] += _add_aliases(record, aliases)
        task = make_task(record, source, num_records - 1, whole)
        key = question_key(task.question)
        if not key:
            counts["num_empty_questions"] += 1
        elif not task.golden_answers:
            counts["num_empty_answers"] += 1
        elif key in first_of and not whole:
            counts["num_duplicates"] += 1
            counts["num_conflicting"] += _answer_keys(task) != _answer_keys(first_of[key])
        elif whole and task.task_id in ids and key in first_of:  # a repeated record of a published set
            tasks.append(replace(task, task_id=f"{task.task_id}/{num_records}"))
        else:
            if task.task_id in ids:
                counts["num_repeated_ids"] += 1
                task = replace(task, task_id=_unused(task.task_id, ids))
            tasks.append(task)
            first_of[key] = task
            ids.add(task.task_id)
    if not tasks:
        raise DataError(
            f"{path}: no usable question among {num_records} records "
            f"({counts['num_empty_questions']} empty questions, {counts['num_empty_answers']} without a usable answer)"
        )
    report = TaskReport(
        source=path.name,
        num_records=num_records,
        num_tasks=len(tasks),
        num_questions_with_comma=sum("," in task.question for task in tasks),
        num_answers_with_comma=sum(any("," in answer for answer in task.golden_answers) for task in tasks),
        num_answers_with_bracket=sum(any(answer[0] == "[" for answer in task.golden_answers) for task in tasks),
        num_yes_no=sum(_answer_keys(task) <= {"yes", "no"} for task in tasks),
        **counts,
    )
    return LoadedTasks(tuple(tasks), report)


def _unused(task_id: str, ids: set[str]) -> str:
    """Return ``"t/7#2"`` for a second ``"t/7"``, and so on."""
    return next(name for number in count(2) if (name := f"{task_id}#{number}") not in ids)


def _add_aliases(record: Record, aliases: dict[str, list[str]]) -> bool:
    """Add the other names of the answer of a 2Wiki record; False if there are none."""
    answer_id = record.fields["answer_id"]
    names = aliases.get(answer_id, []) if isinstance(answer_id, str) else []
    if names:
        record.fields["answer_aliases"] = [*_as_list(record.fields.get("answer_aliases", [])), *names]
    return bool(names)


def question_key(question: str) -> str:
    """Return a key without case, extra spaces and closing punctuation: ``"who wrote faust"`` of " Who wrote  Faust? ".

    Punctuation inside is kept: "C++" is not "C#".
    """
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split()).strip("?.! ")


def overlap(train: Iterable[Task], evaluation: Iterable[Task]) -> list[str]:
    """Return the evaluation questions that are also in ``train``, in the order of ``evaluation``."""
    seen = {question_key(task.question) for task in train}
    return [task.question for task in evaluation if question_key(task.question) in seen]


def without_overlap(train: Iterable[Task], evaluation: Iterable[Task]) -> tuple[Task, ...]:
    """Return the training tasks whose question is not in ``evaluation``.

    The training side gives way, so that figures on a published evaluation set stay comparable.
    """
    held_out = {question_key(task.question) for task in evaluation}
    return tuple(task for task in train if question_key(task.question) not in held_out)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON list, of one JSON object per line, of TriviaQA's ``{"Data": [...]}``, or of a table.

    Raises:
        DataError: the file is missing or empty, or a line is broken; names file and line.
    """
    if path.suffix in TABLES or (path.is_file() and is_parquet(path)):
        yield from (Record(fields, where) for fields, where in read_table(path))
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
    if not path.is_file():
        raise DataError(f"no task file {path}; give an existing JSON or JSONL file")
    with opened(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error


def _data_entries(text: str, path: Path) -> Iterator[tuple[Any, str]] | None:
    """Return the entries of an object with a list ``Data``, as TriviaQA's files are; None for any other file."""
    try:
        first, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None  # the reader of lines says which line is wrong
    data = first.get("Data") if isinstance(first, dict) else None
    if not isinstance(data, list):
        return None
    _check_end(text, end, path)
    return ((entry, f"{path}, entry {number} of Data") for number, entry in enumerate(data, start=1))


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
    line, counted_to = 1, 0
    while text[position : position + 1] != "]":
        line, counted_to = line + text.count("\n", counted_to, position), position
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {line}: not valid JSON ({_reason(error)})") from error
        yield entry, f"{path}, line {line}"
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
    """Refuse text behind the one JSON value of a file: nothing would read it."""
    if rest := text[position:].lstrip():
        line = 1 + text.count("\n", 0, len(text) - len(rest))
        raise DataError(f"{path}, line {line}: not valid JSON (more text after its end); keep one list in a file")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def make_task(record: Record, source: str, position: int, whole: bool) -> Task:
    """Read the task of a record of the file ``source``; ``position`` is its id where it has none.

    Raises:
        DataError: a field has the wrong type, or half a character.
    """
    record = Record(plain_fields(record.fields, record.where), record.where)
    fields = record.fields
    question = fields.get("question")
    if "question" not in fields:
        raise DataError(f"{record.where}: got the keys {', '.join(map(str, fields))}, expected a question")
    if not isinstance(question, str):
        raise DataError(f"{record.where}: got question {_shown(question)}, expected text")
    local_id = next((fields[key] for key in _ID_KEYS if key in fields), position)
    if not isinstance(local_id, str | int):
        raise DataError(f"{record.where}: got id {_shown(local_id)}, expected text or a number")
    category = next((fields[key] for key in _CATEGORY_KEYS if isinstance(fields.get(key), str)), "")
    task = Task(
        task_id=f"{source}/{local_id}",
        question=question.strip(),
        golden_answers=_answers(record, whole),
        category=category,
        supporting_ids=_supporting_ids(record),
    )
    try:
        "".join((task.task_id, question, *task.golden_answers, category, *task.supporting_ids)).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{record.where}: half a character, a lone \\ud800 escape or the like; mend the text"
        ) from error
    return task


def _answers(record: Record, whole: bool) -> tuple[str, ...]:
    """Return the answers, unique, order kept; those of articles and punctuation with ``whole`` only."""
    given = [record.fields[key] for key in ANSWER_KEYS if key in record.fields]
    if not given:
        raise DataError(f"{record.where}: no answer; expected one of the keys {', '.join(ANSWER_KEYS)}")
    if record.fields.get("answerable") is False:  # MuSiQue's; the answer of such a record is a guess
        return ()
    given.sort(key=lambda value: value in ([], "", None))  # an empty list hides no answer
    aliases = record.fields.get("answer_aliases", [])  # MuSiQue's
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


def _supporting_ids(record: Record) -> tuple[str, ...]:
    """Titles of the supporting facts: the passage ids of a corpus keyed by title."""
    facts = record.fields.get("supporting_facts", record.fields.get("supporting_ids"))
    if facts is None:
        paragraphs = record.fields.get("paragraphs")  # MuSiQue's
        paragraphs = [p for p in paragraphs if isinstance(p, dict)] if isinstance(paragraphs, list) else []
        facts = [paragraph.get("title") for paragraph in paragraphs if paragraph.get("is_supporting")]
    if isinstance(facts, dict):  # as the data sets hub stores it: {"title": [...], "sent_id": [...]}
        facts = facts.get("title")
    if isinstance(facts, list):
        titles = [fact[0] if isinstance(fact, list) and fact else fact for fact in facts]
        if all(isinstance(title, str) for title in titles):
            return tuple(dict.fromkeys(titles))
    raise DataError(f"{record.where}: got supporting facts {_shown(facts)}, expected [[title, sentence number], ...]")


def _text(value: str | float | None) -> str:
    """Return an answer as text: 1981 and 1981.0 are both "1981"."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return str(int(value))
    return "" if value is None else str(value)


def _items(value: Any) -> list[Any]:
    """Return the items of a list, be it written as text; any other value is the one item."""
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
    return "a number of thousands of digits"  # the only other ValueError of json's


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "brackets nested deeply"
    return shortened(text, 60)
