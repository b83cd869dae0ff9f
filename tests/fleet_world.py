"""What the tests of runner fleets share: requests, and waits for a state of the fleet."""

from __future__ import annotations

import os
import time
from typing import Any

from ragr1_actors.core.types import Task
from ragr1_actors.rollout.env_runner_group import EnvRunnerGroup
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest


def request(index: int, **changes: Any) -> GroupRequest:
    """Ask for two trajectories."""
    task = Task(f"t/{index}", f"Where is Riga {index}?", ("Latvia",))
    return GroupRequest(f"{task.task_id}#0", task, 2, **{"temperature": 1.0, **changes})


def drain(fleet: EnvRunnerGroup) -> list[FinishedGroup]:
    """Collect all groups that were submitted."""
    finished: list[FinishedGroup] = []
    while fleet.num_unfinished:
        finished += fleet.collect()
    return finished


def pids(fleet: EnvRunnerGroup) -> list[int]:
    """Return the process ids of the healthy runners, in the order of their indices."""
    return fleet.foreach_env_runner(lambda runner: os.getpid())


def wait_until_healed(fleet: EnvRunnerGroup, timeout_s: float = 600.0) -> None:
    """Return once both runners of a fleet of two are healthy: while it collects, it looks for those that came back."""
    deadline = time.monotonic() + timeout_s
    while fleet.num_healthy < 2:
        assert time.monotonic() < deadline, "the runner did not come back"
        fleet.submit(request(0))
        drain(fleet)
