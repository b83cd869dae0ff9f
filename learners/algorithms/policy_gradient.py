"""What all policy gradients share: the clipped loss, its correction for who sampled, and what may be added to it.

::

    compute_loss = weights * ( policy_loss * importance weights  -  entropy bonus  +  KL  +  LLDS )

An algorithm overrides ``compute_advantages`` and, where its loss is another one, ``policy_loss``.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from learners.algorithms.options import LearnerOptions, PolicyGradientOptions
from learners.batches.train_batch import TrainBatch
from learners.learner import Learner
from learners.losses import KL_ESTIMATORS, clipped_policy_loss, displacement_penalty, truncated_importance_weights
from learners.meter import Columns, TokenLoss
from learners.models.scoring import TokenOutputs


class PolicyGradientLearner(Learner):
    """A learner that weighs log-probs by advantages.

    Columns beside those of ``TrainBatch``:

    ``advantages``: of ``compute_advantages``.
    ``kl``: estimate of the divergence from the reference at sampling time, where it goes into the reward.
    ``ref_logprobs``: where the divergence goes into the loss.
    ``segments``: number of the turn or trajectory of every token, where LLDS is on.
    ``weights``: of the loss of every token, where the mean is not one over all tokens.
    """

    options_class: ClassVar[type[LearnerOptions]] = PolicyGradientOptions
    options: PolicyGradientOptions
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.2)
    """``training.clip_low`` and ``training.clip_high`` where they are null."""

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it."""
        low, high = self.config.training.clip_low, self.config.training.clip_high
        return self.default_clip[0] if low is None else low, self.default_clip[1] if high is None else high

    def prepare(self, batch: TrainBatch) -> Columns:
        """Ask the reference, where there is a KL term, and number turns or trajectories for LLDS."""
        columns: Columns = {}
        if self.config.training.kl_coeff > 0:
            ref_logprobs_M = self.reference_logprobs(batch.flat)
            if self.options.kl_in == "reward":
                estimate = KL_ESTIMATORS[self.options.kl_estimator]
                columns["kl"] = estimate(batch.columns["old_logprobs"], ref_logprobs_M)
            else:
                columns["ref_logprobs"] = ref_logprobs_M
        if self.options.llds_coeff:
            columns["segments"] = segment_ids(batch, self.options.llds_gate == "turn")
        return columns

    def policy_loss(self, logprobs_M: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every MODEL token of one micro-batch, and whether its ratio was clipped."""
        return clipped_policy_loss(
            logprobs_M, columns["old_logprobs"], columns["advantages"], *self.clip, self.options.dual_clip
        )

    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """Policy loss, weighted where the sampler is corrected for, less the entropy bonus, plus KL and LLDS."""
        training = self.config.training
        policy_loss, was_clipped = self.policy_loss(outputs.logprobs, columns)
        metrics = {"clip_fraction": was_clipped}
        if training.tis_clip and "engine_logprobs" in columns:
            weights, was_truncated = truncated_importance_weights(
                columns["old_logprobs"], columns["engine_logprobs"], training.tis_clip
            )
            policy_loss = policy_loss * weights
            metrics |= {"tis_weight_mean": weights, "tis_truncated": was_truncated}
        loss = policy_loss
        if training.entropy_coeff:
            loss = loss - training.entropy_coeff * outputs.entropy
        if "ref_logprobs" in columns:
            kl = KL_ESTIMATORS[self.options.kl_estimator](outputs.logprobs, columns["ref_logprobs"])
            loss = loss + training.kl_coeff * kl
            metrics["kl"] = kl
        elif "kl" in columns:
            metrics["kl"] = columns["kl"]
        if "segments" in columns:
            penalty = displacement_penalty(
                outputs.logprobs, columns["old_logprobs"], columns["advantages"], columns["segments"]
            )
            loss = loss + self.options.llds_coeff * penalty
            metrics["llds"] = penalty
        if "weights" in columns:
            loss = loss * columns["weights"]
        return TokenLoss(loss, metrics | {"policy_loss": policy_loss})


def segment_ids(batch: TrainBatch, are_turns: bool) -> torch.Tensor:
    """Number the turns, or the trajectories, of a batch and return every MODEL token's, ``[M]``.

    Raises:
        ValueError: the turns of a trajectory do not have as many tokens as the trajectory.
    """
    lengths = batch.flat.model_lengths
    if are_turns:
        for trajectory, length in zip(batch.trajectories, lengths, strict=True):
            if (found := sum(turn.num_model_tokens for turn in trajectory.turns)) != length:
                raise ValueError(
                    f"trajectory {trajectory.trajectory_id}: its turns have {found} MODEL tokens, expected {length}; "
                    "set Turn.num_model_tokens to what each has, or training.options.llds_gate=trajectory"
                )
        lengths = [turn.num_model_tokens for trajectory in batch.trajectories for turn in trajectory.turns]
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
