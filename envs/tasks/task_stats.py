"""TaskStats: results of the trained trajectories of a task, by which a ``Curriculum`` decides."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragr1_actors.core.types import Task

_ROW = np.dtype([("num_trajectories", "<i4"), ("num_passed", "<i4"), ("total_reward", "<f8")])


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Results of a task's trajectories that were trained since the start of the run; there is at least one."""

    num_trajectories: int
    num_passed: int
    """Number of trajectories whose reward was above 0: right, or partly right."""
    total_reward: float

    @property
    def mean_reward(self) -> float:
        """Mean reward per trajectory."""
        return self.total_reward / self.num_trajectories

    @property
    def pass_rate(self) -> float:
        """Share of the trajectories that passed, 0 to 1."""
        return self.num_passed / self.num_trajectories

    def plus(self, rewards: Sequence[float]) -> TaskStats:
        """Return the stats with the rewards of further trajectories."""
        num_passed = self.num_passed + sum(reward > 0 for reward in rewards)
        return TaskStats(self.num_trajectories + len(rewards), num_passed, self.total_reward + sum(rewards))


NO_STATS = TaskStats(0, 0, 0.0)
Stats = Mapping[str, TaskStats]
"""Stats by task id, of all tasks with a trained trajectory."""


def pack_stats(stats: Stats, tasks: Sequence[Task]) -> str:
    """Return the stats as text: 16 bytes for each of the ``tasks``, in their order, compressed, in base64."""
    known = (stats.get(task.task_id, NO_STATS) for task in tasks)
    rows = np.array([(one.num_trajectories, one.num_passed, one.total_reward) for one in known], _ROW)
    return b64encode(zlib.compress(rows.tobytes(), 1)).decode()


def unpack_stats(text: str, tasks: Sequence[Task]) -> dict[str, TaskStats]:
    """Return the stats from a text of ``pack_stats`` for the same tasks."""
    rows = np.frombuffer(zlib.decompress(b64decode(text)), _ROW).tolist()
    return {task.task_id: TaskStats(*row) for task, row in zip(tasks, rows, strict=True) if row[0]}
