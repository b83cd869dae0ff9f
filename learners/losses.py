"""Losses as pure functions of flat tensors: one entry a MODEL token, nothing else is ever in them.

Every function returns one value a token and never averages. The learner takes the mean over all the MODEL tokens of
an optimizer step, over micro-batches and ranks alike (DAPO's token-level loss, arXiv:2503.14476, section 3.3), so that
no result depends on how the tokens were packed. Search-R1 and RAG-R1 average within a micro-batch first, which
weighs a token by the company it keeps.

Notation: M MODEL tokens.
"""

from __future__ import annotations

import torch

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate loss and whether the clip took the gradient away, both a token.

    Schulman et al., Proximal Policy Optimization (arXiv:1707.06347), equation 7, with the two sides of the clip apart
    as in DAPO (arXiv:2503.14476), equation 10. The old log-probs are those the engine sampled with, not recomputed,
    unless ``training.tis_clip`` asks for ``truncated_importance_weights``.
    """
    ratios_M = ratios(logprobs_M, old_logprobs_M)
    clipped_M = ratios_M.clamp(1 - clip_low, 1 + clip_high)
    loss_M = -torch.minimum(ratios_M * advantages_M, clipped_M * advantages_M)
    was_clipped_M = clipped_M * advantages_M < ratios_M * advantages_M
    return loss_M, was_clipped_M


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
    """Estimate KL(policy, reference) by the log-ratio: unbiased, of high variance, may be negative.

    Schulman, Approximating KL divergence (2020), estimator k1. Goes into PPO's reward; it is no use as a loss, since
    its gradient has mean zero.
    """
    return logprobs_M - ref_logprobs_M


def k3_kl(logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) by ``exp(-x) - 1 + x`` of the log-ratio x: never negative.

    Schulman, Approximating KL divergence (2020), estimator k3; GRPO's penalty (arXiv:2402.03300, equation 4).
    """
    log_ratio_M = (logprobs_M - ref_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-log_ratio_M) + log_ratio_M  # exp(x) - 1 would lose all digits where the policies agree


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
