"""What a benchmark finds: the median ratio of two sides, and whether it meets its goal; and what it says meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from ragr1_actors.core.errors import UserError


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


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a ratio: ``Goal(0.97, at_least=True)`` is >= 0.97."""

    limit: float
    at_least: bool

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat: both sides, and the ratio that is made of them."""

    ratio: float
    ours: float
    theirs: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the repeats; its fields are the keys of the JSON object."""

    metric: str
    ratio: float
    goal: float | None
    met: bool | None
    ours: float
    theirs: float
    unit: str
    repeats: int
    spread: float
    """(max - min) / median of the ratio over the repeats; just max - min where the median is 0."""

    def to_json(self) -> str:
        """One line."""
        rounded = {k: _round(v) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return json.dumps(rounded)


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


def measure(metric: str, samples: Sequence[Sample], unit: str, goal: Goal | None) -> Measurement:
    """Reduce the repeats of one metric to their medians."""
    ratios = [sample.ratio for sample in samples]
    ratio = median(ratios)
    return Measurement(
        metric=metric,
        ratio=ratio,
        goal=None if goal is None else goal.limit,
        met=None if goal is None else goal.is_met(ratio),
        ours=median(sample.ours for sample in samples),
        theirs=median(sample.theirs for sample in samples),
        unit=unit,
        repeats=len(samples),
        spread=(max(ratios) - min(ratios)) / (abs(ratio) or 1.0),
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
