"""Loads for autoscalers in virtual time: a fleet of retrievers with a queue, and a trainer with env runners."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from cluster.autoscaler import Autoscaler, FleetState, LearnerState

Load = Callable[[float], float]
"""Given a time in seconds, what arrives or is needed then."""


@dataclass(frozen=True)
class Outcome:
    """How a fleet did."""

    sizes: tuple[tuple[float, int], ...]
    """Time and new size of each change."""
    done: float
    """Queries answered, or batches learned."""
    replica_s: float
    """Replicas that were held, starting or running, times seconds."""

    @property
    def num_reversals(self) -> int:
        """Changes of direction."""
        sizes = [size for _, size in self.sizes]
        ups = [after > before for before, after in itertools.pairwise(sizes)]
        return sum(one != other for one, other in itertools.pairwise(ups))


class _Fleet:
    """Replicas that take ``start_s`` to start."""

    def __init__(self, size: int, scaler: Autoscaler | None, start_s: float) -> None:
        self.scaler, self.start_s = scaler, start_s
        self.ready_at = [0.0] * size  # of each replica
        self.sizes = [(0.0, size)]
        self.replica_s = 0.0

    def num_running(self, now_s: float) -> int:
        return sum(ready <= now_s for ready in self.ready_at)

    def decide(self, state: FleetState) -> None:
        if self.scaler is None:
            return
        size = self.scaler.decide(state).num_replicas
        if size != len(self.ready_at):
            self.sizes.append((state.time_s, size))
        while len(self.ready_at) < size:
            self.ready_at.append(state.time_s + self.start_s)
        self.ready_at = sorted(self.ready_at)[:size]


def serve_queries(
    load: Load, size: int, scaler: Autoscaler | None, duration_s: int, per_replica: float = 100.0, start_s: float = 10.0
) -> Outcome:
    """Answer queries that arrive at ``load(t)`` per second with replicas that answer ``per_replica`` per second."""
    fleet = _Fleet(size, scaler, start_s)
    queued = busy_s = answered = 0.0
    for second in range(duration_s):
        now_s = float(second)
        running = fleet.num_running(now_s)
        queued += load(now_s)
        done = min(queued, running * per_replica)
        queued, answered, busy_s = queued - done, answered + done, busy_s + done / per_replica
        fleet.replica_s += len(fleet.ready_at)
        fleet.decide(
            FleetState(
                now_s + 1,
                running,
                len(fleet.ready_at) - running,
                ongoing=done / 10,  # each takes 0.1 s
                queued=queued,
                busy_s=busy_s,
                num_answered=answered,
            )
        )
    return Outcome(tuple(fleet.sizes), answered, fleet.replica_s)


@dataclass
class Trainer:
    """A training loop whose batches take ``work(t)`` runner-seconds to sample and ``learn_s`` to learn."""

    work: Load
    learn_s: float = 60.0
    lag: int = 1
    num_requests: int = 1600
    """Trajectories of a batch, which are all issued at once."""
    per_runner: int = 16
    """Trajectories that a runner works on at the same time."""
    step_s: float = 1.0

    def run(self, size: int, scaler: Autoscaler | None, duration_s: float, start_s: float = 30.0) -> Outcome:
        """Train for ``duration_s``; with a lag of 1 one more batch is sampled while the learner works."""
        fleet = _Fleet(size, scaler, start_s)
        now_s = busy_s = learner_busy_s = waited_s = learning_s = 0.0
        left = 0.0  # runner-seconds of the batches that are issued
        num_issued = num_sampled = num_learned = num_taken = 0
        sampled_until = [0.0]  # cumulative work at the end of each issued batch
        worked = 0.0
        while now_s < duration_s:
            while num_issued < num_learned + 1 + self.lag:
                sampled_until.append(sampled_until[-1] + self.work(now_s))
                num_issued += 1
            left = sampled_until[-1] - worked
            running = fleet.num_running(now_s)
            requests = math.ceil(self.num_requests * min(left / self.work(now_s), 1.0 + self.lag))
            active = min(running, requests) if left > 0 else 0
            done = min(left, active * self.step_s)
            worked, busy_s = worked + done, busy_s + done
            num_sampled = sum(worked >= end - 1e-9 for end in sampled_until) - 1
            if learning_s > 0:
                learner_busy_s, learning_s = learner_busy_s + self.step_s, learning_s - self.step_s
                num_learned += learning_s <= 0
            elif num_sampled > num_learned:
                learning_s = self.learn_s
                num_taken += 1
            else:
                waited_s += self.step_s
            now_s += self.step_s
            fleet.replica_s += len(fleet.ready_at) * self.step_s
            ongoing = min(requests, running * self.per_runner)
            fleet.decide(
                FleetState(
                    now_s,
                    running,
                    len(fleet.ready_at) - running,
                    ongoing=float(ongoing),
                    queued=float(requests - ongoing),
                    busy_s=busy_s,
                    learner=LearnerState(num_taken, learner_busy_s, waited_s, num_sampled - num_taken),
                )
            )
        return Outcome(tuple(fleet.sizes), float(num_learned), fleet.replica_s)
