"""Index of a run's trajectories for filters: a part per file, with scalars and searched text, without tokens.

::

    trajectories/iteration_00012.arrow ──► view/iteration_00012.arrow   a tenth of the bytes, mapped and not read
    trajectories/*.arrow ──► Index.refresh() ──► parts on disk ──► Snapshot (scalars in memory, texts mapped)

A part is plain Arrow without compression, so that the texts of all parts are searched where they are mapped. After it
comes a digest of its bytes, of this format and of the size and the time of the file that it was made from. A part that
is damaged, of another version or of another file has another digest, and is made again. A snapshot never changes: a
query reads one while the next one is made.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from envs.measures import exact_match
from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.errors import DataError, one_line
from ragr1_actors.core.schema import TRAJECTORY_SCHEMA, check_format, current_format
from ragr1_actors.core.types import Record, StopReason, Task
from retrieval.base import RETRIEVE, SEARCH
from retrieval.corpora.text import found_evidence

FORMAT = "5"
"""Format number; raise it if a column changes its meaning. Parts of other formats or columns are made again."""
PART_SCHEMA = pa.schema(
    {
        "batch": pa.int32(),  # position in the file
        "row": pa.int32(),  # position in the batch
        "group": pa.int32(),  # number in the batch
        "trajectory_id": pa.string(),
        "task_id": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "stop_reason": pa.string(),
        "reward": pa.float64(),
        "is_correct": pa.bool_(),
        "is_failed": pa.bool_(),
        "is_truncated": pa.bool_(),
        "is_malformed": pa.bool_(),
        "has_evidence": pa.bool_(),
        "has_searched": pa.bool_(),
        "num_turns": pa.int32(),
        "num_calls": pa.int32(),
        "num_cached": pa.int32(),
        "num_model_tokens": pa.int32(),
        "latency_s": pa.float64(),
        "text": pa.string(),
    }
)
_DIGEST_BYTES = 16
_ROWS_AT_ONCE = 2000
"""Number of rows for which a viewer that is stopped waits: a fraction of a second."""
_READ = ("group", "trajectory_id", "task", "turns", "stop_reason", "reward", "answer", "error")
_FAILED = {reason.value for reason in StopReason if reason.is_failure}
_TRUNCATED = {StopReason.MAX_TURNS.value, StopReason.CONTEXT_FULL.value}
_TOO_COMMON = {"", "yes", "no", "true", "false"}
"""Gold answers that nearly every document holds, so that finding them is no evidence."""
_ITERATION = re.compile(r"(eval_)?iteration_(\d+)")
STAGES = ("demonstrations", "training", "evaluation", "other")


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Origin of a file of trajectories in a run; origins sort as the run wrote them.

    ``Origin.of("eval_iteration_00060") == Origin(3, 60, 1, "eval_iteration_00060")``
    """

    phase: int
    """Phase: 0 before training, 3 during it, 4 after it; the evaluations before and after SFT are in between."""
    iteration: int
    is_evaluation: int
    name: str

    @classmethod
    def of(cls, name: str) -> Origin:
        """Return the origin in the name of a file without its suffix."""
        if found := _ITERATION.fullmatch(name):
            return cls(3, int(found[2]), int(bool(found[1])), name)
        phase = {"demonstrations": 0, "eval_start": 1, "eval_sft": 2, "eval_rl": 4}.get(name, 5)
        return cls(phase, 0, int(name.startswith("eval_")), name)

    @property
    def stage(self) -> str:
        """Stage, one of ``STAGES``."""
        if self.is_evaluation:
            return "evaluation"
        return {0: "demonstrations", 3: "training"}.get(self.phase, "other")


@dataclass(frozen=True, slots=True)
class Source:
    """State of a file as it was seen; it changes with its size and time."""

    path: Path
    version: str

    @classmethod
    def of(cls, path: Path) -> Source:
        """Return the present state of a file.

        Raises:
            OSError: it does not exist.
            DataError: it is not a regular file: a reader of a FIFO would wait without end.
        """
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is no regular file; remove it from the run")
        return cls(path, f"{found.st_size}:{found.st_mtime_ns}")


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """The rows of one file."""

    origin: Origin
    source: Source
    kept: Source | None
    """File from which ``table`` is mapped; None if it could not be written and is in memory."""
    table: pa.Table


def map_file(path: Path) -> pa.Buffer:
    """Map a regular file; raises ``OSError`` if it is another kind or empty, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return pa.py_buffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise OSError("it is empty") from None
    finally:
        os.close(descriptor)


def read_part(path: Path, source: Source) -> IndexedFile | None:
    """Map the part of a file; None if there is none, or it is damaged, or belongs to another file or version."""
    try:
        kept = Source.of(path)
        mapped = map_file(path)
    except (OSError, DataError):
        return None
    rows = mapped.slice(0, max(0, mapped.size - _DIGEST_BYTES))
    if mapped.slice(rows.size).to_pybytes() != _digest(rows, source):
        return None
    return IndexedFile(Origin.of(source.path.stem), source, kept, pa.ipc.open_file(rows).read_all())


def make_part(source: Source, is_stopped: Callable[[], bool]) -> IndexedFile | None:
    """Read a file of trajectories; return None if the viewer is stopped meanwhile.

    Raises:
        DataError: the file has no trajectories of this version, or is damaged.
    """
    batches = []
    for batch in _rows_of(source.path):
        if is_stopped():
            return None
        batches.append(batch)
    table = pa.Table.from_batches(batches, schema=PART_SCHEMA).combine_chunks()
    return IndexedFile(Origin.of(source.path.stem), source, None, table)


def keep_part(path: Path, part: IndexedFile) -> IndexedFile:
    """Write a part, replace an existing one, and return it mapped; ``OSError`` if it cannot be written."""

    def write(writing: Path) -> None:
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_file(buffer, PART_SCHEMA) as writer:
            writer.write_table(part.table)
        rows = buffer.getvalue()
        with writing.open("wb") as file:
            file.write(rows)
            file.write(_digest(rows, part.source))

    if path.is_dir() and not path.is_symlink():  # the folder is ours, and nothing can replace a folder by rename
        shutil.rmtree(path)
    write_file(path, write)
    return read_part(path, part.source) or part


def _digest(rows: pa.Buffer, source: Source) -> bytes:
    digest = xxhash.xxh3_128(f"{FORMAT} {source.path.name} {source.version} {PART_SCHEMA}".encode())
    digest.update(rows)
    return digest.digest()


def _rows_of(path: Path) -> Iterator[pa.RecordBatch]:
    options = pa.ipc.IpcReadOptions(included_fields=[TRAJECTORY_SCHEMA.get_field_index(name) for name in _READ])
    try:
        reader = pa.ipc.open_file(map_file(path), options=options)
        check_format(path, reader.schema)
        first, batches = 0, []
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            batch.validate(full=True)  # damaged offsets would lead out of the mapped memory
            batches.append(current_format(batch))
            if sum(batch.num_rows for batch in batches) >= _ROWS_AT_ONCE or index + 1 == reader.num_record_batches:
                yield _rows(batches, first)
                first, batches = index + 1, []
    except DataError:
        raise
    # errors of validation, and nulls where the schema has none
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; restore it, or remove it from the run") from error


def _rows(batches: list[pa.RecordBatch], first: int) -> pa.RecordBatch:
    """Return the rows of some batches of a file; ``first`` is the index of the first batch."""
    # a run writes a batch per group, and every step below has a cost per batch, so they are merged
    counts = [batch.num_rows for batch in batches]
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or batches[:1]
    task, turns = batch.column("task"), batch.column("turns")
    turn_offsets, turn = _flat(turns)
    call_offsets, call = _flat(turn.field("calls"))
    row_calls = call_offsets[turn_offsets]
    reasons, answers = batch.column("stop_reason").to_pylist(), batch.column("answer").to_pylist()
    questions, ids = task.field("question").to_pylist(), batch.column("trajectory_id").to_pylist()
    completions, actions = turn.field("completion_text").to_pylist(), turn.field("action").to_pylist()
    golden = task.field("golden_answers").to_pylist()
    bounds = list(zip(turn_offsets[:-1].tolist(), turn_offsets[1:].tolist(), strict=True))
    columns: dict[str, Any] = {
        "batch": np.repeat(np.arange(first, first + len(counts), dtype=np.int32), counts),
        "row": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        "group": batch.column("group"),
        "trajectory_id": ids,
        "task_id": task.field("task_id"),
        "question": questions,
        "answer": answers,
        "stop_reason": reasons,
        "reward": batch.column("reward"),
        "is_correct": [is_correct(answer, tuple(gold)) for answer, gold in zip(answers, golden, strict=True)],
        "is_failed": [reason in _FAILED for reason in reasons],
        "is_truncated": [reason in _TRUNCATED for reason in reasons],
        "is_malformed": ["malformed" in actions[start:end] for start, end in bounds],
        "has_evidence": _evidence(call, row_calls, task.field("supporting_ids").to_pylist(), golden),
        "has_searched": _has_searched(call, row_calls),
        "num_turns": np.diff(turn_offsets),
        "num_calls": np.diff(row_calls),
        "num_cached": _sums(call.field("is_cached").to_numpy(zero_copy_only=False), row_calls),
        "num_model_tokens": _sums(turn.field("num_model_tokens").to_numpy(), turn_offsets),
        "latency_s": _sums(call.field("latency_s").to_numpy(), row_calls),
        "text": [
            "\n".join((name, question, *completions[start:end], answer, error))
            for name, question, (start, end), answer, error in zip(
                ids, questions, bounds, answers, batch.column("error").to_pylist(), strict=True
            )
        ],
    }
    return pa.RecordBatch.from_pydict(columns, schema=PART_SCHEMA)


@lru_cache(100_000)
def is_correct(answer: str, golden_answers: tuple[str, ...]) -> bool:
    """Return whether an answer is exactly a golden one after normalisation, whatever the run's reward was."""
    return bool(exact_match(answer, golden_answers))


def _evidence(
    call: pa.StructArray, row_calls: NDArray[np.int64], supporting: list[list[str]], golden: list[list[str]]
) -> list[bool | None]:
    """Return per row whether its documents held the evidence; None if that is unknown.

    The evidence is all supporting passages if the task names them, else a document with a gold answer in it.
    """
    record_offsets, record = _flat(call.field("records"))
    ids, titles = record.field("id").to_pylist(), record.field("title").to_pylist()
    texts = record.field("text").to_pylist() if not all(supporting) else []
    bounds = record_offsets[row_calls].tolist()
    rows: list[bool | None] = []
    for row, (wanted, answers) in enumerate(zip(supporting, golden, strict=True)):
        start, end = bounds[row], bounds[row + 1]
        if wanted:
            gold = set(wanted)
            rows.append(found_evidence(gold, ids[start:end], titles[start:end]) == gold)
            continue
        named = _named(answers)
        rows.append(any(_holds(text, named) for text in texts[start:end]) if named else None)
    return rows


def _has_searched(call: pa.StructArray, row_calls: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return per row whether a search ran, as ``envs.measures.searches`` says it; other tools are no searches."""
    num_records = np.diff(_flat(call.field("records"))[0])
    took_s, results = call.field("latency_s").to_numpy(), call.field("result").to_pylist()
    was_made = (num_records > 0) | (took_s > 0) | np.array([not result for result in results], bool)
    is_search = np.array([tool in (SEARCH, RETRIEVE) for tool in call.field("tool").to_pylist()], bool)
    return _sums(was_made & is_search, row_calls) > 0


def is_evidence(task: Task, record: Record) -> bool:
    """Return whether a record is evidence, by the rule of ``has_evidence``."""
    if gold := set(task.supporting_ids):
        return bool(found_evidence(gold, (record.id,), (record.title,)))
    return _holds(record.text, _named(task.golden_answers))


def _named(golden_answers: Iterable[str]) -> list[str]:
    return [f" {gold} " for gold in map(normalize_answer, golden_answers) if gold not in _TOO_COMMON]


def _holds(text: str, named: list[str]) -> bool:
    return any(gold in _words(text) for gold in named)


@lru_cache(20_000)
def _words(text: str) -> str:
    return f" {normalize_answer(text)} "


def _flat(column: pa.ListArray) -> tuple[NDArray[np.int64], pa.Array]:
    """Return the offsets of a list column, from 0, and the values of all its lists."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], column.flatten()


def _sums(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
    kind = np.float64 if values.dtype.kind == "f" else np.int64
    total = np.concatenate([np.zeros(1, kind), np.cumsum(values, dtype=kind)])
    sums: NDArray[Any] = total[offsets[1:]] - total[offsets[:-1]]
    return sums


PARTS = "view"
"""Name of the folder in a run with the parts; it can be removed at any time."""
_SCALARS = tuple(field.name for field in PART_SCHEMA if not pa.types.is_string(field.type))
_PUBLISH_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Rows of all parts, in the order in which the run wrote them. About 70 bytes per row are in memory."""

    version: int
    """Version, which rises with every change."""
    parts: tuple[IndexedFile, ...]
    num_files: int
    """Number of files of trajectories in the run; more than ``parts`` while the index is made."""
    problems: tuple[str, ...] = ()
    """Sentence for each file that cannot be read, and one if parts cannot be written."""

    @cached_property
    def starts(self) -> NDArray[np.int64]:  # [num_parts + 1]
        """Return the first row of each part, and the number of rows."""
        return np.cumsum([0, *(part.table.num_rows for part in self.parts)])

    @property
    def num_rows(self) -> int:
        """Number of trajectories."""
        return int(self.starts[-1])

    @cached_property
    def iterations(self) -> list[int]:  # [num_parts]
        """Return the iteration of each part; evaluations after training count as the last iteration."""
        last = max((part.origin.iteration for part in self.parts), default=0)
        return [last if part.origin.phase == 4 else part.origin.iteration for part in self.parts]

    @cached_property
    def scalars(self) -> dict[str, NDArray[Any]]:  # [num_rows] each
        """Return the columns without text, and ``iteration``, ``stage`` (of ``STAGES``) and ``part`` of each row."""
        table = self._concatenated(_SCALARS)
        evidence = table.schema.get_field_index("has_evidence")  # null if it is not known
        table = table.set_column(evidence, "has_evidence", table.column(evidence).fill_null(False))
        columns = {name: table.column(name).to_numpy() for name in _SCALARS}
        counts = np.diff(self.starts)
        origins = [part.origin for part in self.parts]
        columns["iteration"] = np.repeat(np.array(self.iterations, np.int64), counts)
        columns["stage"] = np.repeat(np.array([STAGES.index(o.stage) for o in origins], np.int8), counts)
        columns["part"] = np.repeat(np.arange(len(origins), dtype=np.int32), counts)
        return columns

    @cached_property
    def strings(self) -> pa.Table:
        """Return the columns of text, which are mapped, not read."""
        return self._concatenated(tuple(name for name in PART_SCHEMA.names if name not in _SCALARS))

    def _concatenated(self, names: Sequence[str]) -> pa.Table:
        tables = [part.table.select(names).replace_schema_metadata() for part in self.parts]
        return pa.concat_tables([pa.schema([PART_SCHEMA.field(name) for name in names]).empty_table(), *tables])


class Index:
    """Newest snapshot of a run. One thread at a time calls ``refresh``; any thread reads ``snapshot``."""

    def __init__(self, trajectories: Path, parts: Path) -> None:
        """Index the files of the folder ``trajectories``, and keep the parts in the folder ``parts``."""
        self._trajectories, self._directory = trajectories, parts
        self._parts: dict[Path, IndexedFile] = {}
        self._refused: dict[Source, str] = {}
        self._odd: tuple[str, ...] = ()
        self._unwritten = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.snapshot = Snapshot(0, (), 0)

    def refresh(self) -> bool:
        """Look for new, changed and removed files; return whether there were any.

        Snapshots appear meanwhile, so that the newest files can be seen while older ones are still indexed. A part that
        cannot be written is kept in memory.
        """
        with self._lock:
            sources, odd = self._look()
            gone = self._parts.keys() - {source.path for source in sources}
            for path in gone:
                del self._parts[path]
            refused = {source: self._refused[source] for source in sources if source in self._refused}
            is_mended, self._refused = len(refused) < len(self._refused), refused
            is_other, self._odd = odd != self._odd, odd
            new = [s for s in sources if s not in self._refused and not self._holds(s)]
            num_files = len(sources) + len(odd)
            if not (new or gone or is_mended or is_other) and num_files == self.snapshot.num_files:
                return False
            missing = [source for source in new if not self._map(source)]
            self._publish(num_files)
            published = time.monotonic()
            for source in missing:
                if self._stopped.is_set():
                    break
                self._make(source)
                if time.monotonic() - published > _PUBLISH_INTERVAL_S:
                    self._publish(num_files)
                    published = time.monotonic()
            self._publish(num_files)
            return True

    def stop(self) -> None:
        """Let ``refresh`` return soon."""
        self._stopped.set()

    def _look(self) -> tuple[list[Source], tuple[str, ...]]:
        """Return the files, the newest iterations first, and a sentence for each entry that is not such a file."""
        sources, odd = [], []
        found = self._trajectories.glob("*.arrow")
        for path in sorted(found, key=lambda path: Origin.of(path.stem), reverse=True):
            if path.name.startswith("."):
                continue
            try:
                if not path.name.isprintable():  # JSON cannot name a file that is not UTF-8
                    raise DataError(f"{path.name!a} has characters that the page cannot show; rename it")
                sources.append(Source.of(path))
            except DataError as error:
                odd.append(str(error))
            except OSError as error:
                if path.is_symlink() or not isinstance(error, FileNotFoundError):  # else the run is rolling back
                    odd.append(f"{path} cannot be read: {error.strerror}; restore it, or remove it from the run")
        return sources, tuple(odd)

    def _holds(self, source: Source) -> bool:
        held = self._parts.get(source.path)
        if held is None or held.source != source:
            return False
        try:  # a part that was changed where it is mapped is made again
            return held.kept is None or Source.of(held.kept.path) == held.kept
        except (OSError, DataError):
            return False

    def _map(self, source: Source) -> bool:
        part = read_part(self._directory / source.path.name, source)
        if part is not None:
            self._parts[source.path] = part
        return part is not None

    def _make(self, source: Source) -> None:
        try:
            part = make_part(source, self._stopped.is_set)
        except DataError as error:
            logger.warning("%s", error)
            self._parts.pop(source.path, None)
            self._refused[source] = str(error)
            return
        if part is not None:
            self._parts[source.path] = self._kept(part)

    def _kept(self, part: IndexedFile) -> IndexedFile:
        kept = self._directory / part.source.path.name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return keep_part(kept, part)
        except OSError as error:  # such as a full disk: the indexed files can be seen all the same
            if not self._unwritten:
                self._unwritten = (
                    f"{kept} cannot be written: {one_line(error)}; the index is in memory for now: free some space, or "
                    "remove what is in its way, and start the viewer again"
                )
                logger.warning("%s", self._unwritten)
            return part

    def _publish(self, num_files: int) -> None:
        parts = tuple(sorted(self._parts.values(), key=lambda part: part.origin))
        found = (*self._odd, *self._refused.values(), self._unwritten)
        problems = tuple(dict.fromkeys(problem for problem in found if problem))
        snapshot = Snapshot(self.snapshot.version + 1, parts, num_files, problems)
        _ = snapshot.scalars, snapshot.strings  # here, not in the first query
        self.snapshot = snapshot
