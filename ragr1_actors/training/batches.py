"""Batches: ``BatchCollector`` issues the tasks that its ``TaskLedger`` keeps books of, and batches their groups.

::

    TaskLedger ──feed──► one task of the loop per group ──► queue of ended tasks ──collect──► GroupBuffer ──► batch
         ▲                                                                  │ failed                │ stale, lost
         └────────────────────────────── again ─────────────────────────────┴───────────────────────┘

With lag L the fleet is asked for at most L + 1 batches ahead of the learner. Each batch takes the groups that were
asked for first, so at most one batch of groups reaches the bound on its age at a time, and none is too old if the
learner waits for the groups in flight. The bound is from AReaL (arXiv:2505.24298, equation 3).

``Algorithm`` trains on batches of an ``EnvRunnerGroup``; ``ragr1 simulate`` runs the same code over scripted runners.
The coroutines run in the loop of the fleet, the other methods between its runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.measures import RATIOS, RewardContext
from envs.tasks.curriculum import (
    NO_STATS,
    Curriculum,
    TaskStats,
    all_skipped,
    checked_order,
    checked_skip,
    make_curriculum,
    pack_stats,
    unpack_stats,
)
from learners.options import GroupOptions, has_variance, learner_options
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError, RunDirectoryError, shortened
from ragr1_actors.core.process.driver_loop import note_error
from ragr1_actors.core.types import HISTOGRAM_PREFIX, Bucket, FailedTask, Failure, StopReason, Task
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.runs.telemetry.metrics import TIME_PREFIX, mean_over, ratio

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


logger = logging.getLogger(__name__)

HOPELESS_TASKS = 16
"""Number of tasks given up in a row, without a trainable group in between, at which the run ends."""
MAX_OUTAGES = 16
"""Limit of failures of the infrastructure on a task, which do not count against it, before the task is given up."""


SampleGroup = Callable[[GroupRequest], Coroutine[Any, Any, FinishedGroup]]
"""Coroutine function that samples a group; see ``EnvRunnerGroup.sample``."""


def max_set_aside(config: RunConfig) -> int:
    """Return the number of groups per batch that the algorithm's dynamic sampling may pass over."""
    options = learner_options(config.training)
    num_batches = options.max_sampled_batches if isinstance(options, GroupOptions) else 1
    return (num_batches - 1) * config.training.train_batch_size


class GroupBuffer:
    """Holds finished groups, and returns batches without stale groups: those first that were asked for first.

    With dynamic sampling, a group whose rewards are all equal is set aside, and another group is sampled in its place
    (DAPO, arXiv:2503.14476, section 3.2). At most ``max_set_aside`` groups per batch are; further ones fill the batch.
    At lag 0, a batch depends on the order of the tasks, not on the order in which groups finish.
    """

    def __init__(self, max_policy_lag: int, max_set_aside: int = 0) -> None:
        """Take groups up to ``max_policy_lag`` versions behind; ``max_set_aside`` 0 turns dynamic sampling off."""
        self._max_policy_lag = max_policy_lag
        self._max_set_aside = max_set_aside
        self._groups: list[FinishedGroup] = []
        self._set_aside: list[FinishedGroup] = []

    def __len__(self) -> int:
        """Return the number of groups for a batch."""
        return len(self._groups) + max(0, len(self._set_aside) - self._max_set_aside)

    def add(self, group: FinishedGroup) -> None:
        """Add a finished group."""
        if self._max_set_aside and not has_variance(group.summary.rewards):
            self._set_aside.append(group)
        else:
            self._groups.append(group)

    def drop_set_aside(self) -> list[FinishedGroup]:
        """Remove and return the groups that were set aside, in the order of their tasks."""
        dropped, self._set_aside = self._set_aside, []
        return sorted(dropped, key=lambda group: group.request.issue_id)

    def drop_stale(self, policy_version: int) -> list[FinishedGroup]:
        """Remove and return the groups that are too far behind ``policy_version``; their tasks are issued again."""
        oldest = policy_version - self._max_policy_lag

        def is_stale(group: FinishedGroup) -> bool:
            return 0 <= group.summary.oldest_version < oldest  # -1: no token was sampled

        held = [*self._groups, *self._set_aside]
        self._groups = [group for group in self._groups if not is_stale(group)]
        self._set_aside = [group for group in self._set_aside if not is_stale(group)]
        return [group for group in held if is_stale(group)]

    def take(self, count: int) -> list[FinishedGroup]:
        """Remove and return ``count`` groups with the oldest policy versions, the first ones among equals.

        Groups that were set aside come last.
        """
        self._set_aside.sort(key=lambda group: group.request.issue_id)
        missing = max(0, count - len(self._groups))
        filling, self._set_aside = self._set_aside[:missing], self._set_aside[missing:]
        self._groups.sort(key=lambda group: group.request.policy_version)  # stable
        taken, self._groups = self._groups[: count - missing], self._groups[count - missing :]
        return taken + filling


class BatchCollector:
    """Issues tasks to a fleet, and collects batches within the bound on their age; ``tasks`` has the tasks' books."""

    def __init__(self, config: RunConfig, tasks: Sequence[Task], sample: SampleGroup) -> None:
        """Take the training tasks of a run, and the function that samples a group."""
        self.tasks = TaskLedger(tasks, config.debugging.seed, make_curriculum(config.environment))
        self._config = config
        self._sample = sample
        self._num_given_up = 0  # in a row
        self._buffer = GroupBuffer(config.training.max_policy_lag, max_set_aside(config))
        self._fault_tolerance = config.debugging.fault_tolerance
        self._policy_version = 0
        self.num_iterations_done = 0
        """Number of finished RL iterations, for rewards that depend on the progress of a run."""
        self.num_failed: Counter[StopReason] = Counter()
        """Number of failed trajectories by stop reason, including those of groups that are sampled again."""
        self.num_sampled_tokens = 0
        """Tokens of all groups that were collected; an evaluation adds those of its groups."""
        self.num_stale = 0
        """Number of groups that were too old for the newest batch and are sampled again."""
        self.num_awaited = 0
        """Number of groups for which the newest batch waited, as they would be too old for the next one."""
        self._in_flight: Counter[int] = Counter()
        """Number of groups in flight, by the policy version at which they were asked for."""
        self._ended: asyncio.Queue[asyncio.Task[FinishedGroup]] = asyncio.Queue()
        """Tasks of groups that were sampled and not collected."""

    def num_finished_batches(self) -> float:
        """Return the number of batches that the finished groups make up, such as 1.5."""
        return (len(self._buffer) + self._ended.qsize()) / self._config.training.train_batch_size

    async def feed(self, *, while_learning: bool = False) -> None:
        """Issue tasks until the groups in flight and in the buffer make up all batches that the lag allows.

        While the learner works on a batch, it is one batch less: one more would be too old when it is needed.
        """
        training = self._config.training
        wanted = training.train_batch_size * (training.max_policy_lag + (not while_learning))
        temperature = self._config.env_runners.temperature
        progress = self.num_iterations_done / max(1, training.num_iterations)
        context = RewardContext("train", min(1.0, progress))
        while self._in_flight.total() + len(self._buffer) < wanted:
            request = replace(
                self.tasks.next(),
                num_trajectories=training.group_size,
                temperature=temperature,
                policy_version=self._policy_version,
                context=context,
            )
            self._in_flight[request.policy_version] += 1
            asyncio.create_task(self._sample(request), name=request.group_id).add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[FinishedGroup]) -> None:
        note_error(task)
        if not task.cancelled():  # else the loop is being closed
            self._ended.put_nowait(task)

    async def next_batch(
        self, policy_version: int, find_lost: Callable[[list[Any]], Collection[int]] = lambda batches: ()
    ) -> list[FinishedGroup]:
        """Return the next batch, in the order of its tasks.

        It returns once no group is in flight that would be too old for the batch after it.

        The tasks of failed, stale and lost groups are issued again. ``find_lost`` returns the positions of references
        to groups that no node has any more.

        Raises:
            FleetError: every task is in quarantine, or ``HOPELESS_TASKS`` in a row were given up.
            ConfigError: the curriculum fails.
        """
        size = self._config.training.train_batch_size
        self.num_stale = self.num_awaited = 0
        self._policy_version = policy_version
        while True:
            for group in self._buffer.drop_stale(policy_version):
                self.num_stale += 1
                self.tasks.again(group.request)
            is_complete = len(self._buffer) >= size
            if is_complete and (num_due := self._num_due()):
                self.num_awaited = max(self.num_awaited, num_due)
            elif is_complete:
                batch = sorted(self._buffer.take(size), key=lambda g: g.request.issue_id)
                if not (lost := find_lost([group.batch for group in batch])):
                    return batch
                for index, group in enumerate(batch):
                    if index in lost:
                        self.tasks.again(group.request)
                    else:
                        self._buffer.add(group)
            await self.feed()
            await self._collect()

    async def _collect(self) -> None:
        """Wait until a group is sampled, and route all that are."""
        self._route_finished(await self._take())
        while not self._ended.empty():
            self._route_finished(await self._take())

    async def _take(self) -> FinishedGroup:
        group = (await self._ended.get()).result()
        self._in_flight[group.request.policy_version] -= 1
        self.num_sampled_tokens += group.summary.num_sampled_tokens
        return group

    async def drop_in_flight(self) -> None:
        """Wait for all groups in flight, and drop them."""
        while self._in_flight.total():
            await self._take()

    def metrics(self) -> dict[str, float]:
        """Return the books of the tasks, the failures and the newest batch: ``{"tasks/lost": 0.0, ...}``."""
        failures = {f"num_{reason}": self.num_failed[reason] for reason in StopReason if reason.is_failure}
        return {
            **{f"tasks/{name}": float(count) for name, count in self.tasks.counts().items()},
            **{f"env_runners/{name}": float(count) for name, count in failures.items()},
            "loop/stale_groups": float(self.num_stale),
            "loop/awaited_groups": float(self.num_awaited),
        }

    def _num_due(self) -> int:
        """Return the number of groups in flight for which this batch is the last, if the recipe waits for them."""
        if self._fault_tolerance.stale_groups == "drop":
            return 0
        oldest = self._policy_version - self._config.training.max_policy_lag
        return sum(number for version, number in self._in_flight.items() if version <= oldest)

    def _route_finished(self, group: FinishedGroup) -> None:
        """Keep a trainable group; else issue its task again, or give it up after its last try.

        A group with failed trajectories is kept, without them, if ``failed_trajectories`` allows it or after the last
        try of its task. At least two must be left, as one alone has no baseline.
        """
        summary, rules = group.summary, self._fault_tolerance
        self.num_failed.update(summary.stop_reasons)
        if not summary.num_failed:
            self._keep(group)
            return
        failure = Failure.DATA if summary.data_errors else Failure.INFRASTRUCTURE
        request = group.request.failed(failure)
        was_last = request.num_failures > rules.max_task_retries or request.num_outages == MAX_OUTAGES
        can_shrink = len(summary.rewards) >= 2
        if can_shrink and (was_last or rules.failed_trajectories == "shrink"):
            self._keep(group)
        elif was_last:
            self._give_up(request, failure, (summary.data_errors or summary.errors)[-1])
        else:
            self.tasks.again(request)

    def _keep(self, group: FinishedGroup) -> None:
        self._buffer.add(group)
        self._num_given_up = 0

    def _give_up(self, request: GroupRequest, failure: Failure, error: str) -> None:
        self.tasks.give_up(request, failure, error)
        logger.warning("task %s was given up (%s): %s", request.task.task_id, failure, error)
        self._num_given_up += 1
        if self._num_given_up == HOPELESS_TASKS:
            raise FleetError(f"all of the last {HOPELESS_TASKS} tasks failed; the last one with: {error}")

    def trained(self, batch: Sequence[FinishedGroup]) -> list[FinishedGroup]:
        """Count the tasks of a batch that the learner has used, and of the groups set aside for it; return the latter.

        The task of a group that was set aside is done, too, as it has no gradient.
        """
        set_aside = self._buffer.drop_set_aside()
        for group in [*batch, *set_aside]:
            self.tasks.trained(group.request, group.summary.rewards)
        return set_aside


Samples = dict[str, list[float]]
"""Values of all trajectories of a batch by metric: ``{"reward": [1.0, 0.0, ...], "turns": [2.0, 3.0, ...]}``."""
Histograms = dict[str, list[Bucket]]
"""Buckets of an update by name: ``{"ratio": [(0.9, 1.1, 7.0)]}``."""
_RATIOS = {"observation_share": ("observation_tokens", "context_tokens")}


def rollout_samples(batch: Sequence[FinishedGroup]) -> Samples:
    """Return the values of all trajectories of a batch."""
    summaries = [group.summary for group in batch]
    names = dict.fromkeys(name for summary in summaries for name in summary.samples)
    found = {name: [value for s in summaries for value in s.samples.get(name, ())] for name in names}
    return {"reward": [value for summary in summaries for value in summary.rewards], **found}


def take_histograms(metrics: Mapping[str, float]) -> tuple[dict[str, float], Histograms]:
    """Return a learner's metrics without the counts of buckets, and the histograms."""
    found: Histograms = {}
    left_over = dict(metrics)
    for key in metrics:
        if key.startswith(HISTOGRAM_PREFIX):
            name, left, right = key.removeprefix(HISTOGRAM_PREFIX).split("/")
            found.setdefault(name, []).append((float(left), float(right), left_over.pop(key)))
    return left_over, {name: sorted(buckets) for name, buckets in found.items()}


def rollout_metrics(batch: Sequence[FinishedGroup]) -> dict[str, float]:
    """Average the groups of a batch: ``{"rollout/reward": 0.61, "rollout/em": 0.6, "time/retrieval_s": 0.2, ...}``."""
    summaries = [group.summary for group in batch]
    rewards = [np.array(s.rewards) for s in summaries if s.rewards]
    names = {name for s in summaries for name in s.means}  # a name that a group does not have counts as 0
    means = mean_over([dict.fromkeys(names, 0.0) | s.means for s in summaries if s.means])
    return {
        **{name if name.startswith(TIME_PREFIX) else f"rollout/{name}": value for name, value in means.items()},
        "rollout/reward": float(np.mean([r.mean() for r in rewards])),
        "rollout/reward_std": float(np.mean([r.std() for r in rewards])),
        "rollout/groups_with_variance": float(np.mean([len(r) > 1 and has_variance(r.tolist()) for r in rewards])),
        **{f"rollout/{name}": ratio(means, *of) for name, of in (RATIOS | _RATIOS).items()},
        "rollout/failed_trajectories": float(sum(s.num_failed for s in summaries)),
        **_by_source(batch),
    }


def _by_source(batch: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return the mean reward of the tasks of each source, and their number, if there are several sources."""
    rewards: dict[str, list[float]] = {}
    for group in batch:
        if (source := group.request.task.source) and group.summary.rewards:
            rewards.setdefault(source, []).append(float(np.mean(group.summary.rewards)))
    means = {f"source/{name}/reward": float(np.mean(found)) for name, found in rewards.items()}
    return means | {f"source/{name}/tasks": float(len(found)) for name, found in rewards.items()}


def mean_lag(batch: Sequence[FinishedGroup], policy_version: int) -> float:
    """Return how many versions the groups are behind the policy, on average."""
    versions = [group.summary.oldest_version for group in batch if group.summary.oldest_version >= 0]
    return float(policy_version - np.mean(versions)) if versions else 0.0
