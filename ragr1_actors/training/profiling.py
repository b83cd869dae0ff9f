"""``ragr1 train --profile N``: the largest costs of some iterations.

::

    iteration 1 (not measured)   2 ... N + 1                                    profile/learner_0.json.gz, ray.json
                                 torch's profiler in every rank, Ray's own ──►  the five largest costs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from learners.profiling import RankProfile

FOLDER = "profile"
NUM_COSTS = 5
_PHASES = {
    "time/sample_s": "the learner waits for samples",
    "time/publish_s": "weights are published",
    "time/write_s": "trajectories and metrics are written",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds over the profiled iterations: ``Cost("learner: aten::addmm", 12.5, 0.31)``."""

    name: str
    seconds: float
    share: float
    """Share of the wall time of the iterations."""


def largest_costs(rows: Sequence[Mapping[str, float]], ranks: Sequence[RankProfile]) -> list[Cost]:
    """Return the largest costs of the iterations with these metrics: phases of the driver, operators of the learner.

    Learning is divided into its operators, by the mean over the ranks.
    """
    wall_s = math.fsum(row["time/iteration_s"] for row in rows)
    found = {what: math.fsum(row[name] for row in rows) for name, what in _PHASES.items()}
    phases = math.fsum(found.values()) + math.fsum(row["time/learn_s"] for row in rows)
    found["the driver's other work"] = max(0.0, wall_s - phases)
    for name in dict.fromkeys(name for rank in ranks for name in rank.operators_s):
        found[f"learner: {name}"] = math.fsum(rank.operators_s.get(name, 0.0) for rank in ranks) / len(ranks)
    largest = sorted(found.items(), key=lambda item: item[1], reverse=True)[:NUM_COSTS]
    return [Cost(name, seconds, seconds / wall_s) for name, seconds in largest]


def write_timelines(run_dir: Path, ranks: Sequence[RankProfile]) -> Path:
    """Write the timelines of all ranks and of Ray's tasks; return their folder."""
    import ray

    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for number, rank in enumerate(ranks):
        (folder / f"learner_{number}.json.gz").write_bytes(rank.timeline)
    if ray.is_initialized():
        ray.timeline(str(folder / "ray.json"))
    return folder
