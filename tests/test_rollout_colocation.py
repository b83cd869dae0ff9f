"""Learner and engine on one device: real runners and learner ranks take turns, on a CPU."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import test_rollout_weight_sync
from fakes import OnePassage
from fleet_world import drain, look, pids, request, submit, wait_until_healed
from small_world import SHORT, make_files
from small_world import make_config as make_run_config
from test_rollout_weight_sync import apply_to_the_first, make_sync, read

from cluster.placement import Placement
from learners.algorithms.grpo import GRPOLearner
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, FleetError
from ragr1_actors.planning.prepare import prepare
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def by_value(ray_local: ModuleType) -> ModuleType:
    """Ray, whose actors cannot import the tests."""
    for module in (sys.modules[__name__], test_rollout_weight_sync):
        ray_local.cloudpickle.register_pickle_by_value(module)
    return ray_local


def make_config(learners: dict[str, Any] | None = None, **env_runners: Any) -> RunConfig:
    config = AlgorithmConfig().env_runners(num_cpus_per_env_runner=0.5, max_context_tokens=400)
    config.env_runners(max_new_tokens_per_turn=40, weight_transport="ipc")
    config.env_runners(**{"num_env_runners": 2, **env_runners})
    config.training(group_size=2, lr=0.01, entropy_coeff=0.1, options={"drop_zero_variance": False})
    config.environment(prompt="{question}", max_turns=3)
    config.debugging(num_threads=1, fault_tolerance={"hang_timeout_s": 300})  # a busy machine is no hang here
    return config.learners(
        **{"num_learners": 2, "num_cpus_per_learner": 0.5, "zero_stage": 0, **(learners or {})}
    ).freeze()


class Setup:
    """Two runners and two learner ranks that share devices, and the weight sync between them."""

    def __init__(self, config: RunConfig, policy_dir: Path) -> None:
        self.placement = Placement(config)
        self.learners = LearnerGroup(config, self.placement.learner_options)
        self.fleet = EnvRunnerGroup(config, policy_dir, OnePassage(), actor_options=self.placement.runner_options)
        self.transport = make_sync(self.learners, self.fleet, timeout_s=600.0, transport="ipc")
        self.learners.build("grpo", policy_dir)
        self.fleet.wait_until_ready()
        self.version = 0

    def iterate(self) -> dict[str, float]:
        """Sample, learn and publish, as ``Algorithm.train`` does; check that engines pause for the learners."""
        for index in range(4):
            submit(self.fleet, request(index))
        batch = drain(self.fleet)
        assert {one.summary.oldest_version for one in batch} == {self.version}
        self.transport.make_room()
        submit(self.fleet, request(9))  # a request that comes too early waits
        metrics = self.learners.update([one.batch for one in batch])
        self.version += 1
        self.transport.publish(self.version)
        [late] = drain(self.fleet)
        assert late.summary.oldest_version == self.version
        return metrics

    def assert_all_have_it(self) -> None:
        """Check that both runners have the learners' weights, which the learners reload and offload for it."""
        expected = self.learners.get_weights()
        self.learners.offload_states()
        found = self.fleet.foreach_env_runner(read)
        assert len(found) == 2
        for has, weights in found:
            assert has == self.version
            for name, weight in weights.items():
                np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@contextmanager
def made(config: RunConfig, folder: Path) -> Iterator[Setup]:
    make_tiny_policy(folder, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    setup = Setup(config, folder)
    try:
        yield setup
    finally:
        setup.fleet.stop()
        setup.learners.stop()
        setup.placement.remove()


def is_offloaded(learner: Any) -> bool:
    return all(engine.is_offloaded for engine in learner.engines().values())


def die_at_the_first_part(runner: EnvRunner) -> None:
    engine: Any = runner.engine

    async def die(*part: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    engine.receive_weights = die


@pytest.mark.ray
@pytest.mark.slow
def test_learners_and_engines_take_turns_and_learners_wait_for_an_engine_that_loads(
    by_value: ModuleType, tmp_path: Path
) -> None:
    with made(make_config({"zero_stage": 0}), tmp_path) as setup:
        take_turns(setup)
        fleet = setup.fleet
        by_value.kill(list(fleet.receivers.values())[1], no_restart=False)
        deadline = time.monotonic() + 600
        while not fleet.admissions:
            assert time.monotonic() < deadline, "the runner was not called again"
            setup.transport.catch_up()
            look(fleet)
            time.sleep(0.05)
        setup.transport.make_room()
        assert not fleet.admissions
        setup.version += 1
        setup.transport.publish(setup.version)
        wait_until_healed(fleet)
        setup.assert_all_have_it()


def take_turns(setup: Setup) -> None:
    for version in range(3):
        metrics = setup.iterate()
        assert metrics["logprob_gap_max"] < 1e-4 and metrics["grad_norm"] > 0, (version, metrics)
        assert all(setup.learners.foreach_learner(is_offloaded)), "the engines have the devices"
        setup.assert_all_have_it()
    assert setup.transport.num_fallbacks == 0


@pytest.mark.ray
@pytest.mark.slow
def test_they_take_turns_through_deaths(by_value: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with made(make_config({"zero_stage": 3}), tmp_path) as setup:
        take_turns(setup)
        with setup.transport.room(), setup.transport.room():  # as for a checkpoint
            setup.learners.get_state()
        assert all(setup.learners.foreach_learner(is_offloaded))
        setup.assert_all_have_it()

        apply_to_the_first(setup.fleet, die_at_the_first_part)
        with caplog.at_level(logging.WARNING):
            started = time.monotonic()
            setup.iterate()
        assert time.monotonic() - started < 300, "the update waited for a deadline"
        assert setup.transport.num_fallbacks == 1
        assert "version 4 goes to 1 of 2 env runners" in caplog.text
        wait_until_healed(setup.fleet)
        setup.assert_all_have_it()
        setup.iterate()
        setup.assert_all_have_it()
        assert setup.transport.num_fallbacks == 1

        pid = pids(setup.fleet)[1]
        for index in range(12):
            submit(setup.fleet, request(index))
        os.kill(pid, signal.SIGKILL)  # while the engines have the devices
        assert {one.summary.oldest_version for one in drain(setup.fleet)} == {setup.version}
        wait_until_healed(setup.fleet)
        setup.assert_all_have_it()
        assert all(setup.learners.foreach_learner(is_offloaded)), "the learners offload again after sending"
        setup.iterate()
        assert setup.transport.num_fallbacks == 1

        os.kill(setup.learners.foreach_learner(lambda learner: os.getpid())[1], signal.SIGKILL)
        setup.iterate()
        setup.assert_all_have_it()
        assert (setup.learners.num_restarts, setup.transport.num_fallbacks) == (1, 1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_with_evaluations_and_checkpoints(by_value: ModuleType, tmp_path: Path) -> None:
    """The learner agrees with the engines in every iteration, also after a resume."""
    sections = make_run_config(make_files(tmp_path), {**SHORT, "num_steps": 3}).model_dump()
    sections["env_runners"] |= {"num_env_runners": 2, "num_cpus_per_env_runner": 0.5, "weight_transport": "ipc"}
    sections["learners"] |= {"num_learners": 2, "num_cpus_per_learner": 0.5, "zero_stage": 1}
    sections["training"]["options"] = {"drop_zero_variance": False}
    config = AlgorithmConfig(sections).freeze()

    def train(algorithm: Algorithm, version: int) -> None:
        metrics = algorithm.train()
        assert metrics["learner/logprob_gap_max"] < 1e-4 and metrics["learner/num_steps"] == 1, metrics
        assert (metrics["loop/policy_version"], metrics["loop/weight_fallbacks"]) == (version, 0)
        assert algorithm.evaluate().num_tasks == 8

    algorithm = Algorithm.create(config, tmp_path / "run")
    try:
        assert algorithm.evaluate().num_tasks == 8
        algorithm.pretrain(lambda step, metrics: algorithm.save(wait=False) and None)
        for version in (2, 3):
            train(algorithm, version)
            algorithm.save(wait=version == 3)
            algorithm.evaluate()
    finally:
        algorithm.stop()
    assert by_value.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" for group in by_value.util.placement_group_table().values()
    )
    algorithm = Algorithm.start(config, tmp_path / "run", prepare(config, tmp_path / "run"))
    try:
        algorithm.restore()
        train(algorithm, 4)
    finally:
        algorithm.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_a_runner_whose_engine_does_not_load_again_is_left_out(
    by_value: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_policy(tmp_path / "policy", [" Riga is a city"], seed=0, vocab_size=400)
    fleet = EnvRunnerGroup(make_config(), tmp_path / "policy", OnePassage())
    fleet.wait_until_ready()
    fleet.expect(0)
    fleet.offer({})
    (tmp_path / "policy" / "tokenizer.json").unlink()
    os.kill(pids(fleet)[0], signal.SIGKILL)
    deadline = time.monotonic() + 600
    while not fleet.metrics()["num_lost"]:
        assert time.monotonic() < deadline, fleet.metrics()
        submit(fleet, request(0))
        assert len(drain(fleet)) == 1
    assert fleet.num_healthy == 1
    assert "env runner 0 did not start again" in caplog.text and "1 of 2 go on" in caplog.text
    fleet.stop()


# -- placement --------------------------------------------------------------------------------------------------------


def place(_: Any) -> tuple[list[str], str]:
    """Return the GPUs and the placement group of the runner's or learner's actor."""
    import ray

    context = ray.get_runtime_context()
    return context.get_accelerator_ids()["GPU"], context.get_placement_group_id()


class NoDevice(GRPOLearner):
    """A learner that has built nothing."""

    def build(self) -> None:
        pass


@pytest.mark.ray
@pytest.mark.slow
def test_a_runner_and_its_learner_rank_have_one_gpu_also_after_a_restart(by_value: ModuleType, tmp_path: Path) -> None:
    """The GPUs are only counted: neither the scripted engine nor the learner uses one."""
    make_tiny_policy(tmp_path, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=1, num_heads=2)
    learners_on = {"num_gpus_per_learner": 0.5}
    placement = Placement(make_config(learners_on, num_gpus_per_env_runner=0.4))
    engine = {"engine": "benchmarks.rollout.fleet:PacedEngine", "weight_transport": "object_store"}
    config = make_config(learners_on, num_gpus_per_env_runner=0.4, **engine)
    learners = LearnerGroup(config, placement.learner_options)
    fleet = EnvRunnerGroup(config, tmp_path, OnePassage(), actor_options=placement.runner_options)
    try:
        fleet.wait_until_ready()
        learners.build(f"{__name__}:NoDevice", tmp_path)
        before = places(fleet, learners)
        assert by_value.available_resources().get("GPU", 0) == 0, "no other actor may have a part of them"
        runner, rank = pids(fleet)[0], learners.foreach_learner(lambda learner: os.getpid())[0]
        for index in range(4):
            submit(fleet, request(index))
        os.kill(runner, signal.SIGKILL)
        os.kill(rank, signal.SIGKILL)
        drain(fleet)
        wait_until_healed(fleet)
        assert places(fleet, learners) == before
        assert (fleet.fleet.num_restarts, learners.num_restarts) == (1, 1)
    finally:
        fleet.stop()
        learners.stop()
        placement.remove()


def places(fleet: EnvRunnerGroup, learners: LearnerGroup) -> list[Any]:
    """Return the places of all runners, after a check that those of the ranks are the same and no two share a GPU."""
    runners = fleet.foreach_env_runner(place)
    assert learners.foreach_learner(place) == runners
    assert sorted(gpu for [gpu], _ in runners) == ["0", "1"] and runners[0][1]
    return runners


@pytest.mark.ray
def test_a_placement_without_room_is_refused(by_value: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.placement.START_TIMEOUT_S", 1.0)
    config = make_config(
        {"num_gpus_per_learner": 0.5, "num_learners": 3}, num_gpus_per_env_runner=0.5, num_env_runners=3
    )
    with pytest.raises(
        FleetError, match=r"no room for 3 pairs of an env runner and a learner rank, each 1 CPU, 1 GPU, in 1 s"
    ):
        Placement(config)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"env_runners": {"num_env_runners": 0}}, "num_env_runners=0 .*expected actors on both sides"),
        ({"learners": {"num_learners": 0}}, "learners.num_learners=0, expected actors on both sides"),
        (
            {"learners": {"num_learners": 2}},
            "num_env_runners=1 and learners.num_learners=2, expected .*as many of each",
        ),
        ({"training": {"max_policy_lag": 1}}, "max_policy_lag=1, expected 0: runners sleep"),
        ({"learners": {"num_gpus_per_learner": 0.5}}, "num_gpus_per_env_runner=0 .*expected a part of a GPU on both"),
        (
            {"env_runners": {"num_gpus_per_env_runner": 0.6}, "learners": {"num_gpus_per_learner": 0.5}},
            "expected at most 1 together",
        ),
        ({"env_runners": {"engine_options": {"tensor_parallel_size": 2}}}, "tensor_parallel_size=2, expected 1"),
    ],
)
def test_what_cannot_share_a_device_is_refused_before_a_run_directory_is_made(
    sections: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    config = AlgorithmConfig(sections)
    config.env_runners(weight_transport="auto").freeze()
    config.env_runners(weight_transport="ipc")
    with pytest.raises(ConfigError, match=rf"^env_runners\.weight_transport: got ipc with .*{message}.*set it to auto"):
        config.build_algo(tmp_path / "run")
    assert not (tmp_path / "run").exists()
