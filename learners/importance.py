"""Weights of a policy loss that correct for the engine, which sampled the tokens in place of the learner.

A ratio is the probability under the learner at the start of the update (``old``), divided by the probability under the
engine (``rollout``). The clipped ratio of the policy loss compares with ``old`` and bounds the update only; a weight
corrects for the policy that sampled (Hilton et al., arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298). No gradient
flows through a weight.

Deviation of all weights here: in the sources engine and learner have the same version; here ``old`` is the newest
version, so with a policy lag a weight corrects for the lag too. Entropy bonus, KL terms and value loss have no weight.

Notation: M MODEL tokens, S sequences. A sequence is the MODEL tokens of a trajectory, as in GSPO, or of a row of it
where its conversation was rewritten; all of them are in one call. Log-probs are float32 in training, in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from learners.losses import MAX_LOG_RATIO, ratios
from learners.options import CorrectionKind


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
