"""2WikiMultihopQA (Ho et al., arXiv:2011.01060, Apache-2.0) as the recipe ``smollm2_2wiki`` reads it.

``python -m benchmarks.real.two_wiki FOLDER`` reads the set's own JSON from ``FOLDER`` and writes ``data/2wiki/``::

    *train*.json   questions in 2Wiki's own form    ──► train.json: two thirds, for RL
                                                    ──► demonstrations.json, demonstrations_single.json: for SFT
    *test*.json    the same, or *dev*.json          ──► test.json    unchanged
    *corpus*.json  passages; the largest file       ──► corpus.json  unchanged
                                                    ──► evidence.json: those that test questions need, and no other

A third of the set's training answers are yes or no, a twelfth of its test answers. A policy that is trained on all of
them answers "no" to what it cannot find, so at most a tenth of them are kept. RL trains on questions that SFT has not
seen: SFT learns the answers to its questions by heart, and then RL has nothing to learn from them.

A demonstration searches for the evidence round by round, several queries per turn or one, and its thoughts repeat the
``evidences`` that the passages hold::

    <think> find evidence</think><search> Devotion (1929 film)</search>
    <think> Devotion , director , Guido Brignone</think><search> Guido Brignone</search>
    <think> Guido Brignone , child , Lilla Brignone</think><answer> Lilla Brignone</answer>
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measurement import run_script
from envs.grammars.tags import format_queries
from envs.options import QueryFormat
from envs.tasks.files import Record, load_tasks, make_task
from envs.tasks.formats import depths_of_triples, folded
from ragr1_actors.core.disk.data_files import opened
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.errors import DataError, UserError, one_line, valid_unicode
from retrieval.corpora.readers import read_passages

FOLDER = Path("data/2wiki")
"""Where the files are written."""
MAX_YES_NO = 0.1
"""Largest share of training answers that are yes or no."""
DEMONSTRATIONS: dict[str, QueryFormat] = {"demonstrations.json": "lines", "demonstrations_single.json": "single"}
"""The files of demonstrations, and how their queries are written."""
DEMONSTRATED = 1 / 3
"""Share of the training questions that SFT sees; RL trains on the others."""
MAX_QUERIES = 3
_TEXTS, _LISTS = ("question", "answer", "type"), ("supporting_facts", "evidences")
"""Keys of a training record, by what they hold."""


def main(source: Path, target: Path = FOLDER) -> None:
    """Write the files, each of them whole; ``DataError`` if one of the set is missing or damaged: then none."""
    test, corpus = find_file(source, "*test*.json", "*dev*.json"), find_file(source, "*corpus*.json")
    train = read_train(find_file(source, "*train*.json"))
    needed = {title for task in load_tasks(test, whole=True).tasks for title in task.supporting_ids}
    # read to its end, as a corpus that is cut off would be copied
    evidence = [
        {"title": passage.title, "text": passage.text}
        for passage in read_passages(corpus)
        if needed & {passage.id, passage.title}
    ]
    rng = random.Random(0)
    kept = subsample(train, rng)
    demonstrated, others = split(kept, rng)
    made: dict[str, list[dict[str, Any]]] = {"train.json": others, "evidence.json": evidence}
    for name, query_format in DEMONSTRATIONS.items():
        made[name] = [demonstration(record, query_format) for record in demonstrated]
    files = {name: json.dumps(records, ensure_ascii=False).encode() for name, records in made.items()}
    files |= {"test.json": test.read_bytes(), "corpus.json": corpus.read_bytes()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_file(target / name, lambda writing, content=content: writing.write_bytes(content))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); name another folder as TARGET") from error
    print(f"{target}: {len(kept)} of {len(train)} training questions are kept")
    print(f"for SFT {len(demonstrated)}: {_counted(demonstrated)}")
    print(f"for RL {len(others)}: {_counted(others)}")


def read_train(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of training questions; ``DataError`` if it is not whole, or not of 2Wiki's form."""
    with opened(path) as file:
        raw = file.read()
    try:
        records = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no whole JSON file ({one_line(error)}); fetch it again") from error
    if not isinstance(records, list) or not records:
        raise DataError(f"{path}: got no list with records, expected the training questions of 2WikiMultihopQA")
    for number, record in enumerate(records, start=1):
        if not _is_whole(record):
            raise DataError(
                f"{path}, entry {number}: expected texts as {', '.join(_TEXTS)} and lists as {', '.join(_LISTS)}, none "
                "of them empty; take the set's own JSON"
            )
        if valid_unicode(text := json.dumps(record, ensure_ascii=False)) != text:
            raise DataError(
                f"{path}, entry {number}: half a character, a lone \\ud800 escape or the like; mend the text"
            )
    return records


def _is_whole(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    texts, lists = ([record.get(key) for key in keys] for keys in (_TEXTS, _LISTS))
    are_texts = all(isinstance(text, str) and text.strip() for text in texts)
    return are_texts and all(isinstance(found, list) and found and all(map(_is_row, found)) for found in lists)


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list) and bool(row) and isinstance(row[0], str) and all(isinstance(x, str | int) for x in row)
    )


def subsample(records: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the records in their order, without those yes-or-no questions that are more than ``MAX_YES_NO``."""
    yes_no = [number for number, record in enumerate(records) if is_yes_no(record["answer"])]
    num_others = len(records) - len(yes_no)
    num_kept = min(len(yes_no), int(num_others * MAX_YES_NO / (1 - MAX_YES_NO)))
    left_out = set(yes_no) - set(rng.sample(yes_no, num_kept))
    return [record for number, record in enumerate(records) if number not in left_out]


def split(records: list[dict[str, Any]], rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records for SFT, ``DEMONSTRATED`` of them, and those for RL; both in their order."""
    chosen = set(rng.sample(range(len(records)), round(len(records) * DEMONSTRATED)))
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for number, record in enumerate(records):
        parts[number not in chosen].append(record)
    return parts


def is_yes_no(answer: str) -> bool:
    """Whether an answer is yes or no."""
    return answer.strip().lower() in ("yes", "no")


def demonstration(record: dict[str, Any], query_format: QueryFormat) -> dict[str, Any]:
    """Return a record of a file for ``sft.demonstrations``; ``record`` is one of 2Wiki's."""
    task = make_task(Record(record, record["question"]), "2wiki", 0, whole=True)
    depths, step = depths_of_triples(record["evidences"]), 1 if query_format == "single" else MAX_QUERIES
    rounds = task.plan or (task.supporting_ids,)
    thought, turns = "find evidence", []
    for number, names in enumerate(rounds):
        for start in range(0, len(names), step):
            queries = format_queries([f" {name}" for name in names[start : start + step]], query_format)
            turns.append(f"<think> {thought}</think><search>{queries}</search>")
            thought = "next"
        is_last = number == len(rounds) - 1
        read = [one for one in record["evidences"] if _is_read_in(number, depths.get(folded(one[0]), 0), is_last)]
        thought = " ; ".join(" , ".join(map(str, one)) for one in read) or "found"
    turns.append(f"<think> {thought}</think><answer> {task.golden_answers[0]}</answer>")
    known = {key: record[key] for key in ("question", "answer", "supporting_facts")}
    return {**known, "instruction": record["question"], "input": "", "output": "".join(turns)}


def _is_read_in(round_: int, depth: int, is_last: bool) -> bool:
    return depth >= round_ if is_last else depth == round_


def _counted(records: list[dict[str, Any]]) -> str:
    types = Counter(record["type"] for record in records)
    num_yes_no = sum(is_yes_no(record["answer"]) for record in records)
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) + f"; {num_yes_no} answers yes or no"


def find_file(folder: Path, *patterns: str) -> Path:
    """Return the largest file of 2Wiki that fits the first pattern that any fits; ``DataError`` if there is none."""
    for pattern in patterns:
        if found := [path for path in folder.glob(pattern) if "2wiki" in path.name.lower()]:
            return max(found, key=lambda path: path.stat().st_size)
    raise DataError(
        f"no file of 2WikiMultihopQA like {' or '.join(patterns)} in {folder}; its name must have 2wiki in it"
    )


if __name__ == "__main__":
    run_script(main, source=None, target="?")
