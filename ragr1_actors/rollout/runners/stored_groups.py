"""StoredGroups: trajectories that another run, policy or system sampled earlier.

``training.from_trajectories`` names their folder. Training takes them in place of groups from env runners. The stored
log-probs are the denominator of the policy ratio, so the corrections of the policy gradients apply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ragr1_actors.core.disk.files import WRITING
from ragr1_actors.core.errors import DataError, shortened
from ragr1_actors.core.schema import TRAJECTORIES, groups_to_record_batch, read_trajectories
from ragr1_actors.core.types import Task, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.rollout.groups import ROUNDING, FinishedGroup, GroupRequest, summarize

KEY = "training.from_trajectories"
_NUM_COMPARED = 8
"""Number of trajectories of each file whose first turn is decoded; one that matches its text is enough."""
_NOT_TRAINED = ("eval_", "demonstrations.", WRITING)
"""Beginnings of the names of a run's files that are not trained on."""


class StoredGroups:
    """Groups of a folder by task, in memory; trajectories that failed are left out."""

    def __init__(self, folder: Path) -> None:
        """Read a run's training batches; in a folder that is no run, these or else all files except evaluations.

        Raises:
            DataError: there is no file, no trajectory that did not fail, or a damaged file.
        """
        if not folder.is_dir():
            raise DataError(f"{KEY}: {folder} is no folder; give a run directory, or a folder of *.arrow files")
        self._groups: dict[str, list[TrajectoryGroup]] = defaultdict(list)
        self._compared: dict[Path, list[Trajectory]] = defaultdict(list)
        for path, group in ((file, group) for file in _files(folder) for group in read_trajectories(file)):
            kept = tuple(one for one in group.trajectories if not one.stop_reason.is_failure)
            for one in kept:
                if problem := problem_of_arrays(one):
                    raise DataError(f"{KEY}: {path}: {one.trajectory_id} has {problem}; leave it out, or write it anew")
            if len(kept) > 1 or len(kept) == len(group.trajectories):  # the rest of several has no baseline alone
                self._groups[group.task.task_id].append(replace(group, trajectories=kept))
                self._compared[path] += kept[: len(self._compared[path]) < _NUM_COMPARED]
        if not self._groups:
            raise DataError(
                f"{KEY}: {folder} has no trajectories to train on; give a run with checkpointing.keep_trajectories, or "
                "a folder of *.arrow files beside demonstrations.arrow and eval_*.arrow"
            )

    def check_tokens(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Raise a ``DataError`` if a file's token ids are other texts for this policy than for the sampling one."""
        for path, trajectories in self._compared.items():
            pairs = [
                (decode(one.token_ids[one.turn_positions[0]].tolist()), one.turns[0].completion_text)
                for one in trajectories
                if one.turns
            ]
            if pairs and all(read != sampled for read, sampled in pairs):
                read, sampled = (shortened(repr(text)) for text in pairs[0])
                raise DataError(
                    f"{KEY}: {path}: the tokenizer of policy.model reads {read} where {sampled} was sampled; name the "
                    "policy that sampled the trajectories, or one with its tokenizer"
                )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that have groups, in the order of the files."""
        return tuple(groups[0].task for groups in self._groups.values())

    async def sample(self, request: GroupRequest) -> FinishedGroup:
        """Answer a request with a group of its task. No group is too old: it gets the version of the request."""
        group = replace(self.group(request.task.task_id, request.epoch), task=request.task)
        summary = replace(summarize(group), oldest_version=request.policy_version, num_sampled_tokens=0)
        return FinishedGroup(request, summary, groups_to_record_batch([group]))

    def group(self, task_id: str, epoch: int) -> TrajectoryGroup:
        """Return a group of a task: the next one in each epoch, and the first one after the last."""
        groups = self._groups[task_id]
        return groups[epoch % len(groups)]


def _files(folder: Path) -> list[Path]:
    """Return the files of a run, or of another folder, that can be trained on."""
    of_run = folder / TRAJECTORIES
    found = sorted((of_run if of_run.is_dir() else folder).glob("*.arrow"))
    batches = [path for path in found if path.name.startswith("iteration_")]
    return batches or [path for path in found if not path.name.startswith(_NOT_TRAINED)]


def problem_of_arrays(one: Trajectory) -> str:
    """Return why the numbers of a trajectory cannot be trained on; empty if they can."""
    rewards = (one.reward, *one.turn_rewards)
    arrays = {name: getattr(one, name) for name in ("kinds", "logprobs", "policy_versions", "behaviour_logprobs")}
    lengths = {name: len(array) for name, array in arrays.items() if array is not None and len(array) != one.num_tokens}
    if lengths:
        return f"{one.num_tokens} token_ids, but {', '.join(f'{count} {name}' for name, count in lengths.items())}"
    if one.row_lengths and (min(one.row_lengths) < 1 or sum(one.row_lengths) != one.num_tokens):
        return f"{one.num_tokens} tokens in rows of {shortened(repr(one.row_lengths))}"
    if not np.isfinite(rewards).all():
        return f"the reward {rewards[0]} and {shortened(repr(rewards[1:]))} of its turns, expected finite numbers"
    if (one.token_ids < 0).any():
        return f"the token id {one.token_ids.min()}, expected ids from 0"
    is_sampled = one.kinds == TokenKind.MODEL
    if (versions := one.policy_versions[is_sampled]).min(initial=0) < 0:  # the learner would take it as code's
        return f"the policy version {versions.min()} of a sampled token, expected versions from 0"
    logprobs = one.logprobs[is_sampled]
    if (bad := logprobs[~(np.isfinite(logprobs) & (logprobs <= ROUNDING))]).size:
        return f"the log-prob {bad[0]:g} of a sampled token, expected finite ones up to 0"
    return ""
