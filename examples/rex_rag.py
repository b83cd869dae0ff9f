"""REX-RAG (arXiv:2508.08149): where an attempt went wrong, another one goes on from its last turn with a hint.

To train with it::

    ragr1 train quickstart env_runners.strategy=examples.rex_rag:Explore training.algorithm=examples.rex_rag:HintLearner

The hint is INJECTED: it has no log-prob of an engine. ``HintLearner`` learns it, too, with the learner's own log-probs.
"""

from __future__ import annotations

import asyncio

from pydantic import Field

from learners.algorithms.grpo import GRPOLearner
from ragr1_actors import RolloutStrategy, TokenKind, Trajectory
from ragr1_actors.core.section import Section
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.strategy import Play


class ExploreOptions(Section):
    """``env_runners.strategy_options``."""

    hints: list[str] = Field(
        ["<think> That may be wrong. What else could be searched for?", "<think> Step by step: what is still unknown?"],
        min_length=1,
    )
    max_forks: int = Field(2, ge=0)
    """Per group."""


class Explore(RolloutStrategy):
    """Plain attempts, then forks of those that were wrong."""

    options_class = ExploreOptions

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        count, hints = request.num_trajectories, self.options.hints
        plain = list(await asyncio.gather(*(play(index) for index in range(count))))
        wrong = [one for one in plain if not one.stop_reason.is_failure and not one.reward and one.turns]
        forks = [
            play(count + n, fork=(one, len(one.turns) - 1, hints[n % len(hints)]))
            for n, one in enumerate(wrong[: self.options.max_forks])
        ]
        return plain + list(await asyncio.gather(*forks))


class HintLearner(GRPOLearner):
    """GRPO that learns the hints, too."""

    trained_kinds = frozenset((TokenKind.MODEL, TokenKind.INJECTED))
