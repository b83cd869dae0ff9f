"""Losses as pure functions of flat tensors: one entry a MODEL token, nothing else is ever in them.

Every function returns one value a token and never averages. The learner takes the mean over all the MODEL tokens of
an optimizer step, over micro-batches and ranks alike (DAPO's token-level loss, arXiv:2503.14476, section 3.3), so that
no result depends on how the tokens were packed. Search-R1 and RAG-R1 average within a micro-batch first, which
weighs a token by the company it keeps.

What needs a sum over a trajectory or a turn takes ``segments_M``, its number a token; all of its tokens are there.

Notation: M MODEL tokens, N trajectories, P pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid

from learners.algorithms.options import Aggregation, KLEstimator

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in every dtype in use; a ratio this far away is clipped by the loss in any case."""


def ratios(logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor) -> torch.Tensor:
    """How much more likely the policy makes every token than the policy that sampled it."""
    return (logprobs_M - old_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate loss and whether a clip took the gradient away, both a token.

    Schulman et al., Proximal Policy Optimization (arXiv:1707.06347), equation 7, with the two sides of the clip apart
    as in DAPO (arXiv:2503.14476), equation 10. The old log-probs are those the engine sampled with, not recomputed,
    unless ``training.tis_clip`` asks for ``truncated_importance_weights``. With ``dual_clip`` above 0, a token with a
    negative advantage costs at most as much as at that ratio (Ye et al., arXiv:1912.09729).
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
    """Return CISPO's loss and whether the ratio was clipped, both a token.

    MiniMax, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5: REINFORCE, weighted by the clipped ratio, through which
    no gradient flows, so that every token keeps one.
    """
    ratios_M = ratios(logprobs_M, old_logprobs_M).detach()
    weights_M = ratios_M.clamp(1 - clip_low, 1 + clip_high)
    return -weights_M * advantages_M * logprobs_M, weights_M != ratios_M


def sequence_log_ratios(
    logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, segments_M: torch.Tensor
) -> torch.Tensor:
    """Return the mean log-ratio of every token's segment, with the gradient of the token's own log-prob.

    Zheng et al., Group Sequence Policy Optimization (arXiv:2507.18071): equation 7 is the value, and equation 14
    (GSPO-token) the gradient. Averaged over the tokens of a sequence the gradient is that of the sequence ratio itself,
    without a sum that autograd would have to go through.
    """
    log_ratios_M = (logprobs_M - old_logprobs_M).detach()
    means_M = _segment_sums(log_ratios_M, segments_M) / _segment_sums(torch.ones_like(log_ratios_M), segments_M)
    return means_M + (logprobs_M - logprobs_M.detach())


def truncated_importance_weights(
    proximal_logprobs_M: torch.Tensor, engine_logprobs_M: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``min(proximal / engine, clip)``, the weight of a token's policy loss, and whether it was truncated.

    Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025,
    fengyao.notion.site/off-policy-rl). The proximal policy is the learner at the start of the update. It takes the
    place of the engine in the clipped ratio, which then bounds the update alone, while the weight corrects for who
    sampled (Hilton et al., arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298). No gradient flows through a weight.

    Deviations: Hilton et al. and AReaL truncate nothing. In Yao et al. engine and learner hold the same version; here
    the proximal policy is the newest one, so that at a lag the weight corrects for the lag too. Entropy bonus, KL terms
    and value loss are not weighted.
    """
    ratios_M = ratios(proximal_logprobs_M, engine_logprobs_M).detach()
    return ratios_M.clamp(max=clip), ratios_M > clip


def k1_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by the log-ratio x: unbiased, of high variance, may be negative.

    Schulman, Approximating KL divergence (2020), estimator k1. Goes into a reward; it is no use as a loss, since its
    gradient is that of the log-prob, whose mean over the policy is 0.
    """
    return logprobs_M - ref_logprobs_M


def k2_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by half the square of the log-ratio x: never negative, of little bias.

    Schulman, Approximating KL divergence (2020), estimator k2. As a loss its gradient, x times that of the log-prob,
    has the mean of the gradient of KL(policy, reference): the right one (Hu et al., arXiv:2501.03262).
    """
    return 0.5 * (logprobs_M - ref_logprobs_M).square()


def k3_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by ``exp(-x) - 1 + x`` of the log-ratio x: unbiased, never negative.

    Schulman, Approximating KL divergence (2020), estimator k3; GRPO's penalty (arXiv:2402.03300, equation 4). As a loss
    its gradient, ``1 - exp(-x)`` times that of the log-prob, has the mean of the gradient of the other divergence,
    KL(reference, policy); the two agree to first order where the policies do.
    """
    log_ratio_M = (logprobs_M - ref_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-log_ratio_M) + log_ratio_M  # exp(x) - 1 would lose all digits where the policies agree


KL_ESTIMATORS: dict[KLEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1_kl,
    "k2": k2_kl,
    "k3": k3_kl,
}


def displacement_penalty(
    logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, advantages_M: torch.Tensor, segments_M: torch.Tensor
) -> torch.Tensor:
    """Return how much less likely every token of what deserves no loss of likelihood has become, in nats.

    LLDS, the likelihood-displacement regulariser of arXiv:2512.04220: ``max(0, log old - log policy)`` on tokens whose
    advantage is not negative, and only in segments whose summed log-likelihood has fallen below that of the old policy.
    A segment is a response in the first version of the paper, and an action, here a turn, in the second.

    Written from the paper's abstract and a description of the formula, not from its code. The old policy is that of
    ``old_logprobs``: where an update is one step at lag 0, nothing has become less likely and the penalty is 0.
    """
    drops_M = old_logprobs_M - logprobs_M
    is_active_M = (_segment_sums(drops_M.detach(), segments_M) > 0) & (advantages_M >= 0)
    return torch.where(is_active_M, drops_M.clamp(min=0), 0.0)


def _segment_sums(values_M: torch.Tensor, segments_M: torch.Tensor) -> torch.Tensor:
    """Return for every token the sum over its segment."""
    numbers, index_M = segments_M.unique(return_inverse=True)
    sums_M: torch.Tensor = values_M.new_zeros(len(numbers)).index_add_(0, index_M, values_M)[index_M]
    return sums_M


def trajectory_weights(lengths_N: torch.Tensor, aggregation: Aggregation, constant: int) -> torch.Tensor:
    """Return the weight of every trajectory's tokens that makes the mean over all tokens another mean.

    ``lengths_N`` counts the MODEL tokens of the trajectories of one optimizer step.

    * ``token_mean``: every token counts alike (DAPO, arXiv:2503.14476, section 3.3): 1.
    * ``trajectory_mean``: the mean over trajectories of the mean over their tokens (GRPO, arXiv:2402.03300,
      equation 3).
    * ``constant``: the mean over trajectories of the sum over their tokens divided by ``constant`` (Dr.GRPO,
      arXiv:2503.20783, whose code takes the limit of tokens).
    """
    if aggregation == "token_mean":
        return torch.ones(len(lengths_N), dtype=torch.float64)
    mean_length = lengths_N.double().mean()
    divisors_N = lengths_N if aggregation == "trajectory_mean" else torch.full_like(lengths_N, constant)
    return mean_length / divisors_N


def dpo_loss(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """Return ``-log sigmoid(beta * margin)`` of every pair.

    Rafailov et al., Direct Preference Optimization (arXiv:2305.18290), equation 7. A margin is how much more likely,
    against the reference, the policy has made the right trajectory than the wrong one, in nats.
    """
    return -logsigmoid(beta * margins_P)


def ipo_loss(margins_P: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the squared distance of every pair's margin from ``1 / (2 beta)``.

    Azar et al., A General Theoretical Paradigm (arXiv:2310.12036), equation 17, with tau called ``beta``.
    """
    return (margins_P - 1 / (2 * beta)).square()


def clipped_value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip: float
) -> torch.Tensor:
    """Half the squared error of the value, or of the value moved by at most ``clip``, whichever is larger.

    From the code that came with arXiv:1707.06347 (it is not in the paper).
    """
    clipped_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_M - returns_M).square(), (clipped_M - returns_M).square())


def negative_log_likelihood(logprobs_M: torch.Tensor) -> torch.Tensor:
    """Supervised loss on the tokens of a demonstration."""
    return -logprobs_M
