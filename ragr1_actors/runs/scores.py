"""Scores of an evaluation per task, in a JSON-lines file from which it can continue, and statistics over such files.

The first line of a file has the settings of the evaluation, every other line a ``TaskScore``::

    {"policy": "runs/mine/checkpoints/step_40/policy", "tasks": "musique", "num_tasks": 2417, "digest": "5c1f...", ...}
    {"task_id": "musique/2hop__1_2", "answer": "Riga", "em": 1.0, "f1": 1.0, "em_rag_r1": 1.0, "recall": 0.5, ...}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.measures import exact_match, num_queries, num_rounds, token_f1
from ragr1_actors.core.disk.files import held_alone
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task, Trajectory
from retrieval.corpora.text import found_evidence

_REMEDY = "name a file of `ragr1 evaluate --out`"
_PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUM_RESAMPLES = 2000
_CHUNK = 50  # resamples at once: 50 draws of 14,267 tasks are 6 MB
MEASURES = ("em", "f1", "em_rag_r1", "f1_rag_r1", "recall", "rounds", "queries", "tokens", "latency_s")
"""Numbers of a ``TaskScore``."""


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Answer to one task, with its measures."""

    task_id: str
    answer: str
    stop_reason: str
    em: float
    """Exact match after Search-R1's and SQuAD's normalisation."""
    f1: float
    em_rag_r1: float
    """Exact match as in RAG-R1's evaluation: punctuation becomes a space, so "U.S." is not "US"."""
    f1_rag_r1: float
    """Token F1 after RAG-R1's normalisation: "well-known" is two tokens."""
    recall: float | None
    """Share of the supporting passages that any search of the trajectory found; None if they are not known."""
    rounds: int
    queries: int
    tokens: int
    """Number of tokens that the policy sampled."""
    latency_s: float
    """Seconds from the prompt to the end of the trajectory, searches included, beside ``concurrency - 1`` others."""
    measures: dict[str, float] = field(default_factory=dict)
    """Measures that only the environment has, from ``TextEnv.measures``."""
    digest: str = ""
    """``tasks_digest`` of the task alone; empty in files of earlier versions."""


@dataclass(frozen=True, slots=True)
class EvalArguments:
    """Settings of a results file; an evaluation continues a file only with equal settings."""

    policy: str
    tasks: str
    num_tasks: int
    digest: str
    """Digest of the tasks' ids, questions and answers, from ``tasks_digest``."""
    method: str
    """Method: ``search``, or the baseline ``direct``, ``rag`` or ``single-query``."""
    index: str
    """Path of the index, or a ``retrieval.type`` without an index."""
    settings: str
    """Digest of the other settings that affect answers: prompt, formats, limits, retrieval."""
    concurrency: int
    """Limit of trajectories at the same time."""
    decoding: str = "greedy"
    """Decoding: ``greedy``, or temperature, top_p and seed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over tasks with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two policies on the same tasks."""

    num_tasks: int
    """Number of tasks that both answered."""
    em_difference: Interval
    """Exact match of the first less the second's, by the paired bootstrap."""
    f1_difference: Interval
    only_first: int
    """Number of tasks that only the first policy answered right."""
    only_second: int
    p_value: float
    """Two-sided p value of McNemar's exact test on these two counts."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of questions, and the work in it; the last three are means per question."""

    concurrency: int
    """Limit of questions in flight at the same time."""
    num_tasks: int
    median_s: float
    p95_s: float
    """Seconds that 95 % of the questions took at most."""
    mean_s: float
    tokens: float
    rounds: float
    queries: float


def normalize_rag_r1(text: str) -> str:
    """Apply RAG-R1's normalisation: lower case, a space for ASCII punctuation, no articles, single spaces.

    ``normalize_rag_r1("The U.S.") == "u s"``; ``normalize_answer`` returns ``"us"``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION_TO_SPACE)).split())


def score(trajectory: Trajectory, own: Iterable[str] = ()) -> TaskScore:
    """Return the measures of a finished trajectory; ``own`` names measures that only its environment has."""
    task, answer = trajectory.task, trajectory.answer
    records = [record for call in trajectory.calls for record in call.records]
    gold = set(task.supporting_ids)
    ids, titles = [record.id for record in records], [record.title for record in records]
    return TaskScore(
        task_id=task.task_id,
        answer=answer,
        stop_reason=trajectory.stop_reason.value,
        em=exact_match(answer, task.golden_answers),
        f1=token_f1(answer, task.golden_answers),
        em_rag_r1=exact_match(answer, task.golden_answers, normalize_rag_r1),
        f1_rag_r1=token_f1(answer, task.golden_answers, normalize_rag_r1),
        recall=len(found_evidence(gold, ids, titles)) / len(gold) if gold else None,
        rounds=int(num_rounds(trajectory)),
        queries=int(num_queries(trajectory)),
        tokens=trajectory.num_model_tokens,
        latency_s=trajectory.metrics.get("time/trajectory_s", 0.0),
        measures={name: trajectory.metrics[name] for name in own},
        digest=tasks_digest([task]),
    )


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return a hexadecimal digest of 16 characters over ids, questions and answers."""
    content = json.dumps([(task.task_id, task.question, task.golden_answers) for task in tasks])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def open_scores(path: Path, settings: EvalArguments) -> list[TaskScore]:
    """Return the scores of the file that this evaluation continues; a new file is begun, and a cut line is removed.

    Raises:
        DataError: the file belongs to another evaluation, is damaged, or cannot be written.
    """
    try:
        content, first_line = path.read_bytes() if path.exists() else b"", _line(asdict(settings)).encode()
        if first_line.startswith(content):  # a crash may have cut the first line off
            path.write_bytes(first_line)
            return []
        if b"\n" not in content:
            raise DataError(
                f"{path} holds something else than the scores of this evaluation, and is left as it is; name another "
                "--out, or delete the file"
            )
        found, scores = read_scores(path)
        if found != settings:
            there, here = asdict(found), asdict(settings)
            different = [
                f"{name} {there[name]!r} there, {here[name]!r} here" for name in here if there[name] != here[name]
            ]
            raise DataError(f"{path} is of another evaluation ({'; '.join(different)}); name another --out")
        os.truncate(path, content.rindex(b"\n") + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
    return scores


@contextmanager
def only_writer(path: Path | None) -> Iterator[None]:
    """Hold the file of an evaluation until the block ends; without a path, do nothing.

    Raises:
        DataError: another process writes it, it is not a regular file, or it cannot be written.
    """
    if path is None or str(path) == os.devnull:
        yield
        return
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file; choose another --out")
    taken = DataError(f"another evaluation writes {path}; wait until it ends, or choose another --out")
    with ExitStack() as held:
        try:
            held.enter_context(held_alone(path, taken))
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
        yield


def append_score(path: Path, found: TaskScore) -> None:
    """Append a score to a file of ``open_scores``."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(asdict(found)))


def read_scores(path: Path) -> tuple[EvalArguments, list[TaskScore]]:
    """Return the settings and scores of a results file; a last line without its end is left out.

    Raises:
        DataError: there is no such file, a line is damaged, or a task has two lines; the message names the line.
    """
    if not path.is_file():
        raise DataError(f"no results file {path}; give one that `ragr1 evaluate --out` wrote")
    lines = path.read_bytes().split(b"\n")[:-1]
    settings = validated(EvalArguments, lines[0] if lines else b"", f"{path}, line 1", _REMEDY)
    scores: dict[str, TaskScore] = {}
    for number, line in enumerate(lines[1:], start=2):
        found = validated(TaskScore, line, f"{path}, line {number}", _REMEDY)
        if found.task_id in scores:
            raise DataError(
                f"{path}, line {number}: a second score of task {found.task_id}; delete one of the two lines"
            )
        scores[found.task_id] = found
    return settings, list(scores.values())


def check_shared(path: Path, tasks: Sequence[Task]) -> None:
    """Check that a results file has at least one of the tasks.

    Raises:
        DataError: it has none, another question under the id of one, or cannot be read.
    """
    settings, scores = read_scores(path)
    if {one.task_id for one in scores}.isdisjoint(task.task_id for task in tasks):
        raise DataError(
            f"--against: {path} has scores of {len(scores):,} tasks of {settings.tasks}, and none of the "
            f"{len(tasks):,} tasks asked for; evaluate both policies on the same --tasks"
        )
    _check_digests(scores, {task.task_id: tasks_digest([task]) for task in tasks})


def _check_digests(scores: Sequence[TaskScore], digests: Mapping[str, str]) -> None:
    """Refuse scores of other questions with the same ids: files of several sets may be named ``test.jsonl``."""
    for one in scores:
        if one.digest and (other := digests.get(one.task_id)) and one.digest != other:
            raise DataError(
                f"{one.task_id} is not the same question in both evaluations, or has other answers; evaluate both "
                "policies on the same --tasks"
            )


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"


def intervals(scores: Sequence[TaskScore]) -> dict[str, Interval]:
    """Return every measure with its interval; recall is left out if no task has known evidence."""
    values = {name: [getattr(one, name) for one in scores] for name in MEASURES}
    own = dict.fromkeys(name for one in scores for name in one.measures)
    values |= {name: [one.measures.get(name) for one in scores] for name in own}
    known = {name: [value for value in column if value is not None] for name, column in values.items()}
    return {name: bootstrap(np.asarray(column, np.float64)) for name, column in known.items() if column}


def latency(scores: Sequence[TaskScore], concurrency: int) -> Latency:
    """Return the latency over at least one score, measured with ``concurrency`` trajectories at the same time."""
    seconds = np.asarray([one.latency_s for one in scores], np.float64)  # [num_tasks]
    median_s, p95_s = np.percentile(seconds, (50, 95))
    means = {
        name: math.fsum(getattr(one, name) for one in scores) / len(scores) for name in ("tokens", "rounds", "queries")
    }
    return Latency(concurrency, len(scores), float(median_s), float(p95_s), float(seconds.mean()), **means)


def bootstrap(values: NDArray[np.float64], seed: int = 0) -> Interval:
    """Return the mean of ``values`` [num_tasks] and the percentiles 2.5 and 97.5 of its means over resamples."""
    rng = np.random.default_rng(seed)
    means = [
        values[rng.integers(len(values), size=(_CHUNK, len(values)))].mean(axis=1)
        for _ in range(_NUM_RESAMPLES // _CHUNK)
    ]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return Interval(math.fsum(values) / len(values), float(low), float(high))


def wilson(share: float, num_tasks: int) -> Interval:
    """Return a share of ``num_tasks`` tasks with its 95 % Wilson interval: ``wilson(0.9, 100)`` is 0.9 in [0.826,
    0.945].

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z = 1.959964  # the normal distribution's 97.5 % quantile
    middle = (share + z * z / (2 * num_tasks)) / (1 + z * z / num_tasks)
    spread = math.sqrt(share * (1 - share) / num_tasks + z * z / (4 * num_tasks**2)) / (1 + z * z / num_tasks)
    return Interval(share, max(0.0, middle - z * spread), min(1.0, middle + z * spread))


def compare(first: Sequence[TaskScore], second: Sequence[TaskScore]) -> Comparison:
    """Compare two policies over the tasks that both answered.

    Raises:
        DataError: there is no task that both answered, or an id names two questions.
    """
    _check_digests(first, {one.task_id: one.digest for one in second})
    others = {one.task_id: one for one in second}
    pairs = [(one, others[one.task_id]) for one in first if one.task_id in others]
    if not pairs:
        raise DataError("the two results files have no task in common; evaluate both policies on the same --tasks")
    em, f1 = (
        bootstrap(np.asarray([getattr(a, name) - getattr(b, name) for a, b in pairs], np.float64))
        for name in ("em", "f1")
    )
    only_first = sum(a.em > b.em for a, b in pairs)
    only_second = sum(a.em < b.em for a, b in pairs)
    return Comparison(len(pairs), em, f1, only_first, only_second, mcnemar(only_first, only_second))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the p value of McNemar's exact two-sided test: ``mcnemar(0, 5) == 0.0625``; 1 if no task differs."""
    total, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return min(1.0, float(2 * tail / 2**total))
