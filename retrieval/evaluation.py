"""Measures an index (recall of supporting passages, recall against exact search, speed) and audits a corpus.

The audit counts the tasks whose gold answer or supporting passages are in the corpus. A task without them can only be
answered from memory or by a guess, and its searches earn nothing."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task, normalize_answer
from retrieval.base import Passage
from retrieval.corpora.corpus import Corpus
from retrieval.corpora.text import whole_id
from retrieval.indexes.manifest import FLAT, Manifest
from retrieval.indexes.ranking import Ranking, merge_rankings
from retrieval.local import LocalRetriever

if TYPE_CHECKING:
    from retrieval.indexes.vector_index import DenseRanker

EXACT_UP_TO = 50_000
"""Passages that are encoded again for exact search without being asked to."""
LATENCY_K = 3
_NOTHING_KNOWN = "no task names its supporting passages; recall cannot be measured without them"
_BLOCK = 2048
_MAX_EXACT_QUERIES = 2000
_MAX_TIMED_QUERIES = 512
_TIMED_BATCH = 64
_TIMED_S = 10.0
"""After this a measurement of speed ends, with however many queries it has."""


def evaluate_index(
    directory: str | Path,
    tasks: Iterable[Task],
    ks: Sequence[int] = (2, 3, 5, 10),
    *,
    exact: bool | None = False,
    latency: bool = False,
    num_threads: int = 0,
    device: str = "cpu",
    reranker: str = "",
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure ``{"recall@2": 0.61, ...}``: the mean share of a task's supporting passages among the top k.

    The question is the query. Of a passage that was split, any piece counts. Tasks without ``supporting_ids`` count
    for the other measures only.

    Args:
        directory: of the index.
        tasks: questions, and the ids of the passages that answer them.
        ks: depths of recall.
        exact: also measure ``exact_recall@k``, the share of the truly nearest k vectors among those found, with
            ``exact_queries`` and ``exact_vectors``, which says where the true vectors are from: the index, where it
            keeps them as they were, else the whole corpus encoded again. None does so unless the index is exact
            anyway, or has more than 50,000 passages to encode.
        latency: also measure ``latency_p50_ms`` and ``latency_p95_ms`` of single queries, ``queries_per_s`` in batches
            of 64, encoding included, and say with how many ``threads``.
        num_threads: of the search; 0 is all of the machine.
        device: ``cpu`` or ``cuda``.
        reranker: see ``LocalRetriever``, also for ``options``.

    Raises:
        DataError: no index there, no task, or none with supporting ids and nothing else to measure.
    """
    tasks = list(tasks)
    known = [task for task in tasks if task.supporting_ids]
    if not tasks or (exact is False and not (known or latency)):
        raise DataError(_NOTHING_KNOWN)
    num_threads = num_threads or os.cpu_count() or 1
    retriever = LocalRetriever(directory, num_threads, device=device, reranker=reranker, options=options)
    measured: dict[str, Any] = _supporting_recall(Path(directory), retriever, known, ks) if known else {}
    questions = [task.question for task in tasks]
    if exact or exact is None:
        measured |= _exact_recall(Path(directory), questions[:_MAX_EXACT_QUERIES], ks, exact, retriever, num_threads)
    if latency:
        measured |= {**_latency(retriever, questions[:_MAX_TIMED_QUERIES]), "threads": num_threads}
    if not measured:
        raise DataError(_NOTHING_KNOWN)
    return measured


def _supporting_recall(
    directory: Path, retriever: LocalRetriever, tasks: list[Task], ks: Sequence[int]
) -> dict[str, float]:
    corpus = Corpus.open(directory)
    gold = [set(task.supporting_ids) for task in tasks]
    found = [
        [_evidence_id(passage.id, corpus) for passage in passages]
        for start in range(0, len(tasks), _BLOCK)
        for passages in retriever.search_batch([task.question for task in tasks[start : start + _BLOCK]], max(ks))
    ]
    recalls = {k: [len(ids & set(some[:k])) / len(ids) for ids, some in zip(gold, found, strict=True)] for k in ks}
    return {f"recall@{k}": float(np.mean(shares)) for k, shares in recalls.items()}


def _evidence_id(passage_id: str, corpus: Corpus) -> str:
    """Return the id of the passage that was split into this piece, which tasks know it by; else its own id."""
    whole = whole_id(passage_id)
    try:
        corpus.row_of(whole)
    except KeyError:
        return whole
    return passage_id  # the whole one is there too: this is another passage of the same title


def _exact_recall(
    directory: Path,
    questions: list[str],
    ks: Sequence[int],
    is_asked: bool | None,
    retriever: LocalRetriever,
    num_threads: int,
) -> dict[str, Any]:
    """Measure the vectors of an index, also of a hybrid one: words have no exact search to be compared with."""
    ranker = retriever.dense
    manifest = Manifest.read(directory)
    if ranker is None or (manifest.vector_type == FLAT and not is_asked):
        return {}
    if not ranker.is_lossless and not is_asked and manifest.count > EXACT_UP_TO:
        return {}
    vectors = ranker.encoder.encode_queries(questions)
    vectors = vectors[np.any(vectors, axis=1)]
    if not len(vectors):
        return {}
    source = "of the index" if ranker.is_lossless else f"{manifest.count} passages encoded again"
    blocks = ranker.blocks() if ranker.is_lossless else _encoded(directory, ranker)
    truth = _search_exactly(blocks, vectors, max(ks), num_threads)
    found = ranker.rank([""] * len(vectors), max(ks), vectors).rows
    recalls = {f"exact_recall@{k}": _overlap(found[:, :k], truth[:, :k]) for k in ks}
    return {**recalls, "exact_queries": len(vectors), "exact_vectors": source}


def _encoded(directory: Path, ranker: DenseRanker) -> Iterator[NDArray[np.float32]]:
    corpus = Corpus.open(directory)
    for start in range(0, len(corpus), _BLOCK):
        yield ranker.encoder.encode_passages(corpus.take(range(start, min(start + _BLOCK, len(corpus)))))


def _search_exactly(
    blocks: Iterable[NDArray[np.float32]], queries: NDArray[np.float32], k: int, num_threads: int
) -> NDArray[np.int64]:
    """Return the nearest rows, ``[len(queries), min(k, count)]``, holding one block of the vectors at a time."""
    from retrieval.indexes.vector_index import VectorIndex

    start, best = 0, list[Ranking]()
    for block in blocks:
        scores, rows = VectorIndex.build([block], block.shape[1], count=len(block)).search(queries, k, num_threads)
        best = [merge_rankings([*best, Ranking(scores, rows + start)], k)]
        start += len(block)
    return best[0].rows


def _overlap(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float(np.mean([np.isin(true, some).mean() for some, true in zip(found, truth, strict=True)]))


def _latency(retriever: LocalRetriever, questions: list[str]) -> dict[str, float]:
    retriever.search_batch(questions[:1], LATENCY_K)  # what is loaded on first use
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
        retriever.search_batch(batch, LATENCY_K)
        yield time.perf_counter() - asked, len(batch)


NUM_EXAMPLES = 20

_YES_NO = frozenset({"yes", "no"})
_BARRIER = " \0 "  # a word that is in no answer: no answer is half in the title and half in the text


@dataclass(frozen=True, slots=True)
class MissingTask:
    """A task with an answer or a supporting passage that is not in the corpus."""

    task_id: str
    question: str
    missing: tuple[str, ...]
    """Its gold answers, or the passage ids that are not in the corpus."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Tasks held against a corpus. ``str`` of it is a few lines for a person."""

    num_passages: int
    num_tasks: int
    num_yes_no: int = 0
    """Tasks whose only gold answers are yes or no, which are not looked up. The next two count the others."""
    num_answers_found: int = 0
    """Tasks with a gold answer in the title or the text of a passage."""
    num_answers_missing: int = 0
    num_support_all: int = 0
    """Tasks whose ``supporting_ids`` are all ids of passages; the next two: some of them, none of them."""
    num_support_partly: int = 0
    num_support_none: int = 0
    num_support_unknown: int = 0
    """Tasks without ``supporting_ids``."""
    missing_answers: tuple[MissingTask, ...] = ()
    """The first ``NUM_EXAMPLES`` of ``num_answers_missing``."""
    missing_support: tuple[MissingTask, ...] = ()
    """The first ``NUM_EXAMPLES`` of ``num_support_partly`` and ``num_support_none``."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        return asdict(self)

    def __str__(self) -> str:
        """Five lines at most: passages and tasks, answers, yes and no, evidence."""
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

    Answers and passages are normalised as for exact match (``normalize_answer``), and a passage contains
    an answer if it has all its words in order: "party" does not contain "art". A passage that contains an answer need
    not answer the question: many passages contain a short answer. A supporting passage that was split counts as found.
    """
    answers = {answer for task in tasks for answer in _answers(task) - _YES_NO}
    wanted_ids = {passage_id for task in tasks for passage_id in task.supporting_ids}
    found_answers: set[str] = set()
    found_ids: set[str] = set()
    num_passages = 0
    lengths = _lengths_by_first_word(answers)
    for passage in corpus:
        num_passages += 1
        found_ids |= wanted_ids & {passage.id, whole_id(passage.id)}
        words = normalize_answer(f"{passage.title}{_BARRIER}{passage.text}").split()
        found_answers.update(answer for answer in _runs(words, lengths) if answer in answers)
    return _summarise(tasks, num_passages, found_answers, found_ids)


def _lengths_by_first_word(answers: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return, for each first word of an answer, the numbers of words of these answers."""
    lengths: defaultdict[str, set[int]] = defaultdict(set)
    for words in map(str.split, answers):
        lengths[words[0]].add(len(words))
    return {word: tuple(sorted(found)) for word, found in lengths.items()}


def _runs(words: list[str], lengths: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the runs of words that are as long as an answer that begins alike."""
    for start, word in enumerate(words):
        if word in lengths:
            for length in lengths[word]:
                yield " ".join(words[start : start + length])


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
