"""Which task next: every task exactly once an epoch, through failures, crashes and resumes."""

from __future__ import annotations

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
    """Task and epoch; the same over attempts, so that what is trained twice is seen."""
    task: Task
    epoch: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """Unique over attempts too: the sampling seeds depend on it."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id


class TaskSampler:
    """Hands out tasks in a seeded order and remembers which are out.

    An issue leaves the books in one of two ways: ``trained``, or ``give_up`` after too many failures. Until then it is
    outstanding, and a resumed run hands it out again.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Take the training tasks; their ids are unique."""
        self._tasks = list(tasks)
        self._seed = seed
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
        """The next issue: one that failed, else the next task of the epoch."""
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
        """The learner has used it."""
        if self._outstanding.pop(issue.issue_id, None) is None:
            self.num_doubled += 1
        else:
            self.num_trained += 1

    def again(self, issue: Issue) -> None:
        """It failed, or went stale: hand it out again."""
        self._again.append(replace(issue, attempt=issue.attempt + 1))

    def give_up(self, issue: Issue) -> None:
        """It failed too often: counted, and not handed out again in this epoch."""
        self.num_failed += 1
        self._outstanding.pop(issue.issue_id, None)

    def counts(self) -> dict[str, int]:
        """The books: every issued task is trained, given up (failed) or still out, or else it was lost."""
        return {
            "issued": self.num_issued,
            "trained": self.num_trained,
            "failed": self.num_failed,
            "lost": self.num_issued - self.num_trained - self.num_failed - len(self._outstanding),
            "doubled": self.num_doubled,
        }

    def get_state(self) -> dict[str, Any]:
        """JSON state: what is outstanding is handed out again after ``set_state``."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "outstanding": [[i.task.task_id, i.epoch, i.attempt] for i in self._outstanding.values()],
            "counts": self.counts(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from ``get_state`` over the same tasks.

        Raises:
            RunDirectoryError: they are not the same tasks.
        """
        by_id = {task.task_id: task for task in self._tasks}
        unknown = [task_id for task_id, *_ in state["outstanding"] if task_id not in by_id]
        if unknown or state["cursor"] > len(self._tasks):
            what = f"task {unknown[0]}" if unknown else f"at least {state['cursor']:,} tasks"
            raise RunDirectoryError(
                f"the checkpoint is of a run over {what}, which the {len(self._tasks):,} training tasks of now do not "
                "hold; put the task file back as it was when the run began"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffle(self._epoch)
        issues = [Issue(f"{task_id}#{epoch}", by_id[task_id], epoch, n) for task_id, epoch, n in state["outstanding"]]
        self._outstanding = {issue.issue_id: issue for issue in issues}
        self._again = deque(issues)
        counts = state["counts"]
        self.num_issued, self.num_trained, self.num_failed = counts["issued"], counts["trained"], counts["failed"]
        self.num_doubled = counts["doubled"]
