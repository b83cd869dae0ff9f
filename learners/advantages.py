"""Advantages as pure functions, over MODEL tokens only.

Tokens that the policy did not sample are not time steps: the state after a MODEL token is the one before the next MODEL
token, however much retrieved text lies between the two. RAG-R1 runs GAE, whitening and the value loss over the
retrieved tokens as well.

Notation: N trajectories, M MODEL tokens of all the trajectories one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROUP_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


def group_advantages(
    rewards_N: torch.Tensor, group_ids_N: torch.Tensor, failed_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every trajectory's advantage within its group, and its weight (0 for a failure, else 1).

    ``(reward - mean) / (std + eps)`` over the group, std unbiased: GRPO (Shao et al., arXiv:2402.03300, section 4.1.2).
    A failure of the machinery says nothing about the policy: it is left out of mean and std. A group of which
    one trajectory is left has no baseline, and its advantage is the reward itself, as in Search-R1.
    """
    advantages_N = torch.zeros_like(rewards_N)
    for group in group_ids_N.unique():
        members = (group_ids_N == group) & ~failed_N
        rewards = rewards_N[members]
        if len(rewards) > 1:
            rewards = (rewards - rewards.mean()) / (rewards.std() + GROUP_EPSILON)
        advantages_N[members] = rewards
    return advantages_N, (~failed_N).to(rewards_N.dtype)


def centered_advantages(rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
    """Return every trajectory's reward less the mean of its group.

    Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783): Dr.GRPO, GRPO without the division by the
    standard deviation, which favours groups that are nearly solved or nearly lost. A group of one keeps its reward.
    """
    advantages_N = rewards_N.clone()
    for group in group_ids_N.unique():
        members = group_ids_N == group
        if members.sum() > 1:
            advantages_N[members] -= rewards_N[members].mean()
    return advantages_N


def leave_one_out_advantages(rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
    """Return every trajectory's reward less the mean of the others of its group.

    Ahmadian et al., Back to Basics (arXiv:2402.14740): RLOO. A group of one keeps its reward.
    """
    advantages_N = rewards_N.clone()
    for group in group_ids_N.unique():
        members = group_ids_N == group
        count = members.sum()
        if count > 1:
            rewards = rewards_N[members]
            advantages_N[members] = rewards - (rewards.sum() - rewards) / (count - 1)
    return advantages_N


def overlong_penalty(lengths_N: torch.Tensor, limit: int, share: float) -> torch.Tensor:
    """Return what overlong trajectories lose: 0 up to ``(1 - share) * limit`` tokens, then linearly 1 at the limit.

    Yu et al., DAPO (arXiv:2503.14476), equation 13, with L_max = ``limit`` and L_cache = ``share * limit``.
    """
    return ((lengths_N - (1 - share) * limit) / (share * limit)).clamp(0, 1)


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ. A group of one always has a signal: it has no baseline."""
    return len(rewards) == 1 or (len(rewards) > 1 and max(rewards) - min(rewards) > GROUP_EPSILON)


def generalized_advantages(
    rewards_M: torch.Tensor, values_M: torch.Tensor, lengths_N: Sequence[int], gamma: float, lambda_: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, a MODEL token each.

    Schulman et al., Generalized Advantage Estimation (arXiv:1506.02438), equation 16, over the MODEL tokens of every
    trajectory; ``lengths_N`` counts them. After the last one the value is 0, for truncated trajectories too: the turn
    budget is part of the task.
    """
    advantages_M = torch.zeros_like(values_M)
    lengths = torch.as_tensor(lengths_N)
    starts = lengths.cumsum(0) - lengths
    next_value_N = values_M.new_zeros(len(lengths))
    next_advantage_N = values_M.new_zeros(len(lengths))
    for back in range(
        1, int(lengths.max()) + 1 if len(lengths) else 1
    ):  # all the trajectories at once, from their ends
        alive_N = lengths >= back
        at = (starts + lengths - back)[alive_N]
        delta = rewards_M[at] + gamma * next_value_N[alive_N] - values_M[at]
        advantages_M[at] = delta + gamma * lambda_ * next_advantage_N[alive_N]
        next_value_N[alive_N] = values_M[at]
        next_advantage_N[alive_N] = advantages_M[at]
    return advantages_M, advantages_M + values_M


def whiten(values_M: torch.Tensor, weights_M: torch.Tensor | None = None, epsilon: float = 1e-8) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over the tokens with a weight; the others become 0."""
    weights_M = torch.ones_like(values_M) if weights_M is None else weights_M
    count = weights_M.sum().clamp(min=1)
    mean = (values_M * weights_M).sum() / count
    variance = ((values_M - mean).square() * weights_M).sum() / (count - 1).clamp(min=1)
    return (values_M - mean) * torch.rsqrt(variance + epsilon) * weights_M
