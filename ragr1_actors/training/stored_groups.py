"""Training on trajectories that were sampled before: by another run, another policy, or another system.

``StoredFleet`` stands where the env runners' fleet does. It answers each request at once, with a stored group of the
task; only evaluations are sampled. The log-probs that are stored are the denominator of the policy ratio, so the
corrections of the policy gradients apply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError, shortened
from ragr1_actors.core.schema import TRAJECTORIES, groups_to_record_batch, read_trajectories
from ragr1_actors.core.types import Task, TrajectoryGroup
from ragr1_actors.rollout.fleet_members import FinishedGroup
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.summary import summarize
from ragr1_actors.training.collector import GroupFleet, SharedFleet

KEY = "training.from_trajectories"
_NUM_COMPARED = 8
"""Trajectories whose first turn is decoded; one that is read as it was sampled is enough."""


class StoredGroups:
    """The groups of a folder by task, in memory; trajectories that failed are left out."""

    def __init__(self, folder: Path) -> None:
        """Read a run's training batches, or all ``*.arrow`` files of another folder.

        Raises:
            DataError: there is no file, no trajectory that did not fail, or a damaged file.
        """
        if not folder.is_dir():
            raise DataError(f"{KEY}: {folder} is no folder; give a run directory, or a folder of *.arrow files")
        of_run = folder / TRAJECTORIES
        files = sorted(of_run.glob("iteration_*.arrow") if of_run.is_dir() else folder.glob("*.arrow"))
        self._groups: dict[str, list[TrajectoryGroup]] = defaultdict(list)
        for group in (group for path in files for group in read_trajectories(path)):
            kept = tuple(one for one in group.trajectories if not one.stop_reason.is_failure)
            if len(kept) > 1 or len(group.trajectories) == 1:  # what is left of several has no baseline alone
                self._groups[group.task.task_id].append(replace(group, trajectories=kept))
        if not self._groups:
            raise DataError(
                f"{KEY}: {folder} has no trajectories to train on; give a run with checkpointing.keep_trajectories, or "
                "a folder of *.arrow files"
            )

    def check_tokens(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Raise a ``DataError`` if the token ids are other texts to a policy than to the one that sampled them."""
        pairs = []
        for groups in [*self._groups.values()][:_NUM_COMPARED]:
            one = groups[0].trajectories[0]
            for turn, sampled_at in zip(one.turns[:1], one.turn_positions, strict=False):
                pairs.append((decode(one.token_ids[sampled_at].tolist()), turn.completion_text))
        if pairs and all(read != sampled for read, sampled in pairs):
            read, sampled = (shortened(repr(text)) for text in pairs[0])
            raise DataError(
                f"{KEY}: the tokenizer of policy.model reads {read} where {sampled} was sampled; name the policy that "
                "sampled the trajectories, or one with its tokenizer"
            )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that have groups, in the order of the files."""
        return tuple(groups[0].task for groups in self._groups.values())

    def group(self, task_id: str, epoch: int) -> TrajectoryGroup:
        """Return a group of a task: in each epoch the next one, and after the last the first."""
        groups = self._groups[task_id]
        return groups[epoch % len(groups)]


class StoredFleet(SharedFleet):
    """Answers requests for training with stored groups; the fleet behind it samples evaluations."""

    def __init__(self, fleet: GroupFleet, stored: StoredGroups) -> None:
        """Take groups from ``stored``."""
        super().__init__(fleet)
        self._stored = stored
        self._ready: list[FinishedGroup] = []

    @property
    def num_unfinished(self) -> int:
        """Groups that were asked for and not collected."""
        return len(self._ready)

    @property
    def num_finished(self) -> int:
        """All of them."""
        return len(self._ready)

    def submit(self, request: GroupRequest) -> None:
        """Answer at once. No group is too old: its version is that of the request."""
        group = self._stored.group(request.issue.task.task_id, request.issue.epoch)
        group = replace(group, task=request.issue.task)
        summary = replace(summarize(group), oldest_version=request.policy_version, num_sampled_tokens=0)
        self._ready.append(FinishedGroup(request, summary, groups_to_record_batch([group])))

    def collect(self) -> list[FinishedGroup]:
        """Return the groups that were asked for; without any, wait for those of an evaluation."""
        if not self._ready:
            return super().collect()
        taken, self._ready = self._ready, []
        return taken

    def drop(self) -> None:
        """Drop what is ready, too."""
        super().drop()
        self._ready = []


def training_fleet(config: RunConfig, env_runners: GroupFleet) -> SharedFleet:
    """Return what answers the requests for training: the env runners, or ``training.from_trajectories``."""
    stored = config.training.from_trajectories
    return StoredFleet(env_runners, StoredGroups(Path(stored))) if stored else SharedFleet(env_runners)
