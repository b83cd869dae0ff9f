"""Supervised fine-tuning on demonstrations: RAG-R1's first stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import numpy as np
import torch

from learners.deepspeed_engine import Schedule
from learners.learner import Learner
from learners.losses import TokenLoss
from learners.models.scoring import TokenOutputs
from learners.options import LearnerOptions
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import TokenKind, Trajectory


class SFTLearner(Learner):
    """Maximum likelihood of the MODEL tokens, with the same mask as in reinforcement learning.

    RAG-R1 cuts each demonstration into segments and trains on their last part (``segment``). Training on the whole
    trajectory with the MODEL mask has the same loss per token, and computes each context once instead of once per turn.
    """

    has_rollout_logprobs: ClassVar[bool] = False

    @property
    def temperature(self) -> float:
        """1.0: no engine sampled the demonstrations, so their likelihood is under the plain softmax."""
        return 1.0

    def make_options(self) -> LearnerOptions:
        """Return no options: ``training.options`` belong to stage 2."""
        return LearnerOptions()

    def make_schedule(self) -> Schedule:
        """Return a schedule of one step per update, with the learning rate of the ``sft`` section."""
        sft = self.config.sft
        return Schedule(
            lr=sft.lr,
            warmup_steps=sft.warmup_steps,
            num_steps=sft.num_steps if sft.lr_schedule == "cosine" else 0,
            betas=(0.9, 0.98),  # averages over 50 steps, not 1000: the stage is short and its gradients shrink fast
            grad_clip=self.config.training.grad_clip,
        )

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return no columns: every MODEL token has the same weight."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the negative log-likelihood per token."""
        return TokenLoss(-outputs.logprobs)


class SegmentCategory(StrEnum):
    """RAG-R1's four kinds of decision (arXiv:2507.02962, section 3.1)."""

    INTERNAL_ANSWER = "internal_answer"
    """Answers without any search."""
    FIRST_SEARCH = "first_search"
    """Searches for the first time."""
    EVIDENCE_ANSWER = "evidence_answer"
    """Answers after a search."""
    FURTHER_SEARCH = "further_search"
    """Searches again."""


@dataclass(frozen=True)
class Segment:
    """One decision: its context, and the tokens that the model wrote."""

    category: SegmentCategory
    trajectory: Trajectory
    """Ends with the decision; only the tokens of the decision are MODEL, those of earlier turns are PROMPT."""


def segment(trajectory: Trajectory) -> list[Segment]:
    """Cut a trajectory into one segment per turn; malformed turns are left out."""
    positions = np.flatnonzero(trajectory.kinds == TokenKind.MODEL)
    segments: list[Segment] = []
    taken, has_evidence = 0, False
    for index, turn in enumerate(trajectory.turns):
        own = positions[taken : taken + turn.num_model_tokens]
        taken += turn.num_model_tokens
        if turn.action in ("search", "answer") and len(own):
            end = int(own[-1]) + 1
            kinds = trajectory.kinds[:end].copy()
            earlier = np.flatnonzero(kinds == TokenKind.MODEL)
            kinds[earlier[earlier < own[0]]] = TokenKind.PROMPT
            is_own = kinds == TokenKind.MODEL
            cut = replace(
                trajectory,
                trajectory_id=f"{trajectory.trajectory_id}/turn{index}",
                token_ids=trajectory.token_ids[:end],
                kinds=kinds,
                logprobs=np.where(is_own, trajectory.logprobs[:end], np.float32(0)),
                policy_versions=np.where(is_own, trajectory.policy_versions[:end], np.int32(-1)),
                turns=(turn,),
            )
            segments.append(Segment(_category(turn.action, has_evidence), cut))
        has_evidence = has_evidence or turn.action == "search"
    return segments


def _category(action: str, has_evidence: bool) -> SegmentCategory:
    if action == "answer":
        return SegmentCategory.EVIDENCE_ANSWER if has_evidence else SegmentCategory.INTERNAL_ANSWER
    return SegmentCategory.FURTHER_SEARCH if has_evidence else SegmentCategory.FIRST_SEARCH
