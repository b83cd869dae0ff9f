"""The report of a run: ``report.json`` for programs, ``report.html`` and a table for people.

``report.json``::

    {"peak_rss_bytes": 2147483648,
     "ratios": {"rounds_vs_single_query": 0.71},
     "stages": [{"eval": {"em": 0.93, "f1": 0.93, "num_failed": 0, "num_tasks": 200, "queries": 2.9,
                          "queries_per_round": 1.6, "rounds": 1.8, "tokens": 61.0}, "stage": "rl", "wall_s": 402.5}],
     "tasks": {"doubled": 0, "failed": 0, "issued": 6400, "lost": 0, "trained": 6400},
     "wall_s": 517.0}
"""

from __future__ import annotations

import html
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from ragr1_actors.core.errors import DataError, RunDirectoryError
from ragr1_actors.core.files import read_json, write_json
from ragr1_actors.runs.metrics import METRICS_FILE, read_metrics

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
StageName = Literal["start", "sft", "rl"]
STAGE_TITLES: dict[StageName, str] = {"start": "before SFT", "sft": "after SFT", "rl": "after RL"}
CURVES = ("rollout/reward", "eval/em")
"""Metrics drawn in ``report.html``, one line a stage."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Greedy evaluation on held-out tasks; means over tasks where nothing else is said."""

    em: float
    """Share answered exactly, in [0, 1]."""
    f1: float
    rounds: float
    """Turns that searched."""
    queries_per_round: float
    """All queries ÷ all rounds; 0 where nothing was searched."""
    queries: float
    tokens: float
    """Tokens that the policy sampled."""
    num_tasks: int
    """Tasks that came to their end: those that the means are over."""
    num_failed: int = 0
    """Tasks that the machinery failed on, retries included; they are in no mean."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage cost, and what the policy could do at its end."""

    stage: StageName
    eval: EvalResult
    wall_s: float


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """What became of the tasks that were issued for training. ``lost`` and ``doubled`` are 0 or there is a bug."""

    issued: int = 0
    trained: int = 0
    failed: int = 0
    """Given up after every retry."""
    lost: int = 0
    doubled: int = 0
    """Trained more than once in an epoch."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run."""

    stages: tuple[StageReport, ...]
    wall_s: float
    peak_rss_bytes: int
    """Of the driver and every process below it, see ``PeakMemory``."""
    tasks: TaskCounts = TaskCounts()
    ratios: dict[str, float] = field(default_factory=dict)


def write_report(run_dir: Path, report: RunReport) -> None:
    """Write ``report.json`` and ``report.html``, with the curves of ``metrics.jsonl`` where there is one."""
    write_json(run_dir / REPORT_JSON, asdict(report))
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    (run_dir / REPORT_HTML).write_text(_html(run_dir.name, report, rows), encoding="utf-8")


def read_report(run_dir: Path) -> RunReport:
    """Read ``report.json`` of a run.

    Raises:
        RunDirectoryError: the run has no report, which is written at its end, or it is damaged.
    """
    path = run_dir / REPORT_JSON
    if not path.is_file():
        raise RunDirectoryError(
            f"{run_dir} holds no {REPORT_JSON}, which a run writes at its end; finish it with --resume"
        )
    again = "delete the file, and --resume writes it again"
    try:
        report = TypeAdapter(RunReport).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "all of it"
        raise RunDirectoryError(f"{path} is damaged: {name}: {first['msg'].lower()}; {again}") from error
    except DataError as error:
        raise RunDirectoryError(f"{error}; {again}") from error
    if not report.stages:
        raise RunDirectoryError(f"{path} is damaged: it reports on no stage; {again}")
    return report


def render_table(report: RunReport) -> Table:
    """Return the table a person sees at the end of a run: a row a measure, a column a stage."""
    table = Table(title=f"Held-out tasks, greedy ({_num_tasks(report)})")
    table.add_column("")
    for stage in report.stages:
        table.add_column(STAGE_TITLES[stage.stage], justify="right")
    for name, *cells in _table_rows(report):
        table.add_row(name, *cells)
    return table


class PeakMemory:
    """Samples the memory of this process and of every process below it while the ``with`` block runs.

    Ray's daemons and workers are below the driver that started them (``ray.init`` without a running cluster), so the
    whole of a run on one machine is seen; actors on other machines are not. Shared pages, such as Ray's object store,
    are counted once: a process counts with its proportional set size where the kernel tells it.

    ::

        with PeakMemory() as memory:
            algorithm.train()
        memory.peak_bytes
    """

    def __init__(self, interval_s: float = 3.0) -> None:
        """Sample every ``interval_s`` seconds; a sample of a dozen processes costs about 0.05 s of one core."""
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self.peak_bytes = 0
        """The largest sum seen up to now."""

    def __enter__(self) -> Self:
        """Take the first sample and start the thread."""
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the last sample and end the thread."""
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_rss_bytes())


def tree_rss_bytes(root: int | None = None) -> int:
    """Return the memory of process ``root`` (this one by default) and all its descendants now; 0 without ``/proc``."""
    return sum(_process_bytes(pid) for pid in _descendants(os.getpid() if root is None else root))


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:  # grows while it is read: a walk down the tree
        found += children.get(pid, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Yield ``(pid, parent pid)`` of every process that can be seen."""
    proc = Path("/proc")
    if not proc.is_dir():
        return
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:  # ended since it was listed
                continue
            # "412 (a name) with) spaces) S 400 ...": the name may hold anything, so count from its last bracket.
            yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def _process_bytes(pid: int) -> int:
    for name, field_name in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{name}").read_text(errors="replace").splitlines()
        except OSError:  # ended, or another user's
            continue
        for line in lines:
            if line.startswith(field_name):
                return int(line.split()[1]) * 1024  # "Pss:   5124 kB"
    return 0


def _num_tasks(report: RunReport) -> str:
    counts = sorted({stage.eval.num_tasks for stage in report.stages})
    return " / ".join(f"{count:,}" for count in counts) + " tasks"


def _table_rows(report: RunReport) -> list[tuple[str, ...]]:
    evals = [stage.eval for stage in report.stages]
    num_failed = [result.num_failed for result in evals]
    return [
        ("EM", *(f"{result.em:.3f}" for result in evals)),
        ("F1", *(f"{result.f1:.3f}" for result in evals)),
        ("search rounds", *(f"{result.rounds:.2f}" for result in evals)),
        ("queries a round", *(f"{result.queries_per_round:.2f}" for result in evals)),
        ("queries", *(f"{result.queries:.2f}" for result in evals)),
        ("tokens", *(f"{result.tokens:.1f}" for result in evals)),
        *([("tasks failed, in no mean", *map(str, num_failed))] if any(num_failed) else []),
        ("wall time of the stage", *(f"{stage.wall_s:.0f} s" for stage in report.stages)),
    ]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }}
th, td {{ padding: .2rem .9rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0 }}
svg {{ width: 100%; height: auto }} svg text {{ font-size: 11px; fill: #666 }}
</style></head><body>
<h1>{title}</h1>
{table}
<p>{summary}</p>
{curves}
</body></html>
"""


def _html(title: str, report: RunReport, rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(STAGE_TITLES[stage.stage])}</th>" for stage in report.stages)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in _table_rows(report))
    tasks = ", ".join(f"{count:,} {name}" for name, count in asdict(report.tasks).items())
    ratios = "".join(f" {html.escape(name)}: {value:.3f}." for name, value in sorted(report.ratios.items()))
    summary = f"{report.wall_s:.0f} s, {report.peak_rss_bytes / 2**30:.2f} GiB at the peak. Tasks: {tasks}.{ratios}"
    return _PAGE.format(
        title=html.escape(title),
        table=f"<table><tr><th>{_num_tasks(report)}</th>{head}</tr>{body}</table>",
        summary=summary,
        curves="\n".join(_curve(name, stage, rows) for name in CURVES for stage in STAGE_TITLES),
    )


def _curve(name: str, stage: str, rows: list[dict[str, Any]]) -> str:
    """Draw one metric of one stage as an SVG line over its iterations; empty with fewer than two points."""
    points = [(row["iteration"], row[name]) for row in rows if row["stage"] == stage and name in row]
    points = [(x, y) for x, y in points if abs(y) != float("inf") and y == y]
    if len(points) < 2:
        return ""
    left, top, width, height = 40, 10, 640, 160
    x_low, x_high = points[0][0], points[-1][0]
    y_low, y_high = min(0.0, *(y for _, y in points)), max(1.0, *(y for _, y in points))
    path = " ".join(
        f"{left + (x - x_low) / (x_high - x_low) * width:.1f},{top + (y_high - y) / (y_high - y_low) * height:.1f}"
        for x, y in points
    )
    return (
        f"<h2>{html.escape(name)}, {html.escape(stage)}</h2>"
        f'<svg viewBox="0 0 {left + width + 10} {top + height + 24}" role="img">'
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>'
        f'<polyline points="{path}" fill="none" stroke="#0b62a3" stroke-width="2"/>'
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{y_high:g}</text>'
        f'<text x="{left - 6}" y="{top + height}" text-anchor="end">{y_low:g}</text>'
        f'<text x="{left}" y="{top + height + 16}">iteration {x_low}</text>'
        f'<text x="{left + width}" y="{top + height + 16}" text-anchor="end">{x_high}</text></svg>'
    )
