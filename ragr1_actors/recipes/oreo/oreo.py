"""OREO's two losses (arXiv:2412.16145, section 3), and the baseline that learns from what was right alone.

The soft Bellman equation of a policy pi with the reference mu, which sampled, for token ``a_t`` in state ``s_t``::

    V(s_t) - V(s_t+1) = r_t - beta log(pi(a_t | s_t) / mu(a_t | s_t))

Summed to the end, with ``R_t`` the rewards from ``t`` on, it says what each of the two learns from all of T tokens::

    value    1/T sum_t ( V(s_t) - R_t + beta sum_{i>=t} log pi/mu )^2                          pi is constant
    policy   1/T sum_t ( V(s_t) - R_t + beta sum_{i>t} log pi/mu + beta log pi/mu(a_t|s_t) )^2   the last term learns

plus ``training.kl_coeff`` times KL(pi, mu). A wrong trajectory teaches, too, and a token is compared with what was
expected before it: a habit that is right by chance half of the time loses against one that is always right.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator

from learners.advantages import generalized_advantages
from learners.algorithms.grpo import PolicyGradientLearner, PPOLearner, turn_rewards
from learners.losses import TokenLoss
from learners.models.scoring import TokenOutputs
from learners.options import LearnerOptions, PPOOptions
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import Trajectory

MAX_LOG_RATIO = 10.0
"""Largest log-ratio in the estimate of the KL divergence: exp(10) is far above what a bounded loss can want."""


class OreoOptions(PPOOptions):
    """Options of OREO: those of the critic of PPO, and ``beta``."""

    beta: float = Field(0.03, gt=0)
    """Price of a nat of the log-ratio, in rewards; the published code takes 0.03."""
    vf_clip: float = Field(1e6, gt=0)
    """The value loss is not clipped."""

    @model_validator(mode="after")
    def _are_used(self) -> Self:
        if unused := sorted(self.model_fields_set - {"beta", "vf_lr", "vf_warmup_steps", "vf_clip"}):
            raise ValueError(f"{', '.join(unused)}: OREO has no ratio and no discount; leave it out")
        return self


class OreoLearner(PPOLearner):
    """OREO with one value per token. The critic is that of PPO.

    Deviations: the other side of each equation is that at the start of the update, where the paper takes that of the
    step; only MODEL tokens are states; the KL divergence is estimated from the stored tokens, by
    ``x log x - x + 1`` of the ratio x, whose mean under mu is KL(pi, mu).
    """

    options_class: ClassVar[type[LearnerOptions]] = OreoOptions
    options: OreoOptions
    uses_old_logprobs: ClassVar[bool] = False  # mu is the reference, and no ratio has the engine's log-probs

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Score the batch under mu, the policy at the start of the stage."""
        return {"ref_logprobs": self.reference_logprobs(batch.flat)}

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return what V and ``beta log pi/mu`` should be: ``returns`` and ``advantages``, ``[M]`` each."""
        values_M = self.score(self.critic, batch.flat)
        own_M = self.options.beta * (self.score(self.policy_logprobs, batch.flat) - batch.columns["ref_logprobs"])
        returns_M = to_the_end(turn_rewards(batch).to(own_M.dtype) - own_M, batch.flat.model_lengths)
        return {"returns": returns_M, "values": values_M, "advantages": returns_M + own_M - values_M}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the policy loss and the KL divergence per token."""
        log_ratios_M = outputs.logprobs - columns["ref_logprobs"]
        policy_loss_M = (self.options.beta * log_ratios_M - columns["advantages"]).square()
        kl_M = kl_of_stored(log_ratios_M)
        loss_M = policy_loss_M + self.config.training.kl_coeff * kl_M
        return TokenLoss(loss_M, {"policy_loss": policy_loss_M, "kl": kl_M})


def to_the_end(values_M: torch.Tensor, lengths_N: list[int]) -> torch.Tensor:
    """Return the sum from each token to the end of its trajectory: ``[1, 2, 4]`` of one trajectory is ``[7, 6, 4]``."""
    return generalized_advantages(values_M, torch.zeros_like(values_M), lengths_N, 1.0, 1.0)[1]


def kl_of_stored(log_ratios_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(pi, mu) per token that mu sampled: ``x log x - x + 1`` of the ratio x = pi/mu, at least 0."""
    log_ratios_M = log_ratios_M.clamp(max=MAX_LOG_RATIO)
    ratios_M = log_ratios_M.exp()
    return ratios_M * log_ratios_M - ratios_M + 1


class RightOnlyLearner(PolicyGradientLearner):
    """The baseline: SFT on the stored trajectories that are right."""

    uses_old_logprobs: ClassVar[bool] = False

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return those with a reward above 0."""
        return [member for member in members if member.reward > 0]

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return no columns: every token of a right trajectory has the same weight."""
        return {}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the negative log-likelihood per token."""
        return TokenLoss(-outputs.logprobs)
