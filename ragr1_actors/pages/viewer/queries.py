"""Filters over a snapshot: the trajectories that a person asked for, and the number of each kind.

Scalars are compared as NumPy columns. Text is searched in the mapped parts by pyarrow's RE2, which ignores case five
times as fast as its plain search (docs/decisions/viewer.md).
"""

from __future__ import annotations

import itertools
import os
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ragr1_actors.core.errors import UserError, nearest
from ragr1_actors.pages.viewer.index import Snapshot
from ragr1_actors.pages.viewer.parts import STAGES

OUTCOMES = {
    "all": "every trajectory",
    "correct": "the answer is a golden one",
    "wrong": "it ended without a failure of the machinery, and the answer is none of the golden ones",
    "unsearched": "correct without a search",
    "ignored": "wrong, although the evidence was in its documents",
    "malformed": "a turn had no valid action",
    "failed": "engine, retrieval or environment failed",
    "truncated": "the turns or the context were used up",
}
"""Outcomes by which trajectories can be filtered, with their meaning."""
ORDERS = ("newest", "oldest", "reward", "length")
MAX_TEXT_CHARS, MAX_ROWS = 200, 500
_MAX_TERMS = 8
_NUM_CACHED = 16
_TERM = re.compile(r'"([^"]+)"|(\S+)')

Mask = NDArray[np.bool_]  # [num_rows]


@dataclass(frozen=True, slots=True)
class Scope:
    """Scope of a search: ``Scope(text='"world war" riga', stage="training", first=10, last=20)``."""

    text: str = ""
    """Words that must all occur, in any case; several in double quotes are one phrase."""
    stage: str = ""
    """Stage, one of ``STAGES``; empty is every stage."""
    first: int | None = None
    last: int | None = None
    """Iterations, both inclusive."""
    task: str = ""
    """Id of a task."""

    def __post_init__(self) -> None:
        """Check the values; ``UserError`` for an unknown stage or a too long text."""
        if self.stage and self.stage not in STAGES:
            raise UserError(f"got stage {self.stage!r}{nearest(self.stage, STAGES)}")
        if len(self.text) > MAX_TEXT_CHARS:
            raise UserError(f"got a text of {len(self.text)} characters, expected at most {MAX_TEXT_CHARS}")

    @property
    def terms(self) -> tuple[str, ...]:
        """Words and phrases, the longest first, since it leaves the fewest rows to the others."""
        found = {phrase or word for phrase, word in _TERM.findall(self.text)}
        return tuple(sorted(found, key=lambda term: (-len(term), term))[:_MAX_TERMS])


@dataclass(frozen=True, slots=True)
class Query:
    """Scope, with the outcome to show and its order: the rows from ``offset`` on, at most ``limit``."""

    scope: Scope = Scope()
    outcome: str = "all"
    order: str = "newest"
    offset: int = 0
    limit: int = 100

    def __post_init__(self) -> None:
        """Check the values; ``UserError`` for a value that is unknown or out of range."""
        for name, value, known in (("outcome", self.outcome, OUTCOMES), ("order", self.order, ORDERS)):
            if value not in known:
                raise UserError(f"got {name} {value!r}{nearest(value, known)}")
        if not (self.offset >= 0 and 1 <= self.limit <= MAX_ROWS):
            raise UserError(f"got offset {self.offset} and limit {self.limit}, expected 0 or more and 1 to {MAX_ROWS}")


class Searcher:
    """Answers queries on one thread per core, and remembers the rows of the last scopes. Any thread may call it."""

    def __init__(self) -> None:
        """Begin without any scope."""
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="search")
        self._scopes: OrderedDict[tuple[int, Scope], Mask] = OrderedDict()

    def find(self, snapshot: Snapshot, query: Query) -> tuple[NDArray[np.int64], dict[str, int]]:
        """Return the rows of one page, ``[<= limit]``, and the number of all in the scope for each of ``OUTCOMES``."""
        within = self._within(snapshot, query.scope)
        outcomes = {name: within & outcome_mask(snapshot, name) for name in OUTCOMES}
        counts = {name: int(np.count_nonzero(mask)) for name, mask in outcomes.items()}
        rows = np.flatnonzero(outcomes[query.outcome])
        rows = _in_order(snapshot, rows, query.order)[query.offset : query.offset + query.limit]
        return rows, counts

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _within(self, snapshot: Snapshot, scope: Scope) -> Mask:
        key = (snapshot.version, scope)
        if (known := self._scopes.get(key)) is not None:
            return known
        mask = _scalar_mask(snapshot, scope)
        if scope.terms:
            starts = snapshot.starts
            pieces = [mask[start:end] for start, end in itertools.pairwise(starts.tolist())]
            texts = [part.table.column("text") for part in snapshot.parts]
            terms = [scope.terms] * len(texts)
            mask = np.concatenate([np.zeros(0, bool), *self._threads.map(_matches, texts, pieces, terms)])
        self._scopes[key] = mask
        while len(self._scopes) > _NUM_CACHED:
            self._scopes.pop(next(iter(self._scopes)), None)
        return mask


def outcome_mask(snapshot: Snapshot, outcome: str) -> Mask:
    """Return a mask of the rows that have one of ``OUTCOMES``."""
    columns = snapshot.scalars
    correct: Mask = columns["is_correct"].astype(bool)
    failed: Mask = columns["is_failed"].astype(bool)
    wrong: Mask = ~correct & ~failed
    match outcome:
        case "correct":
            return correct
        case "wrong":
            return wrong
        case "unsearched":
            unsearched: Mask = correct & (columns["num_calls"] == 0)
            return unsearched
        case "ignored":
            ignored: Mask = wrong & columns["has_evidence"]
            return ignored
        case "malformed" | "failed" | "truncated":
            return columns[f"is_{outcome}"].astype(bool)
    return np.ones(snapshot.num_rows, bool)


def _scalar_mask(snapshot: Snapshot, scope: Scope) -> Mask:
    columns = snapshot.scalars
    mask: Mask = np.ones(snapshot.num_rows, bool)
    if scope.stage:
        mask &= columns["stage"] == STAGES.index(scope.stage)
    if scope.first is not None:
        mask &= columns["iteration"] >= scope.first
    if scope.last is not None:
        mask &= columns["iteration"] <= scope.last
    if scope.task:
        mask &= pc.equal(snapshot.strings.column("task_id"), scope.task).to_numpy()
    return mask


def _matches(texts: pa.ChunkedArray, mask: Mask, terms: tuple[str, ...]) -> Mask:
    """Return a mask of the rows of one part that are in ``mask`` and have all the terms."""
    rows = np.flatnonzero(mask)
    left = texts if len(rows) == len(mask) else texts.take(pa.array(rows))
    for term in terms:
        if not len(rows):
            break
        hits = pc.match_substring(left, term, ignore_case=True)
        kept = hits.to_numpy()
        if not kept.all():
            rows, left = rows[kept], left.filter(hits)
    found: Mask = np.zeros(len(mask), bool)
    found[rows] = True
    return found


def _in_order(snapshot: Snapshot, rows: NDArray[np.int64], order: str) -> NDArray[np.int64]:
    if order == "oldest":
        return rows
    newest = rows[::-1]
    if order == "newest":
        # groups stay whole and siblings in order: only the order of the files is reversed
        parts = snapshot.scalars["part"][rows]
        return rows[np.argsort(-parts.astype(np.int64), kind="stable")]
    keys = snapshot.scalars["reward" if order == "reward" else "num_model_tokens"][newest].astype(np.float64)
    return newest[np.argsort(keys if order == "reward" else -keys, kind="stable")]
