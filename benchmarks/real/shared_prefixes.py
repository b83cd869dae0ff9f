"""The share of a run's tokens that learners compute: tokens that several trajectories of a group begin with count once.

``python -m benchmarks.real.shared_prefixes RUN ...`` reads the trajectories of iterations, and of them the groups whose
rewards differ. A group is one row here; a learner's micro-batch may hold a part of it or several groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measurement import run_script
from learners.packing import flatten, pack
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.schema import read_trajectories


def main(runs: Sequence[Path]) -> None:
    """Print a line per run; ``DataError`` if a run has no trajectories of iterations, or a file of them is damaged."""
    for run in runs:
        paths = sorted(run.glob("trajectories/iteration_*.arrow"))
        if not paths:
            raise DataError(f"no trajectories/iteration_*.arrow in {run}; name the folder of a run that kept them")
        computed, total = (sum(counts) for counts in zip(*map(count_tokens, paths), strict=True))
        print(f"{run}: {computed:,} of {total:,} tokens, {computed / max(total, 1):.2f}")


def count_tokens(path: Path) -> tuple[int, int]:
    """Count the tokens that are computed, and all tokens of the trajectories that are learned from."""
    computed = total = 0
    for group in read_trajectories(path):
        members = [one for one in group.trajectories if one.num_model_tokens and not one.stop_reason.is_failure]
        if len({one.reward for one in members}) > 1:
            row = pack(flatten(members), range(len(members)))
            computed, total = computed + row.num_tokens, total + row.layout.num_tokens
    return computed, total


if __name__ == "__main__":
    run_script(main, runs="+")
