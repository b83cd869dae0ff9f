"""A learner that learns from the better half of a group only."""

from __future__ import annotations

import torch

from learners.algorithms.grpo import GRPOLearner
from learners.train_batch import TrainBatch


class BetterHalfLearner(GRPOLearner):
    """GRPO without the advantages below 0."""

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return GRPO's advantages, ``[M]``, of which those below 0 are 0."""
        found = super().compute_advantages(batch)
        return found | {"advantages": found["advantages"].clamp(min=0)}
