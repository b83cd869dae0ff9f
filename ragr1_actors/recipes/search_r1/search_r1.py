"""Search-R1's reward for the format (arXiv:2505.15117, section 3; v0.3 of its code), and a start that needs it.

================================  ======
trajectory                        reward
================================  ======
right answer, valid structure     1.0
right answer                      0.8
valid structure                   0.2
an answer                         0.1
anything else                     0.0
================================  ======
"""

from __future__ import annotations

import random
import re
from typing import ClassVar

from envs.measures import exact_match
from envs.sources import WorldSource
from ragr1_actors import RewardContext, RewardResult, SearchEnv, StopReason, Task, Trajectory

STRUCTURE, FINAL = 0.2, 0.1
"""``structure_format_score`` and ``final_format_score`` of the published script."""
NUM_HASTY = 0.3
"""Share of the turns of ``HastyWorld`` that do not think."""
_TURN = re.compile(r"\s*<think>.*?</think>\s*<(search|answer)>.*</\1>\s*", re.DOTALL)


def is_valid(trajectory: Trajectory) -> float:
    """Return 1.0 where each turn thinks first, then searches or answers, and the last one answers."""
    is_answered = trajectory.stop_reason is StopReason.ANSWERED
    return float(is_answered and all(_TURN.fullmatch(turn.completion_text) for turn in trajectory.turns))


async def with_format(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward of the table above."""
    valid = is_valid(trajectory)
    right = exact_match(trajectory.answer, trajectory.task.golden_answers)
    total = 1.0 - STRUCTURE * (1 - valid) if right else STRUCTURE if valid else FINAL * bool(trajectory.answer)
    return RewardResult(total, parts={"right": right, "valid": valid})


class StructuredEnv(SearchEnv):
    """The search environment, which measures whether the structure is valid."""

    measures: ClassVar = {"valid": is_valid}


class HastyWorld(WorldSource):
    """The generated world, whose demonstrations leave out the thought of some turns."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a scripted attempt, of which each turn may begin with its action."""
        turns = super().demonstrate(task, rng)
        return [turn.partition("</think>")[2] if rng.random() < NUM_HASTY else turn for turn in turns]
