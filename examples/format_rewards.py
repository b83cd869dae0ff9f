"""Rewards for the format, as ReSearch (arXiv:2503.19470) and Search-R1's study of rewards (arXiv:2505.15117) have them.

To train with it::

    ragr1 train quickstart environment.reward=examples.format_rewards:research
"""

from __future__ import annotations

from envs.measures import exact_match, token_f1
from ragr1_actors import RewardContext, RewardResult, StopReason, Trajectory
from ragr1_actors.core.types import FinishReason


def is_valid(trajectory: Trajectory) -> bool:
    """Whether it ended with an answer, no turn was malformed, and none was cut at the limit of tokens."""
    was_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in trajectory.turns)
    return trajectory.is_well_formed and not was_cut


async def research(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """F1 of the answer where it is above 0, else 0.1 for a valid format, else 0; a full context counts as invalid."""
    f1 = token_f1(trajectory.answer, trajectory.task.golden_answers) if is_valid(trajectory) else 0.0
    has_format = float(is_valid(trajectory))
    return RewardResult(f1 or 0.1 * has_format, parts={"f1": f1, "format": has_format})


async def search_r1(trajectory: Trajectory, context: RewardContext) -> float:
    """Exact match, less 0.2 where the format is wrong; 0.2 for the format alone."""
    is_right = bool(exact_match(trajectory.answer, trajectory.task.golden_answers))
    valid = is_valid(trajectory) and trajectory.stop_reason is StopReason.ANSWERED
    return (1.0 if valid else 0.8) if is_right else 0.2 * valid
