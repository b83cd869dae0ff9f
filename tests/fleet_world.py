"""What the tests of runner fleets share: requests, and waits for a state of the fleet."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any
from weakref import WeakKeyDictionary

from ragr1_actors.core.types import Task
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup


def request(index: int, **changes: Any) -> GroupRequest:
    """Ask for two trajectories."""
    task = Task(f"t/{index}", f"Where is Riga {index}?", ("Latvia",))
    return GroupRequest(f"{task.task_id}#0", task, 2, **{"temperature": 1.0, **changes})


_asked: WeakKeyDictionary[EnvRunnerGroup, list[asyncio.Task[FinishedGroup]]] = WeakKeyDictionary()


def submit(fleet: EnvRunnerGroup, *requests: GroupRequest, looks: bool = True) -> None:
    """Ask for groups, which go to runners that have room: now, or when the loop runs next."""
    _asked.setdefault(fleet, []).extend(fleet.loop.begin(fleet.sample(one)) for one in requests)
    if looks:
        look(fleet)


def look(fleet: EnvRunnerGroup) -> None:
    """Let the fleet look after its runners, and read what has ended."""
    fleet.loop.run(asyncio.sleep(0))


def num_unfinished(fleet: EnvRunnerGroup) -> int:
    """Return the number of groups that were asked for and not collected."""
    return len(_asked.get(fleet, []))


def collect(fleet: EnvRunnerGroup) -> list[FinishedGroup]:
    """Wait until a group is finished, and return all finished groups."""

    async def wait(tasks: list[asyncio.Task[FinishedGroup]]) -> None:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    tasks = _asked.pop(fleet)
    fleet.loop.run(wait(tasks))
    if left := [task for task in tasks if not task.done()]:
        _asked[fleet] = left
    return [task.result() for task in tasks if task.done()]


def drain(fleet: EnvRunnerGroup) -> list[FinishedGroup]:
    """Collect all groups that were asked for."""
    finished: list[FinishedGroup] = []
    while num_unfinished(fleet):
        finished += collect(fleet)
    return finished


def pids(fleet: EnvRunnerGroup) -> list[int]:
    """Return the process ids of the healthy runners, in the order of their indices."""
    return fleet.foreach_env_runner(lambda runner: os.getpid())


def wait_until_healed(fleet: EnvRunnerGroup, timeout_s: float = 600.0) -> None:
    """Return once both runners of a fleet of two are healthy: while it collects, it looks for those that came back."""
    deadline = time.monotonic() + timeout_s
    while fleet.num_healthy < 2:
        assert time.monotonic() < deadline, "the runner did not come back"
        submit(fleet, request(0))
        drain(fleet)
