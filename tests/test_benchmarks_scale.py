"""The loads of ``ragr1 bench scale``, and a fleet that follows one."""

from __future__ import annotations

import pytest

from benchmarks.scale import elastic, loads
from benchmarks.scale.loads import LOADS, LOW, MAX_RUNNERS, PERIOD_S, Outcome


@pytest.mark.parametrize(
    ("name", "high_share"), [("sawtooth", 0.5), ("step", 1 / 3), ("ramp", 0.5), ("spike", 600 / PERIOD_S)]
)
def test_a_load_is_between_low_and_one_and_repeats(name: str, high_share: float) -> None:
    load = LOADS[name]
    times = [PERIOD_S * index / 2400 for index in range(2400)]
    values = [load(time_s) for time_s in times]
    assert min(values) == pytest.approx(LOW, abs=0.01)
    assert max(values) == pytest.approx(1, abs=0.01)
    assert sum(values) / len(values) == pytest.approx(LOW + (1 - LOW) * high_share, abs=0.01)
    assert [load(time_s + 3 * PERIOD_S) for time_s in times] == pytest.approx(values)


def test_reversals_are_changes_of_direction() -> None:
    assert Outcome(30.0, 8.0, (4,)).num_reversals == 0
    assert Outcome(30.0, 8.0, (4, 8, 12)).num_reversals == 0
    assert Outcome(30.0, 8.0, (4, 8, 12, 6, 3, 5)).num_reversals == 2


@pytest.mark.integration
def test_a_fleet_that_follows_a_low_load_is_smaller_and_hardly_slower() -> None:
    fixed = loads.run(LOADS["spike"], MAX_RUNNERS, 0.2, is_autoscaled=False)
    ours = loads.run(LOADS["spike"], MAX_RUNNERS, 0.2, is_autoscaled=True)
    assert (fixed.sizes, fixed.runner_h) == ((MAX_RUNNERS,), pytest.approx(MAX_RUNNERS))
    assert min(ours.sizes) < MAX_RUNNERS / 3
    assert ours.runner_h < 0.6 * fixed.runner_h
    assert ours.batches_per_h > 0.9 * fixed.batches_per_h


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_the_quickstart_is_trained_on_a_cluster_whose_nodes_come() -> None:
    found = elastic.train([*elastic.PLACES, *elastic.AUTOSCALING, *elastic.QUICK])
    assert 0 <= found.em <= 1
    assert found.actor_s > 0
    assert found.wall_s > 0
