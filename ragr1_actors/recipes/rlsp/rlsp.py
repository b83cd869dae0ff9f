"""RLSP (arXiv:2502.06773): a reward for exploration beside that for the outcome, decoupled from it, for PPO.

::

    r = (1 - w) r_outcome + w r_explore        w = weight * max(0, 1 - progress / until), constant without `until`
    r_explore = -scale / length                length: tokens that the policy wrote

====================  ===========
attempt               r_outcome
====================  ===========
right answer           1.0
wrong answer           0.0
no answer             -0.5
====================  ===========

The simplest exploration reward of the paper: more intermediate steps, with a falling gain, whether the answer is right
or not. Its code subtracts ``scale / length`` (1000 over characters / 4) from the outcome, and for the 32B model weighs
a judge's reward with 0.2 and the rest with 0.8, all of it in the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from envs.measures import exact_match
from ragr1_actors import RewardContext, RewardResult, StopReason, Trajectory
from ragr1_actors.core.section import Section

NO_ANSWER = -0.5
"""Reward of the published verifier for an attempt without an answer."""


class ExploreOptions(Section):
    """``environment.reward_options``."""

    weight: float = Field(0.2, ge=0, le=1)
    """w at the start."""
    until: float | None = Field(None, gt=0, le=1)
    """Share of the run after which w is 0; null keeps it."""
    scale: float = Field(1000.0, ge=0)
    """In tokens: at this length ``r_explore`` is -1."""


def outcome(trajectory: Trajectory) -> float:
    """Return the verifier's reward."""
    if trajectory.stop_reason is not StopReason.ANSWERED:
        return NO_ANSWER
    return float(exact_match(trajectory.answer, trajectory.task.golden_answers))


def exploration(trajectory: Trajectory, scale: float) -> float:
    """Return ``-scale / length``."""
    return -scale / max(1, trajectory.num_model_tokens)


class Explored:
    """The sum of both rewards."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read ``ExploreOptions``."""
        self.options = ExploreOptions.read(options, "environment.reward_options")

    def weight(self, progress: float) -> float:
        """Return w."""
        until = self.options.until
        return self.options.weight * (1.0 if until is None else max(0.0, 1 - progress / until))

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> RewardResult:
        """Return r."""
        weight = self.weight(context.progress)
        right, explored = outcome(trajectory), exploration(trajectory, self.options.scale)
        return RewardResult((1 - weight) * right + weight * explored, parts={"outcome": right, "exploration": explored})
