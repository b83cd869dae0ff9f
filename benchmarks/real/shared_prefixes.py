"""The share of a run's tokens that learners compute: tokens that several trajectories of a group begin with count once.

``python -m benchmarks.real.shared_prefixes RUN ...`` reads the trajectories of iterations, and of them the groups whose
rewards differ. A group is one row here; a learner's micro-batch may hold a part of it or several groups.
"""

from __future__ import annotations

import sys
from pathlib import Path

from learners.packing import flatten, pack
from ragr1_actors.core.schema import read_trajectories


def main(runs: list[str]) -> None:
    """Print a line per run."""
    for run in map(Path, runs):
        computed = total = 0
        for path in sorted(run.glob("trajectories/iteration_*.arrow")):
            for group in read_trajectories(path):
                members = [one for one in group.trajectories if one.num_model_tokens]
                if len({one.reward for one in members}) > 1:
                    row = pack(flatten(members), range(len(members)))
                    computed, total = computed + row.num_tokens, total + row.layout.num_tokens
        print(f"{run}: {computed:,} of {total:,} tokens, {computed / max(total, 1):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
