"""A curriculum by a field of the task file: few hops first, and tasks that are always right no more.

To train with it::

    ragr1 train quickstart environment.curriculum=examples.hop_curriculum:ByHops \\
      environment.tasks=tasks.jsonl retrieval.corpus=passages.json

A line of tasks.jsonl: ``{"question": ..., "answer": ..., "hops": 2}``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.tasks.curriculum import Stats
from ragr1_actors import Curriculum, Task

ENOUGH = 8
"""Trajectories after which a task that was right in all of them is skipped."""


class ByHops(Curriculum):
    """Rising numbers of hops; within a number another order in each epoch."""

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        shuffled = rng.permutation(len(rest))
        hops = np.array([int(rest[at].meta.get("hops", 1)) for at in shuffled])
        return [int(at) for at in shuffled[np.argsort(hops, kind="stable")]]

    def skip(self, task: Task, stats: Stats) -> bool:
        known = stats.get(task.task_id)
        return known is not None and known.num_trajectories >= ENOUGH and known.num_passed == known.num_trajectories
