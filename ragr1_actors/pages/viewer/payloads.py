"""Contents of the page: the trajectories that a person asked for, as plain values for JSON.

Scalars are compared as NumPy columns. Text is searched in the mapped parts by pyarrow's RE2, which ignores case five
times as fast as its plain search (docs/decisions/viewer.md). Tokens, texts and documents are read only for the rows
shown.
"""

from __future__ import annotations

import logging
import os
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ragr1_actors.core.content import Image
from ragr1_actors.core.disk.digests import check_digests
from ragr1_actors.core.errors import DataError, UserError, nearest, one_line
from ragr1_actors.core.schema import LEARNED_SCHEMA, current_format, groups_from_record_batch
from ragr1_actors.core.types import Task, TokenKind, Trajectory, Turn
from ragr1_actors.pages.viewer.parts import STAGES, Snapshot, is_correct, is_evidence, map_file

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
        outcomes = {name: within & mask for name, mask in outcome_masks(snapshot).items()}
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
            texts = [part.table.column("text") for part in snapshot.parts]
            found = self._threads.map(partial(_matches, scope.terms), texts, np.split(mask, snapshot.starts[1:-1]))
            mask = np.concatenate([np.zeros(0, bool), *found])
        self._scopes[key] = mask
        while len(self._scopes) > _NUM_CACHED:
            self._scopes.pop(next(iter(self._scopes)), None)
        return mask


def outcome_masks(snapshot: Snapshot) -> dict[str, Mask]:
    """Return a mask of the rows that have each of ``OUTCOMES``."""
    columns = snapshot.scalars
    correct, failed = columns["is_correct"].astype(bool), columns["is_failed"].astype(bool)
    wrong = ~correct & ~failed
    return {
        "all": np.ones(snapshot.num_rows, bool),
        "correct": correct,
        "wrong": wrong,
        "unsearched": correct & ~columns["has_searched"].astype(bool),
        "ignored": wrong & columns["has_evidence"],
        "malformed": columns["is_malformed"].astype(bool),
        "failed": failed,
        "truncated": columns["is_truncated"].astype(bool),
    }


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


def _matches(terms: tuple[str, ...], texts: pa.ChunkedArray, mask: Mask) -> Mask:
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


logger = logging.getLogger(__name__)
_SHOWN = ("is_correct", "is_failed", "is_truncated", "is_malformed", "has_evidence", "has_searched")
_COUNTED = ("num_turns", "num_calls", "num_cached", "num_model_tokens")
_MAX_QUESTION_CHARS = 300


def run_payload(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return the summary of the run."""
    stages = sorted({part.origin.stage for part in snapshot.parts}, key=STAGES.index)
    return {
        "name": name,
        "version": snapshot.version,
        "num_trajectories": snapshot.num_rows,
        "num_indexed": len(snapshot.parts),
        "num_files": snapshot.num_files,
        "problems": snapshot.problems,
        "stages": stages,
        "outcomes": OUTCOMES,
    }


def row_payloads(snapshot: Snapshot, rows: list[int]) -> list[dict[str, Any]]:
    """Return some rows in the form of the list."""
    columns = snapshot.scalars
    strings = snapshot.strings.select(["trajectory_id", "task_id", "question", "answer", "stop_reason"])
    texts = strings.take(pa.array(rows, pa.int64())).to_pylist()
    shown = []
    for row, text in zip(rows, texts, strict=True):
        part = int(columns["part"][row])
        origin = snapshot.parts[part].origin
        shown.append(
            text
            | {name: bool(columns[name][row]) for name in _SHOWN}
            | {name: int(columns[name][row]) for name in _COUNTED}
            | {"question": text["question"][:_MAX_QUESTION_CHARS], "answer": text["answer"][:_MAX_QUESTION_CHARS]}
            | {"reward": float(columns["reward"][row]), "latency_s": float(columns["latency_s"][row])}
            | {"file": origin.name, "stage": origin.stage, "iteration": snapshot.iterations[part]}
        )
    return shown


def find_row(snapshot: Snapshot, file: str, trajectory_id: str) -> int:
    """Return the row of a trajectory; without ``file``, the newest with that id. ``DataError`` if there is none."""
    newest_first = range(len(snapshot.parts) - 1, -1, -1)
    for position in newest_first:
        part = snapshot.parts[position]
        if file and part.origin.name != file:
            continue
        found = part.table.column("trajectory_id").index(trajectory_id).as_py()
        if found >= 0:
            return int(snapshot.starts[position]) + int(found)
    raise DataError(f"no trajectory {trajectory_id} in {file or 'the run'}; it may not be indexed yet, or was replaced")


def trajectory_payload(snapshot: Snapshot, row: int, pieces: TokenPieces) -> dict[str, Any]:
    """Return all records of one trajectory, and its siblings.

    Raises:
        DataError: its file is missing or damaged.
    """
    columns = snapshot.scalars
    trajectory, learned = read_trajectory(snapshot, row)
    same = ("part", "batch", "group")
    start, end = (int(bound) for bound in snapshot.starts[int(columns["part"][row]) :][:2])
    within = [columns[name][start:end] == columns[name][row] for name in same]
    siblings = row_payloads(snapshot, (np.flatnonzero(np.logical_and.reduce(within)) + start).tolist())
    rewards = [sibling["reward"] for sibling in siblings if not sibling["is_failed"]]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    for sibling in siblings:
        sibling["above_mean"] = sibling["reward"] - mean
    return {
        "summary": row_payloads(snapshot, [row])[0],
        "task": asdict(trajectory.task),
        "turns": [_turn(trajectory.task, turn) for turn in trajectory.turns],
        "answer": trajectory.answer,
        "error": trajectory.error,
        "variant": trajectory.variant,
        "parent": trajectory.parent,
        "is_correct": is_correct(trajectory.answer, trajectory.task.golden_answers),
        "metrics": dict(sorted(trajectory.metrics.items())),
        "siblings": siblings,
        "tokens": {
            "pieces": pieces.of(trajectory.token_ids.tolist()),
            "row_starts": [row.start for row in trajectory.rows],
            "kinds": trajectory.kinds.tolist(),
            "kind_names": [kind.name.lower() for kind in TokenKind],
            "logprobs": trajectory.logprobs.tolist(),
            "policy_versions": trajectory.policy_versions.tolist(),
            "is_text": pieces.is_text,
            "images": [
                {"start": one.start, "num_tokens": one.num_tokens, "url": _url(one.image)} for one in trajectory.images
            ],
            **{name: _spread(values, trajectory) for name, values in learned.items()},
        },
    }


def _turn(task: Task, turn: Turn) -> dict[str, Any]:
    """Return a turn with ``asked`` in each of its calls, and ``gold`` in each record: whether it is evidence."""
    shown = asdict(turn)
    for made, call in zip(shown["calls"], turn.calls, strict=True):
        made["asked"] = call.asked
        for found, record in zip(made["records"], call.records, strict=True):
            found["gold"] = is_evidence(task, record)
            found["image"] = record.image and _url(record.image)
    return shown


def _url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.data).decode()}"


def _spread(values: list[float], trajectory: Trajectory) -> list[float | None]:
    """Place the values of the MODEL tokens among all tokens; the others get None."""
    spread: list[float | None] = [None] * len(trajectory.kinds)
    for position, value in zip(np.flatnonzero(trajectory.kinds == TokenKind.MODEL), values, strict=True):
        spread[position] = value
    return spread


def read_trajectory(snapshot: Snapshot, row: int) -> tuple[Trajectory, dict[str, list[float]]]:
    """Read one trajectory from its file; ``DataError`` if that is gone or damaged.

    The second result has the learner's values per MODEL token, if any: ``{"advantages": [...], "ratios": [...]}``.
    """
    columns = snapshot.scalars
    path = snapshot.parts[int(columns["part"][row])].source.path
    expected = snapshot.strings.column("trajectory_id")[row].as_py()
    try:
        batch = pa.ipc.open_file(map_file(path)).get_batch(int(columns["batch"][row]))
        batch.validate(full=True)  # the file may have been damaged since
        batch = current_format(batch.slice(int(columns["row"][row]), 1))
        (group,) = groups_from_record_batch(batch)
        names = [name for name in LEARNED_SCHEMA.names[1:] if name in batch.schema.names]
        learned = {name: values for name in names if (values := batch.column(name)[0].as_py()) is not None}
    # errors of validation, and nulls where the schema has none
    except (OSError, pa.ArrowException, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; reload the page") from error
    (trajectory,) = group.trajectories
    if trajectory.trajectory_id != expected:
        raise DataError(f"{path} was replaced by another file; reload the page")
    return trajectory, learned


@lru_cache(8)
def _read_tokenizer(path: Path, written_ns: int) -> Any:
    """Return a tokenizer, or None if the file, which was written at that time, is damaged; warn once."""
    try:
        check_digests(path.parent, path.name.__eq__)
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more exact
        logger.warning("%s cannot be read: %s; restore it to see the text of tokens", path, one_line(error))
        return None


class TokenPieces:
    """Texts of single tokens, or their ids if the run has no tokenizer yet."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Take the ``tokenizer.json`` of the first folder that has a whole one."""
        paths = (path for folder in folders if (path := folder / "tokenizer.json").is_file())
        self._tokenizer: Any = next(
            (found for path in paths if (found := _read_tokenizer(path, path.stat().st_mtime_ns))), None
        )
        self._piece = cache(self._decode)

    @property
    def is_text(self) -> bool:
        """Whether the pieces are text."""
        return self._tokenizer is not None

    def of(self, token_ids: list[int]) -> list[str]:
        """Return a piece per token; a part of a character becomes U+FFFD."""
        return [self._piece(token_id) for token_id in token_ids]

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False) or f"[{token_id}]"
