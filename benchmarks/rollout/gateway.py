"""Agents instead of an environment: what the gateway of one runner can carry, and whether agents take longer.

The agents run in another process, over HTTP on loopback, as programs do; it is not measured. Each asks for as many
turns as its trajectory has, searches at the gateway after all but the last, and sends the whole history every time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import Sample, quotient
from benchmarks.rollout import sides, workload
from benchmarks.rollout.ceiling import NUM_ROWS, InstantRetriever, SteppedScripts
from benchmarks.rollout.fleet import GROUP_SIZE
from benchmarks.rollout.paced import PacedEngine
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.gateway.agents import AgentSession, Ended
from ragr1_actors.rollout.groups import GroupRequest

_AGENT = {"function": "benchmarks.rollout.gateway:in_the_other_process"}


async def in_the_other_process(task: Task, session: AgentSession) -> str:
    """Name an agent for the configuration; ``_sample`` puts ``OtherProcess`` in its place before it is called."""
    raise AssertionError("the runner was not given OtherProcess")


class OtherProcess:
    """``Agent``: hands tasks to a process that runs all of them at once."""

    def __init__(self, process: asyncio.subprocess.Process, *, is_planned: bool) -> None:
        """With ``is_planned`` the number of the turn says whether it searches, else its text."""
        self._process, self._is_planned = process, is_planned
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._reading = asyncio.create_task(self._read())

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        num_searches = workload.plan(task.task_id).num_searches if self._is_planned else None
        asked = {"url": session.url, "key": session.api_key, "question": task.question, "num_searches": num_searches}
        done = self._waiting[session.api_key] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await done
        return Ended("done")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._waiting.pop(line.decode().strip()).set_result(None)


async def _solve(http: Any, asked: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {asked['key']}"}
    messages: list[dict[str, str]] = [{"role": "user", "content": asked["question"]}]

    async def post(path: str, body: object) -> Any:
        async with http.post(asked["url"] + path, json=body, headers=headers) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return found

    for turn in range(workload.MAX_TURNS):
        said = (await post("/v1/chat/completions", {"model": "policy", "messages": messages}))["choices"][0]["message"]
        messages.append(said)
        planned = asked["num_searches"]
        if turn == planned or (planned is None and "<search>" not in said["content"]):
            return
        found = (await post("/retrieve", {"queries": [f"query {turn}"], "topk": 1}))["result"][0][0]
        messages.append({"role": "user", "content": f"<information>{found['contents']}</information>"})


async def _serve() -> None:
    """Run agents for the lines of standard input, and print the key of each that ends."""
    import aiohttp

    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def run(asked: dict[str, Any]) -> None:
            await _solve(http, asked)
            print(asked["key"], flush=True)

        print("ready", flush=True)
        while line := await reader.readline():
            task = asyncio.create_task(run(json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)


def _config(num_in_flight: int) -> RunConfig:
    config = sides.make_config(num_in_flight)
    environment = config.environment.model_copy(
        update={"agent": type(config.environment).model_validate({"agent": _AGENT}).agent}
    )
    policy = config.policy.model_copy(update={"chat_format": "hermes"})
    return config.model_copy(update={"environment": environment, "policy": policy})


async def _sample(runner: EnvRunner, requests: Sequence[GroupRequest], *, is_planned: bool) -> tuple[int, float, float]:
    """Return tokens, wall seconds and CPU seconds of this process."""
    assert runner._agents is not None
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rollout.gateway",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()  # it has started
    try:
        runner._agents._agent = OtherProcess(process, is_planned=is_planned)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        groups = await asyncio.gather(*map(runner.sample_group, requests))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    finally:
        process.kill()
        await process.wait()
        await runner._agents.close()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for one in trajectories:
        assert not one.stop_reason.is_failure, one.error
        assert len(one.rows) == 1
    return sum(one.num_model_tokens for one in trajectories), wall_s, cpu_s


def gateway_ceiling(policy_dir: Path, num_groups: int) -> Sample:
    """Return tokens ÷ CPU seconds of the runner's process, with ``NUM_ROWS`` sessions at once."""
    tokenizer = PolicyTokenizer(policy_dir)
    engine = SteppedScripts(tokenizer.encode)
    runner = EnvRunner(_config(NUM_ROWS), tokenizer, InstantRetriever(), engine)
    names = [f"ceiling/{index}" for index in range(num_groups)]
    requests = [GroupRequest(f"{name}#0", workload.task(name), GROUP_SIZE, 1.0) for name in names]
    tokens, _, cpu_s = asyncio.run(_sample(runner, requests, is_planned=False))
    return Sample(tokens / cpu_s, tokens, cpu_s)


def gateway_parity(policy_dir: Path, num_trajectories: int) -> Sample:
    """Return wall seconds of the environment ÷ those of agents, of the same turns on an engine that keeps time."""
    tokenizer = PolicyTokenizer(policy_dir)
    names = [f"bench/{index}" for index in range(num_trajectories)]
    config = sides.make_config(num_trajectories)
    theirs = asyncio.run(sides.run_loop(config, str(policy_dir), PacedEngine(tokenizer), names)).wall_s
    planned = sides.PlannedEngine(PacedEngine(tokenizer))
    runner = EnvRunner(_config(num_trajectories), tokenizer, workload.SlowRetriever(), planned)
    requests = [GroupRequest(f"{name}#0", workload.task(name), 1, 1.0) for name in names]
    _, ours, _ = asyncio.run(_sample(runner, requests, is_planned=True))
    return quotient(theirs, ours)


if __name__ == "__main__":
    asyncio.run(_serve())
