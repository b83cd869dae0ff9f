"""StoredFleet: training on trajectories that were sampled earlier, which ``StoredGroups`` reads.

It replaces the env runners' fleet and answers each request at once, with a stored group of the task; only evaluations
are sampled. The stored log-probs are the denominator of the policy ratio, so the corrections of the policy gradients
apply.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, summarize
from ragr1_actors.rollout.stored_groups import StoredGroups
from ragr1_actors.training.batches import GroupFleet


class StoredFleet:
    """Answers requests for training with stored groups; the fleet behind it samples evaluations."""

    def __init__(self, fleet: GroupFleet, stored: StoredGroups) -> None:
        """Take the fleet for evaluations and the stored groups."""
        self._fleet, self._stored = fleet, stored
        self._ready: list[FinishedGroup] = []

    @property
    def num_unfinished(self) -> int:
        """Groups that were asked for and not collected, those of the fleet behind included."""
        return len(self._ready) + self._fleet.num_unfinished

    @property
    def num_finished(self) -> int:
        """Groups that are ready, and those of the fleet behind."""
        return len(self._ready) + self._fleet.num_finished

    def submit(self, request: GroupRequest) -> None:
        """Answer at once. No group is too old: it gets the version of the request."""
        group = self._stored.group(request.task.task_id, request.epoch)
        group = replace(group, task=request.task)
        summary = replace(summarize(group), oldest_version=request.policy_version, num_sampled_tokens=0)
        self._ready.append(FinishedGroup(request, summary, groups_to_record_batch([group])))

    def collect(self) -> list[FinishedGroup]:
        """Return the requested groups; without any, wait for an evaluation's."""
        if not self._ready:
            return self._fleet.collect()
        taken, self._ready = self._ready, []
        return taken


def training_fleet(config: RunConfig, env_runners: GroupFleet) -> GroupFleet:
    """Return what answers the requests for training: the env runners, or ``training.from_trajectories``."""
    stored = config.training.from_trajectories
    return StoredFleet(env_runners, StoredGroups(Path(stored))) if stored else env_runners
