"""Supervised fine-tuning on demonstrations: RAG-R1's first stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from learners.deepspeed.deepspeed_engine import Schedule
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
    Malformed turns are context in both.
    """

    has_rollout_logprobs: ClassVar[bool] = False

    @property
    def temperature(self) -> float:
        """1.0: no engine sampled the demonstrations, so their likelihood is under the plain softmax."""
        return 1.0

    def make_options(self) -> LearnerOptions:
        """Return no options: ``training.options`` belong to RL."""
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

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Turn malformed turns into context; leave out a trajectory without another turn."""
        taught = [without_malformed_turns(member) for member in members]
        return [member for member in taught if member.num_model_tokens]

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return no columns: every MODEL token has the same weight."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the negative log-likelihood per token."""
        return TokenLoss(-outputs.logprobs)


_DECISIONS = ("search", "answer")
"""Actions that are learned; the other one is ``malformed``."""


class SegmentCategory(StrEnum):
    """RAG-R1's four kinds of decision (arXiv:2507.02962, section 3.1)."""

    INTERNAL_ANSWER = "internal_answer"
    """Answers without anything found."""
    FIRST_SEARCH = "first_search"
    """Searches before anything was found."""
    EVIDENCE_ANSWER = "evidence_answer"
    """Answers after a search that found something."""
    FURTHER_SEARCH = "further_search"
    """Searches again after something was found."""


@dataclass(frozen=True)
class Segment:
    """One decision: its context, and the tokens that the model wrote."""

    category: SegmentCategory
    trajectory: Trajectory
    """Ends with the decision; only the tokens of the decision are MODEL, those of earlier turns are PROMPT."""


def segment(trajectory: Trajectory) -> list[Segment]:
    """Cut a trajectory into one segment per turn; malformed turns are left out."""
    segments: list[Segment] = []
    has_evidence = False
    for index, (turn, own) in enumerate(zip(trajectory.turns, _positions(trajectory), strict=True)):
        if turn.action in _DECISIONS and len(own):
            cut = _taught(trajectory, [index], end=int(own[-1]) + 1)
            cut = replace(cut, trajectory_id=f"{trajectory.trajectory_id}/turn{index}")
            segments.append(Segment(_category(turn.action, has_evidence), cut))
        has_evidence = has_evidence or any(record.passage_ids for record in turn.retrievals)
    return segments


def without_malformed_turns(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with the tokens of malformed turns as PROMPT; itself if it has none."""
    decisions = [index for index, turn in enumerate(trajectory.turns) if turn.action in _DECISIONS]
    if len(decisions) == len(trajectory.turns):
        return trajectory
    return _taught(trajectory, decisions, end=trajectory.num_tokens)


def _positions(trajectory: Trajectory) -> list[NDArray[np.int64]]:
    """Return the positions of the MODEL tokens of every turn."""
    positions, lengths = np.flatnonzero(trajectory.kinds == TokenKind.MODEL), trajectory.turn_lengths
    return [positions[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def _taught(trajectory: Trajectory, turns: Sequence[int], end: int) -> Trajectory:
    """Return the first ``end`` tokens, of which those of the chosen turns are MODEL and those of the others PROMPT."""
    kinds = np.where(trajectory.kinds == TokenKind.MODEL, np.uint8(TokenKind.PROMPT), trajectory.kinds)
    positions = _positions(trajectory)
    for index in turns:
        kinds[positions[index]] = TokenKind.MODEL
    is_own = kinds[:end] == TokenKind.MODEL
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:end],
        kinds=kinds[:end],
        logprobs=np.where(is_own, trajectory.logprobs[:end], np.float32(0)),
        policy_versions=np.where(is_own, trajectory.policy_versions[:end], np.int32(-1)),
        turns=tuple(trajectory.turns[index] for index in turns),
    )


def _category(action: str, has_evidence: bool) -> SegmentCategory:
    if action == "answer":
        return SegmentCategory.EVIDENCE_ANSWER if has_evidence else SegmentCategory.INTERNAL_ANSWER
    return SegmentCategory.FURTHER_SEARCH if has_evidence else SegmentCategory.FIRST_SEARCH
