"""GSPO: the ratio is that of a whole trajectory."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import GSPOOptions, LearnerOptions
from learners.algorithms.policy_gradient import segment_ids
from learners.batches.train_batch import TrainBatch
from learners.losses import clipped_policy_loss, sequence_log_ratios
from learners.meter import Columns


class GSPOLearner(GRPOLearner):
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071), in its form by token.

    Deviation: the likelihood of a sequence is that of its MODEL tokens alone.
    """

    options_class: ClassVar[type[LearnerOptions]] = GSPOOptions
    default_clip: ClassVar[tuple[float, float]] = (3e-4, 4e-4)  # section 5.1

    def prepare(self, batch: TrainBatch) -> Columns:
        """Number the trajectories."""
        return super().prepare(batch) | {"trajectories": segment_ids(batch, are_turns=False)}

    def policy_loss(self, logprobs_M: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
        """Clipped surrogate of the trajectory's ratio."""
        log_ratios_M = sequence_log_ratios(logprobs_M, columns["old_logprobs"], columns["trajectories"])
        return clipped_policy_loss(
            log_ratios_M, torch.zeros_like(log_ratios_M), columns["advantages"], *self.clip, self.options.dual_clip
        )
