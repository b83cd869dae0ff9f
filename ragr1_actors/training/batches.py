"""BatchCollector: keeps a fleet of env runners busy, and makes batches of finished groups, with a ``GroupBuffer``.

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
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from envs.rewards import RewardContext
from envs.tasks.curriculum import make_curriculum
from learners.options import GroupOptions, has_variance, learner_options
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.types import Failure, StopReason, Task
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.training.task_ledger import TaskLedger

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
        if not task.cancelled():  # else the loop is being closed
            task.exception()  # read, so that asyncio does not print it if it is never collected
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
