"""Markdown tables of the runs ``runs/real/NAME_seed*``: ``python -m benchmarks.real.results NAME ...``.

Of every stage and type of question: exact match, F1, search rounds and queries, with 95 % intervals of the bootstrap
over the answers of all seeds. ``found`` counts answers that are in a passage that was found, ``read`` those in an
observation, which has room for a part of the passages and repeats the queries; yes and no are hardly there. With two
names, the paired difference of the second to the first after RL, question by question and seed by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.measurement import run_script
from benchmarks.real.runs import ROOT, Answered, FinishedRun, finished_runs
from ragr1_actors.core.errors import DataError
from ragr1_actors.runs.scores import Interval, bootstrap

MEASURES = ("em", "f1", "rounds", "queries")
HEADING = (
    "| stage | type | answers | found | read | EM | F1 | rounds | queries |\n|---|---|---|---|---|---|---|---|---|"
)


def main(names: Sequence[str | Path], root: Path = ROOT) -> None:
    """Print the tables."""
    found = {str(name): finished(str(name), root) for name in names}
    for name, runs in found.items():
        minutes = fmean(one.report.wall_s for one in runs) / 60
        peak = max(one.report.peak_rss_bytes for one in runs) / 1e9
        seeds = ", ".join(str(one.seed) for one in runs)
        print(f"\n### {name}: seeds {seeds}, {minutes:.0f} minutes each, {peak:.1f} GB at the peak\n")
        print(HEADING)
        for stage in [one.stage for one in runs[0].report.stages]:
            print("\n".join(rows(stage, [answered for one in runs for answered in one.answers(stage)])))
    if len(found) == 2:
        first, second = found.values()
        print(f"\n{names[1]} less {names[0]}, after RL:")
        for measure, interval in paired(first, second).items():
            print(f"- {measure}: {shown(interval, '+')}")


def finished(name: str, root: Path) -> list[FinishedRun]:
    """The runs of a name that ended, in the order of their seeds; ``DataError`` if there is none."""
    found = finished_runs(name, root)
    if not found:
        raise DataError(f"no run {root / name}_seed* has ended; train it with: ragr1 bench real")
    return found


def rows(stage: str, answers: Sequence[Answered]) -> list[str]:
    """The rows of a table: of each type of question, of all, and of all but those whose answer is yes or no."""
    parts = {kind: [one for one in answers if one.category == kind] for kind in sorted({a.category for a in answers})}
    parts["all"] = list(answers)
    if any(one.is_yes_no for one in answers):
        parts["all but yes and no"] = [one for one in answers if not one.is_yes_no]
    return [_row(stage, name, part) for name, part in parts.items()]


def _row(stage: str, category: str, answers: Sequence[Answered]) -> str:
    intervals = [bootstrap(np.asarray([getattr(one.score, name) for one in answers], np.float64)) for name in MEASURES]
    counts = len(answers), sum(one.is_found for one in answers), sum(one.is_shown for one in answers)
    return f"| {stage} | {category} | " + " | ".join([*map(str, counts), *map(shown, intervals)]) + " |"


def paired(first: Sequence[FinishedRun], second: Sequence[FinishedRun]) -> dict[str, Interval]:
    """The differences of the second to the first over the questions that both answered with the same seed.

    Raises:
        DataError: there is no such question.
    """
    ours, theirs = (
        {(run.seed, one.score.task_id): one.score for run in runs for one in run.answers("rl")}
        for runs in (first, second)
    )
    pairs = [(score, theirs[key]) for key, score in ours.items() if key in theirs]
    if not pairs:
        first_path, second_path = first[0].path, second[0].path
        raise DataError(
            f"the runs like {first_path} and {second_path} answered no question with the same seed; train both names "
            "with the same seeds"
        )
    return {
        name: bootstrap(np.asarray([getattr(b, name) - getattr(a, name) for a, b in pairs], np.float64))
        for name in MEASURES
    }


def shown(interval: Interval, sign: str = "") -> str:
    """``.843 (.803-.883)``."""
    mean, low, high = (f"{value:{sign}.3f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    run_script(main, names="+")
