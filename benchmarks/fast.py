"""``ragr1 bench fast``: ratios of several benchmarks against floors, in three minutes on two cores, as in ``.ci/run``.

A floor lies so far from the measured figure that a busy machine does not break it, and so near that a lost advantage
does: packing, prefix sharing, early search, the transport to the retrievers, growth. It takes the place of the goal.
Both sides of each ratio are measured on the same machine, so a slower CPU does not break a floor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import BENCHMARKS
from benchmarks.measurement import Goal, Measurement, choose

FLOORS = {
    "learner": {
        "padding_waste_8": Goal(0.01, at_least=False),
        "in_step_loss": Goal(0.2, at_least=False),
        "prefix_sharing": Goal(0.6, at_least=False),
        "record_heap": Goal(0.75, at_least=False),
        "vs_whole": Goal(1.2, at_least=True),
    },
    "retrieval": {
        "transport_64": Goal(0.6, at_least=False),
        "router_p50": Goal(1.3, at_least=False),
    },
    "rollout": {
        "vs_lockstep_paced": Goal(0.2, at_least=False),
        "loop_cost": Goal(6.0, at_least=False),
    },
    "growth": {
        "trajectories_s": Goal(1.2, at_least=False),
        "runners_s": Goal(0.6, at_least=False),
    },
}
METRICS = tuple(metric for floors in FLOORS.values() for metric in floors)


def describe() -> str:
    """The workload, in one line."""
    return "fast: some ratios of several benchmarks against floors"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found: each metric once, if ``repeats`` does not say more.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    for name, floors in FLOORS.items():
        benchmark = importlib.import_module(BENCHMARKS[name])
        for metric, floor in floors.items():
            if metric in wanted:
                (found,) = benchmark.run(only=metric, repeats=repeats or 1, quick=quick)
                yield replace(found, goal=floor.limit, met=floor.is_met(found.ratio))
