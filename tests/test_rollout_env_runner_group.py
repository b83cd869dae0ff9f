"""The rollout fleet: runners that are killed, stopped or cannot start, and what the driver counts."""

import asyncio
import gc
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fakes import OnePassage
from fleet_world import collect, drain, num_unfinished, pids, request, submit, wait_until_healed
from small_world import wait_for
from transformers import AutoModelForCausalLM

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, FleetError
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import Completion, StopReason, Task, TokenKind
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest, summarize
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerActor, EnvRunnerGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return directory


def make_config(hang_timeout_s: float = 300, hedge_factor: float = 4, **env_runners: Any) -> RunConfig:
    settings = {"num_env_runners": 2, "max_context_tokens": 400, "max_new_tokens_per_turn": 12, **env_runners}
    config = AlgorithmConfig().env_runners(**settings).training(group_size=2)
    config = config.debugging(fault_tolerance={"hang_timeout_s": hang_timeout_s, "hedge_factor": hedge_factor})
    return config.environment(prompt="{question}", max_turns=3).freeze()


async def test_a_group_that_ends_its_runners_has_failed(
    ray_local: ModuleType, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = EnvRunnerGroup(make_config(num_env_runners=0), policy_dir, OnePassage())
    urgent: list[tuple[bool, int]] = []

    async def died(request: GroupRequest, *, is_urgent: bool) -> None:
        urgent.append((is_urgent, request.num_deaths))

    monkeypatch.setattr(fleet, "_local", None)
    monkeypatch.setattr(fleet, "_sample_there", died)
    found = await fleet.sample(GroupRequest("t#1", Task("t", "?", ("a",)), 2))
    assert urgent == [(False, 0), (True, 1), (True, 2)]  # a group that was lost goes before the others
    assert (found.summary.num_failed, found.summary.rewards) == (2, ())
    assert found.summary.stop_reasons == (StopReason.ENV_ERROR,) * 2  # a fault of the task: it goes into quarantine
    assert set(found.summary.errors) == {"3 env runners died of it in a row, the last one with no other group"}
    (group,) = groups_from_record_batch(found.batch)
    assert [one.trajectory_id for one in group.trajectories] == ["t#1/0", "t#1/1"]


async def test_a_runner_gets_one_update_of_its_weights_at_a_time() -> None:
    under_way, versions = list[int](), list[int]()

    class Engine:
        async def update_weights(self, weights: object, version: int) -> None:
            under_way.append(version)
            await asyncio.sleep(0.01)
            assert under_way == [version], "the other one has not ended"
            under_way.remove(version)
            versions.append(version)

    actor = EnvRunnerActor.__new__(EnvRunnerActor)
    actor._loaded, actor._updating = SimpleNamespace(engine=Engine()), asyncio.Lock()  # type: ignore[assignment]
    await asyncio.gather(actor.catch_up({}, 1), actor.call_engine("update_weights", {}, 2))
    assert versions == [1, 2]


@pytest.fixture(scope="module")
def fleet_of_two(ray_local: ModuleType, policy_dir: Path) -> Iterator[EnvRunnerGroup]:
    fleet = EnvRunnerGroup(make_config(), policy_dir, OnePassage(), version=1)
    fleet.wait_until_ready()
    yield fleet
    fleet.stop()


@pytest.fixture
def group(ray_local: ModuleType, fleet_of_two: EnvRunnerGroup, policy_dir: Path) -> EnvRunnerGroup:
    """The fleet with both runners alive, idle, and at version 1 of the same weights."""
    wait_until_healed(fleet_of_two)
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    fleet_of_two.update_weights(ray_local.put({n: v.numpy() for n, v in model.state_dict().items()}), version=1)
    return fleet_of_two


async def test_a_scripted_runner_plays_through_the_environment(policy_dir: Path) -> None:
    asked = request(0, temperature=0.0)
    script = ["<search> Riga</search>", "<answer> Latvia</answer>"]
    scripts = {asked.trajectory_id(index): script for index in range(2)}
    tokenizer = PolicyTokenizer(policy_dir)
    runner = EnvRunner(make_config(), tokenizer, OnePassage(), ScriptedEngine(scripts, tokenizer.encode))
    summary = summarize(await runner.sample_group(asked))
    assert summary.rewards == (1.0, 1.0)
    assert (summary.means["rounds"], summary.means["em"]) == (1.0, 1.0)
    assert summary.num_sampled_tokens == 2 * sum(len(tokenizer.encode(turn)) for turn in script)


async def test_tokens_of_a_trajectory_that_failed_were_sampled_too(policy_dir: Path) -> None:
    asked = replace(request(0, temperature=0.0), num_trajectories=1)
    tokenizer = PolicyTokenizer(policy_dir)
    engine = ScriptedEngine({asked.trajectory_id(0): ["<search> Riga</search>"]}, tokenizer.encode)  # and no more
    summary = summarize(await EnvRunner(make_config(), tokenizer, OnePassage(), engine).sample_group(asked))
    assert (summary.num_failed, summary.means) == (1, {})
    assert summary.num_sampled_tokens == len(tokenizer.encode("<search> Riga</search>"))


async def test_the_trajectories_of_a_group_are_sampled_at_the_same_time(policy_dir: Path) -> None:
    all_here = asyncio.Barrier(4)

    class Meeting(ScriptedEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            async with asyncio.timeout(60):
                await all_here.wait()  # for the first turns of all four
            return await super().generate(*arguments, **options)

    asked = replace(request(0), num_trajectories=4)
    tokenizer = PolicyTokenizer(policy_dir)
    scripts = {asked.trajectory_id(index): ["<answer> Latvia</answer>"] for index in range(4)}
    runner = EnvRunner(make_config(), tokenizer, OnePassage(), Meeting(scripts, tokenizer.encode))
    assert summarize(await runner.sample_group(asked)).rewards == (1.0,) * 4


def test_groups_come_back_as_record_batches_with_their_summary(ray_local: ModuleType, group: EnvRunnerGroup) -> None:
    submit(group, request(0))
    submit(group, request(1))
    by_id = {finished.request.issue_id: finished for finished in drain(group)}
    assert len(by_id) == 2
    assert by_id["t/0#0"].summary.means["tokens"] > 0
    (decoded,) = groups_from_record_batch(ray_local.get(by_id["t/1#0"].batch))
    assert len(decoded.trajectories) == 2
    for trajectory in decoded.trajectories:
        assert set(trajectory.policy_versions[trajectory.kinds == TokenKind.MODEL]) == {1}
    assert decoded.trajectories[0].token_ids.tolist() != decoded.trajectories[1].token_ids.tolist()


def test_a_killed_runners_groups_are_sampled_elsewhere_and_none_twice(
    ray_local: ModuleType, group: EnvRunnerGroup
) -> None:
    num_restarts = group.fleet.num_restarts
    pid = pids(group)[0]
    for index in range(20):
        submit(group, request(index))
    finished = drain(group)
    os.kill(pid, signal.SIGSTOP)  # else it may be done with its groups before it is killed
    for index in range(20, 40):
        submit(group, request(index))
    finished += collect(group)
    os.kill(pid, signal.SIGKILL)
    finished += drain(group)
    ids = [one.request.issue_id for one in finished]
    assert sorted(ids) == sorted(f"t/{index}#0" for index in range(40))
    assert group.fleet.num_restarts == num_restarts + 1


@pytest.mark.slow
def test_a_runner_that_comes_back_has_the_newest_weights(
    ray_local: ModuleType, group: EnvRunnerGroup, policy_dir: Path
) -> None:
    weights = {n: v.numpy() for n, v in AutoModelForCausalLM.from_pretrained(policy_dir).state_dict().items()}
    group.update_weights(ray_local.put(weights), version=5)
    for pid in pids(group):
        os.kill(pid, signal.SIGKILL)
    for index in range(4):
        submit(group, request(index))
    assert [one.summary.oldest_version for one in drain(group)] == [5] * 4
    wait_until_healed(group)


def other_process(ray: ModuleType, actor: Any, pid: int) -> bool:
    """Return whether an actor answers from another process than ``pid``."""
    try:
        return bool(ray.get(actor.apply.remote(lambda runner: os.getpid())) != pid)
    except ray.exceptions.RayActorError:
        return False


def test_a_runner_that_dies_while_idle_has_the_newest_weights_before_it_counts(
    ray_local: ModuleType, group: EnvRunnerGroup, policy_dir: Path
) -> None:
    weights = {n: v.numpy() for n, v in AutoModelForCausalLM.from_pretrained(policy_dir).state_dict().items()}
    group.update_weights(ray_local.put(weights), version=6)
    num_restarts, before = group.fleet.num_restarts, pids(group)
    os.kill(before[0], signal.SIGKILL)
    # no call is open, so none fails; the fleet asks only once Ray has restarted the actor with the weights of the start
    assert wait_for(lambda: other_process(ray_local, group.actors[0], before[0]), 600)
    for index in range(8):
        submit(group, request(index))
    assert [one.summary.oldest_version for one in drain(group)] == [6] * 8
    assert group.fleet.num_restarts == num_restarts + 1
    wait_until_healed(group)


def num_waiting(fleet: EnvRunnerGroup) -> float:
    """Return the number of groups of two that wait for a runner."""
    return fleet.state().queued / 2


def test_what_is_in_flight_is_finished_before_new_weights_come(
    ray_local: ModuleType, group: EnvRunnerGroup, policy_dir: Path
) -> None:
    submit(group, *map(request, range(400)), looks=False)  # on a busy machine all would end meanwhile
    group.loop.run(group.finish_in_flight())
    num_begun = 400 - num_waiting(group)
    assert 0 < num_begun < 400
    weights = {n: v.numpy() for n, v in AutoModelForCausalLM.from_pretrained(policy_dir).state_dict().items()}
    group.update_weights(ray_local.put(weights), version=7)
    assert num_waiting(group) == 400 - num_begun
    versions = []
    for one in drain(group):
        (found,) = groups_from_record_batch(ray_local.get(one.batch))
        versions += [set(t.policy_versions[t.kinds == TokenKind.MODEL].tolist()) for t in found.trajectories]
    assert [versions.count({version}) for version in (1, 7)] == [2 * num_begun, 2 * (400 - num_begun)]


def test_a_function_runs_in_every_runner(group: EnvRunnerGroup, policy_dir: Path) -> None:
    assert len(set(pids(group)) - {os.getpid()}) == 2
    with pytest.raises(FleetError, match="division by zero"):
        group.foreach_env_runner(lambda runner: 1 / 0)
    local = EnvRunnerGroup(make_config(num_env_runners=0), policy_dir, OnePassage())
    assert pids(local) == [os.getpid()]
    local.stop()


@pytest.mark.slow
def test_a_runner_that_hangs_is_replaced_and_holds_up_no_call_of_the_driver(
    ray_local: ModuleType, policy_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While groups are sampled; while weights move and it has none, as after hedging; and while nothing is asked."""
    fleet = EnvRunnerGroup(make_config(hang_timeout_s=10), policy_dir, OnePassage())
    fleet.wait_until_ready()
    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    weights = ray_local.put({n: v.numpy() for n, v in model.state_dict().items()})

    def stop_the_first() -> int:
        pid = pids(fleet)[0]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def check_that_both_have(version: int) -> None:
        wait_until_healed(fleet)
        submit(fleet, request(1))
        submit(fleet, request(2))
        assert [one.summary.oldest_version for one in drain(fleet)] == [version] * 2

    stop_the_first()
    for index in range(8):
        submit(fleet, request(index))
    assert len(drain(fleet)) == 8
    metrics = fleet.metrics()
    assert metrics["num_restarts"] == metrics["num_hangs"] >= 1
    assert re.search(r"env runner 0 hangs: it has not answered for \d+ s", caplog.text)
    check_that_both_have(0)

    num_hangs = fleet.fleet.num_hangs
    caplog.clear()
    stop_the_first()
    fleet.update_weights(weights, version=7)
    assert fleet.fleet.num_hangs > num_hangs
    assert re.search(r"env runner 0 hangs: it has not answered for \d+ s; 1 of 2 go on", caplog.text)
    check_that_both_have(7)

    stopped = stop_the_first()
    # the process is another one, though nothing was asked of the fleet
    assert wait_for(lambda: other_process(ray_local, fleet.actors[0], stopped), 600)
    fleet.update_weights(weights, version=8)
    check_that_both_have(8)
    fleet.stop()


@pytest.mark.slow
def test_a_group_that_takes_long_beside_groups_of_its_size_is_sampled_by_an_idle_runner_too(
    ray_local: ModuleType, policy_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ragr1_actors.rollout.runners.env_runner_group._HEDGE_AFTER_S", 0.0)
    fleet = EnvRunnerGroup(make_config(hang_timeout_s=1000, hedge_factor=1e-9), policy_dir, OnePassage())
    fleet.wait_until_ready()
    for index in range(16):  # as many as an evaluation needs for a median
        submit(fleet, replace(request(index), num_trajectories=1))
    assert len(drain(fleet)) == 16
    for index in range(16):
        submit(fleet, request(index))
        assert len(drain(fleet)) == 1
    assert fleet.num_hedged == 0, "an evaluation's trajectory says nothing about a group of two"
    submit(fleet, request(16))
    assert len(drain(fleet)) == 1
    assert fleet.num_hedged == 1

    # one runner is stopped, which no heartbeat notices in this time; later it goes on, and what it has is left out
    monkeypatch.setattr("ragr1_actors.rollout.runners.env_runner_group._HEDGE_AFTER_S", 1.0)
    caplog.clear()
    slow = pids(fleet)[0]
    os.kill(slow, signal.SIGSTOP)
    try:
        for index in range(16, 20):
            submit(fleet, request(index))
        finished = drain(fleet)
    finally:
        os.kill(slow, signal.SIGCONT)
    assert sorted(one.request.issue_id for one in finished) == [f"t/{index}#0" for index in range(16, 20)]
    metrics = fleet.metrics()
    assert metrics["num_hedged"] >= 2
    assert metrics["num_restarts"] == 0
    assert "env runner 1 samples it, too" in caplog.text
    for index in range(20, 30):
        submit(fleet, request(index))
    assert len(drain(fleet)) == 10
    assert num_unfinished(fleet) == 0
    fleet.stop()


def test_an_engine_that_refuses_a_call_is_one_sentence(group: EnvRunnerGroup) -> None:
    with pytest.raises(FleetError, match=r"env runner \d failed in no_such_method: .*AttributeError"):
        group.call_engines("no_such_method")


@pytest.mark.slow
def test_the_fleet_goes_on_with_fewer_and_stops_when_none_is_left(
    ray_local: ModuleType, policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(policy_dir, tmp_path / "policy")
    fleet = EnvRunnerGroup(make_config(), tmp_path / "policy", OnePassage())
    fleet.wait_until_ready()
    shutil.rmtree(tmp_path / "policy")  # a runner that dies cannot start again
    first, second = pids(fleet)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 600
    while not fleet.metrics()["num_lost"]:
        submit(fleet, request(0))
        assert len(drain(fleet)) == 1
        assert time.monotonic() < deadline
    assert fleet.num_healthy == 1
    assert "env runner 0 did not start again" in caplog.text
    assert "1 of 2 go on" in caplog.text
    submit(fleet, request(0))
    os.kill(second, signal.SIGKILL)
    with pytest.raises(
        FleetError, match=r"none of 2 env runners is left; env runner 1 did not start again: .*does not see"
    ):
        drain(fleet)
    fleet.stop()


@pytest.mark.slow
def test_a_runner_that_cannot_start_is_one_sentence(ray_local: ModuleType, tmp_path: Path) -> None:
    fleet = EnvRunnerGroup(make_config(num_env_runners=1), tmp_path, OnePassage())
    with pytest.raises(FleetError, match=r"did not start.*tokenizer"):
        fleet.wait_until_ready()
    fleet.stop()


@pytest.mark.slow
def test_the_driver_samples_the_same_tokens_as_an_actor(
    ray_local: ModuleType, group: EnvRunnerGroup, policy_dir: Path
) -> None:
    local = EnvRunnerGroup(make_config(num_env_runners=0), policy_dir, OnePassage(), version=1)
    for fleet in (local, group):
        submit(fleet, request(3))
    (here,), (there,) = drain(local), drain(group)
    ours = groups_from_record_batch(here.batch)[0].trajectories
    theirs = groups_from_record_batch(ray_local.get(there.batch))[0].trajectories
    assert [t.token_ids.tolist() for t in ours] == [t.token_ids.tolist() for t in theirs]
    local.stop()


def test_an_unknown_engine_is_named(policy_dir: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of endpoint, transformers, vllm or my_module:MyName"):
        EnvRunnerGroup(make_config(num_env_runners=0, engine="vlm"), policy_dir, OnePassage())


def test_an_interrupt_in_the_driver_leaves_nothing_behind_that_asyncio_prints(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    gc.collect()  # what other tests left behind
    caplog.clear()
    local = EnvRunnerGroup(make_config(num_env_runners=0), policy_dir, OnePassage())
    monkeypatch.setattr("ragr1_actors.rollout.engines.transformers_engine.sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(local, request(0), request(1))
        collect(local)
    local.stop()
    del local
    gc.collect()
    assert "never retrieved" not in caplog.text
