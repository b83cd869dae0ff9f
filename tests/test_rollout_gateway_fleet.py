"""Agents of real env runners: nothing is lost, doubled or left behind where a runner is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from fakes import OnePassage
from fleet_world import drain, pids, request, submit
from gateway_world import play
from small_world import wait_for
from test_rollout_gateway_agents import ASKS, HIDES, is_alive
from tool_templates import write_tool_family

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import StopReason, Task
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.gateway import attempt
from ragr1_actors.rollout.gateway.agents import AgentSession, Ended, FunctionAgent
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return directory


def config_of(agent: object) -> RunConfig:
    config = AlgorithmConfig().env_runners(num_env_runners=1, max_context_tokens=400, max_new_tokens_per_turn=12)
    return config.training(group_size=2).environment(agent=agent).policy(chat_format="hermes").freeze()


def written(folder: Path) -> list[int]:
    return [int(pid) for one in folder.iterdir() if one.suffix != ".new" for pid in one.read_text().split()]


def test_of_ten_agents_in_flight_none_is_lost_doubled_or_left_when_their_runner_is_killed(
    ray_local: ModuleType, policy_dir: Path, tmp_path: Path
) -> None:
    folder, go, agent = tmp_path / "pids", tmp_path / "go", tmp_path / "agent.py"
    folder.mkdir()
    agent.write_text(
        f"{ASKS}\nPIDS = {str(folder)!r} + '/' + str(os.getpid())\nask(sys.argv[1])\n{HIDES}\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('Riga')\n"
    )
    fleet = EnvRunnerGroup(config_of({"command": [sys.executable, str(agent), "{question}"]}), policy_dir, OnePassage())
    try:
        fleet.wait_until_ready()
        (runner,) = pids(fleet)
        for index in range(5):
            submit(fleet, request(index))
        wait_for(lambda: len(written(folder)) == 40, 120)
        first = written(folder)
        assert all(map(is_alive, first))
        os.kill(runner, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, first)), 120)
        go.touch()
        finished = drain(fleet)
        assert sorted(one.request.issue_id for one in finished) == [f"t/{index}#0" for index in range(5)]
        trajectories = [
            trajectory
            for one in finished
            for group in groups_from_record_batch(ray_local.get(one.batch))
            for trajectory in group.trajectories
        ]
        assert [(one.stop_reason, one.answer, len(one.turns)) for one in trajectories] == (
            [(StopReason.ANSWERED, "Riga", 1)] * 10
        )
        assert not any(map(is_alive, written(folder)))
    finally:
        fleet.stop()


def asks_from_a_task(task: Task, session: AgentSession) -> str:
    import json
    import urllib.request

    body = json.dumps({"messages": [{"role": "user", "content": task.question}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"}
    urllib.request.urlopen(urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)).close()
    if task.task_id == "t/1":
        raise KeyError("one")
    if task.task_id == "t/2":
        os.kill(os.getpid(), signal.SIGKILL)
    return 3 if task.task_id == "t/3" else str(os.getpid())  # type: ignore[return-value]


def test_a_ray_task_is_an_agent(ray_local: ModuleType, policy_dir: Path) -> None:
    agent = {"ray": f"{__name__}:asks_from_a_task", "num_cpus": 0}
    fleet = EnvRunnerGroup(config_of(agent), policy_dir, OnePassage())
    try:
        fleet.wait_until_ready()
        for index in range(4):
            submit(fleet, request(index))
        found = {one.request.task.task_id: one for one in drain(fleet)}
        (good,) = groups_from_record_batch(ray_local.get(found["t/0"].batch))
        assert all(int(one.answer) not in (os.getpid(), *pids(fleet)) for one in good.trajectories)
        for name, problem in (("t/1", "KeyError: 'one'"), ("t/2", "its process ended"), ("t/3", "returned 3")):
            (group,) = groups_from_record_batch(ray_local.get(found[name].batch))
            for one in group.trajectories:
                assert one.stop_reason is StopReason.AGENT_FAILED and problem in one.calls[-1].result, one.calls
    finally:
        fleet.stop()


def test_the_deadline_of_a_ray_task_begins_when_it_has_its_cpus(
    ray_local: ModuleType, policy_dir: Path, tmp_path: Path
) -> None:
    def hold(go: Path) -> None:
        while not go.exists():
            time.sleep(0.01)

    go, deadline_s = tmp_path / "go", 8
    most = ray_local.nodes()[0]["Resources"]["CPU"] / 2 + 0.1  # of these, one runs at a time
    agent = {"ray": f"{__name__}:asks_from_a_task", "num_cpus": most, "deadline_s": deadline_s}
    fleet = EnvRunnerGroup(config_of(agent), policy_dir, OnePassage())
    try:
        fleet.wait_until_ready()
        holding = ray_local.remote(num_cpus=most)(hold).remote(go)
        wait_for(lambda: ray_local.available_resources().get("CPU", 0) < most, 60)
        submit(fleet, request(0))
        time.sleep(deadline_s + 1)
        go.touch()
        (finished,) = drain(fleet)
        (group,) = groups_from_record_batch(ray_local.get(finished.batch))
        assert [one.stop_reason for one in group.trajectories] == [StopReason.ANSWERED] * 2, group
        ray_local.get(holding)
    finally:
        go.touch()
        fleet.stop()


def stays(task: Task, session: AgentSession) -> None:
    asks_from_a_task(task, session)
    time.sleep(1000)


def test_a_ray_task_that_passes_its_deadline_is_ended(ray_local: ModuleType, policy_dir: Path) -> None:
    most = ray_local.nodes()[0]["Resources"]["CPU"] / 2 + 0.1
    agent = {"ray": f"{__name__}:stays", "num_cpus": most, "deadline_s": 6}  # the second one begins after the first
    fleet = EnvRunnerGroup(config_of(agent), policy_dir, OnePassage())
    try:
        fleet.wait_until_ready()
        submit(fleet, request(0))
        (finished,) = drain(fleet)
        (group,) = groups_from_record_batch(ray_local.get(finished.batch))
        assert [one.stop_reason for one in group.trajectories] == [StopReason.AGENT_DEADLINE] * 2, group
        wait_for(lambda: ray_local.available_resources().get("CPU", 0) >= most, 60)
    finally:
        fleet.stop()


async def test_an_agent_that_gets_no_cpus_is_no_failure_of_its_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def waits(agent: FunctionAgent, task: Task, session: AgentSession, begun: asyncio.Event) -> Ended:
        await asyncio.Event().wait()
        return Ended()

    monkeypatch.setattr(FunctionAgent, "solve", waits)
    monkeypatch.setattr(attempt, "CPU_TIMEOUT_S", 0.05)
    (found,) = await play(write_tool_family(tmp_path / "policy", "qwen2.5"), f"{__name__}:stays", {})
    assert found.stop_reason is StopReason.SERVICE_FAILED
    assert found.error.startswith("Ray had no CPUs for the agent within 0.05 s; lower environment.agent.num_cpus")
