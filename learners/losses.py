"""Losses as pure functions of flat tensors with one entry per MODEL token.

Every function returns one value per token and never averages. The learner takes the mean over all MODEL tokens of an
optimizer step, over micro-batches and ranks (DAPO's token-level loss, arXiv:2503.14476, section 3.3), so no result
depends on the packing. Search-R1 and RAG-R1 average within a micro-batch first, so the weight of a token there depends
on the tokens that share its micro-batch.

A function that sums over a trajectory or a turn takes ``segment_ids_M``, the number of each token's segment; all tokens
of a segment are in one call. Tensors named ``_M`` have shape ``[M]`` and are float32 in training, log-probs in nats.

Notation: M MODEL tokens, N trajectories, P pairs of trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import logsigmoid

from learners.options import KLEstimator

if TYPE_CHECKING:
    from learners.advantages import SequenceWeights

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios: exp(20) is finite in every used dtype, and the losses clip such ratios anyway."""
MAX_K3 = 10.0
"""Largest estimate of ``k3_kl`` per token, in nats."""


@dataclass(frozen=True)
class TokenLoss:
    """Result of ``Learner.compute_loss``."""

    loss: torch.Tensor  # [M]
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values of shape ``[M]`` by name; their means over the MODEL tokens of the update are reported."""
    sequences: SequenceWeights | None = None
    """Ratios of a sequence correction; their mean and extremes over the sequences of the update are reported."""


def propagate_not_finite(loss: torch.Tensor, logprobs_M: torch.Tensor) -> torch.Tensor:
    """Give a loss that is not finite a gradient that is not finite: the norm then makes every rank skip the step.

    A clamp cuts off the gradient of NaN; without this, a token with a NaN constant would be ignored silently.
    """
    factor = torch.where(loss.detach().isfinite(), 0.0, math.nan)
    return loss + factor * logprobs_M.sum()


def ratios(logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return ``exp(logprobs - old_logprobs)``, with the exponent clamped to ``MAX_LOG_RATIO``."""
    return (logprobs_M - old_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate loss, and whether the clip removed the gradient, per token.

    Schulman et al., Proximal Policy Optimization (arXiv:1707.06347), equation 7, with two bounds as in
    DAPO (arXiv:2503.14476), equation 10. With ``dual_clip`` above 0, the loss of a token with a negative advantage is
    at most its loss at that ratio (Ye et al., arXiv:1912.09729).
    """
    ratios_M = ratios(logprobs_M, old_logprobs_M)
    clipped_M = ratios_M.clamp(1 - clip_low, 1 + clip_high)
    loss_M = -torch.minimum(ratios_M * advantages_M, clipped_M * advantages_M)
    was_clipped_M = clipped_M * advantages_M < ratios_M * advantages_M
    if dual_clip:
        is_beyond_M = (advantages_M < 0) & (loss_M > -dual_clip * advantages_M)
        loss_M = torch.where(is_beyond_M, -dual_clip * advantages_M, loss_M)
        was_clipped_M = was_clipped_M | is_beyond_M
    return loss_M, was_clipped_M


def clipped_weight_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CISPO's loss, and whether the ratio was clipped, per token.

    MiniMax, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5: REINFORCE times the clipped ratio. No
    gradient flows through the ratio, so every token keeps its gradient.
    """
    ratios_M = ratios(logprobs_M, old_logprobs_M).detach()
    weights_M = ratios_M.clamp(1 - clip_low, 1 + clip_high)
    return -weights_M * advantages_M * logprobs_M, weights_M != ratios_M


def sequence_log_ratios(
    logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, segment_ids_M: torch.Tensor
) -> torch.Tensor:
    """Return the mean log-ratio of each token's segment, with the gradient of the token's log-prob.

    Zheng et al., Group Sequence Policy Optimization (arXiv:2507.18071): equation 7 is the value, and equation 14
    (GSPO-token) the gradient. The mean over the tokens of a sequence is the gradient of the sequence ratio, without a
    sum in autograd.
    """
    log_ratios_M = (logprobs_M - old_logprobs_M).detach()
    means_M = _segment_sums(log_ratios_M, segment_ids_M) / _segment_sums(torch.ones_like(log_ratios_M), segment_ids_M)
    return means_M + (logprobs_M - logprobs_M.detach())


def k1_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by the log-ratio x: unbiased, of high variance, may be negative.

    Schulman, Approximating KL divergence (2020), estimator k1. It is used in a reward; as a loss it has no effect,
    since its gradient is the gradient of the log-prob, whose mean over the policy is 0.
    """
    return logprobs_M - ref_logprobs_M


def k2_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by half the square of the log-ratio x: never negative, with a small bias.

    Schulman, Approximating KL divergence (2020), estimator k2. As a loss, its gradient is x times the log-prob's; the
    mean is the gradient of KL(policy, reference) (Hu et al., arXiv:2501.03262).
    """
    return 0.5 * (logprobs_M - ref_logprobs_M).square()


def k3_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by ``exp(-x) - 1 + x`` of the log-ratio x: unbiased, never negative.

    Schulman, Approximating KL divergence (2020), estimator k3; GRPO's penalty (arXiv:2402.03300, equation 4). As a
    loss, its gradient is ``1 - exp(-x)`` times the log-prob's; the mean is the gradient of KL(reference, policy), which
    equals the gradient of KL(policy, reference) to first order.

    Deviation, as in verl: it is at most ``MAX_K3``, without a gradient beyond. One token that the policy no longer
    writes, x = -20, would count 4.9e8 nats.
    """
    log_ratio_M = (logprobs_M - ref_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # exp(x) - 1 would lose all digits if the policies agree
    return (torch.expm1(-log_ratio_M) + log_ratio_M).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[KLEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1_kl,
    "k2": k2_kl,
    "k3": k3_kl,
}


def displacement_penalty(
    logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, advantages_M: torch.Tensor, segment_ids_M: torch.Tensor
) -> torch.Tensor:
    """Return the unwanted fall of each token's log-likelihood, in nats per token.

    LLDS, the likelihood-displacement regulariser of arXiv:2512.04220: ``max(0, log old - log policy)`` on tokens whose
    advantage is not negative, in segments whose summed log-likelihood is below the old policy's. A segment is a
    response in the first version of the paper, and an action, here a turn, in the second.

    It was written from the paper's abstract and a description of the formula, not from its code. In an update of one
    step at lag 0 no likelihood has fallen, and the penalty is 0.
    """
    drops_M = old_logprobs_M - logprobs_M
    is_active_M = (_segment_sums(drops_M.detach(), segment_ids_M) > 0) & (advantages_M >= 0)
    return torch.where(is_active_M, drops_M.clamp(min=0), 0.0)


def _segment_sums(values_M: torch.Tensor, segment_ids_M: torch.Tensor) -> torch.Tensor:
    """Return the sum over each token's segment, ``[M]``."""
    numbers, index_M = segment_ids_M.unique(return_inverse=True)
    sums_M: torch.Tensor = values_M.new_zeros(len(numbers)).index_add_(0, index_M, values_M)[index_M]
    return sums_M


def trajectory_weights(
    lengths_N: torch.Tensor, aggregation: Literal["trajectory_mean", "constant"], constant: int
) -> torch.Tensor:
    """Return the weight per trajectory, ``[N]`` of float64, that turns the mean over all tokens into another mean.

    ``lengths_N`` counts the MODEL tokens of the trajectories of one optimizer step.

    * ``trajectory_mean``: the mean over trajectories of the mean over their tokens (GRPO, arXiv:2402.03300,
      equation 3).
    * ``constant``: the mean over trajectories of the sum over their tokens divided by ``constant`` (Dr.GRPO,
      arXiv:2503.20783, whose code takes the limit of tokens).
    """
    mean_length = lengths_N.double().mean()
    divisors_N = lengths_N if aggregation == "trajectory_mean" else torch.full_like(lengths_N, constant)
    return mean_length / divisors_N


def dpo_loss(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """Return ``-log sigmoid(beta * margin)`` per pair.

    Rafailov et al., Direct Preference Optimization (arXiv:2305.18290), equation 7. A margin, in nats, is the log-ratio
    of policy and reference on the better trajectory, minus the log-ratio on the worse one.
    """
    return -logsigmoid(beta * margins_P)


def ipo_loss(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the squared distance of the margin from ``1 / (2 beta)`` per pair.

    Azar et al., A General Theoretical Paradigm (arXiv:2310.12036), equation 17, with tau called ``beta``.
    """
    return (margins_P - 1 / (2 * beta)).square()


def clipped_value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return half the squared error of the value, or of the value moved by at most ``clip``: the larger of the two.

    The formula is from the code of arXiv:1707.06347 (it is not in the paper).
    """
    clipped_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_M - returns_M).square(), (clipped_M - returns_M).square())
