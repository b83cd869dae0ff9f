"""Dr.GRPO: GRPO without what favours long answers and lopsided groups."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.advantages import centered_advantages
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import DrGRPOOptions, LearnerOptions


class DrGRPOLearner(GRPOLearner):
    """GRPO done right (Liu et al., arXiv:2503.20783): neither the standard deviation nor a trajectory's own length.

    Deviation: the constant that sums over tokens are divided by counts MODEL tokens, ``max_model_tokens``.
    """

    options_class: ClassVar[type[LearnerOptions]] = DrGRPOOptions

    def trajectory_advantages(self, rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
        """Reward less the mean of the group."""
        return centered_advantages(rewards_N, group_ids_N)
