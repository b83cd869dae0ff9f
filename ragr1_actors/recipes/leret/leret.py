"""LeReT (arXiv:2410.23214): try several prompts, score what they retrieve, learn the differences under the bare prompt.

Sampling
    The attempts of a group have the texts of ``strategy_options.examples`` in front of the question, in turn; the
    first of them is empty: the bare prompt.
Score
    Average precision of the gold passages among those that the searches bring, in their order, with the precision
    P(k) of the first k passages and R gold passages: ``(1/R) sum P(k) rel(k)``.
Pairs
    Among attempts of different texts, each of a score with each of the next lower score.
Learning
    First the best attempt of each group by maximum likelihood (``DistillLearner``), then the pairs by IPO, with
    ``(margin - 1 / (2 beta))^2``. Both see the bare prompt in place of that which an attempt had: context distillation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise, product
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from envs.base import EnvContext
from learners.algorithms.dpo import IPOLearner
from learners.learner import Learner
from learners.losses import TokenLoss
from learners.models.scoring import TokenOutputs
from learners.options import has_variance
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors import RewardContext, RolloutStrategy, SearchEnv, Task, TokenKind, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Message, Record, TrajectoryGroup
from ragr1_actors.recipes.worlds.evidence import evidence_in, recall
from ragr1_actors.rollout.groups import GroupRequest, Play


class PromptOptions(Section):
    """``env_runners.strategy_options``."""

    examples: list[str] = Field(min_length=1)
    """What is in front of the question, for an attempt each; the first text is empty."""


class Prompts(RolloutStrategy):
    """Attempts with each text of examples in turn."""

    options_class = PromptOptions

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        """Return the attempts."""
        examples = self.options.examples
        plays = (play(n, variant=examples[n % len(examples)]) for n in range(request.num_trajectories))
        return list(await asyncio.gather(*plays))


def brought(trajectory: Trajectory) -> list[Record]:
    """Return what the searches brought, each passage once, in their order."""
    return list({record.id: record for call in trajectory.calls for record in call.records}.values())


def average_precision(trajectory: Trajectory) -> float:
    """Return the score of an attempt: ``(1/1 + 2/3) / 2`` of two gold passages at the first and the third place."""
    found, total = set[str](), 0.0
    for place, record in enumerate(brought(trajectory), start=1):
        new = evidence_in(trajectory.task, [record]) - found
        found |= new
        total += len(found) / place if new else 0.0
    return total / max(1, len(trajectory.task.supporting_ids))


async def score(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the average precision as the reward: an answer counts nothing."""
    return average_precision(trajectory)


class ExamplesEnv(SearchEnv):
    """Puts the examples of an attempt in front of the prompt, and measures the recall."""

    measures: ClassVar = {"recall": recall}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the examples."""
        super().__init__(settings, context)
        self._examples = context.variant

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt."""
        (prompt,) = await super().reset(task)
        return [replace(prompt, content=f"{self._examples} {prompt.text}")] if self._examples else [prompt]


def with_prompt_of(bare: Trajectory, trajectory: Trajectory) -> Trajectory:
    """Return an attempt with the prompt of another one in place of its prompt."""
    new, own = (int(np.cumprod(one.kinds == TokenKind.PROMPT).sum()) for one in (bare, trajectory))
    parts: dict[str, Any] = {}
    for name in ("token_ids", "kinds", "logprobs", "policy_versions"):
        parts[name] = np.concatenate([getattr(bare, name)[:new], getattr(trajectory, name)[own:]])
    return replace(trajectory, **parts)


class BarePromptLearner(Learner):
    """Learns each attempt under the bare prompt, which the first of its group had."""

    uses_old_logprobs: ClassVar[bool] = False

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Distill the context."""
        bare = [[with_prompt_of(group.trajectories[0], one) for one in group.trajectories] for group in groups]
        return [replace(group, trajectories=tuple(members)) for group, members in zip(groups, bare, strict=True)]


class DistillLearner(BarePromptLearner):
    """Maximum likelihood of the best attempt of each group, where they differ."""

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return the best attempt."""
        return [max(members, key=lambda one: one.reward)] if has_variance([one.reward for one in members]) else []

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the negative log-likelihood."""
        return TokenLoss(-outputs.logprobs)


class LeretLearner(BarePromptLearner, IPOLearner):
    """IPO on the pairs."""

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return the pairs one after another, the better attempt of each first; an attempt may be in several."""
        texts = {tuple(turn.completion_text for turn in one.turns): one for one in reversed(members)}
        ranked = sorted(texts.values(), key=lambda one: one.reward)
        levels = [list(same) for _, same in groupby(ranked, key=lambda one: one.reward)]
        return [one for worse, better in pairwise(levels) for pair in product(better, worse) for one in pair]
