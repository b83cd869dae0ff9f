"""Report of a run: ``report.json`` for programs (a ``RunReport``), and a table."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import NonNegativeInt
from rich.table import Table

from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import DataError, RunDirectoryError, advised
from ragr1_actors.core.types import FailedTask
from ragr1_actors.runs.telemetry.events import Alarm, Incident, ScalingDecision
from ragr1_actors.runs.telemetry.metrics import Gap

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
StageName = Literal["start", "sft", "rl"]
STAGE_TITLES: dict[StageName, str] = {"start": "before SFT", "sft": "after SFT", "rl": "after RL"}
SAMPLE_INTERVAL_S = 3.0
"""Seconds between two samples of the memory; one of a dozen processes takes about 0.05 s of one core."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Greedy evaluation on held-out tasks; a float is a mean over the tasks unless its docstring says otherwise."""

    em: float
    """Exact match, in [0, 1]."""
    f1: float
    """Token F1, in [0, 1]."""
    rounds: float
    """Turns that searched, per task."""
    queries_per_round: float
    """All queries divided by all rounds; 0 if no task searched."""
    queries: float
    """Queries per task."""
    tokens: float
    """Tokens per task that the policy sampled."""
    num_tasks: int
    """Number of tasks with a finished trajectory, over which the means are taken."""
    num_failed: int = 0
    """Number of tasks that failed in every attempt for reasons other than the policy; no mean includes them."""
    measures: dict[str, float] = field(default_factory=dict)
    """Means of measures that only this environment has: ``{"ndcg": 0.71}``."""

    def by_name(self) -> dict[str, float]:
        """Return every number under its name: ``{"em": 0.9, ..., "ndcg": 0.71}``."""
        numbers: dict[str, Any] = asdict(self)
        own: dict[str, float] = numbers.pop("measures")
        return numbers | own


@dataclass(frozen=True, slots=True)
class StageReport:
    """Evaluation at the end of a stage, and the run's wall time since the stage before in seconds, over all resumes."""

    stage: StageName
    eval: EvalResult
    wall_s: float


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """Numbers of issued training tasks, by their end. ``lost`` and ``doubled`` are 0 unless there is a bug."""

    issued: NonNegativeInt
    trained: NonNegativeInt
    failed: NonNegativeInt
    """Tasks given up after too many failures; ``RunReport.failed_tasks`` names them."""
    skipped: NonNegativeInt = field(default=0, kw_only=True)
    """Tasks that the curriculum skipped; they do not count as issued."""
    lost: int
    """Tasks that were issued, but neither trained nor failed."""
    doubled: NonNegativeInt
    """Tasks that were trained more than once in an epoch."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Content of ``report.json``."""

    stages: tuple[StageReport, ...]
    wall_s: float
    peak_rss_bytes: int
    """Largest memory of the driver and its descendants, see ``PeakMemory``."""
    tasks: TaskCounts
    ratios: dict[str, float] = field(default_factory=dict)
    """Further figures, such as ``{"recall@3": 0.61}``."""
    decisions: tuple[ScalingDecision, ...] = ()
    """Sizes that the fleets got during the run, from ``metrics.jsonl``."""
    incidents: tuple[Incident, ...] = ()
    """Failures that were mended, from ``metrics.jsonl``."""
    failed_tasks: tuple[FailedTask, ...] = ()
    """Training tasks that were given up, with the reason; those with a failure of the data are in quarantine."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of the collapse guard."""
    gaps: tuple[Gap, ...] = ()
    """Steps that a damaged ``metrics.jsonl`` lacks."""


def write_report(run_dir: Path, report: RunReport) -> None:
    """Write ``report.json``. It marks the run as finished, so ``report.html`` is written before it."""
    write_file(run_dir / REPORT_JSON, lambda writing: write_json(writing, asdict(report)))


def read_report(run_dir: Path) -> RunReport:
    """Read ``report.json`` of a run; ``RunDirectoryError`` if there is none yet, ``DataError`` if it is damaged."""
    path = run_dir / REPORT_JSON
    if not path.is_file():
        raise RunDirectoryError(
            f"{run_dir} holds no {REPORT_JSON}, which a run writes at its end; see how far it is with --html, or "
            f"finish it with {advised('train', 'RECIPE', '--run-dir', str(run_dir), '--resume')} unless it still runs"
        )
    again = "delete the file, and --resume writes it again"
    report = read_json_as(RunReport, path, again)
    if not report.stages:
        raise DataError(f"{path} is damaged: it has no stages; {again}")
    return report


def render_table(report: RunReport) -> Table:
    """Return the table that a run prints at its end: one row per measure, one column per stage."""
    num_tasks = sorted({stage.eval.num_tasks for stage in report.stages})
    table = Table(title=f"Held-out tasks, greedy ({' / '.join(f'{number:,}' for number in num_tasks)} tasks)")
    table.add_column("")
    for stage in report.stages:
        table.add_column(STAGE_TITLES[stage.stage], justify="right")
    for name, *cells in _table_rows(report):
        table.add_row(name, *cells)
    return table


class PeakMemory:
    """Samples the memory of this process and its descendants while the ``with`` block runs, as ``peak_bytes``.

    Ray's daemons and workers descend from the driver that started them (``ray.init`` without a running cluster), so the
    figure covers a run on one machine; actors on other machines are not in it.
    """

    def __init__(self) -> None:
        """Prepare the thread."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self.peak_bytes = 0
        """Largest sample so far, in bytes."""

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the last sample."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.is_set()
            self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
            self._stop.wait(SAMPLE_INTERVAL_S)


def tree_memory_bytes(process: psutil.Process | None = None) -> int:
    """Return the memory of a process, by default this one, and its descendants in bytes.

    A process counts with its proportional set size if the system has one (Linux), so that memory shared between
    processes, such as Ray's object store, counts once; else with its resident set size.
    """
    process = process or psutil.Process()
    return sum(_process_bytes(one) for one in (process, *process.children(recursive=True)))


def _process_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):  # the process has ended
        try:
            memory = process.memory_full_info()
            return int(memory.pss if psutil.LINUX else memory.rss)
        except psutil.AccessDenied:  # the process belongs to another user
            return int(process.memory_info().rss)
    return 0


def _table_rows(report: RunReport) -> list[tuple[str, ...]]:
    evals = [stage.eval for stage in report.stages]
    num_failed = [result.num_failed for result in evals]
    return [
        ("EM", *(f"{result.em:.3f}" for result in evals)),
        ("F1", *(f"{result.f1:.3f}" for result in evals)),
        ("search rounds", *(f"{result.rounds:.2f}" for result in evals)),
        ("queries per round", *(f"{result.queries_per_round:.2f}" for result in evals)),
        ("queries", *(f"{result.queries:.2f}" for result in evals)),
        ("tokens", *(f"{result.tokens:.1f}" for result in evals)),
        *((name, *(f"{result.measures.get(name, 0.0):.3f}" for result in evals)) for name in evals[-1].measures),
        *([("failed tasks, in no mean", *map(str, num_failed))] if any(num_failed) else []),
        ("wall time of the stage", *(f"{stage.wall_s:.0f} s" for stage in report.stages)),
    ]
