"""Many groups in a few numbers: the metrics of an iteration, the result of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragr1_actors.rollout.env_runner import GroupSummary
from ragr1_actors.rollout.env_runner_group import FinishedGroup
from ragr1_actors.runs.metrics import TIME_PREFIX, mean_over
from ragr1_actors.runs.report import EvalResult


def eval_result(answered: Sequence[GroupSummary], num_failed: int) -> EvalResult:
    """Average the tasks that came to their end."""
    mean = mean_over([summary.means for summary in answered])
    rounds = mean["rounds"]
    return EvalResult(
        em=mean["em"],
        f1=mean["f1"],
        rounds=rounds,
        queries_per_round=mean["queries"] / rounds if rounds else 0.0,
        queries=mean["queries"],
        tokens=mean["tokens"],
        num_tasks=len(answered),
        num_failed=num_failed,
    )


def rollout_metrics(batch: Sequence[FinishedGroup]) -> dict[str, float]:
    """Average the groups of a batch; ``rollout/what``, and wall times as ``time/what``."""
    summaries = [group.summary for group in batch]
    rewards = [np.array(s.rewards) for s in summaries if s.rewards]
    names = {name for s in summaries for name in s.means}  # what a group did not count, it had none of
    means = mean_over([dict.fromkeys(names, 0.0) | s.means for s in summaries if s.means])
    return {
        **{name if name.startswith(TIME_PREFIX) else f"rollout/{name}": value for name, value in means.items()},
        "rollout/reward": float(np.mean([r.mean() for r in rewards])),
        "rollout/reward_std": float(np.mean([r.std() for r in rewards])),
        "rollout/groups_with_variance": float(np.mean([r.std() > 0 for r in rewards])),
        "rollout/queries_per_round": means["queries"] / means["rounds"] if means.get("rounds") else 0.0,
        "rollout/failed_trajectories": float(sum(s.num_failed for s in summaries)),
    }
