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
from ragr1_actors.training.batches import GroupFleet, SharedFleet


class StoredFleet(SharedFleet):
    """Answers requests for training with stored groups; the fleet behind it samples evaluations."""

    def __init__(self, fleet: GroupFleet, stored: StoredGroups) -> None:
        """Take the fleet for evaluations and the stored groups."""
        super().__init__(fleet)
        self._stored = stored
        self._ready: list[FinishedGroup] = []

    @property
    def num_unfinished(self) -> int:
        """Number of groups that were asked for and not collected."""
        return len(self._ready)

    @property
    def num_finished(self) -> int:
        """Number of finished requests."""
        return len(self._ready)

    def submit(self, request: GroupRequest) -> None:
        """Answer at once. No group is too old: it gets the version of the request."""
        group = self._stored.group(request.task.task_id, request.epoch)
        group = replace(group, task=request.task)
        summary = replace(summarize(group), oldest_version=request.policy_version, num_sampled_tokens=0)
        self._ready.append(FinishedGroup(request, summary, groups_to_record_batch([group])))

    def collect(self) -> list[FinishedGroup]:
        """Return the requested groups; without any, wait for those of an evaluation."""
        if not self._ready:
            return super().collect()
        taken, self._ready = self._ready, []
        return taken

    def drop(self) -> None:
        """Also drop the groups that are ready."""
        super().drop()
        self._ready = []


def training_fleet(config: RunConfig, env_runners: GroupFleet) -> SharedFleet:
    """Return the fleet that answers the requests for training: env runners, or ``training.from_trajectories``."""
    stored = config.training.from_trajectories
    return StoredFleet(env_runners, StoredGroups(Path(stored))) if stored else SharedFleet(env_runners)
