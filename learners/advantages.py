"""Advantages as pure functions over MODEL tokens, and over turns.

Only MODEL tokens are time steps: the state after one is the state before the next, with or without retrieved text
between them. (RAG-R1 runs GAE, whitening and the value loss over the retrieved tokens too.)

Notation: N trajectories; M MODEL tokens, and T turns, of all trajectories, one trajectory after another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from learners.options import GROUP_EPSILON
from ragr1_actors.core.types import Trajectory


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


# -- credit per turn ---------------------------------------------------------------------------------------------------


Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns advantages from values and group numbers, ``[T]`` each, such as ``group_advantages``."""


def turn_advantages(
    trajectories: Sequence[Trajectory],
    group_ids: Sequence[int],
    rewards_N: torch.Tensor,
    gamma: float,
    compare: Compare,
) -> torch.Tensor:
    """Return the advantage of every turn over the turns of its group that began in the same state.

    It is ``[T]`` of float64, one trajectory after another. After GiGPO (Feng et al., Group-in-Group Policy
    Optimization, arXiv:2505.10978): the advantage of a token is that of its trajectory, plus a weight times that of its
    turn, and turns of one group that begin in the same state are compared by their discounted returns.

    Deviations: a state is the set of record ids that the attempt has found so far, or without calls the text of the
    last observation. GiGPO takes the observation of its environments, and the authors' run with searches takes similar
    texts (verl-agent, ``examples/gigpo_trainer/run_search.sh``: similarity of .9). A turn without another one in its
    state has the advantage 0, also for algorithms whose trajectories keep their reward without a group.

    ``rewards_N`` are the rewards by which trajectories are compared, ``[N]``: the last turn gets what exceeds the sum
    of the turns' rewards. ``group_ids`` is ``[N]``.
    """
    returns: list[float] = []
    numbers: dict[Hashable, int] = {}
    states: list[int] = []
    for trajectory, group_id, reward in zip(trajectories, group_ids, rewards_N.tolist(), strict=True):
        returns += discounted_returns(trajectory.turn_rewards, reward, gamma)
        states += [numbers.setdefault((group_id, state), len(numbers)) for state in states_before(trajectory)]
    returns_T, states_T = torch.tensor(returns, dtype=torch.float64), torch.tensor(states)
    is_alone_T = states_T.bincount()[states_T] == 1 if states else torch.zeros(0, dtype=torch.bool)
    return compare(returns_T, states_T).masked_fill(is_alone_T, 0.0)


def discounted_returns(turn_rewards: Sequence[float], reward: float, gamma: float) -> list[float]:
    """Return ``sum of gamma ** (j - k) * r_j`` over the turns ``j`` from ``k`` on, for every turn ``k``.

    ``discounted_returns([0.0, 0.0], 1.0, 0.5) == [0.5, 1.0]``: the last turn gets the rest of the trajectory's reward.
    """
    rewards, running = list(turn_rewards), 0.0
    if rewards:
        rewards[-1] += reward - sum(turn_rewards)
    found: list[float] = []
    for of_turn in reversed(rewards):
        running = of_turn + gamma * running
        found.append(running)
    return found[::-1]


def states_before(trajectory: Trajectory) -> list[Hashable]:
    """Return the state in which each turn begins."""
    found: list[Hashable] = []
    known: frozenset[str] = frozenset()
    seen = ""
    for turn in trajectory.turns:
        found.append(known or seen)
        known |= {record.id for call in turn.calls for record in call.records}
        seen = turn.observation
    return found
