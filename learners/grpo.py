"""GRPO: the baseline of a trajectory is the mean reward of its group."""

from __future__ import annotations

import numpy as np
import torch

from learners.advantages import group_advantages
from learners.learner import Learner, TrainBatch
from learners.losses import k3_kl
from learners.meter import Columns, TokenLoss
from learners.models import TokenOutputs


class GRPOLearner(Learner):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300).

    Deviations: the mean is over tokens instead of over trajectories first (DAPO, arXiv:2503.14476), and groups whose
    rewards are all alike are left out with ``training.drop_zero_variance`` (DAPO's filter, without sampling anew).
    """

    @property
    def needs_reward_variance(self) -> bool:
        """Whether groups without variance are left out."""
        return self.config.training.drop_zero_variance

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Give every MODEL token its trajectory's advantage, and a reference log-prob where a KL term needs it."""
        rewards_N = torch.tensor([trajectory.reward for trajectory in batch.trajectories], dtype=torch.float64)
        no_failures_N = torch.zeros(len(rewards_N), dtype=torch.bool)
        advantages_N, _ = group_advantages(rewards_N, torch.tensor(batch.group_ids), no_failures_N)
        lengths_N = torch.from_numpy(np.diff(batch.flat.model_offsets))
        columns = {"advantages": advantages_N.float().repeat_interleave(lengths_N)}
        if self.config.training.kl_coeff > 0:
            columns["ref_logprobs"] = self.reference_logprobs(batch.flat)
        return columns

    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """Clipped surrogate, minus the entropy bonus, plus k3 against the reference."""
        surrogate = self.surrogate(outputs, columns)
        if "ref_logprobs" not in columns:
            return surrogate
        kl = k3_kl(outputs.logprobs, columns["ref_logprobs"])
        return TokenLoss(surrogate.loss + self.config.training.kl_coeff * kl, surrogate.metrics | {"kl": kl})
