"""Compare the figures of two runs of ``ragr1 bench``, and name what has become worse.

    ragr1 bench all --json > now.jsonl
    python -m benchmarks.check now.jsonl --against benchmarks/stored.jsonl

A ratio is a regression if it is worse than the stored one by more than the stored spread. A row of one repeat has no
spread: it is a regression if it misses a goal that the stored row met. Without ``--against`` every missed goal is
named. The exit status is 1 if anything is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measurement import Measurement
from ragr1_actors.core.errors import UserError


def read_rows(text: str) -> dict[str, Measurement]:
    """Return the rows of ``ragr1 bench --json`` by metric; the last one counts where one was measured twice.

    Other lines than objects are those of ``make`` and ``pip``, and are left out.

    Raises:
        UserError: an object is no such row, or there is none.
    """
    lines = (line for line in text.splitlines() if line.startswith("{"))
    rows = {row.metric: row for row in map(Measurement.from_json, lines)}
    if not rows:
        raise UserError("got no rows, expected the output of ragr1 bench NAME --json")
    return rows


def missed(row: Measurement) -> str:
    """Return a sentence if the row misses its goal, else nothing."""
    if row.met is not False:
        return ""
    return f"{row.metric}: {row.ratio:g} misses its goal of {'>=' if row.better == 'higher' else '<='} {row.goal:g}"


def regression(now: Measurement, stored: Measurement) -> str:
    """Return a sentence if a row is worse than the stored one, else nothing."""
    if min(now.repeats, stored.repeats) == 1:
        return f"{missed(now)}, which {stored.ratio:g} met" if stored.met and missed(now) else ""
    allowed = stored.spread * (abs(stored.ratio) or 1.0)  # as ``measure`` divides
    worse_by = stored.ratio - now.ratio if stored.better == "higher" else now.ratio - stored.ratio
    if worse_by <= allowed:
        return ""
    told = f"{now.metric}: {now.ratio:g}, was {stored.ratio:g}"
    return f"{told}: worse by {worse_by:.3g}, the stored spread is {allowed:.3g}"


def compare(now: dict[str, Measurement], stored: dict[str, Measurement]) -> list[str]:
    """Return a sentence per regression."""
    return [said for metric, row in now.items() if metric in stored and (said := regression(row, stored[metric]))]


def main(arguments: Sequence[str]) -> int:
    """Print what is worse, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__.splitlines()[0])
    parser.add_argument("now", type=Path, help="rows of ragr1 bench --json; - is standard input")
    parser.add_argument("--against", type=Path, metavar="FILE", help="rows to compare with")
    given = parser.parse_args(arguments)
    try:
        now = read_rows(_text_of(given.now))
        if given.against is None:
            found = [said for row in now.values() if (said := missed(row))]
        else:
            stored = read_rows(_text_of(given.against))
            found = compare(now, stored)
            _tell_differences(now, stored)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"{len(now)} rows, none is worse")
    return 1 if found else 0


def _text_of(path: Path) -> str:
    try:
        return sys.stdin.read() if path == Path("-") else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; expected the output of ragr1 bench NAME --json") from error


def _tell_differences(now: dict[str, Measurement], stored: dict[str, Measurement]) -> None:
    """Say what makes the rows less comparable."""
    machines = [next(iter(rows.values())).machine for rows in (stored, now)]
    if len({(one.cpu, one.num_cpus, one.gpu) for one in machines}) > 1:
        names = [f"{one.num_cpus} of {one.cpu} {one.gpu}".rstrip() for one in machines]
        print(f"measured on another machine: {names[0]}, now {names[1]}", file=sys.stderr)
    if absent := sorted(stored.keys() - now.keys()):
        print(f"not measured now: {', '.join(absent)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
