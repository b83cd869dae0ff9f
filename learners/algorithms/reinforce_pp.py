"""REINFORCE++ with baseline: the group gives the mean, the batch the scale."""

from __future__ import annotations

from typing import ClassVar

import torch

from learners.advantages import centered_advantages, whiten
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import LearnerOptions, ReinforcePPOptions
from learners.batches.train_batch import TrainBatch
from learners.meter import Columns


class ReinforcePPLearner(GRPOLearner):
    """REINFORCE++ with baseline (Hu et al., arXiv:2501.03262), with k2 in the loss.

    Reward less the mean of the group, then whitened over the MODEL tokens of the batch, as its code does.
    """

    options_class: ClassVar[type[LearnerOptions]] = ReinforcePPOptions

    def trajectory_advantages(self, rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
        """Reward less the mean of the group."""
        return centered_advantages(rewards_N, group_ids_N)

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Whiten over the batch."""
        return {"advantages": whiten(super().compute_advantages(batch)["advantages"])}
