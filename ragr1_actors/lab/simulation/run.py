"""simulate: the loop of ``Algorithm.train`` in virtual time, with its times.

::

    BatchCollector, TaskLedger, GroupBuffer                  the trainer's
    EnvRunner, run_trajectory, SearchEnv, Batcher, Arrow     the fleets'
    engines, retrievers, learner                             scripted: they take the time that a Pace says
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import fsum

from ragr1_actors.core.config import EnvironmentSettings, RetrieverAutoscaling, RunConfig, RunnerAutoscaling
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.lab.simulation.fleet import LoadAt, SimulatedRetrievers, SimulatedRunners, VirtualLoop
from ragr1_actors.lab.simulation.workload import Workload, made_up_task
from ragr1_actors.planning.fit import changed
from ragr1_actors.planning.pace import Pace
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.runs.telemetry.events import ScalingDecision
from ragr1_actors.runs.telemetry.metrics import Load, Verdict, find_bottleneck
from ragr1_actors.training.batches import BatchCollector, mean_lag, rollout_metrics
from ragr1_actors.training.fleet_controller import (
    TICK_S,
    Controlled,
    FleetSizes,
    LearnerClock,
    Scalable,
    retriever_scaler,
    runner_scaler,
)

NUM_TASKS = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the two fleets."""

    num_runners: int
    num_retrievers: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """Times and counts of one iteration, in virtual seconds."""

    sample_s: float
    learn_s: float
    publish_s: float
    iteration_s: float
    num_trajectories: int
    """Number of trained trajectories."""
    runner_load: float
    """Trajectories in flight per runner, like ``env_runners/load``."""
    runner_s: float
    """Paid runner-seconds, from the start of a runner to its end; likewise ``retriever_s``."""
    retriever_s: float
    retriever_busy_s: float
    """Seconds of work of the retrievers."""
    rollout: dict[str, float]
    """Metrics of the batch, from ``rollout_metrics``."""
    lag: float
    num_stale: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of ``simulate``."""

    size: Size
    """Sizes at the start."""
    iterations: tuple[Iteration, ...]
    """Iterations without the warm-up."""
    tasks: dict[str, int]
    """Books of the task ledger, with the tasks that are ``outstanding``."""
    num_batch_bytes: int
    """Bytes of the record batches of all groups, warm-up included."""
    load: Load
    verdict: Verdict
    resized: tuple[ScalingDecision, ...]
    """Decisions of the autoscaling policy, warm-up included."""

    @property
    def wall_s(self) -> float:
        """Virtual seconds of all iterations."""
        return self.total("iteration_s")

    @property
    def trajectories_per_s(self) -> float:
        """Number of trained trajectories per virtual second."""
        return self.total("num_trajectories") / self.wall_s

    def total(self, name: str) -> float:
        """Sum a field of ``Iteration``, such as ``sample_s``."""
        return fsum(getattr(iteration, name) for iteration in self.iterations)


def simulate(
    config: RunConfig,
    pace: Pace,
    workload: Workload,
    size: Size,
    num_iterations: int,
) -> Simulation:
    """Run ``num_iterations`` in virtual time, after a warm-up of one, and of one more for each version of lag.

    The same arguments give the same result to the bit; the seed is ``debugging.seed``.
    """
    with closing(VirtualLoop()) as loop:
        simulator = Simulator(loop, config, pace, workload, size, lambda time_s: 1.0)
        try:
            for _ in range(1 + config.training.max_policy_lag):
                simulator.train()
            iterations = tuple(simulator.train() for _ in range(num_iterations))
        finally:
            simulator.stop()
    tasks = simulator.collector.tasks
    load = load_of(config, iterations)
    return Simulation(
        size=size,
        iterations=iterations,
        tasks=tasks.counts() | {"outstanding": len(tasks.get_state()["outstanding"])},
        num_batch_bytes=simulator.runners.num_batch_bytes,
        load=load,
        verdict=find_bottleneck(load),
        resized=tuple(simulator.sizes.take_decisions()),
    )


class Simulator:
    """Run in virtual time. ``train()`` is an iteration, like ``Algorithm.train``."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: RunConfig,
        pace: Pace,
        workload: Workload,
        size: Size,
        load_at: LoadAt,
        *,
        num_tasks: int = NUM_TASKS,
        runners: type[SimulatedRunners] = SimulatedRunners,
    ) -> None:
        """Begin with fleets that are ready; ``runners`` is the class of the env runners, such as one with faults."""
        self._loop, self._config, self._pace = loop, config, pace
        self._takes_turns = choose_transport(config) == "ipc"
        self._version = 0
        self.retrievers = SimulatedRetrievers(loop, config, pace, workload, size.num_retrievers)
        self.runners = runners(loop, config, pace, workload, self.retrievers, load_at)
        self.runners.scale_to(size.num_runners, 0.0)
        tasks = [made_up_task(number) for number in range(num_tasks)]
        self.collector = BatchCollector(_shuffled(config), tasks, self.runners.sample)
        self._learner = LearnerClock(loop.time)
        fleets: list[Controlled[Scalable]] = [
            Controlled("runners", "", self.runners, size.num_runners, runner_scaler(config)),
            Controlled(
                "retrievers", "", self.retrievers, size.num_retrievers, retriever_scaler(config.retrieval.autoscaling)
            ),
        ]
        self.sizes = FleetSizes(fleets, self._learner, self.collector.num_finished_batches, loop.time)
        """Sizes of both fleets, with the decisions of the autoscaling policy so far."""
        self._ticking = loop.create_task(self._tick())

    async def _tick(self) -> None:
        """Do what the driver does about once a second while it waits."""
        while True:
            await asyncio.sleep(TICK_S)
            self.sizes.tick()

    def train(self, on_batch: Callable[[list[FinishedGroup]], None] = lambda batch: None) -> Iteration:
        """Collect a batch, learn from it and publish; the calls and their order are as in ``Algorithm.train``.

        ``on_batch`` is called with the groups that the learner takes.
        """
        started_s, before = self._loop.time(), self._counts()
        with self._learner.waits():
            batch = self._loop.run_until_complete(self.collector.next_batch(self._version))
        self._learner.num_stale += self.collector.num_stale
        sampled_s = self._loop.time()
        if self._config.training.max_policy_lag:
            self._loop.run_until_complete(self.collector.feed(while_learning=True))
        lag = mean_lag(batch, self._version)
        on_batch(batch)
        num_trajectories = sum(group.request.num_trajectories for group in batch)
        with self._learner.works():
            if self._takes_turns:
                self.runners.pause()
            self._pass(self._pace.learner.trajectory_s * num_trajectories)
            learned_s = self._loop.time()
            set_aside = self.collector.trained(batch)
            self._publish()
            published_s = self._loop.time()
            self._pass(self._pace.learner.other_s)
        counts = {name: value - before[name] for name, value in self._counts().items()}
        return Iteration(
            sample_s=sampled_s - started_s,
            learn_s=learned_s - sampled_s,
            publish_s=published_s - learned_s,
            iteration_s=self._loop.time() - started_s,
            num_trajectories=num_trajectories,
            runner_load=self.runners.queue.take_load()[0],
            **counts,
            rollout=rollout_metrics(batch + set_aside),
            lag=lag,
            num_stale=self.collector.num_stale,
        )

    def stop(self) -> None:
        """Cancel everything in flight."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    def _publish(self) -> None:
        """Stop the engines for the time of a weight sync."""
        self._version += 1
        self.runners.pause()
        self._pass(self._pace.learner.publish_s)
        self.runners.publish(self._version)
        self.runners.resume()

    def _pass(self, seconds: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def _counts(self) -> dict[str, float]:
        return {
            "runner_s": self.runners.replica_s(),
            "retriever_s": self.retrievers.replica_s(),
            "retriever_busy_s": self.retrievers.busy_s,
        }


def _shuffled(config: RunConfig) -> RunConfig:
    """Return the configuration with the default curriculum, as others may read fields that made-up tasks lack."""
    default = EnvironmentSettings()
    curriculum = {"curriculum": default.curriculum, "curriculum_options": default.curriculum_options}
    return changed(config, "environment", curriculum)


def load_of(config: RunConfig, iterations: Sequence[Iteration]) -> Load:
    """Return the loads of some iterations, as they would be read from the metrics of a run."""
    wall_s = fsum(i.iteration_s for i in iterations)
    waited_s = fsum(i.rollout.get("time/retrieval_waited_s", 0.0) for i in iterations)
    generated_s = fsum(i.rollout["time/generation_s"] for i in iterations)
    runner_s, retriever_s = fsum(i.runner_s for i in iterations), fsum(i.retriever_s for i in iterations)
    loads = fsum(i.runner_load for i in iterations) / len(iterations)
    return Load(
        learner_wait=fsum(i.sample_s for i in iterations) / wall_s,
        search_wait=waited_s / (waited_s + generated_s),
        retriever_busy=fsum(i.retriever_busy_s for i in iterations) / retriever_s,
        runner_load=loads / config.env_runners.max_concurrent_trajectories,
        num_runners=round(runner_s / wall_s),
        num_retrievers=round(retriever_s / wall_s),
        max_policy_lag=config.training.max_policy_lag,
    )


# -- sizes of the fleets -----------------------------------------------------------------------------------------------


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
    by_runners, by_queries = None, None
    if largest is not None:
        by_runners = config.env_runners.autoscaling or RunnerAutoscaling(max_replicas=largest.num_runners)
        by_queries = config.retrieval.autoscaling or RetrieverAutoscaling(max_replicas=largest.num_retrievers)
    config = changed(config, "env_runners", {"autoscaling": by_runners})
    return changed(config, "retrieval", {"autoscaling": by_queries})
