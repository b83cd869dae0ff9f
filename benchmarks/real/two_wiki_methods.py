"""Files of 2WikiMultihopQA that single methods need, beside those of ``benchmarks.real.two_wiki``.

``python -m benchmarks.real.two_wiki_methods FOLDER`` reads ``data/2wiki/`` and the set's own files in ``FOLDER``::

    explore.json                  FrugalRAG: demonstrations, nine in ten of which search until no search is left
    rank_corpus.json              Rank-R1: the passages, cut to their first 30 words, so that prompts are short
    rank_demonstrations.json      for SFT; the thought says what leads from the question to the best passage
    rank_train.json               for RL
    rank_test.json                to evaluate

Rank-R1 ranks the ten paragraphs that the set gives with a question, as far as BM25 finds them. One is relevant: the one
with the answer, of questions that do not name it (``TYPES``). Another paragraph, which the question names, leads to it.

``python -m benchmarks.real.two_wiki_methods FOLDER RUN`` writes ``explored.json`` alone: the questions for RL with the
recall that FrugalRAG's explorer reached on each, from the evaluation of ``RUN`` on ``train.json``.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.measurement import run_script
from benchmarks.real.two_wiki import FOLDER, find_file, read_train
from envs.tasks.demonstrations import load_demonstrations
from envs.tasks.files import read_records
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import Task
from ragr1_actors.recipes.frugal_rag.frugal_rag import MAX_SEARCHES, RECALL_FIELD, recalls
from ragr1_actors.recipes.rank_r1.rank_r1 import DEPTH, shown
from retrieval.base import Passage
from retrieval.build import build_index
from retrieval.corpora.readers import read_passages
from retrieval.local import LocalRetriever

EXPLORES = 0.9
"""Share of the demonstrations that search to the end (FrugalRAG, arXiv:2507.07634)."""
NUM_WORDS = 30
"""Words that are kept of a passage."""
TYPES = ("compositional", "inference")


def main(source: Path, explorer: Path | None = None, target: Path = FOLDER) -> None:
    """Write the files; ``DataError`` if the set's own or those of ``benchmarks.real.two_wiki`` are not whole."""
    if explorer is not None:
        _write(target / "explored.json", explored(target / "train.json", explorer))
        return
    single = target / "demonstrations_single.json"
    _write(target / "explore.json", explore(single, random.Random(0)))
    passages = list(read_passages(target / "corpus.json"))
    cut = [replace(passage, text=" ".join(passage.text.split()[:NUM_WORDS])) for passage in passages]
    _write(target / "rank_corpus.json", ({"title": one.title, "text": one.text} for one in cut))
    with tempfile.TemporaryDirectory() as scratch:
        ranked = Ranked(passages, cut, Path(scratch) / "index")
        train = {one["question"].strip(): one for one in read_train(find_file(source, "*train*.json"))}
        test = read_train(find_file(source, "*test*.json", "*dev*.json"))
        for_rl = [train[record.fields["question"].strip()] for record in read_records(target / "train.json")]
        for_sft = [train[task.question] for task in load_demonstrations(single, "single")[0].tasks]
        _write(target / "rank_train.json", ranked.records(for_rl))
        _write(target / "rank_test.json", ranked.records(test))
        _write(target / "rank_demonstrations.json", map(demonstrated, ranked.records(for_sft)))


def explore(path: Path, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the demonstrations of a file, most of which repeat their searches until none is left."""
    loaded, turns_of = load_demonstrations(path, "single")
    for task in loaded.tasks:
        *searches, answer = turns_of[task.task_id]
        num_more = MAX_SEARCHES - len(searches) if rng.random() < EXPLORES else 0
        names = [turn.partition("<search>")[2].partition("</search>")[0] for turn in searches]
        more = (f"<think> again{name}</think><search>{name}</search>" for name, _ in zip(cycle(names), range(num_more)))
        known = {"question": task.question, "answer": list(task.golden_answers)}
        yield {**known, "supporting_ids": list(task.supporting_ids), **_output("".join([*searches, *more, answer]))}


def explored(path: Path, run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a task file with the recall that a run's evaluation reached on each."""
    groups = read_trajectories(run / "trajectories" / "eval_rl.arrow")
    found = {one.task.question: max(recalls(one.trajectories[0]), default=0.0) for one in groups}
    for record in read_records(path):
        question = record.fields["question"].strip()
        if question in found:
            yield {**record.fields, RECALL_FIELD: found[question]}


class Ranked:
    """Makes tasks of ranking."""

    def __init__(self, passages: Sequence[Passage], cut: Sequence[Passage], index: Path) -> None:
        """Index the passages that are cut."""
        self._text_of = {passage.id: passage.text for passage in passages}
        self._retriever = LocalRetriever(build_index(cut, index, index_type="bm25", progress=False))

    def records(self, questions: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield a record per question of 2Wiki's own form that has one paragraph to find."""
        for one in questions:
            paragraphs = {title for title, _ in one["context"]}
            best = one["supporting_facts"][-1][0]
            has_answer = one["answer"].lower() in self._text_of.get(best, "").lower()
            if one["type"] in TYPES and has_answer and best.lower() not in one["question"].lower():
                question = one["question"].strip()
                (records,) = asyncio.run(self._retriever.search([question], DEPTH))
                found = [record.id for record in records if record.id in paragraphs]
                if best in found:
                    label = str(1 + shown(Task("", question, ()), found).index(best))
                    known = {"_id": one["_id"], "type": one["type"], "question": question, "answer": label}
                    yield {**known, "supporting_ids": [best], "candidates": found, "leads": one["evidences"][0]}


def demonstrated(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a demonstration: a thought that leads to the best passage, and its label."""
    thought = " , ".join(record["leads"])
    return {**record, **_output(f"<think> {thought}</think><answer>[{record['answer']}]</answer>")}


def _output(turns: str) -> dict[str, str]:
    return {"instruction": "", "input": "", "output": turns}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    made = list(records)
    content = json.dumps(made, ensure_ascii=False).encode()
    write_file(path, lambda writing: writing.write_bytes(content))
    print(f"{path}: {len(made):,} records")


if __name__ == "__main__":
    run_script(main, source=None, explorer="?")
