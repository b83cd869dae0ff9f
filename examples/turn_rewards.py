"""Rewards per turn: a search earns what it adds to the evidence, the answer the rest. PPO learns each at its turn.

To train with it::

    ragr1 train quickstart training.algorithm=ppo environment.reward=examples.turn_rewards:gained
"""

from __future__ import annotations

from envs.measures import exact_match
from ragr1_actors import RewardContext, RewardResult, Trajectory
from retrieval.corpora.text import found_evidence

SHARE = 0.5
"""The part of the reward that is paid for finding all of the evidence."""


async def gained(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Exact match, and ``SHARE`` times the share of the evidence that each turn was the first to find."""
    gold, known, per_turn = set(trajectory.task.supporting_ids), set[str](), []
    for turn in trajectory.turns:
        records = [record for call in turn.calls for record in call.records]
        found = found_evidence(gold, [one.id for one in records], [one.title for one in records])
        per_turn.append(SHARE * len(found - known) / max(1, len(gold)))
        known |= found
    is_right = exact_match(trajectory.answer, trajectory.task.golden_answers)
    if per_turn:
        per_turn[-1] += is_right
    return RewardResult(sum(per_turn), tuple(per_turn), {"evidence": len(known) / max(1, len(gold))})
