"""What a run writes about itself: one line of JSON an iteration, and the same numbers for TensorBoard.

``metrics.jsonl``, one line for every ``log``, keys sorted::

    {"iteration": 3, "loop/tokens": 81920.0, "rollout/reward": 0.61, "stage": "rl", "time/iteration_s": 4.2}

A metric's name is ``group/what``: ``rollout/…``, ``learner/…``, ``eval/…``, ``loop/…``. Names that start with ``time/``
are wall times in seconds. They are the only ones that two runs of the same seed do not share.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ragr1_actors.core.errors import RunDirectoryError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
TIME_PREFIX = "time/"
_RESERVED = ("iteration", "stage")


class MetricsLogger:
    """Appends to ``metrics.jsonl`` and ``tensorboard/`` of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        """Open for appending. ``run_dir`` is made where it does not exist."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._path = run_dir / METRICS_FILE
        if self._path.is_file():
            self._rewrite(read_metrics(run_dir))  # without a last line that a crash cut off
        self._file = self._path.open("a", encoding="utf-8")
        self._events: dict[str, _EventFile] = {}

    def log(self, stage: str, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one iteration of ``stage``. They are in both files when this returns.

        ``log("rl", 3, {"rollout/reward": 0.61, "time/iteration_s": 4.2})``

        A logger's first line of a stage drops the lines of that stage from ``iteration`` on: a run that is resumed
        from iteration 3 does not keep what its earlier life logged after that checkpoint.

        Raises:
            OSError: a file cannot be written; ``ENOSPC`` where there is no room.
        """
        reserved = [name for name in metrics if name in _RESERVED]
        if reserved:
            raise ValueError(
                f"got a metric named {reserved[0]!r}, which is the line's own; name it group/{reserved[0]}"
            )
        values = {name: float(value) for name, value in metrics.items()}
        events = self._event_file(stage, iteration)
        self._file.write(_line({"stage": stage, "iteration": iteration, **values}))
        self._file.flush()
        events.write(iteration, values)

    def close(self) -> None:
        """Close the files, all of them also where one cannot be written to its end; may be called twice."""
        with ExitStack() as files:
            files.callback(self._file.close)
            for events in self._events.values():
                files.callback(events.close)
            self._events = {}

    def _event_file(self, stage: str, iteration: int) -> _EventFile:
        # One TensorBoard run a stage: iterations start at 0 in each, and the curves can be laid over one another.
        if stage not in self._events:
            resumed = self._drop(stage, iteration)
            directory = self._run_dir / TENSORBOARD_DIRECTORY / stage
            self._events[stage] = _EventFile(directory, purge_from=iteration if resumed else None)
        return self._events[stage]

    def _drop(self, stage: str, first_iteration: int) -> bool:
        rows = read_metrics(self._run_dir)
        kept = [row for row in rows if row["stage"] != stage or row["iteration"] < first_iteration]
        if len(kept) < len(rows):
            self._file.close()
            self._rewrite(kept)
            self._file = self._path.open("a", encoding="utf-8")
        return any(row["stage"] == stage for row in rows)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        temporary.replace(self._path)


class _EventFile:
    """A file of TensorBoard's, written by the thread that calls.

    ``SummaryWriter`` leaves that to a thread of its own: where the disk is full, that thread prints a traceback of its
    own too. It also imports torch.
    """

    def __init__(self, directory: Path, purge_from: int | None) -> None:
        """Begin a file. From step ``purge_from`` on, TensorBoard forgets what earlier files of the folder hold."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.iterdir()))  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=purge_from, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of one step; they are in the file when this returns."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``, oldest first; a last line that a crash cut off is left out.

    Numbers that are not finite come back as floats again.

    Raises:
        RunDirectoryError: the folder has no metrics, or a line before the last cannot be read.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise RunDirectoryError(f"{run_dir} holds no {METRICS_FILE}; give the directory of a run")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RunDirectoryError(
            f"{path} is damaged (not UTF-8 text at byte {error.start}); delete the file: the run goes on without what "
            "it has logged so far"
        ) from error
    # what follows the last newline is empty, or cut off
    return [_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1)]


def _read_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{where}: not JSON ({error.msg}); delete the line") from error
    except (ValueError, RecursionError) as error:  # a number without end, or brackets without end
        raise RunDirectoryError(f"{where}: not a line of metrics ({error}); delete the line") from error
    if not isinstance(row, dict) or not isinstance(row.get("iteration"), int) or not isinstance(row.get("stage"), str):
        raise RunDirectoryError(
            f"{where}: got {line[:60]!r}, expected an object with stage and iteration; delete the line"
        )
    try:
        return {name: float(value) if name not in _RESERVED else value for name, value in row.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise RunDirectoryError(f"{where}: a metric is no number ({error}); delete the line") from error


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics without wall times: two runs of the same seed share these."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIME_PREFIX)}


def mean_over(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average every name over the mappings that hold it.

    ``mean_over([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}``
    """
    values: dict[str, list[float]] = {}
    for mapping in metrics:
        for name, value in mapping.items():
            values.setdefault(name, []).append(float(value))
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no word for these, and a diverged run must still leave a file that every JSON reader opens.
    plain = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in row.items()
    }
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
