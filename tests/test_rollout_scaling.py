"""A rollout fleet that grows and shrinks while it samples."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fakes import OnePassage
from fleet_world import collect, drain, num_unfinished, pids, request, submit
from small_world import ended
from transformers import AutoModelForCausalLM

from ragr1_actors.core.config import RunConfig
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.ray, pytest.mark.engine]
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return directory


def make_config(num_env_runners: int) -> RunConfig:
    config = AlgorithmConfig().training(group_size=2).environment(prompt="{question}", max_turns=3)
    sizes = {"max_context_tokens": 400, "max_new_tokens_per_turn": 12, "num_cpus_per_env_runner": 0.5}
    config.debugging(fault_tolerance={"hang_timeout_s": 300, "hedge_factor": 0})  # tests stop runners
    return config.env_runners(num_env_runners=num_env_runners, **sizes).freeze()


def sample_until(fleet: EnvRunnerGroup, holds: Callable[[], bool], first: int = 1000) -> list[FinishedGroup]:
    """Keep the fleet busy until ``holds()``, and return all that it sampled meanwhile."""
    finished: list[FinishedGroup] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        submit(fleet, request(first + len(finished) + num_unfinished(fleet)))
        finished += collect(fleet)
    return finished + drain(fleet)


@pytest.fixture(scope="module")
def fleet_of_all(ray_local: ModuleType, policy_dir: Path) -> Iterator[EnvRunnerGroup]:
    fleet = EnvRunnerGroup(make_config(1), policy_dir, OnePassage(), version=1)
    fleet.wait_until_ready()
    yield fleet
    fleet.stop()


@pytest.fixture
def start(fleet_of_all: EnvRunnerGroup) -> Callable[[int], EnvRunnerGroup]:
    """Return the fleet of the module with so many runners, and nothing to do."""

    def start(num_env_runners: int) -> EnvRunnerGroup:
        fleet_of_all.scale_to(num_env_runners)
        sample_until(fleet_of_all, lambda: fleet_of_all.num_healthy == num_env_runners)
        return fleet_of_all

    return start


def ids(finished: list[FinishedGroup]) -> list[str]:
    return sorted(one.request.issue_id for one in finished)


def test_a_runner_that_is_added_samples_with_the_newest_weights(
    ray_local: ModuleType, start: Callable[[int], EnvRunnerGroup], policy_dir: Path
) -> None:
    fleet = start(1)
    weights = {n: v.numpy() for n, v in AutoModelForCausalLM.from_pretrained(policy_dir).state_dict().items()}
    fleet.update_weights(ray_local.put(weights), version=5)
    (old,) = pids(fleet)
    fleet.scale_to(2)
    assert (fleet.num_healthy, fleet.state().num_starting) == (1, 1)
    meanwhile = sample_until(fleet, lambda: fleet.num_healthy == 2)
    assert len(set(ids(meanwhile))) == len(meanwhile)
    assert len(set(pids(fleet))) == 2
    os.kill(old, signal.SIGSTOP)  # what is sampled now is of the new one
    try:
        for index in range(8):
            submit(fleet, request(index))
        first = collect(fleet)
        assert {one.summary.oldest_version for one in first} == {5}
    finally:
        os.kill(old, signal.SIGCONT)
    assert ids(first + drain(fleet)) == sorted(f"t/{index}#0" for index in range(8))
    assert fleet.fleet.num_restarts == 0


def test_a_runner_that_is_removed_returns_what_it_has_and_gets_nothing_more(
    start: Callable[[int], EnvRunnerGroup],
) -> None:
    fleet = start(2)
    _, leaving = pids(fleet)
    os.kill(leaving, signal.SIGSTOP)
    try:
        for index in range(2):  # one each
            submit(fleet, request(index))
        fleet.scale_to(1)
        for index in range(2, 6):
            submit(fleet, request(index))
        finished: list[FinishedGroup] = []
        while num_unfinished(fleet) > 1:
            finished += collect(fleet)
        assert fleet.num_healthy == 1
        assert not ended({leaving})
    finally:
        os.kill(leaving, signal.SIGCONT)
    assert ids(finished + drain(fleet)) == [f"t/{index}#0" for index in range(6)]
    assert (fleet.fleet.num_restarts, fleet.metrics()["num_draining"]) == (0, 0)
    deadline = time.monotonic() + TIMEOUT_S
    while not ended({leaving}):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_fleet_grows_and_shrinks_under_load_and_samples_each_group_once(
    start: Callable[[int], EnvRunnerGroup],
) -> None:
    fleet = start(1)
    finished: list[FinishedGroup] = []
    for number, size in enumerate((3, 1, 2, 1)):
        fleet.scale_to(size)
        first = 10_000 * (1 + number)
        finished += sample_until(fleet, lambda size=size: fleet.num_healthy == size, first)  # type: ignore[misc]
    assert len(set(ids(finished))) == len(finished)
    assert fleet.fleet.num_restarts == 0


@pytest.mark.slow
def test_runners_on_a_node_that_goes_away_are_replaced(
    ray_local: ModuleType, start: Callable[[int], EnvRunnerGroup]
) -> None:
    fleet = start(1)
    (old,) = pids(fleet)
    node_id = ray_local.get_runtime_context().get_node_id()
    submit(fleet, request(0))
    assert fleet.fleet.drain_nodes({node_id}) == 1
    assert fleet.fleet.drain_nodes({node_id}) == 0
    submit(fleet, request(1))  # for the next one
    fleet.scale_to(1)
    assert ids(drain(fleet)) == ["t/0#0", "t/1#0"]
    (new,) = pids(fleet)
    assert new != old
    assert fleet.fleet.num_restarts == 0


@pytest.mark.slow
def test_the_time_with_work_is_counted_per_runner(start: Callable[[int], EnvRunnerGroup]) -> None:
    fleet = start(2)
    idle = fleet.state()
    assert (idle.num_running, idle.ongoing) == (2, 0.0)
    assert fleet.state().busy_s == idle.busy_s
    for index in range(20):
        submit(fleet, request(index))
    assert fleet.state().ongoing == 40
    drain(fleet)
    busy = fleet.state()
    assert busy.num_answered - idle.num_answered == 40
    assert 0 < busy.busy_s - idle.busy_s <= 2 * (busy.time_s - idle.time_s)
    assert fleet.state().busy_s == busy.busy_s
