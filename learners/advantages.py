"""Factors of a policy loss as pure functions: advantages, and weights that correct for the engine.

Only MODEL tokens are time steps: the state after one is the state before the next, with or without retrieved text
between them. (RAG-R1 runs GAE, whitening and the value loss over the retrieved tokens too.)

The engine sampled the tokens in place of the learner. A ratio is the probability under the learner at the start of the
update (``old``), divided by the probability under the engine (``rollout``). The clipped ratio of the policy loss
compares with ``old`` and bounds the update only; a weight corrects for the policy that sampled (Hilton et al.,
arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298). No gradient flows through a weight.

Deviation of all weights here: in the sources engine and learner have the same version; here ``old`` is the newest
version, so with a policy lag a weight corrects for the lag too. Entropy bonus, KL terms and value loss have no weight.

Notation: N trajectories; M MODEL tokens, and T turns, of all trajectories, one trajectory after another; S sequences. A
sequence is the MODEL tokens of a trajectory, as in GSPO, or of a row of it where its conversation was rewritten; all of
them are in one call. Log-probs are float32 in training, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from learners.losses import MAX_LOG_RATIO, ratios
from learners.options import GROUP_EPSILON, CorrectionKind
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
    order = group_ids_N.argsort(stable=True)  # once: there may be as many groups as turns in a batch
    sizes = group_ids_N[order].unique_consecutive(return_counts=True)[1].tolist()
    parts = [compare(part) if len(part) > 1 else part for part in rewards_N[order].split(sizes)]
    advantages_N = torch.empty_like(rewards_N)
    advantages_N[order] = torch.cat([rewards_N[:0], *parts])
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


def turn_advantages(
    trajectories: Sequence[Trajectory],
    group_ids: Sequence[int],
    rewards_N: torch.Tensor,
    gamma: float,
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
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
    of the turns' rewards. ``group_ids`` is ``[N]``. ``compare`` is a function that returns advantages from values and
    group numbers, ``[T]`` each, such as ``group_advantages``.
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


def truncated_importance_weights(
    old_logprobs_M: torch.Tensor, rollout_logprobs_M: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``min(ratio, clip)``, the weight of a token's policy loss, and whether it was truncated; ``[M]`` each.

    Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025,
    fengyao.notion.site/off-policy-rl). Deviation: Hilton et al. and AReaL do not truncate.
    """
    ratios_M = ratios(old_logprobs_M, rollout_logprobs_M).detach()
    return ratios_M.clamp(max=clip), ratios_M > clip


@dataclass(frozen=True)
class SequenceWeights:
    """Result of ``sequence_weights``."""

    weights_M: torch.Tensor  # [M], of the dtype of the log-probs
    """Factor of each token's policy loss, the same for all tokens of a sequence."""
    ratios_S: torch.Tensor  # [S] of float64
    """Ratio of the sequence; for ``geometric_mask`` and ``reject`` the geometric mean of its tokens' ratios."""
    is_outside_S: torch.Tensor  # [S] of bool
    """Whether the sequence is outside the bounds: masked, or with ``truncate`` truncated."""


def sequence_weights(
    old_logprobs_M: torch.Tensor,
    rollout_logprobs_M: torch.Tensor,
    sequence_ids_M: torch.Tensor,
    kind: CorrectionKind,
    low: float,
    high: float,
) -> SequenceWeights:
    """Return the weight of every sequence; ``sequence_ids_M`` numbers them, int64, in any order and with gaps.

    With the ratio of a sequence ``r = exp(sum of the tokens' log-ratios)`` and its number of tokens ``T``:

    * ``truncate``: ``min(r, high)``. Seq-TIS of Liu, Li et al., When Speed Kills Stability (2025,
      richardli.xyz/rl-collapse); verl's ``rollout_is=sequence``, TRL's ``sequence_truncate``.
    * ``mask``: ``r`` where ``low <= r <= high``, else 0. Seq-MIS of the same; TRL's ``sequence_mask``, verl's
      ``decoupled_seq_is_rs``.
    * ``geometric_mask``: 1 where ``low <= r ** (1 / T) <= high``, else 0. Geo-RS of the same, part 3; SkyRL's
      ``sequence_mask_metric=geometric``, verl's ``seq_mean_k1``, of whose ``-log r`` this is the exponential.
    * ``reject``: 1 where the ratio of every token is within ``low`` and ``high``, else 0. SkyRL's
      ``outlier_token_is_threshold_low`` and ``_high``; verl's ``rollout_token_veto_threshold`` is its lower half.

    Bounds are legal ratios themselves, as in TRL and SkyRL. The logarithm of a ratio is clamped to
    ``MAX_LOG_RATIO``, as in verl and SkyRL.
    NaN is neither masked nor truncated: its weight is NaN, and the step is skipped.

    A masked sequence stays in the mean: the loss is divided by all tokens of the step, as in TRL, so that the mean over
    the sequences sampled is the estimator of Liu, Li et al. Deviation: verl takes a masked sequence out of the mask of
    the loss, and so out of the denominator, entropy bonus and KL loss. Baselines of a group and whitening are of all
    sequences; those of a group are in TRL, too.
    """
    numbers, index_M = sequence_ids_M.unique(return_inverse=True)
    # In float64, since a GPU adds in any order, and whether a sequence is within the bounds must not depend on it
    log_ratios_M = (old_logprobs_M - rollout_logprobs_M).detach().double()
    zeros_S = log_ratios_M.new_zeros(len(numbers))
    logs_S = zeros_S.index_add(0, index_M, log_ratios_M)
    if kind in ("geometric_mask", "reject"):
        logs_S = logs_S / zeros_S.index_add(0, index_M, torch.ones_like(log_ratios_M))
    ratios_S, is_nan_S = _ratios(logs_S), logs_S.isnan()
    lowest_S, highest_S = ratios_S, ratios_S
    if kind == "reject":
        lowest_S, highest_S = (
            _ratios(zeros_S.scatter_reduce(0, index_M, log_ratios_M, extreme, include_self=False))
            for extreme in ("amin", "amax")
        )
    if kind == "truncate":
        is_outside_S, weights_S = highest_S > high, ratios_S.clamp(max=high)
    else:
        is_outside_S = ((lowest_S < low) | (highest_S > high)) & ~is_nan_S
        kept_S = ratios_S if kind == "mask" else torch.ones_like(ratios_S).masked_fill(is_nan_S, math.nan)
        weights_S = kept_S.masked_fill(is_outside_S, 0.0)
    return SequenceWeights(weights_S.to(old_logprobs_M.dtype)[index_M], ratios_S, is_outside_S)


def _ratios(logs: torch.Tensor) -> torch.Tensor:
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
