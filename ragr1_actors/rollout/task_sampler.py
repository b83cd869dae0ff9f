"""TaskSampler: the order of the training tasks. Each is trained once per epoch, through failures and resumes."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import FleetError, RunDirectoryError, shortened
from ragr1_actors.core.types import FailedTask, Failure, Task

MAX_ERROR_CHARACTERS = 500
_POSITION = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Issue:
    """One task handed out: ``Issue("world/train/17#2", task, epoch=2, attempt=0)``."""

    issue_id: str
    """Task and epoch. All attempts share it, so that a task that is trained twice is counted."""
    task: Task
    epoch: int
    attempt: int = 0
    num_failures: int = 0
    """Attempts with a failure of the data."""
    num_outages: int = 0
    """Attempts with a failure of the infrastructure only."""

    @property
    def group_id(self) -> str:
        """Unique per attempt: the sampling seeds depend on it."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id

    def failed(self, failure: Failure) -> Issue:
        """Return the issue with one more attempt that failed."""
        is_data = failure is Failure.DATA
        return replace(self, num_failures=self.num_failures + is_data, num_outages=self.num_outages + (not is_data))


class TaskSampler:
    """Issues tasks in a seeded order and remembers which are outstanding.

    An issue is outstanding until it is ``trained``, or until ``give_up`` after too many failures: while it waits, while
    it is sampled, while its group is in the buffer and while the learner works on it. The state therefore holds no
    group and no request. A resumed run issues outstanding tasks again; their groups, finished ones included, are
    sampled anew. What is trained changes only together with the learner, so no task is lost or trained twice.

    The state has the rest of the epoch's order too. The counts do not rely on it: they know which tasks of an epoch
    were issued and trained. A task that an order repeats is counted as doubled, and one that it leaves out as lost.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Take the training tasks; their ids are unique."""
        self._tasks = list(tasks)
        self._seed = seed
        texts = "\0".join(f"{task.task_id}\0{task.question}" for task in tasks)
        self._fingerprint = hashlib.sha256(texts.encode()).hexdigest()
        self._epoch = 0
        self._order = deque(self._shuffle(0))
        """What is left of the epoch: positions of tasks."""
        self._issued_ids: set[str] = set()
        """Ids of the tasks that this epoch has issued."""
        self._trained_ids: set[str] = set()
        """Ids of the issues that were trained, in this epoch and in earlier ones with outstanding issues."""
        self._num_never_issued = 0
        self._again: deque[Issue] = deque()
        self._outstanding: dict[str, Issue] = {}
        self.num_issued = self.num_trained = self.num_doubled = 0
        self.failed_tasks: list[FailedTask] = []
        """In the order in which they were given up."""
        self._quarantined: set[str] = set()

    @property
    def num_failed(self) -> int:
        """Tasks that were given up, once for each epoch."""
        return len(self.failed_tasks)

    def _shuffle(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks)).tolist()
        return order

    def next(self) -> Issue:
        """Return the next issue: one to sample again, else the next task of the epoch that is not in quarantine.

        Raises:
            FleetError: every task is in quarantine.
        """
        if self._again:
            return self._again.popleft()
        if len(self._quarantined) == len(self._tasks):
            raise FleetError(
                f"all of {len(self._tasks)} tasks failed; the last one with: {self.failed_tasks[-1].error}"
            )
        while (task := self._next_task()).task_id in self._quarantined:
            pass
        issue = Issue(f"{task.task_id}#{self._epoch}", task, self._epoch)
        self.num_issued += task.task_id not in self._issued_ids
        self._issued_ids.add(task.task_id)
        self._outstanding[issue.issue_id] = issue
        return issue

    def _next_task(self) -> Task:
        if not self._order:
            expected = {task.task_id for task in self._tasks} - self._quarantined
            self._num_never_issued += len(expected - self._issued_ids)
            self._epoch += 1
            self._order = deque(self._shuffle(self._epoch))
            self._issued_ids = set()
            open_epochs = {issue.epoch for issue in self._outstanding.values()}
            self._trained_ids = {id_ for id_ in self._trained_ids if int(id_.rpartition("#")[2]) in open_epochs}
        return self._tasks[self._order.popleft()]

    def trained(self, issue: Issue) -> None:
        """Count an issue that the learner has used."""
        was_outstanding = self._outstanding.pop(issue.issue_id, None) is not None
        if was_outstanding and issue.issue_id not in self._trained_ids:
            self.num_trained += 1
        else:
            self.num_doubled += 1
        self._trained_ids.add(issue.issue_id)

    def again(self, issue: Issue) -> None:
        """Issue a task again, because it failed, became stale or was lost with its node."""
        issue = replace(issue, attempt=issue.attempt + 1)
        self._outstanding[issue.issue_id] = issue
        self._again.append(issue)

    def give_up(self, issue: Issue, failure: Failure, error: str) -> None:
        """Count a task that failed too often; it is not issued again in this epoch, and after ``DATA`` in no other."""
        num_tries = issue.num_failures + issue.num_outages
        error = shortened(" ".join(error.split()), MAX_ERROR_CHARACTERS)
        self.failed_tasks.append(FailedTask(issue.task.task_id, issue.epoch, failure, num_tries, error))
        if failure is Failure.DATA:
            self._quarantined.add(issue.task.task_id)
        self._outstanding.pop(issue.issue_id, None)

    def counts(self) -> dict[str, int]:
        """Return the counts. Every issued task is trained, given up (failed), outstanding, or else lost."""
        return {
            "issued": self.num_issued,
            "trained": self.num_trained,
            "failed": self.num_failed,
            "lost": self.num_issued
            - self.num_trained
            - self.num_failed
            - len(self._outstanding)
            + self._num_never_issued,
            "doubled": self.num_doubled,
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON; ``set_state`` issues its outstanding tasks again."""
        return {
            "epoch": self._epoch,
            "cursor": len(self._tasks) - len(self._order),
            "order": _as_text(np.array(self._order, _POSITION)),
            "issued": _as_text(np.packbits([task.task_id in self._issued_ids for task in self._tasks])),
            "never_issued": self._num_never_issued,
            "tasks": self._fingerprint,
            "outstanding": [
                [i.task.task_id, i.epoch, i.attempt, i.num_failures, i.num_outages] for i in self._outstanding.values()
            ],
            "counts": self.counts(),
            "failed_tasks": [asdict(failed) for failed in self.failed_tasks],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state`` over the same tasks; ``RunDirectoryError`` if the tasks differ."""
        by_id = {task.task_id: task for task in self._tasks}
        if state["tasks"] != self._fingerprint:
            raise RunDirectoryError(
                f"the checkpoint is of a run over other tasks than these {len(self._tasks):,} training tasks; put the "
                "task files back as they were when the run began"
            )
        self._epoch = state["epoch"]
        if state["order"] is None:
            order = self._shuffle(self._epoch)[state["cursor"] :]
            positions = set(range(len(self._tasks))) - set(order)
        else:
            order = np.frombuffer(b64decode(state["order"]), _POSITION).tolist()
            bits = np.unpackbits(np.frombuffer(b64decode(state["issued"]), np.uint8))
            positions = set(np.flatnonzero(bits).tolist())
        self._order = deque(order)
        self._num_never_issued = state["never_issued"]
        issues = [Issue(f"{id_}#{epoch}", by_id[id_], epoch, *numbers) for id_, epoch, *numbers in state["outstanding"]]
        self._outstanding = {issue.issue_id: issue for issue in issues}
        self._again = deque(issues)
        counts = state["counts"]
        self.num_issued, self.num_trained = counts["issued"], counts["trained"]
        self.num_doubled = counts["doubled"]
        self.failed_tasks = [
            FailedTask(**failed | {"failure": Failure(failed["failure"])}) for failed in state["failed_tasks"]
        ]
        self._quarantined = {failed.task_id for failed in self.failed_tasks if failed.failure is Failure.DATA}
        self._issued_ids = {self._tasks[at].task_id for at in positions}
        given_up = {f"{failed.task_id}#{failed.epoch}" for failed in self.failed_tasks}
        issued = {f"{task_id}#{self._epoch}" for task_id in self._issued_ids}
        earlier = {issue.epoch for issue in issues if issue.epoch < self._epoch}
        issued |= {f"{task_id}#{epoch}" for epoch in earlier for task_id in by_id}
        self._trained_ids = issued - given_up - self._outstanding.keys()


def _as_text(numbers: NDArray[Any]) -> str:
    return b64encode(numbers.tobytes()).decode()
