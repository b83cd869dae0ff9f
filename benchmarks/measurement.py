"""What a benchmark finds: the median ratio of two sides, its goal, how often it is repeated, and on which machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.table import Table

from ragr1_actors.core.errors import UserError, one_line
from ragr1_actors.runs.run_directory import this_start


def run_script(main: Callable[..., None], **arguments: str | None) -> None:
    """Call ``main`` with the paths of the command line, and end with one sentence where it cannot go on.

    ``arguments`` are the parameters of ``main`` and argparse's ``nargs`` of each: ``source=None, target="?"``. One
    with ``"?"`` is passed if it is given.
    """
    parser = argparse.ArgumentParser(description=sys.modules[main.__module__].__doc__)
    for name, nargs in arguments.items():
        parser.add_argument(name, nargs=nargs, type=Path)
    given = {name: path for name, path in vars(parser.parse_args()).items() if path is not None}
    try:
        main(**given)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command starts again", file=sys.stderr)
        sys.exit(130)


SHORT_S, NUM_SHORT, NUM_LONG = 60.0, 5, 3
"""Repeats of a metric: five where the first takes less than a minute, else three."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeats of a metric: ``count``, or five or three by the seconds of the first. Iterating yields 0, 1, ..."""

    count: int | None = None

    def __iter__(self) -> Iterator[int]:
        started = time.monotonic()
        yield 0
        is_short = time.monotonic() - started < SHORT_S
        yield from range(1, self.count or (NUM_SHORT if is_short else NUM_LONG))


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a ratio: ``Goal(0.97, at_least=True)`` is >= 0.97. Without a limit it says which ratio is better."""

    limit: float | None
    at_least: bool

    def is_met(self, ratio: float) -> bool | None:
        """Whether the limit is kept; None without a limit."""
        if self.limit is None:
            return None
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}" if self.limit is not None else ""


HIGHER, LOWER = Goal(None, at_least=True), Goal(None, at_least=False)
"""What is better, for a ratio without a limit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat: both sides, and the ratio that is made of them."""

    ratio: float
    ours: float
    theirs: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a benchmark ran: ``Machine("5991252", "Intel Xeon", 2, "", {"torch": "2.13.0+cpu"})``."""

    commit: str
    """Commit of the checkout, ``5991252+`` if tracked files differ from it; empty without git."""
    cpu: str
    num_cpus: int
    gpu: str
    """Empty without one."""
    versions: dict[str, str]
    """Installed packages, as in a run's ``starts.jsonl``."""


@cache
def this_machine() -> Machine:
    """Return the machine of this process."""
    commit = _said("git", "rev-parse", "--short", "HEAD")
    changed = "+" if commit and _said("git", "status", "--porcelain", "--untracked-files=no") else ""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpus = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    gpus = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    cpu, gpu = (found[0] if found else "" for found in (cpus, gpus))
    return Machine(commit + changed, cpu or platform.processor(), len(cpus) or 1, gpu, this_start().versions)


def _said(*command: str) -> str:
    """Return what a program says; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the repeats; its fields are the keys of the JSON object."""

    metric: str
    ratio: float
    goal: float | None
    met: bool | None
    better: Literal["higher", "lower"]
    ours: float
    theirs: float
    unit: str
    repeats: int
    spread: float
    """(max - min) / median of the ratio over the repeats; just max - min where the median is 0."""
    machine: Machine

    def to_json(self) -> str:
        """One line."""
        rounded = {k: _round(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return json.dumps(rounded)

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """Read a line of ``to_json``.

        Raises:
            UserError: it is no such line.
        """
        try:
            fields: dict[str, Any] = json.loads(line)
            return cls(**{**fields, "machine": Machine(**fields["machine"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"got {line[:80]!r}, expected a line of ragr1 bench --json ({one_line(error)})") from error


def choose(only: str | None, metrics: Sequence[str]) -> set[str]:
    """The metrics to measure: ``only``, or all.

    Raises:
        UserError: ``only`` is no metric.
    """
    if only is not None and only not in metrics:
        raise UserError(f"got --only {only}, expected one of {', '.join(metrics)}")
    return {only} if only else set(metrics)


def log(line: str) -> None:
    """Say how it goes, with the load of the machine: on a busy one the figures mean little."""
    print(f"[load {os.getloadavg()[0]:.1f}] {line}", file=sys.stderr, flush=True)


def measure(metric: str, samples: Sequence[Sample], unit: str, goal: Goal) -> Measurement:
    """Reduce the repeats of one metric to their medians."""
    ratios = [sample.ratio for sample in samples]
    ratio = median(ratios)
    return Measurement(
        metric=metric,
        ratio=ratio,
        goal=goal.limit,
        met=goal.is_met(ratio),
        better="higher" if goal.at_least else "lower",
        ours=median(sample.ours for sample in samples),
        theirs=median(sample.theirs for sample in samples),
        unit=unit,
        repeats=len(samples),
        spread=(max(ratios) - min(ratios)) / (abs(ratio) or 1.0),
        machine=this_machine(),
    )


def quotient(ours: float, theirs: float) -> Sample:
    """The usual sample: ours ÷ theirs."""
    return Sample(ours / theirs, ours, theirs)


def render(measurements: Sequence[Measurement], title: str) -> Table:
    """The table that is printed without ``--json``."""
    table = Table(title=title)
    for heading in ("metric", "ratio", "goal", "met", "ours", "theirs", "unit", "repeats", "spread"):
        table.add_column(heading, justify="left" if heading in ("metric", "unit") else "right")
    for m in measurements:
        goal, met = ("", "") if m.goal is None else (f"{m.goal:g}", "yes" if m.met else "no")
        numbers = (f"{m.ours:.4g}", f"{m.theirs:.4g}", m.unit, str(m.repeats), f"{m.spread:.3f}")
        table.add_row(m.metric, f"{m.ratio:.4g}", goal, met, *numbers)
    return table


def _round(value: float) -> float:
    return float(f"{value:.5g}")
