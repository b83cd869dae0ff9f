"""RLOO: the baseline of a trajectory is the mean reward of the others of its group."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.advantages import leave_one_out_advantages
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import LearnerOptions, RLOOOptions


class RLOOLearner(GRPOLearner):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740), with k1 in the reward of the whole trajectory.

    Deviations: the clipped surrogate takes the place of the log-prob, and has its gradient on-policy, so that an update
    may have several steps; the sum over a trajectory's tokens is divided by a constant, ``max_model_tokens``, which
    keeps ``training.grad_clip`` in its usual range and changes nothing else under AdamW.
    """

    options_class: ClassVar[type[LearnerOptions]] = RLOOOptions

    def trajectory_advantages(self, rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
        """Reward less the mean of the others."""
        return leave_one_out_advantages(rewards_N, group_ids_N)
