"""Publishing from learners to real runners, part by part; also when a runner dies, hangs or refuses a part."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from fakes import OnePassage
from fleet_world import collect, drain, pids, request, submit, wait_until_healed
from small_world import wait_for
from transformers import AutoModelForCausalLM

from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.folders import SharedFolderWriter
from ragr1_actors.core.errors import ConfigError, FleetError, TransferError
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.rollout.runners.weight_sync import WeightSync
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = pytest.mark.engine

BUCKET_BYTES = 10_000  # a tenth of the policy: several parameters in one, and one that is larger


def make_config(learners: dict[str, Any] | None = None, **env_runners: Any) -> RunConfig:
    settings = {"num_env_runners": 2, "max_context_tokens": 400, "max_new_tokens_per_turn": 40, **env_runners}
    settings.setdefault("num_cpus_per_env_runner", 0.5)
    config = AlgorithmConfig().env_runners(**settings).training(group_size=2, options={"drop_zero_variance": False})
    config.environment(prompt="{question}", max_turns=3).debugging(
        num_threads=1, fault_tolerance={"hang_timeout_s": 300}
    )
    return config.learners(**{"num_learners": 0, "zero_stage": 0, **(learners or {})}).freeze()


def move(learners: LearnerGroup, seed: int) -> None:
    """Change every weight by much, as a learner would by many updates."""

    def change(learner: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in learner.policy.module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    learners.foreach_learner(change)


def move_adapters(learners: LearnerGroup, seed: int) -> None:
    """Change every adapter by much; what has none is frozen."""

    def change(learner: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in learner.policy.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

    learners.foreach_learner(change)


def read(runner: EnvRunner) -> tuple[int, dict[str, Any]]:
    """Return the version and the weights of a runner."""
    engine: Any = runner.engine
    return engine.version, {name: value.numpy() for name, value in engine.model.state_dict().items()}


def apply_to_the_first(fleet: EnvRunnerGroup, function: Callable[[EnvRunner], None]) -> None:
    """Call a function with the first healthy runner, in its process."""
    import ray

    first, *_ = fleet.receivers.values()
    ray.get(first.apply.remote(function))


_newest: WeakKeyDictionary[EnvRunnerGroup, WeightSync] = WeakKeyDictionary()


async def catch_up(fleet: EnvRunnerGroup) -> None:
    """Give returned runners the newest weights, as in a run."""
    while True:
        _newest[fleet].catch_up()
        await asyncio.sleep(0.1)


def make_sync(
    learners: LearnerGroup, fleet: EnvRunnerGroup, timeout_s: float = 60.0, transport: str = "broadcast"
) -> WeightSync:
    """A transport of many small parts."""
    sync = WeightSync(make_config({"num_learners": 2}, weight_transport=transport), learners, fleet)
    if fleet not in _newest:
        fleet.loop.run_beside(partial(catch_up, fleet))
    _newest[fleet] = sync
    sync.delivery = replace(sync.delivery, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)
    return sync


class Setup:
    """A learner in the driver and two runners."""

    def __init__(self, policy_dir: Path) -> None:
        self.policy_dir = policy_dir
        self.learners = LearnerGroup(make_config())
        self.learners.build("grpo", policy_dir)
        self.fleet = EnvRunnerGroup(make_config(), policy_dir, OnePassage())
        self.fleet.wait_until_ready()

    def transport(self, timeout_s: float = 60.0) -> WeightSync:
        return make_sync(self.learners, self.fleet, timeout_s)

    def assert_all_have(self, version: int, learners: LearnerGroup | None = None) -> None:
        expected = (learners or self.learners).get_weights()
        found = self.fleet.foreach_env_runner(read)
        assert len(found) == 2
        for has, weights in found:
            assert has == version
            assert weights.keys() == expected.keys()
            for name, weight in weights.items():
                np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@pytest.fixture(scope="module")
def setup(ray_local: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    ray_local.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import the tests
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    made = Setup(directory)
    yield made
    made.fleet.stop()
    made.learners.stop()


@pytest.mark.slow
@pytest.mark.ray
def test_engine_and_learner_agree_after_a_transfer_in_the_middle_of_a_run(setup: Setup) -> None:
    wait_until_healed(setup.fleet)
    transport = setup.transport()
    for version in (101, 102):
        for index in range(180):  # seconds of work, of which the transfer takes tenths
            submit(setup.fleet, request(index))
        before = collect(setup.fleet)
        move(setup.learners, version)
        transport.publish(version)
        under_way = drain(setup.fleet)
        for index in range(12):
            submit(setup.fleet, request(100 + index))
        after = drain(setup.fleet)
        setup.assert_all_have(version)
        assert {one.summary.oldest_version for one in after} == {version}
        metrics = setup.learners.update([one.batch for one in after])
        assert metrics["tokens"] > 100
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["ratio_outliers"] == 0
        metrics = setup.learners.update([one.batch for one in under_way])
        assert len(before) > 0 and metrics["logprob_gap_max"] > 0.1, "nothing was under way with the weights before"
        assert metrics["logprob_gap_mean_fresh"] < 1e-4
    assert transport.num_fallbacks == 0


@pytest.mark.ray
@pytest.mark.slow
def test_a_runner_that_dies_in_a_transfer_is_left_out_and_takes_part_in_the_next_one(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until_healed(setup.fleet)
    transport = setup.transport()
    transport.publish(1)

    def die_in_the_middle(runner: EnvRunner) -> None:
        engine: Any = runner.engine
        receive, parts = engine.receive_weights, []

        async def receive_two(*part: Any) -> None:
            parts.append(part)
            if len(parts) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            await receive(*part)

        engine.receive_weights = receive_two

    apply_to_the_first(setup.fleet, die_in_the_middle)
    num_restarts = setup.fleet.metrics()["num_restarts"]
    move(setup.learners, 2)
    with caplog.at_level(logging.WARNING):
        started = time.monotonic()
        transport.publish(2)
    assert time.monotonic() - started < 300, "the update waited for a deadline"
    assert transport.num_fallbacks == 1
    assert "version 2 goes to" in caplog.text and "through the object store" in caplog.text
    # a runner that is back before the second try takes it, and its death is noticed at its next answer
    assert wait_for(lambda: setup.fleet.metrics()["num_restarts"] == num_restarts + 1, timeout_s=600)
    wait_until_healed(setup.fleet)  # which brings it the newest weights
    setup.assert_all_have(2)
    move(setup.learners, 3)
    transport.publish(3)
    setup.assert_all_have(3)
    assert transport.num_fallbacks == 1


@pytest.mark.ray
@pytest.mark.slow
def test_a_runner_that_hangs_delays_the_others_until_the_deadline_only(setup: Setup) -> None:
    wait_until_healed(setup.fleet)
    transport = setup.transport(timeout_s=10.0)
    transport.publish(1)
    num_restarts = setup.fleet.metrics()["num_restarts"]
    os.kill(pids(setup.fleet)[1], signal.SIGSTOP)
    move(setup.learners, 2)
    started = time.monotonic()
    transport.publish(2)
    assert time.monotonic() - started < 60
    assert transport.num_fallbacks == 1
    assert wait_for(lambda: setup.fleet.metrics()["num_restarts"] == num_restarts + 1, timeout_s=600)
    wait_until_healed(setup.fleet)
    setup.assert_all_have(2)
    transport.publish(3)
    setup.assert_all_have(3)
    assert transport.num_fallbacks == 1


@pytest.mark.slow
@pytest.mark.ray
def test_a_runner_that_refuses_a_part_gets_the_version_through_the_object_store(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until_healed(setup.fleet)
    transport = setup.transport()

    def refuse_once(runner: EnvRunner) -> None:
        engine: Any = runner.engine

        async def refuse(*part: Any) -> None:
            del engine.receive_weights
            raise TransferError("no room for it")

        engine.receive_weights = refuse

    apply_to_the_first(setup.fleet, refuse_once)
    move(setup.learners, 2)
    with caplog.at_level(logging.WARNING):
        transport.publish(2)
    assert "version 2 goes to 1 of 2 env runners through the object store" in caplog.text
    assert "no room for it" in caplog.text
    setup.assert_all_have(2)
    transport.publish(3)
    setup.assert_all_have(3)
    assert (transport.num_fallbacks, setup.fleet.num_healthy) == (1, 2)


@pytest.mark.slow
@pytest.mark.ray
def test_a_runner_that_refuses_weights_of_the_object_store_loads_again(setup: Setup) -> None:
    wait_until_healed(setup.fleet)
    before = pids(setup.fleet)

    def refuse(runner: EnvRunner) -> None:
        async def refusing(*weights: Any) -> None:
            raise TransferError("no room for it")

        runner.engine.update_weights = refusing  # type: ignore[method-assign]

    apply_to_the_first(setup.fleet, refuse)
    move(setup.learners, 2)
    setup.fleet.update_weights(setup.learners.get_weights(), 2)
    wait_until_healed(setup.fleet)
    setup.assert_all_have(2)
    assert len(set(before) & set(pids(setup.fleet))) == len(before) - 1


@pytest.mark.ray
@pytest.mark.slow
def test_learner_ranks_that_share_the_parameters_out_send_them_together(setup: Setup) -> None:
    wait_until_healed(setup.fleet)
    config = make_config({"num_learners": 2, "zero_stage": 3, "num_cpus_per_learner": 0.5})
    learners = LearnerGroup(config)
    learners.build("grpo", setup.policy_dir)
    transport = make_sync(learners, setup.fleet)
    for version in (1, 2):
        transport.publish(version)
        setup.assert_all_have(version, learners)
    assert transport.num_fallbacks == 0

    os.kill(learners.foreach_learner(lambda learner: os.getpid())[0], signal.SIGKILL)
    transport.publish(3)  # the rank is found dead in the middle of it
    setup.assert_all_have(3, learners)
    assert (learners.num_restarts, transport.num_fallbacks) == (1, 0)
    os.kill(learners.foreach_learner(lambda learner: os.getpid())[1], signal.SIGKILL)
    learners.get_weights()  # and here before it
    transport.publish(4)
    setup.assert_all_have(4, learners)
    assert (learners.num_restarts, transport.num_fallbacks) == (2, 0)
    learners.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_adapters_alone_are_sent_and_merged_into_what_the_stage_began_with(
    ray_local: ModuleType, setup: Setup, tmp_path: Path
) -> None:
    wait_until_healed(setup.fleet)
    began_with = AutoModelForCausalLM.from_pretrained(setup.policy_dir).state_dict()  # other tests moved all weights
    setup.fleet.update_weights(ray_local.put({n: v.numpy() for n, v in began_with.items()}), version=0)
    learners = LearnerGroup(make_config({"lora": {"rank": 2, "target_modules": ["q_proj", "down_proj"]}}))
    learners.build("grpo", setup.policy_dir)
    transport = make_sync(learners, setup.fleet)
    before = learners.get_weights()
    for version in (1, 2, 3):
        if version == 3:
            learners.save_policy(SharedFolderWriter(tmp_path / "policy_sft"))
            learners.build("grpo", tmp_path / "policy_sft")
        move_adapters(learners, version)
        transport.publish(version)
        setup.assert_all_have(version, learners)
        expected = learners.get_weights()
        changed = {name for name, weight in expected.items() if not np.array_equal(weight, before[name])}
        assert len(changed) == 4 and all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in changed)
    assert transport.num_fallbacks == 0
    learners.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_an_engine_that_cannot_take_part_is_refused_at_the_start(ray_local: ModuleType, tmp_path: Path) -> None:
    make_tiny_policy(tmp_path, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=1, num_heads=2)
    config = make_config(num_env_runners=1, engine="benchmarks.rollout.fleet:PacedEngine", weight_transport="broadcast")
    fleet = EnvRunnerGroup(config, tmp_path, OnePassage())
    with pytest.raises(
        FleetError, match=r"benchmarks.rollout.fleet:PacedEngine cannot take part; set it to object_store"
    ):
        fleet.wait_until_ready()
    fleet.stop()


LORA = {"lora": {"rank": 2}}


class LearnersOfNothing:
    def weights_ref(self) -> Any: ...

    def foreach_learner(self, function: Any) -> list[Any]:
        return []

    def offload_states(self) -> int:
        return 0


class RunnersOfNothing:
    receivers: Mapping[str, Any] = {}

    def wait_for_restarts(self) -> None: ...

    def expect(self, version: int) -> None: ...

    def update_weights(self, weights: Any, version: int, receivers: Any = None) -> None: ...

    def call_engines(self, method: str, *arguments: Any) -> None: ...


def test_learners_empty_their_cache_before_an_engine_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Learners(LearnersOfNothing):
        def foreach_learner(self, function: Any) -> list[Any]:
            return [function(SimpleNamespace(device=torch.device("cuda")))]

        def offload_states(self) -> int:
            order.append("offload_states")
            return 0

    class Runners(RunnersOfNothing):
        def wait_for_restarts(self) -> None:
            order.append("wait_for_restarts")

        def call_engines(self, method: str, *arguments: Any) -> None:
            order.append(" ".join((method, *arguments)))

        def hold(self, *, is_held: bool) -> None:
            order.append("hold" if is_held else "release")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty_cache"))
    sync = WeightSync(config_with({"weight_transport": "ipc"}, {}), Learners(), Runners())  # type: ignore[arg-type]
    sync.publish(1)
    before = ["wait_for_restarts", "sleep", "hold", "empty_cache", "wake_up weights"]
    assert order == [*before, "offload_states", "wake_up kv_cache", "release"]


def config_with(runners: dict[str, Any], learners: dict[str, Any]) -> RunConfig:
    return AlgorithmConfig({"env_runners": runners, "learners": learners}).freeze()


@pytest.mark.parametrize(
    ("runners", "learners", "expected"),
    [
        ({}, {}, "object_store"),
        ({"engine": "vllm", "num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1}, "broadcast nccl"),
        ({"engine": "vllm", "num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1, **LORA}, "broadcast host"),
        ({"num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1}, "broadcast host"),
        ({"engine": "my:Own", "num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1}, "object_store"),
        ({"engine": "vllm", "num_gpus_per_env_runner": 0.5}, {"num_gpus_per_learner": 0.5}, "ipc ipc"),
        ({"engine": "vllm", "num_gpus_per_env_runner": 0.7}, {"num_gpus_per_learner": 0.5}, "object_store"),
        ({"engine": "my:Own", "num_gpus_per_env_runner": 0.5}, {"num_gpus_per_learner": 0.5}, "object_store"),
        ({"weight_transport": "ipc"}, {}, "ipc host"),
        ({"engine": "vllm", "num_gpus_per_env_runner": 1}, {}, "object_store"),
        ({"num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1, "num_learners": 0}, "object_store"),
        ({"num_env_runners": 0, "num_gpus_per_env_runner": 1}, {"num_gpus_per_learner": 1}, "object_store"),
        ({"weight_transport": "broadcast"}, {}, "broadcast host"),
        ({"weight_transport": "broadcast"}, {"num_learners": 0}, "broadcast host"),
        (
            {"weight_transport": "object_store", "engine": "vllm", "num_gpus_per_env_runner": 1},
            {"num_gpus_per_learner": 1},
            "object_store",
        ),
    ],
)
def test_auto_depends_on_where_the_actors_are_placed(
    runners: dict[str, Any], learners: dict[str, Any], expected: str
) -> None:
    config = config_with(runners, learners)
    made = WeightSync(config, LearnersOfNothing(), RunnersOfNothing())
    backend = f" {made.delivery.backend}" if choose_transport(config) != "object_store" else ""
    assert choose_transport(config) + backend == expected
    assert made.shares_devices is expected.startswith("ipc")


def test_a_broadcast_within_the_driver_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_env_runners 0"):
        choose_transport(config_with({"weight_transport": "broadcast", "num_env_runners": 0}, {}))
