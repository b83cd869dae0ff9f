"""From trajectories to micro-batches: packed rows without padding, balanced over ranks.

::

    trajectories ──flatten──► FlatTrajectories      all tokens one after another, MODEL tokens numbered 0 .. M-1
         lengths ──plan─────► [rank][micro-batch]   indices of trajectories, the same plan on every rank
                  ──pack────► MicroBatch            one row [T] and, for its MODEL tokens, where they are predicted

Whatever a loss needs a MODEL token (advantage, old log-prob ...) stands in columns of length M; ``MicroBatch.columns``
says which entries a micro-batch needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from learners.attention import PackedLayout, packed_layout
from ragr1_actors.types import TokenKind, Trajectory


@dataclass(frozen=True)
class FlatTrajectories:
    """All the tokens of N trajectories one after another."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    offsets: NDArray[np.int64]  # [N + 1], into the tokens
    model_positions: NDArray[np.int64]  # [M], which tokens are MODEL
    model_offsets: NDArray[np.int64]  # [N + 1], into the MODEL tokens
    old_logprobs: NDArray[np.float32]  # [M], as the engine sampled
    policy_versions: NDArray[np.int32]  # [M], the weights that sampled each

    @property
    def lengths(self) -> list[int]:
        """Tokens of every trajectory, prompt included."""
        lengths: list[int] = np.diff(self.offsets).tolist()
        return lengths

    @property
    def model_lengths(self) -> list[int]:
        """MODEL tokens of every trajectory."""
        lengths: list[int] = np.diff(self.model_offsets).tolist()
        return lengths


@dataclass(frozen=True)
class MicroBatch:
    """One packed row, the input of one forward and backward pass. T tokens, M MODEL tokens."""

    token_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [T], from 0 in every sequence
    lengths: tuple[int, ...]  # [num_seqs]
    predict_positions: torch.Tensor  # [M], places in the row whose hidden state predicts a MODEL token
    target_ids: torch.Tensor  # [M]
    columns: torch.Tensor  # [M], which entry of a column belongs to each
    layout: PackedLayout
    weight: float
    """0 for a dummy, which a rank runs only because ZeRO-3's collectives need as many passes of every rank."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return len(self.token_ids)

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to ``device``, or return itself where it is there already."""
        if device == self.token_ids.device:
            return self
        return MicroBatch(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.lengths,
            self.predict_positions.to(device),
            self.target_ids.to(device),
            self.columns.to(device),
            self.layout.to(device),
            self.weight,
        )


def flatten(trajectories: Sequence[Trajectory]) -> FlatTrajectories:
    """Concatenate trajectories and number their MODEL tokens.

    Raises:
        ValueError: a trajectory starts with a MODEL token, which nothing could predict.
    """
    for trajectory in trajectories:
        if trajectory.num_tokens == 0 or trajectory.kinds[0] == TokenKind.MODEL:
            raise ValueError(f"trajectory {trajectory.trajectory_id}: expected a prompt before the first MODEL token")
    is_model = np.concatenate([trajectory.kinds == TokenKind.MODEL for trajectory in trajectories])
    offsets = np.cumsum([0, *(trajectory.num_tokens for trajectory in trajectories)])
    model_positions = np.flatnonzero(is_model)
    return FlatTrajectories(
        token_ids=np.concatenate([trajectory.token_ids for trajectory in trajectories]).astype(np.int64),
        offsets=offsets,
        model_positions=model_positions,
        model_offsets=np.searchsorted(model_positions, offsets),
        old_logprobs=np.concatenate([trajectory.logprobs for trajectory in trajectories])[model_positions],
        policy_versions=np.concatenate([trajectory.policy_versions for trajectory in trajectories])[model_positions],
    )


def plan(
    lengths: Sequence[int], indices: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:  # [num_ranks][num_micro_batches][num_seqs]
    """Share sequences out over ranks and cut each share into micro-batches of at most ``max_tokens``.

    Shares have nearly equal token counts and every rank gets as many micro-batches; an empty one is a dummy. A
    micro-batch holds sequences of similar length. A sequence longer than the budget is a micro-batch of its own. The
    result depends on the lengths alone, so that every rank can compute it.
    """
    by_length = sorted(indices, key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in by_length:  # longest first, to the rank with the least: within 4/3 of the best balance (Graham 1969)
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    micro_batches = [_cut(lengths, share, max_tokens) for share in shares]
    count = max(len(share) for share in micro_batches)
    for share in micro_batches:
        while len(share) < count:
            longest = max(range(len(share)), key=lambda at: len(share[at]), default=-1)
            if longest < 0 or len(share[longest]) < 2:
                share.append([])
                continue
            sequences = share.pop(longest)
            share[longest:longest] = [sequences[: len(sequences) // 2], sequences[len(sequences) // 2 :]]
    return micro_batches


def _cut(lengths: Sequence[int], share: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences sorted by length into runs of at most ``max_tokens``, of about equal size."""
    if not share:
        return []
    total = sum(lengths[index] for index in share)
    target = total / -(-total // max_tokens)
    runs: list[list[int]] = [[]]
    used, before = 0, 0
    for index in share:
        if runs[-1] and (used + lengths[index] > max_tokens or before >= target * len(runs)):
            runs.append([])
            used = 0
        runs[-1].append(index)
        used += lengths[index]
        before += lengths[index]
    return runs


def pack(flat: FlatTrajectories, indices: Sequence[int]) -> MicroBatch:
    """Pack the trajectories ``indices`` into one row; without any, a dummy of weight 0."""
    chosen = np.asarray(indices if len(indices) else [int(np.diff(flat.offsets).argmin())])
    starts, lengths = flat.offsets[chosen], np.diff(flat.offsets)[chosen]
    row_starts = np.cumsum(lengths) - lengths
    columns = _ranges(flat.model_offsets[chosen], np.diff(flat.model_offsets)[chosen])
    num_models = np.diff(flat.model_offsets)[chosen]
    in_row = flat.model_positions[columns] + np.repeat(row_starts - starts, num_models)
    token_ids = flat.token_ids[_ranges(starts, lengths)]
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(_ranges(np.zeros_like(starts), lengths)),
        lengths=tuple(lengths.tolist()),
        predict_positions=torch.from_numpy(in_row - 1),
        target_ids=torch.from_numpy(token_ids[in_row]),
        columns=torch.from_numpy(columns),
        layout=packed_layout(lengths.tolist()),
        weight=1.0 if len(indices) else 0.0,
    )


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``arange(start, start + length)`` of every pair, one after another."""
    ends = np.cumsum(lengths)
    ranges: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - (ends - lengths), lengths)
    return ranges
