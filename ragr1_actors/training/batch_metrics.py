"""Metrics of a batch, from the summaries of its groups and the learner's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envs.measures import RATIOS
from ragr1_actors.core.types import HISTOGRAM_PREFIX, Bucket
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.runs.telemetry.metrics import TIME_PREFIX, mean_over, ratio

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
        "rollout/groups_with_variance": float(np.mean([r.std() > 0 for r in rewards])),
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
