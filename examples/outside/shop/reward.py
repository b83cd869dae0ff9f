"""A reward that knows prices are numbers."""

from __future__ import annotations

from ragr1_actors import RewardContext, RewardResult, Trajectory


async def near(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return 1 for the right price, and up to 0.5 for one that is near."""
    right = float(trajectory.task.golden_answers[0])
    try:
        said = float(trajectory.answer)
    except ValueError:
        return RewardResult(0.0, parts={"is_number": 0.0})
    close = max(0.0, 0.5 - abs(said - right) / right)
    return RewardResult(1.0 if said == right else close, parts={"is_number": 1.0})
