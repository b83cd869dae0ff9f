"""Measures an index (recall of supporting passages, recall against exact search, speed) and audits a corpus.

The audit counts the tasks whose gold answer or supporting passages are in the corpus. A task without them can only be
answered from memory or by a guess, and its searches earn nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.process.progress_bar import CountOf, uncounted
from ragr1_actors.core.types import Task
from retrieval.base import Passage, Retriever
from retrieval.corpora.corpus import Corpus
from retrieval.corpora.text import found_evidence
from retrieval.indexes.manifest import FLAT
from retrieval.indexes.ranking import Ranking, merge_rankings
from retrieval.local import LocalRetriever

EXACT_UP_TO = 50_000
"""Number of passages up to which they are encoded again for exact search without ``exact``."""
_KS = (2, 3, 5, 10)
_LATENCY_K = 3
_BLOCK = 2048
_QUERIES_AT_ONCE = 128
"""Number of queries in one request, so that one replica of a fleet answers within its timeout."""
_MAX_EXACT_QUERIES = 2000
_MAX_TIMED_QUERIES = 512
_TIMED_BATCH = 64
_TIMED_S = 10.0
"""Limit of one measurement of speed, in seconds, with any number of queries done."""


def evaluate_index(
    directory: str | Path,
    tasks: Sequence[Task],
    *,
    exact: bool = False,
    reranker: str = "",
    options: Mapping[str, Any] | None = None,
    count: CountOf = uncounted,
) -> dict[str, Any]:
    """Measure an index with the questions of at least one task, on all cores.

    - ``recall@k``: see ``supporting_recall``; left out if no task has ``supporting_ids``.
    - ``exact_recall@k``: the share of the truly nearest k vectors among those found, with ``exact_queries`` and
      ``exact_vectors``, which says where the true vectors are from: the index, where it keeps them as they were, else
      the whole corpus encoded again. Unless asked for by ``exact``, it is left out where the index is exact anyway, or
      has more than 50,000 passages to encode.
    - ``latency_p50_ms`` and ``latency_p95_ms`` of single queries, ``queries_per_s`` in batches of 64, encoding
      included, and the number of ``threads``.

    ``reranker`` and ``options`` go to ``LocalRetriever``. ``count`` is told how many questions were asked and how many
    passages were searched exactly. Raises ``DataError`` if the directory holds no index.
    """
    num_threads = os.cpu_count() or 1
    retriever = LocalRetriever(directory, num_threads, reranker=reranker, options=options)
    questions = [task.question for task in tasks]
    return {
        **asyncio.run(supporting_recall(retriever, retriever.corpus, tasks, count)),
        **_exact_recall(retriever, questions[:_MAX_EXACT_QUERIES], exact, num_threads, count),
        **_latency(retriever, questions[:_MAX_TIMED_QUERIES]),
        "threads": num_threads,
    }


async def supporting_recall(
    retriever: Retriever, corpus: Corpus, tasks: Iterable[Task], count: CountOf = uncounted
) -> dict[str, float]:
    """Measure ``{"recall@2": 0.61, ...}``: the mean share of a task's supporting passages among the top k.

    The question is the query; ``retriever`` finds passages of ``corpus``. See ``found_evidence`` for what counts.
    ``count`` is told how many questions were asked.
    Tasks without ``supporting_ids`` do not count; if none has them, the result is empty.
    """
    known = [task for task in tasks if task.supporting_ids]
    if not known:
        return {}
    questions = [task.question for task in known]
    found: list[list[tuple[str, str]]] = []
    while len(found) < len(known):
        asked = questions[len(found) : len(found) + _QUERIES_AT_ONCE]
        found += [[(passage.id, passage.title) for passage in top] for top in await retriever.search(asked, max(_KS))]
        count("questions", len(found), len(known))
    # "Riga#2" is a piece of "Riga", as tasks name it, unless "Riga" is there too: then it is another passage.
    present = set(corpus.titles({name for task in known for name in task.supporting_ids}))
    recalls: dict[int, list[float]] = {k: [] for k in _KS}
    for task, passages in zip(known, found, strict=True):
        gold = set(task.supporting_ids)
        ids, titles = [passage_id for passage_id, _ in passages], [title for _, title in passages]
        for k in _KS:
            recalls[k].append(len(found_evidence(gold, ids[:k], titles[:k], present)) / len(gold))
    return {f"recall@{k}": float(np.mean(shares)) for k, shares in recalls.items()}


def _exact_recall(
    retriever: LocalRetriever, questions: list[str], is_asked: bool, num_threads: int, count_of: CountOf
) -> dict[str, Any]:
    """Measure the vectors of an index, also of a hybrid one; for words there is no exact search to compare with."""
    ranker, count = retriever.dense, len(retriever.corpus)
    if ranker is None:
        return {}
    is_dear = not ranker.is_lossless and count > EXACT_UP_TO
    if not is_asked and (is_dear or retriever.manifest.vector_type == FLAT):
        return {}
    vectors = ranker.encoder.encode_queries(questions)
    vectors = vectors[np.any(vectors, axis=1)]
    if not len(vectors):
        return {}
    if ranker.is_lossless:
        source, blocks = "of the index", ranker.blocks()
    else:
        source = f"{count} passages encoded again"
        encode, layout = ranker.encoder.encode_passages, retriever.manifest.layout
        parts = (range(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))
        blocks = ((np.array(rows), encode(retriever.corpus.take(rows), layout)) for rows in parts)
    truth = _search_exactly(
        blocks, ranker.empty_rows, vectors, num_threads, lambda done: count_of("searched exactly", done, count)
    )
    found = ranker.rank([""] * len(vectors), max(_KS), vectors).rows
    recalls = {f"exact_recall@{k}": _overlap(found[:, :k], truth[:, :k]) for k in _KS}
    return {**recalls, "exact_queries": len(vectors), "exact_vectors": source}


def _search_exactly(
    blocks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]],
    empty_rows: NDArray[np.int64],
    queries: NDArray[np.float32],
    num_threads: int,
    count: Callable[[int], None],
) -> NDArray[np.int64]:
    """Return the nearest rows, ``[len(queries), <= max(_KS)]``, holding one block of the vectors at a time.

    Blocks are rows of the corpus, ``[n]``, with their vectors, ``[n, dimension]``; ``empty_rows`` are left out.
    ``count`` is told how many rows were searched.
    """
    from retrieval.indexes.vector_index import VectorIndex

    done, best = 0, list[Ranking]()
    for rows, vectors in blocks:
        is_filled = ~np.isin(rows, empty_rows)
        if is_filled.any():
            index = VectorIndex.build([vectors[is_filled]], vectors.shape[1], count=int(is_filled.sum()))
            scores, places = index.search(queries, max(_KS), num_threads)
            best = [merge_rankings([*best, Ranking(scores, rows[is_filled][places])], max(_KS))]
        done += len(rows)
        count(done)
    return best[0].rows


def _overlap(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float(np.mean([np.isin(true, some).mean() for some, true in zip(found, truth, strict=True)]))


def _latency(retriever: LocalRetriever, questions: list[str]) -> dict[str, float]:
    retriever.search_batch(questions[:1], _LATENCY_K)  # loads everything that the first use loads
    alone = [seconds * 1e3 for seconds, _ in _timed(retriever, questions, 1)]
    repeated = (questions * (1 + _TIMED_BATCH // len(questions)))[: max(len(questions), _TIMED_BATCH)]
    batches = list(_timed(retriever, repeated, _TIMED_BATCH))
    return {
        "latency_p50_ms": float(np.percentile(alone, 50)),
        "latency_p95_ms": float(np.percentile(alone, 95)),
        "queries_per_s": sum(size for _, size in batches) / sum(seconds for seconds, _ in batches),
    }


def _timed(retriever: LocalRetriever, questions: list[str], size: int) -> Iterator[tuple[float, int]]:
    began = time.perf_counter()
    for start in range(0, len(questions), size):
        if start and time.perf_counter() - began > _TIMED_S:
            return
        batch = questions[start : start + size]
        asked = time.perf_counter()
        retriever.search_batch(batch, _LATENCY_K)
        yield time.perf_counter() - asked, len(batch)


NUM_EXAMPLES = 20

_YES_NO = frozenset({"yes", "no"})
_BARRIER = " \0 "  # a word in no answer: no answer is half in the title and half in the text


@dataclass(frozen=True, slots=True)
class MissingTask:
    """Task with an answer or a supporting passage that is not in the corpus."""

    task_id: str
    question: str
    missing: tuple[str, ...]
    """Gold answers, or ids or titles of supporting passages, that are not in the corpus."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts of the tasks whose answers and evidence are in a corpus. ``str`` gives a few lines for a person."""

    num_passages: int
    num_tasks: int
    num_yes_no: int = 0
    """Tasks whose only gold answers are yes or no, which are not looked up. The next two fields count the others."""
    num_answers_found: int = 0
    """Tasks with a gold answer in the title or the text of a passage."""
    num_answers_missing: int = 0
    num_support_all: int = 0
    """Tasks whose ``supporting_ids`` are all in the corpus; the next two fields: some of them, none of them."""
    num_support_partly: int = 0
    num_support_none: int = 0
    num_support_unknown: int = 0
    """Tasks without ``supporting_ids``."""
    missing_answers: tuple[MissingTask, ...] = ()
    """The first ``NUM_EXAMPLES`` of ``num_answers_missing``."""
    missing_support: tuple[MissingTask, ...] = ()
    """The first ``NUM_EXAMPLES`` of ``num_support_partly`` and ``num_support_none``."""

    def __str__(self) -> str:
        """Return at most four lines: passages and tasks, answers, yes and no, evidence."""
        num_open = self.num_answers_found + self.num_answers_missing
        num_known = self.num_tasks - self.num_support_unknown
        lines = [f"{self.num_passages:,} passages, {self.num_tasks:,} tasks"]
        if num_open:
            lines.append(f"gold answer in the corpus: {_share(self.num_answers_found, num_open)}")
        if self.num_yes_no:
            lines.append(f"yes/no answers, not looked for: {self.num_yes_no:,}")
        if num_known:
            lines.append(
                f"supporting passages in the corpus: all for {_share(self.num_support_all, num_known)}, "
                f"some for {self.num_support_partly:,}, none for {self.num_support_none:,}"
            )
        return "\n".join(lines)


def audit_corpus(corpus: Iterable[Passage], tasks: Sequence[Task]) -> Audit:
    """Look up every gold answer and every supporting id in a corpus, in one pass.

    Answers and passages are normalised as for exact match (``normalize_answer``), and a passage contains an answer if
    it has all its words in order: "party" does not contain "art". A passage that contains an answer need not answer the
    question: many passages contain a short answer. Evidence is matched by ``found_evidence``.
    """
    answers = {answer for task in tasks for answer in _answers(task) - _YES_NO}
    wanted_ids = {passage_id for task in tasks for passage_id in task.supporting_ids}
    found_answers: set[str] = set()
    found_ids: set[str] = set()
    num_passages = 0
    lengths: defaultdict[str, set[int]] = defaultdict(set)  # numbers of words of the answers, by their first word
    for first, *others in map(str.split, answers):
        lengths[first].add(1 + len(others))
    for passage in corpus:
        num_passages += 1
        found_ids |= found_evidence(wanted_ids, (passage.id,), (passage.title,))
        words = normalize_answer(f"{passage.title}{_BARRIER}{passage.text}").split()
        for start, word in enumerate(words):
            for length in lengths.get(word, ()):
                run = " ".join(words[start : start + length])
                if run in answers:
                    found_answers.add(run)
    return _summarise(tasks, num_passages, found_answers, found_ids)


def _summarise(tasks: Sequence[Task], num_passages: int, found_answers: set[str], found_ids: set[str]) -> Audit:
    counts: Counter[str] = Counter()
    missing_answers: list[MissingTask] = []
    missing_support: list[MissingTask] = []
    for task in tasks:
        answers = _answers(task)
        if answers and answers <= _YES_NO:
            counts["num_yes_no"] += 1
        elif answers & found_answers:
            counts["num_answers_found"] += 1
        else:
            counts["num_answers_missing"] += 1
            missing_answers.append(MissingTask(task.task_id, task.question, task.golden_answers))
        absent = tuple(passage_id for passage_id in task.supporting_ids if passage_id not in found_ids)
        if not task.supporting_ids:
            counts["num_support_unknown"] += 1
        elif not absent:
            counts["num_support_all"] += 1
        else:
            counts["num_support_none" if len(absent) == len(task.supporting_ids) else "num_support_partly"] += 1
            missing_support.append(MissingTask(task.task_id, task.question, absent))
    return Audit(
        num_passages=num_passages,
        num_tasks=len(tasks),
        **counts,
        missing_answers=tuple(missing_answers[:NUM_EXAMPLES]),
        missing_support=tuple(missing_support[:NUM_EXAMPLES]),
    )


def _answers(task: Task) -> set[str]:
    """Return the normalised gold answers that are not empty."""
    return set(map(normalize_answer, task.golden_answers)) - {""}


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})"
