"""``ragr1 bench scale``: a learner that does not wait, and a driver for hundreds of runners.

================ ======================================================================= =======
metric           ratio                                                                   goal
================ ======================================================================= =======
learner_wait     share of its time that the learner waits at lag 1, 64 runners           <= 0.03
driver_cores     cores of a driver for 512 runners of 8 trajectories, 64 retrievers      <= 1
simulate_1000    seconds in which 1,000 runners are simulated ÷ 120                      <= 1
================ ======================================================================= =======

The fleets are simulated (``ragr1_actors/training/simulation``). ``driver_cores`` is CPU seconds per group of a driver
with real actors and as many groups in flight, times the groups per second of the simulated fleet.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Goal, Measurement, Sample, choose, log, measure, quotient
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.pace import LearnerPace
from ragr1_actors.training.plan import GPUS, Machine, make_pace
from ragr1_actors.training.simulation.run import Size, simulate
from ragr1_actors.training.simulation.workload import DrawnWorkload

GOALS: dict[str, Goal | None] = {
    "learner_wait": Goal(0.03, at_least=False),
    "driver_cores": Goal(1.0, at_least=False),
    "simulate_1000": Goal(1.0, at_least=False),
}
METRICS = tuple(GOALS)
NUM_PASSAGES = 21_015_324
"""Search-R1's corpus."""
LIMIT_S = 120.0
LEARNER_SHARE = 0.8
"""Seconds of sampling per second of learning, where both go on at the same time."""


def describe() -> str:
    """The workload, in one line."""
    return "scale: simulated fleets, the 7B run of Search-R1 on H200s; a driver with 8 real actors"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    if "learner_wait" in wanted:
        yield _measured("learner_wait", learner_wait(1 if quick else 4), "s")
    if "driver_cores" in wanted:
        yield measure(
            "driver_cores", driver_cores(repeats or (1 if quick else 3), quick=quick), "cores", GOALS["driver_cores"]
        )
    if "simulate_1000" in wanted:
        yield _measured("simulate_1000", simulate_1000(1 if quick else 2), "s")


def _measured(metric: str, sample: Sample, unit: str) -> Measurement:
    return measure(metric, [sample], unit, GOALS[metric])


def learner_wait(num_iterations: int) -> Sample:
    """Return the share of its time that the learner waits, where sampling would take 0.8 of the time of learning."""
    config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").freeze()
    pace = make_pace(config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
    workload, size = DrawnWorkload(config), Size(64, 16)
    in_turns = simulate(config, pace, workload, size, 2)
    sample_s = in_turns.total("sample_s") / 2
    batch = config.training.train_batch_size * config.training.group_size
    learner = LearnerPace(sample_s / LEARNER_SHARE / batch, pace.learner.publish_s)
    with_lag = config.model_copy(update={"training": config.training.model_copy(update={"max_policy_lag": 1})})
    found = simulate(with_lag, type(pace)(pace.engine, pace.search, learner), workload, size, num_iterations)
    log(f"in turns {sample_s:.1f} s of sampling; lag 1: {found.total('sample_s'):.2f} of {found.wall_s:.1f} s waited")
    return quotient(found.total("sample_s"), found.wall_s)


def driver_cores(repeats: int, *, quick: bool) -> list[Sample]:
    """Return the cores of the driver, and the goal of one core, as ``ours`` and ``theirs``."""
    from benchmarks.rollout.workload import make_policy
    from benchmarks.scale.driver import RealTraffic, simulated_traffic

    simulated = simulated_traffic(2 if quick else 8)
    log(f"simulated: {simulated.groups_per_s:.1f} groups/s, the collector takes {simulated.cores:.3f} cores")
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        make_policy(Path(directory))
        real = RealTraffic(Path(directory), simulated.groups_per_s)
        try:
            real.measure(2)  # warm
            found = [real.measure(2 if quick else 8) for _ in range(repeats)]
        finally:
            real.close()
    return [quotient(simulated.groups_per_s * traffic.cpu_s_per_group, 1.0) for traffic in found]


def simulate_1000(num_iterations: int) -> Sample:
    """Return the seconds in which 1,000 runners and 64 retrievers are simulated, against the limit."""
    config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").training(max_policy_lag=1, train_batch_size=1024).freeze()
    pace = make_pace(config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
    started, cpu_s = time.perf_counter(), time.process_time()
    found = simulate(config, pace, DrawnWorkload(config), Size(1000, 64), num_iterations)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    log(f"{found.tasks['issued']} tasks of {config.training.group_size} in {seconds:.0f} s, {cpu_s:.0f} s of one core")
    return quotient(seconds, LIMIT_S)
