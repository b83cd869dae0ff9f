"""R1-Searcher's two stages (arXiv:2503.05592) in one run: first search at all, then search and be right.

To train with it::

    ragr1 train quickstart environment.reward=examples.r1_searcher:two_stages training.algorithm=reinforce_pp
"""

from __future__ import annotations

from envs.measures import token_f1
from envs.rewards import stage_switch
from ragr1_actors import RewardContext, Trajectory

FIRST_STAGE = 0.25
"""Share of the run's iterations."""


async def searches_at_all(trajectory: Trajectory, context: RewardContext) -> float:
    """Half for a search, half for a format without a fault; whether the answer is right does not count."""
    return 0.5 * bool(trajectory.calls) + 0.5 * trajectory.is_well_formed


async def answers(trajectory: Trajectory, context: RewardContext) -> float:
    """Token F1 of the answer; a wrong format costs 2."""
    f1 = token_f1(trajectory.answer, trajectory.task.golden_answers)
    return f1 if trajectory.is_well_formed else f1 - 2.0


two_stages = stage_switch([(FIRST_STAGE, searches_at_all), (1.0, answers)])
