"""TaskLedger: the books of the tasks. Each task is trained or skipped once per epoch, through failures and resumes."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.tasks.curriculum import Curriculum, all_skipped, checked_order, checked_skip
from envs.tasks.task_stats import NO_STATS, TaskStats, pack_stats, unpack_stats
from ragr1_actors.core.errors import FleetError, RunDirectoryError, shortened
from ragr1_actors.core.types import FailedTask, Failure, Task
from ragr1_actors.rollout.groups import GroupRequest

MAX_ERROR_CHARACTERS = 500
_POSITION = np.dtype("<i4")


class TaskLedger:
    """Issues the tasks in the order of a ``Curriculum``, and remembers which are outstanding.

    An issue is outstanding until it is ``trained``, or until ``give_up`` after too many failures: while it waits, while
    it is sampled, while its group is in the buffer and while the learner works on it. So the state holds no group and
    no request. A resumed run issues outstanding tasks again; their groups, finished ones included, are sampled again.
    The trained tasks change only together with the learner, so no task is lost or trained twice.

    The state also has the rest of the epoch's order. The counts do not rely on it: they hold what an epoch issued,
    skipped and trained. A task that an order repeats counts as doubled, and one that it leaves out as lost.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, curriculum: Curriculum) -> None:
        """Take the training tasks; their ids are unique."""
        self._tasks = list(tasks)
        self._seed = seed
        self._curriculum = curriculum
        texts = "\0".join(f"{task.task_id}\0{task.question}" for task in tasks)
        self._fingerprint = hashlib.sha256(texts.encode()).hexdigest()
        self._epoch = 0
        self._order = deque(range(len(tasks)))
        """Remaining tasks of the epoch, as positions in their order."""
        self._is_due = True
        """Whether the curriculum orders them before the next one is issued."""
        self._issued_ids: set[str] = set()
        self._skipped_ids: set[str] = set()
        """Ids of the tasks that this epoch has issued, and of those that it has skipped."""
        self._trained_ids: set[str] = set()
        """Ids of the trained issues, in this epoch and in earlier ones with outstanding issues."""
        self._num_never_issued = 0
        self._again: deque[GroupRequest] = deque()
        self._outstanding: dict[str, GroupRequest] = {}
        self.num_issued = self.num_trained = self.num_skipped = self.num_doubled = 0
        self._stats: dict[str, TaskStats] = {}
        self.failed_tasks: list[FailedTask] = []
        """Tasks given up, once per epoch, in their order."""
        self._quarantined: set[str] = set()

    def next(self) -> GroupRequest:
        """Return the next issue: one to sample again, else the next task of the epoch that is not skipped.

        Raises:
            FleetError: every task is in quarantine.
            ConfigError: the curriculum fails, or skips every task of an epoch.
        """
        if self._again:
            return self._again.popleft()
        if len(self._quarantined) == len(self._tasks):
            error = self.failed_tasks[-1].error
            raise FleetError(f"all of {len(self._tasks)} tasks failed; the last one with: {error}")
        while (task := self._upcoming()).task_id in self._quarantined or self._is_skipped(task):
            self._order.popleft()
        self._order.popleft()
        issue = GroupRequest(f"{task.task_id}#{self._epoch}", task, epoch=self._epoch)
        self.num_issued += task.task_id not in self._issued_ids
        self._issued_ids.add(task.task_id)
        self._outstanding[issue.issue_id] = issue
        return issue

    def _upcoming(self) -> Task:
        """Return the next task of the epoch."""
        if not self._order:
            self._begin_epoch()
        if self._is_due:
            rest = sorted(self._order)
            # numpy pads a seed with zeros: the first order of an epoch has the generator of [seed, epoch]
            rng = np.random.default_rng([self._seed, self._epoch, len(self._tasks) - len(rest)])
            tasks, stats = [self._tasks[at] for at in rest], MappingProxyType(self._stats)
            self._order = deque(rest[at] for at in checked_order(self._curriculum, tasks, stats, self._epoch, rng))
            self._is_due = False
        return self._tasks[self._order[0]]

    def _is_skipped(self, task: Task) -> bool:
        if not checked_skip(self._curriculum, task, MappingProxyType(self._stats)):
            return False
        self.num_skipped += task.task_id not in self._skipped_ids
        self._skipped_ids.add(task.task_id)
        return True

    def _begin_epoch(self) -> None:
        expected = {task.task_id for task in self._tasks} - self._quarantined
        if self._skipped_ids and not self._issued_ids:
            raise all_skipped(self._curriculum, len(expected), self._epoch)
        self._num_never_issued += len(expected - self._issued_ids - self._skipped_ids)
        self._epoch += 1
        self._order, self._is_due = deque(range(len(self._tasks))), True
        self._issued_ids, self._skipped_ids = set(), set()
        open_epochs = {issue.epoch for issue in self._outstanding.values()}
        self._trained_ids = {id_ for id_ in self._trained_ids if int(id_.rpartition("#")[2]) in open_epochs}

    def trained(self, issue: GroupRequest, rewards: Sequence[float]) -> None:
        """Count an issue that the learner has used, and the rewards of its trajectories that did not fail."""
        was_outstanding = self._outstanding.pop(issue.issue_id, None) is not None
        if was_outstanding and issue.issue_id not in self._trained_ids:
            self.num_trained += 1
        else:
            self.num_doubled += 1
        self._trained_ids.add(issue.issue_id)
        if rewards:
            self._stats[issue.task.task_id] = self._stats.get(issue.task.task_id, NO_STATS).plus(rewards)
        self._is_due = self._is_due or not self._curriculum.is_fixed

    def again(self, issue: GroupRequest) -> None:
        """Issue a task again, because it failed, became stale or was lost with its node."""
        issue = replace(issue, attempt=issue.attempt + 1)
        self._outstanding[issue.issue_id] = issue
        self._again.append(issue)

    def give_up(self, issue: GroupRequest, failure: Failure, error: str) -> None:
        """Count a task that failed too often; it is not issued again in this epoch, and after ``DATA`` in no other."""
        num_tries = issue.num_failures + issue.num_outages
        error = shortened(" ".join(error.split()), MAX_ERROR_CHARACTERS)
        self.failed_tasks.append(FailedTask(issue.task.task_id, issue.epoch, failure, num_tries, error))
        if failure is Failure.DATA:
            self._quarantined.add(issue.task.task_id)
        self._outstanding.pop(issue.issue_id, None)

    def counts(self) -> dict[str, int]:
        """Return the counts. Every issued task is trained, failed, outstanding or lost; skipped ones are not issued."""
        num_failed = len(self.failed_tasks)
        return {
            "issued": self.num_issued,
            "trained": self.num_trained,
            "failed": num_failed,
            "skipped": self.num_skipped,
            "lost": self.num_issued - self.num_trained - num_failed - len(self._outstanding) + self._num_never_issued,
            "doubled": self.num_doubled,
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON; ``set_state`` issues its outstanding tasks again."""
        return {
            "epoch": self._epoch,
            "order": _as_text(np.array(self._order, _POSITION)),
            "due": self._is_due,
            "issued": self._bits(self._issued_ids),
            "skipped": self._bits(self._skipped_ids),
            "never_issued": self._num_never_issued,
            "tasks": self._fingerprint,
            "outstanding": [
                [i.task.task_id, i.epoch, i.attempt, i.num_failures, i.num_outages] for i in self._outstanding.values()
            ],
            "counts": self.counts(),
            "stats": pack_stats(self._stats, self._tasks),
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
        self._order = deque(np.frombuffer(b64decode(state["order"]), _POSITION).tolist())
        self._is_due = state["due"]
        self._issued_ids, self._skipped_ids = self._ids(state["issued"]), self._ids(state["skipped"])
        self._stats = unpack_stats(state["stats"], self._tasks)
        self._num_never_issued = state["never_issued"]
        issues = [
            GroupRequest(
                f"{task_id}#{epoch}",
                by_id[task_id],
                epoch=epoch,
                attempt=attempt,
                num_failures=num_failures,
                num_outages=num_outages,
            )
            for task_id, epoch, attempt, num_failures, num_outages in state["outstanding"]
        ]
        self._outstanding = {issue.issue_id: issue for issue in issues}
        self._again = deque(issues)
        counts = state["counts"]
        self.num_issued, self.num_trained = counts["issued"], counts["trained"]
        self.num_skipped, self.num_doubled = counts["skipped"], counts["doubled"]
        self.failed_tasks = [
            FailedTask(**failed | {"failure": Failure(failed["failure"])}) for failed in state["failed_tasks"]
        ]
        self._quarantined = {failed.task_id for failed in self.failed_tasks if failed.failure is Failure.DATA}
        given_up = {f"{failed.task_id}#{failed.epoch}" for failed in self.failed_tasks}
        issued = {f"{task_id}#{self._epoch}" for task_id in self._issued_ids}
        earlier = {issue.epoch for issue in issues if issue.epoch < self._epoch}
        issued |= {f"{task_id}#{epoch}" for epoch in earlier for task_id in by_id}
        self._trained_ids = issued - given_up - self._outstanding.keys()

    def _bits(self, ids: set[str]) -> str:
        return _as_text(np.packbits([task.task_id in ids for task in self._tasks]))

    def _ids(self, bits: str) -> set[str]:
        positions = np.flatnonzero(np.unpackbits(np.frombuffer(b64decode(bits), np.uint8)))
        return {self._tasks[at].task_id for at in positions}


def _as_text(numbers: NDArray[Any]) -> str:
    return b64encode(numbers.tobytes()).decode()
