"""The autoscaling policy: steps, ramps, spikes and sawtooth loads in virtual time, and each rule by itself."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoscaling_world import Load, Outcome, Trainer, serve_queries
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaler import Autoscaler, FleetState, LearnerState, autoscale_retrievers, autoscale_runners
from ragr1_actors.core.config import RetrieverAutoscaling, RunnerAutoscaling
from ragr1_actors.core.errors import ConfigError

HOURS = 3600
TRACE = Path(__file__).parent / "autoscaling_trace.jsonl"


def step(before: float, after: float, at_s: float) -> Load:
    return lambda t: before if t < at_s else after


def ramp(low: float, high: float, duration_s: float) -> Load:
    return lambda t: low + (high - low) * t / duration_s


def spike(low: float, high: float, at_s: float, width_s: float) -> Load:
    return lambda t: high if at_s <= t < at_s + width_s else low


def sawtooth(high: float, period_s: float) -> Load:
    return lambda t: high * (t % period_s) / period_s


QUERY_LOADS: dict[str, tuple[Load, int]] = {
    "step up": (step(100, 900, 2 * HOURS), 1),
    "step down": (step(900, 100, 2 * HOURS), 2),
    "ramp": (ramp(100, 1000, 8 * HOURS), 1),
    "spike": (spike(100, 900, 2 * HOURS, 1800), 2),
    "sawtooth": (sawtooth(1000, 4 * HOURS), 3),
}
"""Queries per second over eight hours, and the number of steps: the start, jumps up and jumps down."""
SAMPLING_LOADS: dict[str, tuple[Load, int]] = {
    "constant": (step(480, 480, 0), 1),
    "step up": (step(120, 540, 2 * HOURS), 2),
    "step down": (step(540, 120, 2 * HOURS), 2),
    "ramp": (ramp(60, 600, 8 * HOURS), 2),
    "spike": (spike(120, 540, 2 * HOURS, 1800), 3),
    "sawtooth": (lambda t: 30 + sawtooth(600, 4 * HOURS)(t), 4),
}
"""Runner-seconds of sampling per batch, and the number of steps."""


def best_fixed(run: Callable[[int], Outcome]) -> Outcome:
    """The smallest of the fleets that get the most done: more replicas never do less."""
    best, low, high = run(12), 1, 12
    while low < high:
        size = (low + high) // 2
        found = run(size)
        if round(found.done, 3) >= round(best.done, 3):
            best, high = found, size
        else:
            low = size + 1
    return best


@pytest.mark.integration
@pytest.mark.parametrize("name", QUERY_LOADS)
def test_retrievers_follow_the_queries(name: str) -> None:
    load, num_steps = QUERY_LOADS[name]
    fixed = best_fixed(lambda size: serve_queries(load, size, None, 8 * HOURS))
    scaler = autoscale_retrievers(RetrieverAutoscaling(max_replicas=16), 2)
    ours = serve_queries(load, 2, scaler, 8 * HOURS)
    assert ours.num_reversals <= num_steps
    assert ours.done >= 0.9 * fixed.done
    if name == "sawtooth":
        assert ours.replica_s <= 0.6 * fixed.replica_s


@pytest.mark.integration
@pytest.mark.parametrize("name", SAMPLING_LOADS)
def test_runners_follow_the_learner(name: str) -> None:
    work, num_steps = SAMPLING_LOADS[name]
    trainer = Trainer(work)
    fixed = best_fixed(lambda size: trainer.run(size, None, 8 * HOURS))
    scaler = autoscale_runners(RunnerAutoscaling(max_replicas=16), 2, trainer.per_runner, trainer.lag)
    ours = trainer.run(2, scaler, 8 * HOURS)
    assert ours.num_reversals <= num_steps
    assert ours.done >= 0.9 * fixed.done
    if name == "sawtooth":
        assert ours.replica_s <= 0.6 * fixed.replica_s


def test_in_turns_sampling_and_learning_take_equally_long() -> None:
    trainer = Trainer(step(480, 480, 0), learn_s=60, lag=0)
    scaler = autoscale_runners(RunnerAutoscaling(max_replicas=16), 2, trainer.per_runner, trainer.lag)
    assert trainer.run(2, scaler, 2 * HOURS).sizes[-1][1] == 8
    settings = RunnerAutoscaling(max_replicas=32, target_starvation=0.25)
    scaler = autoscale_runners(settings, 2, trainer.per_runner, trainer.lag)
    assert trainer.run(2, scaler, 2 * HOURS).sizes[-1][1] == 24


def test_the_same_states_give_the_same_decisions() -> None:
    def sizes() -> tuple[tuple[float, int], ...]:
        scaler = autoscale_retrievers(RetrieverAutoscaling(max_replicas=16), 2)
        return serve_queries(sawtooth(1000, HOURS), 2, scaler, 2 * HOURS).sizes

    assert sizes() == sizes()


def queries(second: int, *, busy: float, rate: float = 100.0, queued: float = 0.0, num_running: int = 2) -> FleetState:
    """A fleet that has been like this for all of ``second`` seconds; ``busy`` replicas work."""
    return FleetState(float(second), num_running, queued=queued, busy_s=busy * second, num_answered=rate * second)


def decide(scaler: Autoscaler, states: Sequence[FleetState]) -> dict[float, int]:
    """Return the times at which the size changed, with the sizes."""
    found, size = {}, scaler.num_replicas
    for state in states:
        decision = scaler.decide(state)
        assert decision.reason
        if decision.num_replicas != size:
            size = found[state.time_s] = decision.num_replicas
    return found


def fast(**changes: Any) -> RetrieverAutoscaling:
    settings = {"max_replicas": 10, "upscale_delay_s": 5, "downscale_delay_s": 20, "cooldown_s": 0, **changes}
    return RetrieverAutoscaling.model_validate({"look_back_period_s": 2, "target_utilization": 1.0, **settings})


def test_a_wanted_size_is_taken_after_its_delay() -> None:
    up = [queries(second, busy=4.0) for second in range(12)]
    assert decide(autoscale_retrievers(fast(), 2), up) == {6.0: 4}  # nothing is measured in the first second
    down = [queries(second, busy=1.0) for second in range(40)]
    assert decide(autoscale_retrievers(fast(), 4), down) == {21.0: 1}


def test_a_size_within_the_tolerance_is_kept() -> None:
    states = [queries(second, busy=2.15) for second in range(60)]
    assert decide(autoscale_retrievers(fast(), 2), states) == {}
    assert decide(autoscale_retrievers(fast(tolerance=0.0), 2), states) == {6.0: 3}


def test_a_factor_scales_the_change_and_never_stops_it() -> None:
    up = [queries(second, busy=8.0) for second in range(8)]
    assert decide(autoscale_retrievers(fast(upscaling_factor=0.5), 2), up) == {6.0: 5}
    down = [queries(second, busy=3.0) for second in range(60)]
    scaler = autoscale_retrievers(fast(downscaling_factor=0.1), 5)
    assert list(decide(scaler, down).values()) == [4, 3]


def test_after_a_change_the_other_direction_waits() -> None:
    states = [queries(second, busy=4.0) for second in range(8)]
    low = [replace(queries(second, busy=1.0), busy_s=28.0 + second - 7) for second in range(8, 200)]
    for cooldown_s, expected_s in ((0, 28.0), (100, 106.0)):
        sizes = decide(autoscale_retrievers(fast(cooldown_s=cooldown_s), 2), [*states, *low])
        assert sizes[6.0] == 4
        assert min(time_s for time_s, size in sizes.items() if size < 4) == expected_s


def test_a_fleet_shrinks_only_to_the_most_that_was_wanted_meanwhile() -> None:
    needs = [1.0] * 10 + [2.0] * 5 + [1.0] * 10
    busy_s = list(itertools.accumulate(needs))
    states = [
        replace(queries(second, busy=0.0, rate=100.0, num_running=4), busy_s=done) for second, done in enumerate(busy_s)
    ]
    assert list(decide(autoscale_retrievers(fast(), 4), states).values()) == [2]


def test_queries_that_wait_ask_for_replicas() -> None:
    states = [queries(second, busy=2.0, queued=1000.0) for second in range(8)]
    # 100 queries/s keep 2 replicas busy; 1,000 that wait, within 10 s, are 100 more per second
    assert decide(autoscale_retrievers(fast(), 2), states) == {6.0: 4}
    assert decide(autoscale_retrievers(fast(target_ongoing_requests=200), 2), states) == {5.0: 5}


def test_what_max_replicas_forbids_is_in_the_reason() -> None:
    scaler = autoscale_retrievers(fast(max_replicas=3), 2)
    decisions = [scaler.decide(queries(second, busy=8.0)) for second in range(8)]
    assert decisions[6].num_replicas == 3
    assert "max_replicas allows 3 of 8" in decisions[6].reason


def sampling(second: int, learner: LearnerState, *, busy: float = 2.0, ongoing: float = 64.0) -> FleetState:
    return FleetState(float(second), 2, ongoing=ongoing, busy_s=busy * second, learner=learner)


def starved(second: int, **changes: Any) -> LearnerState:
    """Learns for 1 s and waits for 3 s in turn."""
    turns, rest = divmod(second, 4)
    return LearnerState(turns, float(turns + min(rest, 1)), float(3 * turns + max(0, rest - 1)), **changes)


def runners(size: int, **changes: Any) -> Autoscaler:
    settings = {"max_replicas": 10, "upscale_delay_s": 5, "downscale_delay_s": 20, "cooldown_s": 0, **changes}
    settings = {"look_back_period_s": 8, **settings}
    return autoscale_runners(RunnerAutoscaling.model_validate(settings), size, 8, 1)


def test_a_starving_learner_asks_for_runners() -> None:
    found = decide(runners(2), [sampling(second, starved(second)) for second in range(40)])
    assert list(found.values()) == [8]  # 2 runners sample for 4 s what is learned in 1 s


def test_no_runner_is_added_that_the_requests_do_not_occupy() -> None:
    states = [sampling(second, starved(second), ongoing=24.0) for second in range(40)]
    assert list(decide(runners(2), states).values()) == [3]


def test_no_runner_is_added_while_a_batch_waits_for_the_learner() -> None:
    states = [sampling(second, starved(second, num_finished_batches=1.5)) for second in range(8, 60)]
    assert decide(runners(2), states) == {}


def test_a_learner_that_never_waits_gives_runners_back_unless_groups_become_too_old() -> None:
    def state(second: int, num_stale: int) -> FleetState:
        learner = LearnerState(second // 4, float(second), 0.0, num_stale=num_stale)
        return sampling(second, learner, busy=1.0)

    assert list(decide(runners(4), [state(second, 0) for second in range(60)]).values()) == [1]
    assert decide(runners(4), [state(second, second // 4) for second in range(60)]) == {}


def test_a_fleet_with_nothing_to_do_shrinks_to_its_minimum() -> None:
    idle = [FleetState(float(second), 4) for second in range(60)]
    assert list(decide(runners(4, min_replicas=2), idle).values()) == [2]
    assert list(decide(autoscale_retrievers(fast(), 4), idle).values()) == [1]


states = st.builds(
    FleetState,
    time_s=st.just(0.0),
    num_running=st.integers(0, 20),
    num_starting=st.integers(0, 20),
    ongoing=st.floats(0, 1e6),
    queued=st.floats(0, 1e6),
    busy_s=st.floats(0, 10),
    num_answered=st.floats(0, 1e4),
    learner=st.builds(
        LearnerState,
        num_batches=st.integers(0, 1),
        busy_s=st.floats(0, 10),
        waited_s=st.floats(0, 10),
        num_finished_batches=st.floats(0, 3),
        num_stale=st.integers(0, 2),
    ),
)


@given(st.lists(states, min_size=1, max_size=80), st.booleans())
def test_whatever_is_measured_the_size_stays_within_its_bounds(steps: list[FleetState], of_runners: bool) -> None:
    """The drawn states are what happened since the state before."""
    scaler = runners(3, min_replicas=2) if of_runners else autoscale_retrievers(fast(min_replicas=2), 3)
    total = FleetState(0.0, 3)
    for one in steps:
        learner = LearnerState(
            total.learner.num_batches + one.learner.num_batches,
            total.learner.busy_s + one.learner.busy_s,
            total.learner.waited_s + one.learner.waited_s,
            one.learner.num_finished_batches,
            total.learner.num_stale + one.learner.num_stale,
        )
        sums = {"busy_s": total.busy_s + one.busy_s, "num_answered": total.num_answered + one.num_answered}
        total = replace(one, time_s=total.time_s + 1, learner=learner, **sums)
        assert 2 <= scaler.decide(total).num_replicas <= 10


@pytest.mark.parametrize("wanted", [math.inf, 1e308, 12.0, math.nan, 0.0, -math.inf])
def test_any_demand_gives_a_size_and_a_reason(wanted: float) -> None:
    for size in (1, 2, 3, 99):  # 1 and 99 are out of bounds, as after a person's order
        scaler = Autoscaler(fast(min_replicas=2, max_replicas=3), lambda *_: (wanted, "measured"), size)
        decisions = [scaler.decide(FleetState(float(second), size)) for second in range(60)]
        assert decisions[-1].num_replicas in (2, 3)
        assert all(decision.reason.startswith("measured") for decision in decisions)


def test_answers_in_no_time_are_an_infinite_demand() -> None:
    scaler = autoscale_retrievers(fast(upscale_delay_s=0), 2)
    scaler.decide(FleetState(0.0, 2))
    decision = scaler.decide(FleetState(5e-324, 2, busy_s=1.0, num_answered=100.0))
    assert decision.num_replicas == 10
    assert "max_replicas allows 10 of 1000000000" in decision.reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "max_replicas: got {}; field required"),
        ({"max_replicas": 1, "min_replicas": 2}, "max_replicas: got 1; expected at least min_replicas"),
        ({"max_replica": 1}, "did you mean 'max_replicas'"),
        ({"max_replicas": 2, "target_starvation": 1.5}, "target_starvation: got 1.5"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunnerAutoscaling.read(settings, "env_runners.autoscaling")
    assert message in str(caught.value)


def test_a_recorded_run_gets_the_decisions_that_it_got() -> None:
    """The trace is of a real run on two cores; see its first line."""
    head, *lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
    settings = RunnerAutoscaling.model_validate(head["settings"])
    scaler = autoscale_runners(settings, head["num_replicas"], head["per_runner"], head["lag"])
    states = [FleetState(**{**line, "learner": LearnerState(**line["learner"])}) for line in lines]
    assert list(decide(scaler, states).values()) == head["decided"]
