"""Supervised fine-tuning on demonstrations: RAG-R1's first stage."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.algorithms.segments import without_malformed_turns
from learners.deepspeed.deepspeed_engine import Schedule
from learners.learner import Learner
from learners.losses import TokenLoss
from learners.models.scoring import TokenOutputs
from learners.options import LearnerOptions
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import Trajectory


class SFTLearner(Learner):
    """Maximum likelihood of the MODEL tokens, with the same mask as in reinforcement learning.

    RAG-R1 cuts each demonstration into segments and trains on the last turn of each. Training on the
    whole trajectory with the MODEL mask has the same loss per token, and computes each context once instead of once per
    turn. Malformed turns are context in both.
    """

    has_rollout_logprobs: ClassVar[bool] = False

    @property
    def temperature(self) -> float:
        """Temperature 1.0: no engine sampled the demonstrations, so their likelihood is under the plain softmax."""
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
        """Turn malformed turns into context; leave out trajectories without another turn."""
        taught = [without_malformed_turns(member) for member in members]
        return [member for member in taught if member.num_model_tokens]

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return no columns: every MODEL token has the same weight."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the negative log-likelihood per token."""
        return TokenLoss(-outputs.logprobs)
