"""Base of all policy gradients: the clipped loss, the correction for the sampler, and the terms added to it.

::

    compute_loss = loss_weights * ( policy_loss * weights for the sampler  -  entropy bonus  +  KL  +  LLDS )

An algorithm overrides ``compute_advantages`` and, if its loss differs, ``policy_loss``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch

from learners.importance import sequence_weights, truncated_importance_weights
from learners.learner import Learner
from learners.losses import KL_ESTIMATORS, TokenLoss, clipped_policy_loss, displacement_penalty
from learners.models.scoring import TokenOutputs
from learners.options import LearnerOptions, PolicyGradientOptions
from learners.train_batch import TokenColumns, TrainBatch


class PolicyGradientLearner(Learner):
    """A learner whose loss multiplies log-probs by advantages."""

    options_class: ClassVar[type[LearnerOptions]] = PolicyGradientOptions
    options: PolicyGradientOptions
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.2)
    """Values of ``clip_low`` and ``clip_high`` that replace null."""

    @property
    def clip(self) -> tuple[float, float]:
        """Largest amounts by which the ratio may fall below 1 and rise above 1."""
        low, high = self.options.clip_low, self.options.clip_high
        return self.default_clip[0] if low is None else low, self.default_clip[1] if high is None else high

    @property
    def corrects_sampling(self) -> bool:
        """Whether a token or a sequence is weighted by the ratio of the learner's and the engine's probabilities."""
        is_set = self.options.tis_clip > 0 or self.options.sequence_correction is not None
        return self.uses_old_logprobs and is_set

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Score the batch under the reference if there is a KL term; number turns or sequences for LLDS."""
        columns: dict[str, torch.Tensor] = {}
        if self.config.training.kl_coeff > 0:
            ref_logprobs_M = self.reference_logprobs(batch.flat)
            if self.options.kl_in == "reward":
                old_M = batch.columns.old_logprobs
                policy_M = batch.columns["rollout_logprobs"] if old_M is None else old_M
                columns["rollout_kl"] = KL_ESTIMATORS[self.options.kl_estimator](policy_M, ref_logprobs_M)
            else:
                columns["ref_logprobs"] = ref_logprobs_M
        if self.options.llds_coeff:
            is_turn = self.options.llds_gate == "turn"
            columns["segment_ids"] = turn_ids(batch) if is_turn else batch.columns.sequence_ids
        return columns

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss per MODEL token of one micro-batch, and whether its ratio was clipped; ``[M]`` each."""
        return clipped_policy_loss(
            logprobs_M, columns["old_logprobs"], columns["advantages"], *self.clip, self.options.dual_clip
        )

    def correct_sampling(self, policy_loss_M: torch.Tensor, columns: TokenColumns) -> TokenLoss:
        """Return the policy loss times the weights, per token and sequence, that correct for the engine; metrics."""
        tis_clip, correction = self.options.tis_clip, self.options.sequence_correction
        metrics: dict[str, torch.Tensor] = {}
        sequences = None
        if tis_clip and columns.rollout_logprobs is not None:
            weights, was_truncated = truncated_importance_weights(
                columns["old_logprobs"], columns.rollout_logprobs, tis_clip
            )
            policy_loss_M = policy_loss_M * weights
            metrics = {"tis_weight_mean": weights, "tis_truncated": was_truncated}
        if correction is not None and columns.rollout_logprobs is not None:
            sequences = sequence_weights(
                columns["old_logprobs"],
                columns.rollout_logprobs,
                columns.sequence_ids,
                correction.kind,
                *correction.bounds,
            )
            policy_loss_M = policy_loss_M * sequences.weights_M
        return TokenLoss(policy_loss_M, metrics, sequences)

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the policy loss, corrected for the sampler, minus the entropy bonus, plus KL and LLDS."""
        training = self.config.training
        policy_loss, was_clipped = self.policy_loss(outputs.logprobs, columns)
        corrected = self.correct_sampling(policy_loss, columns)
        loss = policy_loss = corrected.loss
        metrics = {"clip_fraction": was_clipped, **corrected.metrics}
        if training.entropy_coeff:
            loss = loss - training.entropy_coeff * outputs.entropy
        if columns.ref_logprobs is not None:
            kl = KL_ESTIMATORS[self.options.kl_estimator](outputs.logprobs, columns.ref_logprobs)
            loss = loss + training.kl_coeff * kl
            metrics["kl"] = kl
        elif columns.rollout_kl is not None:
            metrics["kl"] = columns.rollout_kl
        if columns.segment_ids is not None:
            penalty = displacement_penalty(
                outputs.logprobs, columns["old_logprobs"], columns["advantages"], columns.segment_ids
            )
            loss = loss + self.options.llds_coeff * penalty
            metrics["llds"] = penalty
        if columns.loss_weights is not None:
            loss = loss * columns.loss_weights
        return TokenLoss(loss, metrics | {"policy_loss": policy_loss}, corrected.sequences)


def turn_ids(batch: TrainBatch) -> torch.Tensor:
    """Number the turns of a batch and return the number per MODEL token, ``[M]`` of int64.

    Raises:
        ValueError: the turns of a trajectory do not have as many MODEL tokens as the trajectory.
    """
    is_sampled_M = batch.flat.policy_versions >= 0
    numbers, num_turns = [], 0
    for trajectory, (start, end) in zip(batch.trajectories, pairwise(batch.flat.trajectory_offsets), strict=True):
        ends, before = np.cumsum(trajectory.turn_lengths), np.cumsum(is_sampled_M[start:end])
        if (found := sum(trajectory.turn_lengths)) != before[-1]:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id}: its turns have {found} MODEL tokens, expected {before[-1]}; "
                "set Turn.num_model_tokens to the number in each turn"
            )
        # a token that code wrote belongs to the next turn, or to the last one if none follows
        turns = np.searchsorted(ends, before - is_sampled_M[start:end], side="right")
        numbers.append(num_turns + turns.clip(max=len(ends) - 1))
        num_turns += len(ends)
    return torch.from_numpy(np.concatenate(numbers))
