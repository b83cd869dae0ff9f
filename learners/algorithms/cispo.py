"""CISPO: the ratio is clipped as a weight, and no token loses its gradient."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import CISPOOptions, LearnerOptions
from learners.losses import clipped_weight_loss
from learners.meter import Columns


class CISPOLearner(GRPOLearner):
    """Clipped importance-sampling policy optimization (MiniMax-M1, arXiv:2506.13585).

    The paper has no lower bound, which is ``training.clip_low=1``, and does not say its upper one; ours is 1 + 4.
    """

    options_class: ClassVar[type[LearnerOptions]] = CISPOOptions
    default_clip: ClassVar[tuple[float, float]] = (1.0, 4.0)

    def policy_loss(self, logprobs_M: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob, weighted by the clipped ratio and the advantage."""
        return clipped_weight_loss(logprobs_M, columns["old_logprobs"], columns["advantages"], *self.clip)
