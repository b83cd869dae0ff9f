"""PPO: a critic learns what return to expect, and the advantage is what came on top."""

from __future__ import annotations

import numpy as np
import torch

from learners.advantages import generalized_advantages, whiten
from learners.batching import MicroBatch
from learners.engine import DeepSpeedEngine
from learners.learner import Learner, TrainBatch
from learners.losses import clipped_value_loss, k1_kl
from learners.meter import Columns, Meter, TokenLoss
from learners.models import TokenOutputs, ValueModel


class PPOLearner(Learner):
    """Proximal policy optimization (Schulman et al., arXiv:1707.06347) with GAE (arXiv:1506.02438).

    Deviations: MODEL tokens are the only time steps, in GAE, whitening and value loss alike; the KL penalty is k1
    against the policy at the start of the stage, in the reward (Ouyang et al., arXiv:2203.02155, equation 2).
    """

    def build(self) -> None:
        """Load the critic beside the policy, from the same folder."""
        super().build()
        checkpointing = self.config.learners.gradient_checkpointing
        critic = ValueModel(self.policy_dir, self.dtype, checkpointing)
        rests = "critic" in self.config.learners.offload
        self.critic = self.make_engine(critic, self.schedule.adamw, rests=rests)

    def engines(self) -> dict[str, DeepSpeedEngine]:
        """Return policy and critic."""
        return {**super().engines(), "critic": self.critic}

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Reward at a trajectory's last MODEL token, less the KL penalty at each; GAE; whitening over the batch."""
        training = self.config.training
        with self.critic.in_use():
            values_M = self.score(self.critic, batch.flat)
        rewards_M = torch.zeros_like(values_M)
        columns: Columns = {}
        if training.kl_coeff > 0:
            kl_M = k1_kl(batch.columns["old_logprobs"], self.reference_logprobs(batch.flat))
            rewards_M -= training.kl_coeff * kl_M
            columns["kl"] = kl_M
        last_N = torch.from_numpy(batch.flat.model_offsets[1:] - 1)
        rewards_M[last_N] += torch.tensor([trajectory.reward for trajectory in batch.trajectories])
        lengths_N = np.diff(batch.flat.model_offsets).tolist()
        advantages_M, returns_M = generalized_advantages(
            rewards_M, values_M, lengths_N, training.gamma, training.lambda_
        )
        return columns | {"advantages": whiten(advantages_M), "returns": returns_M, "old_values": values_M}

    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """Clipped surrogate, minus the entropy bonus."""
        surrogate = self.surrogate(outputs, columns)
        penalty = {"kl": columns["kl"]} if "kl" in columns else {}
        return TokenLoss(surrogate.loss, surrogate.metrics | penalty)

    def train_step(self, micro_batches: list[MicroBatch], columns: Columns, num_tokens: int, meter: Meter) -> None:
        """Step the policy, then the critic on the same micro-batches."""
        super().train_step(micro_batches, columns, num_tokens, meter)
        with self.critic.in_use():
            self._train_critic(micro_batches, columns, num_tokens, meter)

    def _train_critic(self, micro_batches: list[MicroBatch], columns: Columns, num_tokens: int, meter: Meter) -> None:
        for micro_batch in micro_batches:
            chosen = {name: columns[name][micro_batch.columns].to(self.device) for name in ("old_values", "returns")}
            values_M = self.critic(micro_batch)
            loss_M = clipped_value_loss(values_M, chosen["old_values"], chosen["returns"], self.config.training.vf_clip)
            self.critic.backward(loss_M.sum() * (micro_batch.weight * self.world_size / num_tokens))
            meter.add_values(micro_batch, value_loss=loss_M, values=values_M, returns=chosen["returns"])
        step = self.step_index(meter)
        critic_lr = self.config.training.vf_lr * self.schedule.lr_at(step) / self.schedule.lr
        meter.add_step(critic_grad_norm=self.critic.step(critic_lr))
