"""GRPO and the algorithms that share its form: a trajectory is compared with the others of its group.

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

from typing import ClassVar

import torch

from learners.advantages import (
    centered_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    turn_advantages,
    whiten,
)
from learners.algorithms.policy_gradient import PolicyGradientLearner, turn_ids
from learners.losses import clipped_policy_loss, clipped_weight_loss, sequence_log_ratios, trajectory_weights
from learners.options import OPTIONS, GroupOptions, LearnerOptions, has_variance
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import Trajectory


class GRPOLearner(PolicyGradientLearner):
    """Group relative policy optimization (Shao et al., arXiv:2402.03300), the base of all learners with a group.

    Deviations: the mean is over tokens instead of over trajectories first (DAPO, arXiv:2503.14476);
    ``aggregation=trajectory_mean`` follows the paper. Groups whose rewards are all equal are left out if they have no
    gradient (``drops_flat_groups``). With ``kl_in=reward``, a trajectory is one action: the KL estimates of all its
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

    @property
    def drops_flat_groups(self) -> bool:
        """Whether groups whose rewards are all equal are left out.

        DAPO and CISPO leave them out (arXiv:2503.14476, section 3.2; arXiv:2506.13585, section 3.1). The other papers
        do not: KL and entropy of such a group count, and REINFORCE++ whitens over them too. Deviation: without KL term
        and entropy bonus they have no gradient, and are left out of the mean as well.
        """
        if self.options.drop_zero_variance is not None:
            return self.options.drop_zero_variance
        return not (self.config.training.kl_coeff or self.config.training.entropy_coeff)

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return no member of a group whose rewards are all equal, if ``drops_flat_groups``; else all members."""
        if self.drops_flat_groups and not has_variance([member.reward for member in members]):
            return []
        return members

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
        rewards_N = batch.rewards
        if self.options.overlong_share:
            lengths_N = batch.model_lengths.double()
            rewards_N -= overlong_penalty(lengths_N, self.max_model_tokens, self.options.overlong_share)
        if batch.columns.rollout_kl is not None:
            rewards_N -= self.config.training.kl_coeff * batch.per_trajectory(batch.columns.rollout_kl)
        return rewards_N

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
