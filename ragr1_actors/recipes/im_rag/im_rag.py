"""IM-RAG's progress tracker (arXiv:2405.13021): what each round earns, before anything is answered.

The tracker compares what a round found with the supporting passages that no round before it found::

    r_t = 1/|S| * |{s in S : s is found in round t, and in no round before}|        sum_t r_t is the evidence recall

and PPO puts ``r_t`` at the last token of round t. There is no reward for the answer: an answerer is trained apart.

=============================================  ==========================================
round of a question with two supporting ones   reward of the round
=============================================  ==========================================
finds the first, the second, both              0.5, 0.5, 1
finds one again, finds others, is malformed    0
answers                                        0, whether the answer is right or wrong
=============================================  ==========================================

The paper measures a distance between texts; here a passage is a supporting one or none.
"""

from __future__ import annotations

from typing import ClassVar

from envs.measures import RewardContext, RewardResult, searches
from envs.search import SearchEnv
from ragr1_actors.core.types import Trajectory
from ragr1_actors.recipes.worlds.evidence import evidence_in, recall


def progress_of_rounds(ended: Trajectory) -> tuple[float, ...]:
    """Return ``r_t`` of each turn, ``[num_turns]``: ``(0.5, 0.5, 0.0)``; zeros where no evidence is known."""
    num_wanted, known, gained = max(1, len(ended.task.supporting_ids)), set[str](), []
    for turn in ended.turns:
        records = [record for call in searches(turn.calls) for record in call.records]
        found = evidence_in(ended.task, records) - known
        gained.append(len(found) / num_wanted)
        known |= found
    return tuple(gained)


async def progress(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Pay each round for its progress."""
    gained = progress_of_rounds(trajectory)
    return RewardResult(sum(gained), gained)


async def progress_at_end(trajectory: Trajectory, context: RewardContext) -> float:
    """Pay the same sum at the end, to show what the place of the reward does."""
    return recall(trajectory)


class QuestionerEnv(SearchEnv):
    """The search environment, which measures the evidence recall."""

    measures: ClassVar = {"recall": recall}
