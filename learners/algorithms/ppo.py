"""PPO: a critic predicts the return, and the advantage is the difference from it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch

from learners.advantages import generalized_advantages, whiten
from learners.algorithms.grpo import PolicyGradientLearner
from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, Schedule
from learners.losses import clipped_value_loss
from learners.models.scoring import ValueModel
from learners.options import LearnerOptions, PPOOptions
from learners.train_batch import Meter, TrainBatch


class PPOLearner(PolicyGradientLearner):
    """Proximal policy optimization (Schulman et al., arXiv:1707.06347) with GAE (arXiv:1506.02438).

    Deviations: only MODEL tokens are time steps, in GAE, whitening and value loss; the KL penalty is k1 against the
    policy at the start of the stage, in the reward (Ouyang et al., arXiv:2203.02155, equation 2), unless the options
    say otherwise.
    """

    options_class: ClassVar[type[LearnerOptions]] = PPOOptions
    options: PPOOptions

    def build(self) -> None:
        """Load the policy, and the critic from the same folder."""
        super().build()
        with self.loading("params"):
            settings = self.config.learners.gradient_checkpointing, self.config.policy.trust_remote_code
            critic = ValueModel(self.policy_dir, self.dtype, *settings)
        self.critic = self.make_engine(critic, critic.backbone, rests="critic" in self.config.learners.offload)

    @property
    def critic_schedule(self) -> Schedule:
        """Schedule of the policy, with learning rate and warm-up of the critic."""
        lr = self.lr_factor * self.options.vf_lr if self.options.vf_lr else 10 * self.schedule.lr
        return replace(self.schedule, lr=lr, warmup_steps=self.options.vf_warmup_steps)

    def engines(self) -> dict[str, DeepSpeedEngine]:
        """Return the engines of policy and critic."""
        return {**super().engines(), "critic": self.critic}

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return advantages and returns by GAE, whitened, with turn rewards and the KL penalty in the rewards."""
        values_M = self.score(self.critic, batch.flat)
        rewards_M = torch.zeros_like(values_M)
        if batch.columns.rollout_kl is not None:
            rewards_M -= self.config.training.kl_coeff * batch.columns.rollout_kl
        rewards_M += turn_rewards(batch).to(rewards_M.dtype)
        advantages_M, returns_M = generalized_advantages(
            rewards_M, values_M, batch.flat.model_lengths, self.options.gamma, self.options.lambda_
        )
        return {"advantages": whiten(advantages_M), "returns": returns_M, "values": values_M}

    def train(self, batch: TrainBatch, meter: Meter) -> None:
        """Take all steps of the critic, then all steps of the policy on the same micro-batches.

        Neither depends on the other. So a critic that is offloaded is on the device once per update, for its values and
        its steps, and not at the same time as the policy's activations.
        """
        with self.critic.in_use():
            for step, indices in enumerate(self.steps(batch)):
                self._train_critic(batch, indices, self.step_index(step), meter)
        super().train(batch, meter)

    def _train_critic(self, batch: TrainBatch, indices: list[int], step: int, meter: Meter) -> None:
        num_tokens = int(batch.model_lengths[indices].sum())
        for micro_batch in self.local_micro_batches(batch.flat, indices):
            chosen = batch.columns.select(micro_batch.column_index, self.device)
            values_M, returns_M = self.critic(micro_batch), chosen["returns"]
            loss_M = clipped_value_loss(values_M, chosen["values"], returns_M, self.options.vf_clip)
            self.critic.backward(loss_M.sum() * (micro_batch.weight * self.world_size / num_tokens))
            self.num_micro_batches += 1
            meter.add_values(micro_batch, value_loss=loss_M, values=values_M, returns=returns_M)
        meter.add_step(critic_grad_norm=self.critic.step(self.critic_schedule.lr_at(step)))


def turn_rewards(batch: TrainBatch) -> torch.Tensor:
    """Return the reward at every MODEL token, ``[M]`` of float64, whose sum over a trajectory is its reward.

    ``Turn.reward`` is at the turn's last token, and the rest of the trajectory's reward at its last token. The reward
    of a turn without a MODEL token goes to the turn before it, or to the first token.
    """
    rewards_M = torch.zeros(len(batch.columns.trajectory_ids), dtype=torch.float64)
    starts, ends = batch.flat.trajectory_offsets[:-1].tolist(), batch.flat.trajectory_offsets[1:].tolist()
    for trajectory, start, end in zip(batch.trajectories, starts, ends, strict=True):
        rest = trajectory.reward
        if any(of_turns := trajectory.turn_rewards):
            sampled = np.flatnonzero(batch.flat.policy_versions[start:end] >= 0)
            for reward, last in zip(of_turns, accumulate(trajectory.turn_lengths), strict=True):
                rewards_M[start + sampled[max(0, last - 1)]] += reward
            rest -= sum(of_turns)
        rewards_M[end - 1] += rest
    return rewards_M
