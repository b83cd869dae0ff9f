"""What a corpus can teach: how many gold answers, and how much of the evidence, stand in it at all.

A task whose answer stands nowhere can be answered from memory or by a guess only, and a search on the way to it earns
nothing: worth knowing before anyone trains on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragr1_actors.core.text import normalize_answer
from ragr1_actors.core.types import Task
from retrieval.base import Passage
from retrieval.corpora.splitter import whole_id

NUM_EXAMPLES = 20

_YES_NO = frozenset({"yes", "no"})
_BARRIER = " \0 "  # a word of its own, in no answer: none stands half in the title and half in the text


@dataclass(frozen=True, slots=True)
class MissingTask:
    """A task of which something stands nowhere."""

    task_id: str
    question: str
    missing: tuple[str, ...]
    """Its gold answers, or the passage ids that are not in the corpus."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Tasks held against a corpus. ``str`` of it is a few lines for a person."""

    num_passages: int
    num_tasks: int
    num_yes_no: int
    """Tasks with no gold answer but yes and no, which stand nowhere. The next two count the others."""
    num_answers_found: int
    """Tasks of which a gold answer stands in the title or the text of a passage."""
    num_answers_missing: int
    num_support_all: int
    """Tasks whose ``supporting_ids`` are all ids of passages; the next two: some of them, none of them."""
    num_support_partly: int
    num_support_none: int
    num_support_unknown: int
    """Tasks without ``supporting_ids``."""
    missing_answers: tuple[MissingTask, ...]
    """The first ``NUM_EXAMPLES`` of ``num_answers_missing``."""
    missing_support: tuple[MissingTask, ...]
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
    """Look every gold answer and every supporting id up in a corpus, in one pass over it.

    Answers and passages are normalised as for exact match (``normalize_answer``), and an answer stands in a passage
    where all its words do, one after the other: "art" does not stand in "party". That it stands there does not say that
    the passage answers the question: short answers stand in many. A supporting passage that was split is there too.
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
    """Return of how many words the answers are that begin with a word."""
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
    counts = dict.fromkeys(("yes_no", "found", "missing", "all", "partly", "none", "unknown"), 0)
    missing_answers: list[MissingTask] = []
    missing_support: list[MissingTask] = []
    for task in tasks:
        answers = _answers(task)
        if answers and answers <= _YES_NO:
            counts["yes_no"] += 1
        elif answers & found_answers:
            counts["found"] += 1
        else:
            counts["missing"] += 1
            missing_answers.append(MissingTask(task.task_id, task.question, task.golden_answers))
        absent = tuple(passage_id for passage_id in task.supporting_ids if passage_id not in found_ids)
        if not task.supporting_ids:
            counts["unknown"] += 1
        elif not absent:
            counts["all"] += 1
        else:
            counts["none" if len(absent) == len(task.supporting_ids) else "partly"] += 1
            missing_support.append(MissingTask(task.task_id, task.question, absent))
    return Audit(
        num_passages=num_passages,
        num_tasks=len(tasks),
        num_yes_no=counts["yes_no"],
        num_answers_found=counts["found"],
        num_answers_missing=counts["missing"],
        num_support_all=counts["all"],
        num_support_partly=counts["partly"],
        num_support_none=counts["none"],
        num_support_unknown=counts["unknown"],
        missing_answers=tuple(missing_answers[:NUM_EXAMPLES]),
        missing_support=tuple(missing_support[:NUM_EXAMPLES]),
    )


def _answers(task: Task) -> set[str]:
    """Return the normalised gold answers that are not empty."""
    return set(map(normalize_answer, task.golden_answers)) - {""}


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})"
