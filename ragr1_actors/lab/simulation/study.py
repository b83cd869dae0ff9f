"""Study: the throughput of a run over the sizes of its fleets, and the sizes that it needs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from ragr1_actors.core.config import RetrieverAutoscaling, RunConfig, RunnerAutoscaling
from ragr1_actors.lab.simulation.run import Simulation, Size, simulate
from ragr1_actors.lab.simulation.workload import Workload
from ragr1_actors.planning.pace import Pace

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Sizes of a curve, as multiples of the requested size."""
ENOUGH = 0.95
"""Share of the best throughput of a curve that a size must reach to be enough."""
CURVE_ITERATIONS = 2
"""Number of iterations for each point of a curve, after its warm-up."""


@dataclass(frozen=True, slots=True)
class Study:
    """Results that ``ragr1 simulate`` prints."""

    asked: Simulation
    """Simulation with the requested size."""
    by_runners: tuple[Simulation, ...]
    """Simulations with the requested retrievers, fewest runners first."""
    by_retrievers: tuple[Simulation, ...]
    """Simulations with the runners that are needed, fewest retrievers first."""

    @property
    def needed(self) -> Simulation:
        """Simulation with the smallest of both fleets that is enough."""
        return smallest_enough(self.by_retrievers)


def study(
    config: RunConfig,
    pace: Pace,
    workload: Workload,
    size: Size,
    num_iterations: int,
    on_point: Callable[[int, int], None] = lambda done, total: None,
) -> Study:
    """Simulate a size, and without autoscaling the curves around it, with one process per core.

    ``on_point`` is called with the number of finished points of the curves, and the number of all.
    """
    fixed = with_autoscaling(config, None)
    runs = partial(simulate, fixed, pace, workload)
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of libraries hold
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        asked = pool.submit(simulate, config, pace, workload, size, num_iterations)
        total, done = len(around(size.num_runners)) + len(around(size.num_retrievers)), itertools.count(1)

        def curve(sizes: Sequence[Size]) -> Iterator[Simulation]:
            for found in pool.map(partial(runs, num_iterations=CURVE_ITERATIONS), sizes):
                on_point(next(done), total)
                yield found

        on_point(0, total)
        by_runners = tuple(curve([Size(count, size.num_retrievers) for count in around(size.num_runners)]))
        needed = smallest_enough(by_runners).size.num_runners
        by_retrievers = tuple(curve([Size(needed, count) for count in around(size.num_retrievers)]))
        return Study(asked.result(), by_runners, by_retrievers)


def around(count: int) -> list[int]:
    """Return the sizes of a curve: ``around(8) == [1, 2, 4, 8, 16]``."""
    return sorted({max(1, round(count * factor)) for factor in FACTORS})


def smallest_enough(curve: Sequence[Simulation]) -> Simulation:
    """Return the first simulation of a curve whose throughput is ``ENOUGH`` of the best."""
    best = max(simulation.trajectories_per_s for simulation in curve)
    return next(simulation for simulation in curve if simulation.trajectories_per_s >= ENOUGH * best)


def with_autoscaling(config: RunConfig, largest: Size | None) -> RunConfig:
    """Return the recipe with autoscaling of both fleets from one replica to a size, unless it has it; None: without."""
    runners, retrieval = config.env_runners, config.retrieval
    by_runners = None if largest is None else runners.autoscaling or RunnerAutoscaling(max_replicas=largest.num_runners)
    by_queries = (
        None if largest is None else retrieval.autoscaling or RetrieverAutoscaling(max_replicas=largest.num_retrievers)
    )
    return config.model_copy(
        update={
            "env_runners": runners.model_copy(update={"autoscaling": by_runners}),
            "retrieval": retrieval.model_copy(update={"autoscaling": by_queries}),
        }
    )
