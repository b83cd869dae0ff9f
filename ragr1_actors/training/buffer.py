"""GroupBuffer: finished trajectory groups on their way to the learner, and the metrics of the groups of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envs.measures import RATIOS
from learners.options import GroupOptions, has_variance, learner_options
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import HISTOGRAM_PREFIX, Bucket
from ragr1_actors.rollout.fleet_members import FinishedGroup
from ragr1_actors.runs.telemetry.metrics import TIME_PREFIX, mean_over, ratio

_RATIOS = {"observation_share": ("observation_tokens", "context_tokens")}


def max_set_aside(config: RunConfig) -> int:
    """Return how many groups per batch the algorithm's dynamic sampling may pass over."""
    options = learner_options(config.training)
    num_batches = options.max_sampled_batches if isinstance(options, GroupOptions) else 1
    return (num_batches - 1) * config.training.train_batch_size


class GroupBuffer:
    """Holds finished groups, and returns batches without stale groups: those first that were asked for first.

    With dynamic sampling, a group whose rewards are all equal is set aside, and another group is sampled in its place
    (DAPO, arXiv:2503.14476, section 3.2). At most ``max_set_aside`` groups per batch are; further ones fill the batch.
    At lag 0, which groups make a batch depends on the order of the tasks, not on the order in which groups finish.
    """

    def __init__(self, max_policy_lag: int, max_set_aside: int = 0) -> None:
        """Take groups up to ``max_policy_lag`` versions behind; 0 for ``max_set_aside`` is no dynamic sampling."""
        self._max_policy_lag = max_policy_lag
        self._max_set_aside = max_set_aside
        self._groups: list[FinishedGroup] = []
        self._set_aside: list[FinishedGroup] = []

    def __len__(self) -> int:
        """Return the number of groups that a batch can be made of."""
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
        return sorted(dropped, key=lambda group: group.request.issue.issue_id)

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
        """Remove and return ``count`` groups: of the oldest policy versions, and of these the ones that came first.

        Groups that were set aside come last.
        """
        self._set_aside.sort(key=lambda group: group.request.issue.issue_id)
        missing = max(0, count - len(self._groups))
        filling, self._set_aside = self._set_aside[:missing], self._set_aside[missing:]
        self._groups.sort(key=lambda group: group.request.policy_version)  # stable
        taken, self._groups = self._groups[: count - missing], self._groups[count - missing :]
        return taken + filling


def rollout_samples(batch: Sequence[FinishedGroup]) -> dict[str, list[float]]:
    """Return the values of all trajectories of a batch: ``{"reward": [1.0, 0.0, ...], "turns": [2.0, 3.0, ...]}``."""
    summaries = [group.summary for group in batch]
    names = dict.fromkeys(name for summary in summaries for name in summary.samples)
    found = {name: [value for s in summaries for value in s.samples.get(name, ())] for name in names}
    return {"reward": [value for summary in summaries for value in summary.rewards], **found}


def take_histograms(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[Bucket]]]:
    """Return a learner's metrics without the counts of buckets, and these: ``{"ratio": [(0.9, 0.95, 12.0), ...]}``."""
    found: dict[str, list[Bucket]] = {}
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
        "rollout/groups_with_variance": float(np.mean([r.std() > 0 for r in rewards])),
        **{f"rollout/{name}": ratio(means, *of) for name, of in (RATIOS | _RATIOS).items()},
        "rollout/failed_trajectories": float(sum(s.num_failed for s in summaries)),
        **_by_source(batch),
    }


def _by_source(batch: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return the mean reward of the tasks of each source, and their number, if there are several sources."""
    rewards: dict[str, list[float]] = {}
    for group in batch:
        if (source := group.request.issue.task.source) and group.summary.rewards:
            rewards.setdefault(source, []).append(float(np.mean(group.summary.rewards)))
    means = {f"source/{name}/reward": float(np.mean(found)) for name, found in rewards.items()}
    return means | {f"source/{name}/tasks": float(len(found)) for name, found in rewards.items()}
