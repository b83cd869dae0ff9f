"""A simulated run whose work rises and falls, on fleets of a fixed size and on one that follows its load.

A batch is 24 groups of 4 trajectories, which the learner takes 120 s to learn; at lag 1 one more is sampled meanwhile.
A runner advances 2 trajectories. At load 1 it takes 12 runners to sample a batch in those 120 s, a trajectory about
30 s; at load 0.5 half of both. Searches are quick. A runner takes 45 s to start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

from ragr1_actors.core.config import RunConfig
from ragr1_actors.lab.simulation.fleet import VirtualLoop
from ragr1_actors.lab.simulation.run import Simulator, Size
from ragr1_actors.lab.simulation.workload import DrawnWorkload
from ragr1_actors.planning.pace import EnginePace, LearnerPace, Pace, SearchPace
from ragr1_actors.training.algorithm_config import AlgorithmConfig

LOW = 0.1
"""The lowest load; the highest is 1."""
PERIOD_S = 4 * 3600.0
MAX_RUNNERS = 16
BATCH, GROUP_SIZE, CONCURRENCY = 24, 4, 2
LEARN_S, START_S = 120.0, 45.0
PEAK_RUNNERS = 12
TOKENS = 2 * 128
"""Mean number of tokens per trajectory: a trajectory has one to three turns of 128 tokens."""

Load = Callable[[float], float]


def sawtooth(time_s: float) -> float:
    """Rise all the time, and fall at once."""
    return LOW + (1 - LOW) * (time_s % PERIOD_S) / PERIOD_S


def step(time_s: float) -> float:
    """Low, then high, then low again."""
    return 1.0 if PERIOD_S / 3 <= time_s % PERIOD_S < 2 * PERIOD_S / 3 else LOW


def ramp(time_s: float) -> float:
    """Rise and fall again, both slowly."""
    return LOW + (1 - LOW) * (1 - abs(1 - 2 * (time_s % PERIOD_S) / PERIOD_S))


def spike(time_s: float) -> float:
    """Low, but for ten minutes."""
    return 1.0 if 0 <= time_s % PERIOD_S - PERIOD_S / 2 < 600 else LOW


LOADS: dict[str, Load] = {"sawtooth": sawtooth, "step": step, "ramp": ramp, "spike": spike}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a fleet did."""

    batches_per_h: float
    runner_h: float
    """Runner-hours paid for per hour: the mean size of the fleet."""
    sizes: tuple[int, ...]
    """The sizes that it had, one after another."""

    @property
    def num_reversals(self) -> int:
        """Changes of direction."""
        ups = [after > before for before, after in pairwise(self.sizes)]
        return sum(one != other for one, other in pairwise(ups))


def run(load: Load, num_runners: int, num_periods: float, *, is_autoscaled: bool) -> Outcome:
    """Simulate some periods of a load, after two batches that do not count."""
    config = _config(num_runners, is_autoscaled=is_autoscaled)
    step_s = PEAK_RUNNERS * CONCURRENCY * LEARN_S / (BATCH * GROUP_SIZE * TOKENS)
    learner = LearnerPace(LEARN_S / (BATCH * GROUP_SIZE), publish_s=1.0)
    pace = Pace(EnginePace(step_s, 0.0, start_s=START_S), SearchPace(_search_s), learner)
    with closing(VirtualLoop()) as loop:
        simulator = Simulator(loop, config, pace, DrawnWorkload(config), Size(num_runners, 1), load)
        try:
            for _ in range(2):
                simulator.train()
            started_s, paid_s, num_batches = loop.time(), simulator.runners.replica_s(), 0
            while loop.time() < started_s + num_periods * PERIOD_S:
                simulator.train()
                num_batches += 1
            wall_s, paid_s = loop.time() - started_s, simulator.runners.replica_s() - paid_s
        finally:
            simulator.stop()
    sizes = (num_runners, *(change.after for change in simulator.sizes.take_decisions()))
    return Outcome(3600 * num_batches / wall_s, paid_s / wall_s, sizes)


def best_fixed(load: Load, num_periods: float) -> Outcome:
    """Return the smallest fleet of a fixed size that is within 1 % of the fastest."""
    found = [run(load, size, num_periods, is_autoscaled=False) for size in range(6, MAX_RUNNERS + 1, 2)]
    best = max(outcome.batches_per_h for outcome in found)
    return next(outcome for outcome in found if outcome.batches_per_h >= 0.99 * best)


def _search_s(num_queries: int) -> float:
    return 0.02


def _config(num_runners: int, *, is_autoscaled: bool) -> RunConfig:
    autoscaling = {"min_replicas": 1, "max_replicas": MAX_RUNNERS} if is_autoscaled else None
    return (
        AlgorithmConfig()
        .environment(prompt="{question}", max_turns=3, options={"max_queries_per_turn": 1, "top_k": 1})
        .env_runners(num_env_runners=num_runners, max_concurrent_trajectories=CONCURRENCY, autoscaling=autoscaling)
        .training(train_batch_size=BATCH, group_size=GROUP_SIZE, max_policy_lag=1)
        .freeze()
    )
