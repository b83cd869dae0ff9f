"""GRPO: the baseline of a trajectory is the mean reward of its group."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from learners.advantages import group_advantages, has_variance, overlong_penalty
from learners.algorithms.options import GroupOptions, LearnerOptions
from learners.algorithms.policy_gradient import PolicyGradientLearner
from learners.batches.train_batch import TrainBatch
from learners.losses import trajectory_weights
from learners.meter import Columns
from ragr1_actors.core.types import Trajectory


class GRPOLearner(PolicyGradientLearner):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300), the base of all that compare within a group.

    Deviations: the mean is over tokens instead of over trajectories first (DAPO, arXiv:2503.14476), which
    ``aggregation=trajectory_mean`` takes back, and groups whose rewards are all alike are left out unless
    ``drop_zero_variance`` is off. With ``kl_in=reward``, a trajectory is one action: the estimates of all of its tokens
    together are taken off its reward, before the baseline.
    """

    options_class: ClassVar[type[LearnerOptions]] = GroupOptions
    options: GroupOptions

    @property
    def max_model_tokens(self) -> int:
        """MODEL tokens that a trajectory may have."""
        runners = self.config.env_runners
        all_turns = self.config.environment.max_turns * runners.max_new_tokens_per_turn
        return self.options.max_model_tokens or min(all_turns, runners.max_context_tokens)

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Leave a group out whose rewards are all alike."""
        if self.options.drop_zero_variance and not has_variance([member.reward for member in members]):
            return []
        return members

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Give every MODEL token its trajectory's advantage."""
        advantages_N = self.trajectory_advantages(self.shaped_rewards(batch), torch.tensor(batch.group_ids))
        return {"advantages": _to_tokens(advantages_N, batch)}

    def trajectory_advantages(self, rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
        """Return the advantage of every trajectory."""
        advantages_N, _ = group_advantages(rewards_N, group_ids_N, torch.zeros_like(rewards_N, dtype=torch.bool))
        return advantages_N

    def shaped_rewards(self, batch: TrainBatch) -> torch.Tensor:
        """Return every trajectory's reward, ``[N]`` of float64, less what length and divergence cost."""
        rewards_N = torch.tensor([trajectory.reward for trajectory in batch.trajectories], dtype=torch.float64)
        lengths_N = torch.tensor(batch.flat.model_lengths)
        if self.options.overlong_share:
            rewards_N -= overlong_penalty(lengths_N.double(), self.max_model_tokens, self.options.overlong_share)
        if "kl" in batch.columns:
            owners_M = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
            kl_N = torch.zeros_like(rewards_N).index_add_(0, owners_M, batch.columns["kl"].double())
            rewards_N -= self.config.training.kl_coeff * kl_N
        return rewards_N

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> Columns:
        """Give every MODEL token its weight, where the mean is not one over all tokens."""
        if self.options.aggregation == "token_mean":
            return {}
        lengths_N = torch.tensor(batch.flat.model_lengths)
        weights_N = torch.zeros(len(lengths_N), dtype=torch.float64)
        weights_N[indices] = trajectory_weights(lengths_N[indices], self.options.aggregation, self.max_model_tokens)
        return {"weights": _to_tokens(weights_N, batch)}


def _to_tokens(values_N: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Repeat a number a trajectory for each of its MODEL tokens, ``[M]`` of float32."""
    return values_N.float().repeat_interleave(torch.from_numpy(np.diff(batch.flat.model_offsets)))
