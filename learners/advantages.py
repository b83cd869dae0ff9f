"""Advantages as pure functions over MODEL tokens.

Only MODEL tokens are time steps: the state after one is the state before the next, with or without retrieved text
between them. (RAG-R1 runs GAE, whitening and the value loss over the retrieved tokens too.)

Notation: N trajectories; M MODEL tokens of all trajectories, one trajectory after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from learners.options import GROUP_EPSILON


def group_advantages(rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
    """Return ``(reward - mean) / (std + eps)`` of every trajectory's group, ``[N]``; std is unbiased.

    GRPO (Shao et al., arXiv:2402.03300, section 4.1.2). A group of one has no baseline: its advantage is the reward, as
    in Search-R1.
    """
    return _within_groups(
        rewards_N, group_ids_N, lambda rewards: (rewards - rewards.mean()) / (rewards.std() + GROUP_EPSILON)
    )


def centered_advantages(rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean of its group, ``[N]``. A group of one keeps its reward.

    Dr.GRPO (Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783): GRPO without the division by the
    standard deviation, which favours groups that are nearly solved or nearly lost.
    """
    return _within_groups(rewards_N, group_ids_N, lambda rewards: rewards - rewards.mean())


def leave_one_out_advantages(rewards_N: torch.Tensor, group_ids_N: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean of the other rewards of its group, ``[N]``. A group of one keeps its reward.

    RLOO (Ahmadian et al., Back to Basics, arXiv:2402.14740).
    """
    return _within_groups(
        rewards_N, group_ids_N, lambda rewards: rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    )


def _within_groups(
    rewards_N: torch.Tensor, group_ids_N: torch.Tensor, compare: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    advantages_N = rewards_N.clone()
    for group in group_ids_N.unique():
        members = group_ids_N == group
        if members.sum() > 1:
            advantages_N[members] = compare(rewards_N[members])
    return advantages_N


def overlong_penalty(lengths_N: torch.Tensor, limit: int, share: float) -> torch.Tensor:
    """Return the penalty per trajectory: 0 up to ``(1 - share) * limit`` tokens, then linear up to 1 at the limit.

    Yu et al., DAPO (arXiv:2503.14476), equation 13, with L_max = ``limit`` and L_cache = ``share * limit``.
    """
    return ((lengths_N - (1 - share) * limit) / (share * limit)).clamp(0, 1)


def generalized_advantages(
    rewards_M: torch.Tensor, values_M: torch.Tensor, lengths_N: Sequence[int], gamma: float, lambda_: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns per MODEL token, ``[M]`` each.

    Schulman et al., Generalized Advantage Estimation (arXiv:1506.02438), equation 16, over the MODEL tokens of every
    trajectory; ``lengths_N`` counts them. After the last token the value is 0, for truncated trajectories too: the turn
    budget is part of the task.
    """
    advantages_M = torch.zeros_like(values_M)
    lengths = torch.as_tensor(lengths_N)
    starts = lengths.cumsum(0) - lengths
    next_value_N = values_M.new_zeros(len(lengths))
    next_advantage_N = values_M.new_zeros(len(lengths))
    for back in range(1, int(lengths.max()) + 1):  # all trajectories at once, from their last tokens backwards
        alive_N = lengths >= back
        at = (starts + lengths - back)[alive_N]
        delta = rewards_M[at] + gamma * next_value_N[alive_N] - values_M[at]
        advantages_M[at] = delta + gamma * lambda_ * next_advantage_N[alive_N]
        next_value_N[alive_N] = values_M[at]
        next_advantage_N[alive_N] = advantages_M[at]
    return advantages_M, advantages_M + values_M


def whiten(values_M: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over all tokens, ``[M]``."""
    count = len(values_M)
    mean = values_M.sum() / count
    variance = (values_M - mean).square().sum() / max(1, count - 1)
    return (values_M - mean) * torch.rsqrt(variance + 1e-8)
