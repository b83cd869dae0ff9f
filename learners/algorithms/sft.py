"""Supervised fine-tuning on demonstrations: RAG-R1's first stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from learners.algorithms.options import LearnerOptions
from learners.batches.train_batch import TrainBatch
from learners.deepspeed.lr_schedule import Schedule
from learners.deepspeed.zero import AdamWSettings
from learners.learner import Learner
from learners.losses import negative_log_likelihood
from learners.meter import Columns, TokenLoss
from learners.models.scoring import TokenOutputs
from ragr1_actors.core.types import TokenKind, Trajectory


class SFTLearner(Learner):
    """Maximum likelihood of the MODEL tokens, the same mask as in reinforcement learning.

    RAG-R1 cuts each demonstration into segments and trains on their last part (``segment``). Training on the whole
    trajectory with the MODEL mask has the same loss, token by token, and runs each context once instead of once a turn.
    """

    @property
    def temperature(self) -> float:
        """Demonstrations were not sampled, so their likelihood is under the plain softmax."""
        return 1.0

    @property
    def has_engine_logprobs(self) -> bool:
        """Demonstrations have none."""
        return False

    def make_options(self) -> LearnerOptions:
        """None: those of the recipe are of stage 2."""
        return LearnerOptions()

    def make_schedule(self) -> Schedule:
        """One step an update, with the learning rate of the ``sft`` section."""
        sft = self.config.sft
        # The second moment remembers 50 steps instead of 1000: the stage is short and its gradients shrink fast.
        adamw = AdamWSettings(betas=(0.9, 0.98), grad_clip=self.config.training.grad_clip)
        num_steps = sft.num_steps if sft.lr_schedule == "cosine" else 0
        return Schedule(lr=sft.lr, warmup_steps=sft.warmup_steps, num_steps=num_steps, adamw=adamw)

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Nothing: every MODEL token counts alike."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """Negative log-likelihood."""
        return TokenLoss(negative_log_likelihood(outputs.logprobs))


class SegmentCategory(StrEnum):
    """RAG-R1's four kinds of decision (arXiv:2507.02962, section 3.1)."""

    INTERNAL_ANSWER = "internal_answer"
    """Answers from what it knows."""
    FIRST_SEARCH = "first_search"
    """Searches before it has any evidence."""
    EVIDENCE_ANSWER = "evidence_answer"
    """Answers from evidence."""
    FURTHER_SEARCH = "further_search"
    """Searches on although it has evidence."""


@dataclass(frozen=True)
class Segment:
    """One decision: the context it was made in, and what the model wrote."""

    category: SegmentCategory
    trajectory: Trajectory
    """Ends with the decision; only the decision's tokens are MODEL, earlier turns are PROMPT."""


def segment(trajectory: Trajectory) -> list[Segment]:
    """Cut a trajectory at every point where the model acts. Malformed turns are no examples and are left out."""
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
