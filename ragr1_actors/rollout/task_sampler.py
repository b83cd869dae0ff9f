"""TaskSampler: the order of the training tasks. Each is trained once per epoch, through failures and resumes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.core.types import Task


@dataclass(frozen=True, slots=True)
class Issue:
    """One task handed out: ``Issue("world/train/17#2", task, epoch=2, attempt=0)``."""

    issue_id: str
    """Task and epoch. All attempts share it, so that a task that is trained twice is counted."""
    task: Task
    epoch: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """Unique per attempt: the sampling seeds depend on it."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id


class TaskSampler:
    """Issues tasks in a seeded order and remembers which are outstanding.

    An issue is outstanding until it is ``trained``, or until ``give_up`` after too many failures. A resumed run issues
    outstanding tasks again.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Take the training tasks; their ids are unique."""
        self._tasks = list(tasks)
        self._seed = seed
        texts = "\0".join(f"{task.task_id}\0{task.question}" for task in tasks)
        self._fingerprint = hashlib.sha256(texts.encode()).hexdigest()
        self._epoch = 0
        self._cursor = 0
        self._order = self._shuffle(0)
        self._again: deque[Issue] = deque()
        self._outstanding: dict[str, Issue] = {}
        self.num_issued = self.num_trained = self.num_failed = self.num_doubled = 0

    def _shuffle(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks)).tolist()
        return order

    def next(self) -> Issue:
        """Return the next issue: one that failed, else the next task of the epoch."""
        if self._again:
            issue = self._again.popleft()
        else:
            if self._cursor == len(self._tasks):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._shuffle(self._epoch)
            task = self._tasks[self._order[self._cursor]]
            self._cursor += 1
            issue = Issue(f"{task.task_id}#{self._epoch}", task, self._epoch)
            self.num_issued += 1
        self._outstanding[issue.issue_id] = issue
        return issue

    def trained(self, issue: Issue) -> None:
        """Count an issue that the learner has used."""
        if self._outstanding.pop(issue.issue_id, None) is None:
            self.num_doubled += 1
        else:
            self.num_trained += 1

    def again(self, issue: Issue) -> None:
        """Issue a task again, because it failed or became stale."""
        self._again.append(replace(issue, attempt=issue.attempt + 1))

    def give_up(self, issue: Issue) -> None:
        """Count a task that failed too often; it is not issued again in this epoch."""
        self.num_failed += 1
        self._outstanding.pop(issue.issue_id, None)

    def counts(self) -> dict[str, int]:
        """Return the counts. Every issued task is trained, given up (failed), outstanding, or else lost."""
        return {
            "issued": self.num_issued,
            "trained": self.num_trained,
            "failed": self.num_failed,
            "lost": self.num_issued - self.num_trained - self.num_failed - len(self._outstanding),
            "doubled": self.num_doubled,
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON; ``set_state`` issues its outstanding tasks again."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "tasks": self._fingerprint,
            "outstanding": [[i.task.task_id, i.epoch, i.attempt] for i in self._outstanding.values()],
            "counts": self.counts(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state`` over the same tasks; ``RunDirectoryError`` if the tasks differ."""
        by_id = {task.task_id: task for task in self._tasks}
        if state["tasks"] != self._fingerprint:
            raise RunDirectoryError(
                f"the checkpoint is of a run over other tasks than these {len(self._tasks):,} training tasks; put the "
                "task files back as they were when the run began"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffle(self._epoch)
        issues = [Issue(f"{task_id}#{epoch}", by_id[task_id], epoch, n) for task_id, epoch, n in state["outstanding"]]
        self._outstanding = {issue.issue_id: issue for issue in issues}
        self._again = deque(issues)
        counts = state["counts"]
        self.num_issued, self.num_trained, self.num_failed = counts["issued"], counts["trained"], counts["failed"]
        self.num_doubled = counts["doubled"]
