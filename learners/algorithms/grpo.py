"""Policy gradients: the clipped loss with the terms added to it, the learners that compare within a group, and PPO.

::

    compute_loss = loss_weights * ( policy_loss * weights for the sampler  -  entropy bonus  +  KL  +  LLDS )

An algorithm overrides ``compute_advantages`` and, if its loss differs, ``policy_loss``. These compare a trajectory with
the others of its group:

=============== ======================== ====================== ===================== ================
learner         baseline                 scale                  ratio                 mean of a step
=============== ======================== ====================== ===================== ================
``grpo``        mean of the group        deviation of the group per token             over tokens
``dapo``        mean of the group        deviation of the group per token, clip 0.28  over tokens
``gspo``        mean of the group        deviation of the group per trajectory        by trajectory
``cispo``       mean of the group        deviation of the group per token, a weight   over tokens
``dr_grpo``     mean of the group        none                   per token             by a constant
``rloo``        mean of the others       none                   per token             by a constant
``reinforce_pp`` mean of the group       deviation of the batch per token             over tokens
=============== ======================== ====================== ===================== ================
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch

from learners.advantages import (
    centered_advantages,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    sequence_weights,
    truncated_importance_weights,
    turn_advantages,
    whiten,
)
from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, Schedule
from learners.learner import Learner
from learners.losses import (
    KL_ESTIMATORS,
    TokenLoss,
    clipped_policy_loss,
    clipped_value_loss,
    clipped_weight_loss,
    displacement_penalty,
    sequence_log_ratios,
    trajectory_weights,
)
from learners.models.scoring import TokenOutputs, ValueModel
from learners.options import (
    GROUP_EPSILON,
    OPTIONS,
    GroupOptions,
    LearnerOptions,
    PolicyGradientOptions,
    PPOOptions,
    has_variance,
)
from learners.train_batch import Meter, TokenColumns, TrainBatch
from ragr1_actors.core.types import Trajectory


class PolicyGradientLearner(Learner):
    """A learner whose loss multiplies log-probs by advantages."""

    options_class: ClassVar[type[LearnerOptions]] = PolicyGradientOptions
    options: PolicyGradientOptions
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.2)
    """Values of ``clip_low`` and ``clip_high`` that replace null."""

    @property
    def clip(self) -> tuple[float, float]:
        """Largest amounts by which the ratio may fall below 1 and rise above 1."""
        low, high = self.options.clip_low, self.options.clip_high
        return self.default_clip[0] if low is None else low, self.default_clip[1] if high is None else high

    @property
    def corrects_sampling(self) -> bool:
        """Whether a token or a sequence is weighted by the ratio of the learner's and the engine's probabilities."""
        is_set = self.options.tis_clip > 0 or self.options.sequence_correction is not None
        return self.uses_old_logprobs and is_set

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Score the batch under the reference if there is a KL term; number turns or sequences for LLDS."""
        columns: dict[str, torch.Tensor] = {}
        if self.config.training.kl_coeff > 0:
            ref_logprobs_M = self.reference_logprobs(batch.flat)
            if self.options.kl_in == "reward":
                policy_M = batch.columns.policy_logprobs
                columns["rollout_kl"] = KL_ESTIMATORS[self.options.kl_estimator](policy_M, ref_logprobs_M)
            else:
                columns["ref_logprobs"] = ref_logprobs_M
        if self.options.llds_coeff:
            is_turn = self.options.llds_gate == "turn"
            columns["segment_ids"] = turn_ids(batch) if is_turn else batch.columns.sequence_ids
        return columns

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss per MODEL token of one micro-batch, and whether its ratio was clipped; ``[M]`` each."""
        return clipped_policy_loss(
            logprobs_M, columns["old_logprobs"], columns["advantages"], *self.clip, self.options.dual_clip
        )

    def correct_sampling(self, policy_loss_M: torch.Tensor, columns: TokenColumns) -> TokenLoss:
        """Return the policy loss times the weights, per token and sequence, that correct for the engine; metrics."""
        tis_clip, correction = self.options.tis_clip, self.options.sequence_correction
        metrics: dict[str, torch.Tensor] = {}
        sequences = None
        if tis_clip and columns.rollout_logprobs is not None:
            weights, was_truncated = truncated_importance_weights(
                columns["old_logprobs"], columns.rollout_logprobs, tis_clip
            )
            policy_loss_M = policy_loss_M * weights
            metrics = {"tis_weight_mean": weights, "tis_truncated": was_truncated}
        if correction is not None and columns.rollout_logprobs is not None:
            sequences = sequence_weights(
                columns["old_logprobs"],
                columns.rollout_logprobs,
                columns.sequence_ids,
                correction.kind,
                *correction.bounds,
            )
            policy_loss_M = policy_loss_M * sequences.weights_M
        return TokenLoss(policy_loss_M, metrics, sequences)

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the policy loss, corrected for the sampler, minus the entropy bonus, plus KL and LLDS."""
        training = self.config.training
        policy_loss, was_clipped = self.policy_loss(outputs.logprobs, columns)
        corrected = self.correct_sampling(policy_loss, columns)
        loss = policy_loss = corrected.loss
        metrics = {"clip_fraction": was_clipped, **corrected.metrics}
        if training.entropy_coeff:
            loss = loss - training.entropy_coeff * outputs.entropy
        if columns.ref_logprobs is not None:
            kl = KL_ESTIMATORS[self.options.kl_estimator](outputs.logprobs, columns.ref_logprobs)
            loss = loss + training.kl_coeff * kl
            metrics["kl"] = kl
        elif columns.rollout_kl is not None:
            metrics["kl"] = columns.rollout_kl
        if columns.segment_ids is not None:
            penalty = displacement_penalty(
                outputs.logprobs, columns.policy_logprobs, columns["advantages"], columns.segment_ids
            )
            loss = loss + self.options.llds_coeff * penalty
            metrics["llds"] = penalty
        if columns.loss_weights is not None:
            loss = loss * columns.loss_weights
        return TokenLoss(loss, metrics | {"policy_loss": policy_loss}, corrected.sequences)


def turn_ids(batch: TrainBatch) -> torch.Tensor:
    """Number the turns of a batch and return the number per MODEL token, ``[M]`` of int64.

    Raises:
        ValueError: the turns of a trajectory do not have as many MODEL tokens as the trajectory.
    """
    is_sampled_M = batch.flat.policy_versions >= 0
    numbers, num_turns = [], 0
    for trajectory, (start, end) in zip(batch.trajectories, pairwise(batch.flat.trajectory_offsets), strict=True):
        ends, before = np.cumsum(trajectory.turn_lengths), np.cumsum(is_sampled_M[start:end])
        if (found := sum(trajectory.turn_lengths)) != before[-1]:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id}: its turns have {found} MODEL tokens, expected {before[-1]}; "
                "set Turn.num_model_tokens to the number in each turn"
            )
        # a token that code wrote belongs to the next turn, or to the last one if none follows
        turns = np.searchsorted(ends, before - is_sampled_M[start:end], side="right")
        numbers.append(num_turns + turns.clip(max=len(ends) - 1))
        num_turns += len(ends)
    return torch.from_numpy(np.concatenate(numbers))


class GRPOLearner(PolicyGradientLearner):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300), the base of all learners with a group.

    Deviations: the mean is over tokens instead of over trajectories first (DAPO, arXiv:2503.14476);
    ``aggregation=trajectory_mean`` follows the paper. Groups whose rewards are all equal are left out if they have no
    gradient (``select_members``). With ``kl_in=reward``, a trajectory is one action: the KL estimates of all its
    tokens are subtracted from its reward, before the baseline.
    """

    options_class: ClassVar[type[LearnerOptions]] = GroupOptions
    options: GroupOptions
    trajectory_advantages = staticmethod(group_advantages)
    """Function for the advantages per trajectory, float64 ``[N]``, from rewards and group numbers, ``[N]`` each."""

    @property
    def max_model_tokens(self) -> int:
        """Largest number of MODEL tokens per trajectory."""
        runners = self.config.env_runners
        all_turns = self.config.environment.max_turns * runners.max_new_tokens_per_turn
        return self.options.max_model_tokens or min(all_turns, runners.max_context_tokens)

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return all members of a group, or none where its rewards are all equal and ``drop_zero_variance`` says so.

        DAPO and CISPO leave such groups out (arXiv:2503.14476, section 3.2; arXiv:2506.13585, section 3.1). The other
        papers do not: KL and entropy of such a group count, and REINFORCE++ whitens over them too. Deviation: without a
        gradient they are left out of the mean as well.
        """
        if has_variance([member.reward for member in members]):
            return members
        drops = self.options.drop_zero_variance
        return [] if drops or (drops is None and not self._has_gradient(members)) else members

    def _has_gradient(self, members: list[Trajectory]) -> bool:
        """Return whether trajectories with equal rewards are learned from, by ``drop_zero_variance`` null."""
        training, credit = self.config.training, self.options.turn_credit
        if training.kl_coeff or training.entropy_coeff:
            return True
        rewards_N = torch.tensor([member.reward for member in members], dtype=torch.float64)
        rewards_N -= self._overlong_penalties(torch.tensor([float(one.num_model_tokens) for one in members]))
        if has_variance(rewards_N.tolist()):
            return True
        if credit is None or not members:
            return False
        of_one_group = [0] * len(members)
        advantages_T = turn_advantages(members, of_one_group, rewards_N, credit.gamma, self.trajectory_advantages)
        return bool((advantages_T.abs() > GROUP_EPSILON).any())

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return the advantage per MODEL token: its trajectory's, plus with ``turn_credit`` its turn's."""
        rewards_N, credit = self.shaped_rewards(batch), self.options.turn_credit
        advantages_M = batch.per_token(self.trajectory_advantages(rewards_N, torch.tensor(batch.group_ids)))
        if credit is not None:
            advantages_T = turn_advantages(
                batch.trajectories, batch.group_ids, rewards_N, credit.gamma, self.trajectory_advantages
            )
            advantages_M = advantages_M + credit.weight * advantages_T.float()[turn_ids(batch)]
        return {"advantages": advantages_M}

    def shaped_rewards(self, batch: TrainBatch) -> torch.Tensor:
        """Return the reward per trajectory minus the penalties for length and divergence, float64 ``[N]``."""
        rewards_N = batch.rewards - self._overlong_penalties(batch.model_lengths)
        if batch.columns.rollout_kl is not None:
            rewards_N -= self.config.training.kl_coeff * batch.per_trajectory(batch.columns.rollout_kl)
        return rewards_N

    def _overlong_penalties(self, lengths_N: torch.Tensor) -> torch.Tensor:
        if not self.options.overlong_share:
            return torch.zeros(len(lengths_N), dtype=torch.float64)
        return overlong_penalty(lengths_N.double(), self.max_model_tokens, self.options.overlong_share)

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the weight per MODEL token if the step does not average over all its tokens."""
        if self.options.aggregation == "token_mean":
            return {}
        lengths_N = batch.model_lengths
        weights_N = torch.zeros(len(lengths_N), dtype=torch.float64)
        weights_N[indices] = trajectory_weights(lengths_N[indices], self.options.aggregation, self.max_model_tokens)
        return {"loss_weights": batch.per_token(weights_N)}


class DAPOLearner(GRPOLearner):
    """Decoupled clip and dynamic sampling policy optimization (Yu et al., arXiv:2503.14476).

    Its four parts: a clip of 0.2 below and 0.28 above; groups whose rewards are all equal are replaced
    (``max_sampled_batches``, in the algorithm's loop); the mean over tokens; overlong shaping (``overlong_share``).
    Deviations: the length counts MODEL tokens only, since the policy controls no others, and the reward of the
    environment decides whether a group's rewards are all equal, before shaping.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["dapo"]
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.28)


class GSPOLearner(GRPOLearner):
    """Group sequence policy optimization (Zheng et al., arXiv:2507.18071), in its form per token (GSPO-token).

    Deviation: the likelihood of a sequence is the likelihood of its MODEL tokens. A trajectory whose conversation was
    rewritten has a ratio per row.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["gspo"]
    default_clip: ClassVar[tuple[float, float]] = (3e-4, 4e-4)  # section 5.1

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipped surrogate loss with the ratio of the sequence."""
        log_ratios_M = sequence_log_ratios(logprobs_M, columns["old_logprobs"], columns.sequence_ids)
        return clipped_policy_loss(
            log_ratios_M, torch.zeros_like(log_ratios_M), columns["advantages"], *self.clip, self.options.dual_clip
        )


class CISPOLearner(GRPOLearner):
    """Clipped importance-sampling policy optimization (MiniMax-M1, arXiv:2506.13585).

    The paper has no lower bound (``clip_low=1``) and does not state its upper bound; ours is 1 + 4.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["cispo"]
    default_clip: ClassVar[tuple[float, float]] = (1.0, 4.0)

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the negative log-prob times the clipped ratio and the advantage."""
        return clipped_weight_loss(logprobs_M, columns["old_logprobs"], columns["advantages"], *self.clip)


class DrGRPOLearner(GRPOLearner):
    """GRPO done right (Liu et al., arXiv:2503.20783): no division by the deviation or by a trajectory's length.

    Deviation: the constant that divides the sums over tokens counts MODEL tokens, ``max_model_tokens``.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["dr_grpo"]
    trajectory_advantages = staticmethod(centered_advantages)


class RLOOLearner(GRPOLearner):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740), with k1 in the reward of the whole trajectory.

    Deviations: the clipped surrogate replaces the log-prob (its on-policy gradient is the same), so that an update may
    have several steps; the sum over a trajectory's tokens is divided by a constant, ``max_model_tokens``, which keeps
    ``training.grad_clip`` in its usual range and changes nothing else under AdamW.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["rloo"]
    trajectory_advantages = staticmethod(leave_one_out_advantages)


class ReinforcePPLearner(DrGRPOLearner):
    """REINFORCE++ with baseline (Hu et al., arXiv:2501.03262), with k2 in the loss.

    The reward minus the mean of the group is whitened over the MODEL tokens of the batch, as in the paper's code.
    """

    options_class: ClassVar[type[LearnerOptions]] = OPTIONS["reinforce_pp"]

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return the advantages, whitened over the MODEL tokens of the batch."""
        return {"advantages": whiten(super().compute_advantages(batch)["advantages"])}


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
