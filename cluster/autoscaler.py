"""Number of replicas that a fleet should have: a pure function of measurements. It imports no Ray and reads no clock.

::

    FleetState, about once a second ──► Autoscaler.decide ──► Decision(num_replicas, reason)
                                          │
         demand: the size that the load wants, from runner_demand or retriever_demand
         tolerance, scaling factors, minimum and maximum: the size that is desired
         delays and cool-down: when the fleet takes it

The number of requests out says little about env runners: a synchronous trainer always issues all that its batch allows.
So their demand is measured in work: runner-seconds of sampling per second of learning. That quotient does not depend on
how many runners there are, so the fleet does not swing around its size. Retrievers are measured alike: the seconds of
work that the arriving queries need per second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from ragr1_actors.core.config import AutoscalingSettings, RetrieverAutoscaling, RunnerAutoscaling

STARVATION_WITH_LAG, STARVATION_IN_TURNS = 0.05, 0.5
"""Values of ``target_starvation`` if runners and learner work at the same time, and if they take turns: then each waits
for the other, and equal times are the middle between idle runners and an idle learner."""
_MOST = 1e9
"""Limit of a wanted size: a quotient of times that are nearly 0 may be infinite."""
QUERIES_PER_REPLICA = 512.0
"""Value of ``target_ongoing_requests`` for retrievers and encoders: one batch."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Measurements for the scaling of env runners. Counts and seconds are sums since the start of the run."""

    num_batches: int = 0
    """Batches that the learner has taken."""
    busy_s: float = 0.0
    """Seconds in which the learner worked: updates and weight syncs."""
    waited_s: float = 0.0
    """Seconds in which the learner waited for samples."""
    num_finished_batches: float = 0.0
    """Number of batches that the finished groups, which wait for the learner now, make up, such as 1.5."""
    num_stale: int = 0
    """Groups that were dropped because their policy lag was above ``training.max_policy_lag``."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """State of a fleet. A replica is an env runner, an encoder, or all the shards of one copy of the index."""

    time_s: float
    """Time of this state on a monotonic clock."""
    num_running: int
    """Number of replicas that take requests."""
    num_starting: int = 0
    """Number of replicas that were asked for but take no requests yet, including those without room in Ray."""
    ongoing: float = 0.0
    """Number of requests, trajectories or queries, on which replicas work now."""
    queued: float = 0.0
    """Number of requests that wait for a replica now."""
    busy_s: float = 0.0
    """Replica-seconds with work since the start: 2 replicas that both had work for 3 s count 6."""
    num_answered: float = 0.0
    """Number of requests answered since the start."""
    learner: LearnerState = field(default_factory=LearnerState)
    """State of the learner; only for env runners."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Size that a fleet should have from now on, and its reason for log, metrics and report."""

    num_replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """Recent measurements."""

    states: tuple[FleetState, ...]
    """States from ``look_back_period_s`` ago until now, at least one."""
    iterations: tuple[FleetState, ...]
    """States in which the learner had just taken a batch: the last two, if there are two, and all within the period.
    The first state of all counts as one."""
    most_requests: float
    """Largest number of requests running and waiting at the same time, since the first of both kinds of states."""

    @property
    def now(self) -> FleetState:
        """Newest state."""
        return self.states[-1]


Demand = tuple[float, str]
"""Size that the load wants, such as 3.4, before bounds and delays, and the reason."""
DemandOf = Callable[[Window, int], Demand]
"""Function that returns the demand from recent measurements and the present target size."""


class Autoscaler:
    """Decides the size of one fleet. The same states give the same decisions."""

    def __init__(self, settings: AutoscalingSettings, demand: DemandOf, num_replicas: int) -> None:
        """Begin with the number of started replicas."""
        self.num_replicas = num_replicas
        """Size decided last; a caller that sizes the fleet by hand sets it, so that decisions continue from there."""
        self._settings = settings
        self._demand = demand
        self._states: deque[FleetState] = deque()
        self._iterations: deque[FleetState] = deque()
        self._peaks: deque[tuple[float, float]] = deque()  # time and requests, falling: each is a maximum since then
        self._wanted: deque[tuple[float, int]] = deque()  # time and desired size, all on the same side of the size
        self._changed_s, self._was_up = -math.inf, False

    def decide(self, state: FleetState) -> Decision:
        """Return the size from now on, often the previous one; ``time_s`` must be later than in the previous call."""
        window = self._observe(state)
        wanted, reason = self._demand(window, self.num_replicas)
        desired = self._desired(wanted)
        if desired == self.num_replicas:
            self._wanted.clear()
            return Decision(self.num_replicas, reason)
        is_up = desired > self.num_replicas
        if self._wanted and (self._wanted[0][1] > self.num_replicas) != is_up:
            self._wanted.clear()
        self._wanted.append((state.time_s, desired))
        waits_for = self._waits_for(is_up, state.time_s)
        if waits_for:
            return Decision(self.num_replicas, f"{reason}; {desired} after {waits_for}")
        # up to what is wanted now; down only to the most that was wanted meanwhile
        chosen = desired if is_up else max(size for _, size in self._wanted)
        self.num_replicas, self._changed_s, self._was_up = chosen, state.time_s, is_up
        self._wanted.clear()
        if wanted - 1e-9 > chosen == self._settings.max_replicas:
            reason += f"; max_replicas allows {chosen} of {math.ceil(min(wanted, _MOST))}"
        return Decision(chosen, reason)

    def _observe(self, state: FleetState) -> Window:
        states, iterations, peaks = self._states, self._iterations, self._peaks
        start_s = state.time_s - self._settings.look_back_period_s
        if not states or state.learner.num_batches > states[-1].learner.num_batches:
            iterations.append(state)
        states.append(state)
        while len(states) > 2 and states[1].time_s <= start_s:
            states.popleft()
        while len(iterations) > 2 and iterations[1].time_s <= start_s:
            iterations.popleft()
        requests = state.ongoing + state.queued
        while peaks and peaks[-1][1] <= requests:
            peaks.pop()
        peaks.append((state.time_s, requests))
        while peaks[0][0] < min(states[0].time_s, iterations[0].time_s):
            peaks.popleft()
        return Window(tuple(states), tuple(iterations), peaks[0][1])

    def _desired(self, wanted: float) -> int:
        """Return the desired size for a wanted one: the same within the tolerance, else scaled as Ray Serve scales."""
        size, settings = self.num_replicas, self._settings
        wanted = min(max(wanted, 0.0), _MOST)  # NaN keeps the size
        if abs(wanted - size) > settings.tolerance * size:
            factor = settings.upscaling_factor if wanted > size else settings.downscaling_factor
            scaled = math.ceil(size + factor * (wanted - size) - 1e-9)
            if scaled == size and math.ceil(wanted - 1e-9) < size:  # a small factor must not stop it
                scaled -= 1
            size = scaled
        return min(max(size, settings.min_replicas), settings.max_replicas)

    def _waits_for(self, is_up: bool, now_s: float) -> str:
        settings = self._settings
        delay_s = settings.upscale_delay_s if is_up else settings.downscale_delay_s
        if (left_s := delay_s - (now_s - self._wanted[0][0])) > 1e-6:
            return f"{left_s:.0f} s of delay"
        if is_up != self._was_up and (left_s := settings.cooldown_s - (now_s - self._changed_s)) > 1e-6:
            return f"{left_s:.0f} s of cool-down"
        return ""


def autoscale_runners(
    settings: RunnerAutoscaling, num_replicas: int, max_concurrent_trajectories: int, max_policy_lag: int
) -> Autoscaler:
    """Return the autoscaler of a fleet of env runners; the last two arguments are keys of the recipe."""
    with_lag = max_policy_lag > 0
    starvation = settings.target_starvation or (STARVATION_WITH_LAG if with_lag else STARVATION_IN_TURNS)
    occupied_by = settings.target_ongoing_requests or float(max_concurrent_trajectories)

    def demand(window: Window, size: int) -> Demand:
        return runner_demand(window, size, starvation, occupied_by, with_lag=with_lag)

    return Autoscaler(settings, demand, num_replicas)


def autoscale_retrievers(settings: RetrieverAutoscaling, num_replicas: int) -> Autoscaler:
    """Return the autoscaler of a fleet of retrievers or encoders."""
    return Autoscaler(settings, lambda window, size: retriever_demand(window, size, settings), num_replicas)


def runner_demand(window: Window, size: int, target_starvation: float, occupied_by: float, *, with_lag: bool) -> Demand:
    """Return the number of env runners with which the learner waits ``target_starvation`` of its time.

    Sampling takes ``work`` runner-seconds per second of learning. With a lag both run at the same time, and ``work``
    runners would keep up exactly; in turns the learner waits ``work / size`` seconds per second of learning. Starvation
    gives the direction, work the amount: if the learner waits too much, no runners are removed, else none are added.
    There are no more runners than the requests occupy, at ``occupied_by`` requests each.
    """
    first, last, now = window.iterations[0], window.iterations[-1], window.now
    num_batches = last.learner.num_batches - first.learner.num_batches
    learned_s = last.learner.busy_s - first.learner.busy_s
    if learned_s <= 0:
        most = max(state.ongoing + state.queued for state in window.states) / occupied_by
        return most, f"nothing learned yet; the requests occupy {most:.1f} runners"
    sampled_s, waited_s = last.busy_s - first.busy_s, last.learner.waited_s - first.learner.waited_s
    # the batch being sampled counts once it has taken longer than those before
    since_s = now.busy_s - last.busy_s
    if since_s > sampled_s / num_batches:
        sampled_s, waited_s = since_s, now.learner.waited_s - last.learner.waited_s
        learned_s /= num_batches
    work, starvation = sampled_s / learned_s, waited_s / (waited_s + learned_s)
    is_starved = starvation > target_starvation
    wanted = work * (1 - target_starvation) / (1.0 if with_lag else target_starvation)
    wanted = max(wanted, size) if is_starved else min(wanted, size)
    why = f"the learner waits {starvation:.0%} of its time, target {target_starvation:.0%}; sampling takes {work:.1f} "
    why += "runners per learner"
    most = window.most_requests / occupied_by
    if most < wanted:
        return most, f"{why}; the requests occupy only {most:.1f} runners"
    if wanted > size and now.learner.num_finished_batches >= 1:
        return size, f"{why}; a whole batch of finished groups waits"
    if wanted < size and first.learner.num_stale < now.learner.num_stale:
        return size, f"{why}; groups became too old, which fewer runners would make worse"
    return wanted, why


def retriever_demand(window: Window, size: int, settings: RetrieverAutoscaling) -> Demand:
    """Return the number of replicas that answer arriving queries, and waiting queries within ``target_queue_time_s``.

    Each replica works ``target_utilization`` of its time, and has at most ``target_ongoing_requests``.
    """
    first, now = window.states[0], window.now
    passed_s, num_answered = now.time_s - first.time_s, now.num_answered - first.num_answered
    out = fmean(state.ongoing + state.queued for state in window.states)
    by_requests = out / (settings.target_ongoing_requests or QUERIES_PER_REPLICA)
    if num_answered <= 0 or passed_s <= 0:
        return max(by_requests, size) if out or passed_s <= 0 else 0.0, f"none answered lately, {out:.1f} out"
    more = now.ongoing + now.queued - first.ongoing - first.queued
    arriving, queued = max(0.0, num_answered + more) / passed_s, fmean(state.queued for state in window.states)
    each_s = (now.busy_s - first.busy_s) / num_answered
    by_work = each_s * (arriving + queued / settings.target_queue_time_s) / settings.target_utilization
    busy = (now.busy_s - first.busy_s) / passed_s
    why = (
        f"{arriving:.1f} queries/s arrive and keep {busy:.1f} replicas busy, {queued / max(arriving, 1e-9):.2f} s of "
        f"queue, {out:.1f} out"
    )
    return max(by_work, by_requests), why
