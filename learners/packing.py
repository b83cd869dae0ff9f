"""Packing of trajectories into micro-batches: rows without padding, balanced over the learner ranks.

::

    trajectories ──flatten──► FlatTrajectories   all tokens, one sequence after another; MODEL tokens are 0 .. M-1
                  ──bundle──► Bundle                sequences that begin alike and stay in one micro-batch
                  ──plan────► [rank][micro-batch]   indices of sequences; every rank computes the same plan
                  ──pack────► MicroBatch            one row [T], and where it predicts its MODEL tokens

A sequence is the input of the model from its first token: a trajectory, or each of ``Trajectory.rows`` if its
conversation was rewritten. Sequences of a group begin with the same prompt, and often with the same calls and results.
A row holds such a common beginning once. Under causal attention its tokens have the same hidden states in every
sequence, and their gradients add up over the sequences.

The inputs of a loss per MODEL token (advantages, old log-probs) are in ``TokenColumns`` of length M;
``MicroBatch.column_index`` selects the entries of a micro-batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.models.vision import rope_positions
from ragr1_actors.core.types import TokenKind, Trajectory

MAX_BLOCK_PADDING = 0.125
"""Largest share of padding in a block, above which a new block begins. More blocks need more kernel calls."""
MIN_SHARED = 0.125
"""Smallest share of tokens that a sequence must have in common with another one to be bundled with it, and that a row
must save to be computed once: smaller savings cost as much as the copies before attention."""
_COPIED = 0.125
"""Cost of a token that the row already has, in tokens: its copies in attention. With SmolLM2-135M in bfloat16 flash
attention keeps 3.1 KB of them per layer: query, output, and three heads of keys and values. The activations of a token
take ten times as much."""
_BUNDLES_PER_RANK = 4
"""Least number of bundles per rank: larger bundles would leave the ranks with unequal work."""


@dataclass(frozen=True)
class FlatTrajectories:
    """Tokens of N trajectories, one after another, in S sequences."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    offsets: NDArray[np.int64]  # [S + 1], where each sequence begins in the tokens, and where the last one ends
    response_mask: NDArray[np.bool_]  # [num_tokens], True for tokens of a trained kind: the only mask of every loss
    model_offsets: NDArray[np.int64]  # [S + 1], the same offsets, counted in MODEL tokens
    first_sequences: NDArray[np.int64]  # [N + 1], the first sequence of each trajectory, and S
    rollout_logprobs: NDArray[np.float32]  # [M], under the engine that sampled
    policy_versions: NDArray[np.int32]  # [M], version of the weights that sampled each token; -1 where none did
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens of all sequences, in their order."""
    rope_ids: NDArray[np.int64] | None = None  # [3, num_tokens]
    """Rotary positions of every token in its sequence; None without images."""

    @cached_property
    def contents(self) -> NDArray[np.int64]:
        """Token ids with a number of its image, below 0, for each placeholder: equal ones have equal states."""
        if not self.images:
            return self.token_ids
        found, numbers = self.token_ids.copy(), dict[Image, int]()
        for one in self.images:
            found[one.start : one.start + one.num_tokens] = -1 - numbers.setdefault(one.image, len(numbers))
        return found

    @cached_property
    def model_positions(self) -> NDArray[np.int64]:
        """Positions of the MODEL tokens in ``token_ids``, ``[M]``."""
        return np.flatnonzero(self.response_mask)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens per sequence, prompt included, ``[S]``."""
        lengths: list[int] = np.diff(self.offsets).tolist()
        return lengths

    @property
    def model_lengths(self) -> list[int]:
        """Number of MODEL tokens per trajectory, ``[N]``."""
        lengths: list[int] = np.diff(self.trajectory_offsets).tolist()
        return lengths

    @property
    def trajectory_offsets(self) -> NDArray[np.int64]:
        """Position where each trajectory begins, counted in MODEL tokens, and where the last one ends, ``[N + 1]``."""
        return self.model_offsets[self.first_sequences]

    def sequences(self, trajectories: Sequence[int]) -> list[int]:
        """Return the indices of all sequences of some trajectories."""
        first = self.first_sequences
        return [sequence for index in trajectories for sequence in range(first[index], first[index + 1])]


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences with similar numbers of queries and keys, which block attention pads to the largest.

    The queries of a sequence are its tokens in the row, its keys all its tokens.
    """

    start: int
    """Position of the first token in the row."""
    stop: int
    num_seqs: int
    num_queries: int
    """Largest number of queries of a sequence."""
    num_keys: int
    """Largest number of keys of a sequence."""
    slots: torch.Tensor | None  # [stop - start] of int64
    """Position of every token in the padded ``[num_seqs * num_queries]``; None if nothing is padded."""
    keys: torch.Tensor | None = None  # [num_seqs * num_keys] of int64
    """Position in the row of every key, 0 in the padding; None if all sequences are whole in the row."""
    num_common: torch.Tensor | None = None  # [num_seqs] of int64
    """Number of keys of each sequence before its first query's key; None with ``keys``."""

    def bias(self, like: torch.Tensor, window: int | None = None, num_sinks: int = 0) -> torch.Tensor | None:
        """Return the addend of the scores, 0 or -inf, ``[num_seqs, 1, num_queries, num_keys + num_sinks]``.

        A query sees the last ``window`` keys of its sequence up to its own, by default all, and the sinks. The bias has
        the dtype and device of ``like``; it is None if all is causal. It is made when block attention first asks: flash
        attention needs none, and it grows with the square of the length. All layers share it; torch would make one per
        layer of a mask of booleans, and keep it.
        """
        if window is not None and window >= self.num_keys:
            window = None
        if self.num_common is None and window is None and not num_sinks:
            return None
        key = (like.dtype, window, num_sinks)
        if key not in self._biases:
            positions = torch.arange(self.num_queries, device=like.device).expand(self.num_seqs, -1)
            if self.num_common is not None:
                positions = positions + self.num_common[:, None]
            last_key = positions.clamp(max=self.num_keys - 1)[:, None, :, None]  # else a padded query may see no key
            keys = torch.arange(self.num_keys, device=like.device)
            is_hidden = keys > last_key
            if window is not None:
                is_hidden |= keys <= last_key - window
            bias = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
                is_hidden, -torch.inf
            )
            self._biases[key] = pad(bias, (0, num_sinks)) if num_sinks else bias
        return self._biases[key]

    @cached_property
    def _biases(self) -> dict[tuple[torch.dtype, int | None, int], torch.Tensor]:
        return {}

    def to(self, device: torch.device) -> Block:
        """Copy to ``device``."""
        slots, keys, num_common = (
            None if x is None else x.to(device) for x in (self.slots, self.keys, self.num_common)
        )
        return replace(self, slots=slots, keys=keys, num_common=num_common)


Bundle = dict[int, int]
"""Sequences that stay in one micro-batch, because they begin alike, and how many tokens each takes from the others."""


@dataclass(frozen=True)
class SharedTokens:
    """Map between a row, which holds every token once, and its whole sequences, one after another.

    The sequences ``[a b c]`` and ``[a b d]`` are the row ``[a b c d]``: ``spread`` is ``[0, 1, 2, 0, 1, 3]`` and
    ``origin`` is ``[0, 1, 2, 5]``. In the row the second sequence is ``[d]``.
    """

    spread: torch.Tensor  # [E] of int64, for every token of the sequences its position in the row
    origin: torch.Tensor  # [T] of int64, for every token of the row its position in the sequence that it belongs to

    def to(self, device: torch.device) -> SharedTokens:
        """Copy to ``device``."""
        return SharedTokens(self.spread.to(device), self.origin.to(device))


@dataclass(frozen=True)
class PackedLayout:
    """Positions of the sequences in a packed row; the attention function receives it as the keyword ``packing``."""

    blocks: tuple[Block, ...]
    boundaries: torch.Tensor  # [num_seqs + 1] of int32
    """Positions where the sequences begin if all are whole, and where the last one ends: ``[0, 5, 9, 11, 13]``."""
    max_len: int
    padded_cells: int
    """Query-key pairs of all blocks, padding included."""
    useful_cells: int
    """Query-key pairs of the sequences alone."""
    num_tokens: int
    """Number of tokens of all sequences; common tokens count once per sequence."""
    shared: SharedTokens | None = None
    """Map of the row to its sequences; None if every token of the sequences is in the row."""

    def for_one_pass(self) -> PackedLayout:
        """Return a copy whose blocks have no bias, so that the biases of a pass are freed with it."""
        return replace(self, blocks=tuple(replace(block) for block in self.blocks))

    def to(self, device: torch.device) -> PackedLayout:
        """Copy to ``device``."""
        shared = None if self.shared is None else self.shared.to(device)
        blocks = tuple(block.to(device) for block in self.blocks)
        return replace(self, blocks=blocks, boundaries=self.boundaries.to(device), shared=shared)


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of T tokens, and the M MODEL tokens of its sequences: one forward and backward pass."""

    token_ids: torch.Tensor  # [T] of int64
    position_ids: torch.Tensor  # [T] of int64, the position of every token in its sequence
    predict_positions: torch.Tensor  # [P] of int64, positions in the row whose hidden state predicts a MODEL token
    target_ids: torch.Tensor  # [P] of int64, the predicted tokens
    column_index: torch.Tensor  # [M] of int64, index of each MODEL token in ``TokenColumns``; always on the host
    layout: PackedLayout
    weight: float
    """Weight 1, or 0 for a dummy: ZeRO-3's collectives need equally many passes on every rank."""
    predicted_by: torch.Tensor | None = None  # [M] of int64
    """Entry of ``predict_positions`` for each MODEL token; None if each has an entry. Sequences with the same token
    after the same tokens share an entry: P is at most M."""
    rope_ids: torch.Tensor | None = None  # [3, T] of int64
    """Rotary positions of every token; None without images: ``position_ids``."""
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens of the row, each place once."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the row, T."""
        return len(self.token_ids)

    def per_model_token(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return the values of predictions for every MODEL token: ``[P]`` to ``[M]``."""
        return values_P if self.predicted_by is None else values_P.index_select(0, self.predicted_by)

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to ``device``; return ``self`` if it is there already.

        ``column_index`` stays on the host, as the columns do: a tensor of the host has no index on another device.
        """
        if device == self.token_ids.device:
            return self
        movable = (torch.Tensor, PackedLayout)
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, movable) and name != "column_index"
        }
        return replace(self, **moved)


MODEL_ONLY = frozenset((TokenKind.MODEL,))


def flatten(trajectories: Sequence[Trajectory], trained_kinds: frozenset[TokenKind] = MODEL_ONLY) -> FlatTrajectories:
    """Concatenate trajectories and number their MODEL tokens; tokens of other ``trained_kinds`` count as MODEL.

    Raises:
        ValueError: a sequence starts with a token that is trained, which no earlier token can predict.
    """
    kinds = sorted(trained_kinds)
    lengths: list[int] = []
    for trajectory in trajectories:
        for row in trajectory.rows:
            if row.start == row.stop or trajectory.kinds[row.start] in kinds:
                name = trajectory.trajectory_id
                raise ValueError(f"trajectory {name}: expected a prompt before the first MODEL token of a row")
            lengths.append(row.stop - row.start)
    images = _images(trajectories)
    all_kinds = np.concatenate([trajectory.kinds for trajectory in trajectories])
    response_mask = np.logical_or.reduce([all_kinds == kind for kind in kinds])
    offsets = np.cumsum([0, *lengths])
    return FlatTrajectories(
        token_ids=np.concatenate([trajectory.token_ids for trajectory in trajectories]).astype(np.int64),
        offsets=offsets,
        response_mask=response_mask,
        model_offsets=np.searchsorted(np.flatnonzero(response_mask), offsets),
        first_sequences=np.cumsum([0, *(len(trajectory.rows) for trajectory in trajectories)]),
        rollout_logprobs=np.concatenate([trajectory.logprobs for trajectory in trajectories])[response_mask],
        policy_versions=np.concatenate([trajectory.policy_versions for trajectory in trajectories])[response_mask],
        images=images,
        rope_ids=_rope_ids(offsets, images) if images else None,
    )


def _images(trajectories: Sequence[Trajectory]) -> tuple[PlacedImage, ...]:
    starts = accumulate((one.num_tokens for one in trajectories), initial=0)
    pairs = zip(trajectories, starts, strict=False)
    return tuple(replace(image, start=start + image.start) for one, start in pairs for image in one.images)


def _rope_ids(offsets: NDArray[np.int64], images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    within: list[list[PlacedImage]] = [[] for _ in offsets[1:]]
    for one, number in zip(images, np.searchsorted(offsets, [one.start for one in images], "right") - 1, strict=True):
        within[number].append(replace(one, start=one.start - int(offsets[number])))
    lengths = np.diff(offsets).tolist()
    return np.concatenate([rope_positions(n, own) for n, own in zip(lengths, within, strict=True)], axis=1)


def bundle(
    flat: FlatTrajectories, indices: Sequence[int], num_ranks: int, max_tokens: int, *, shares: bool = True
) -> list[Bundle]:
    """Bundle the sequences ``indices`` that begin alike; the size of a bundle is at most ``max_tokens``.

    Without ``shares``, each is in a bundle alone, and ``pack`` holds it whole.

    Sorted by their tokens, every sequence is next to the one with which it shares the longest beginning. With groups of
    eight, .47 of the tokens are computed on 2WikiMultihopQA, and .19 in the generated world (SmolLM2-135M, ``python -m
    benchmarks.real.shared_prefixes RUN``).
    """
    lengths = flat.lengths
    limit: float = max_tokens
    if num_ranks > 1:
        limit = min(limit, sum(lengths[index] for index in indices) / (num_ranks * _BUNDLES_PER_RANK))
    bundles: list[Bundle] = []
    size = 0.0  # of the last bundle
    for index, common in _num_common(flat, indices).items():
        added = lengths[index] - common + _COPIED * common
        if shares and common >= MIN_SHARED * lengths[index] and size + added <= limit:
            bundles[-1][index] = common
            size += added
        else:
            bundles.append({index: 0})
            size = lengths[index]
    return bundles


def _common(flat: FlatTrajectories, one: int, two: int) -> int:
    """Return the number of tokens with which both sequences begin."""
    starts = flat.offsets[[one, two]]
    count = int((flat.offsets[[one + 1, two + 1]] - starts).min())
    is_equal = np.equal(*(flat.contents[start : start + count] for start in starts))
    return count if is_equal.all() else int(is_equal.argmin())


def assign_micro_batches(
    lengths: Sequence[int], bundles: Sequence[Bundle], num_ranks: int, max_tokens: int, pair_cost: float
) -> list[list[list[int]]]:  # [num_ranks][num_micro_batches][num_seqs]
    """Distribute bundles over ranks, then pack each share into micro-batches of at most ``max_tokens``, first fit.

    Shares have nearly equal cost: the tokens that are computed and ``pair_cost * length**2`` of every sequence, in
    tokens, with ``scoring.pair_cost``. Every rank gets the same number of micro-batches, the most expensive first, so
    that ranks that run in lockstep (ZeRO-3) wait little. An empty micro-batch is a dummy; it is made only where no
    micro-batch has two bundles. Within a micro-batch lengths decrease. A sequence longer than the budget gets a
    micro-batch alone. The result depends on the batch only, so every rank computes it without communication.

    Measured on 512 log-normal lengths of 200-8,000 tokens, 8 ranks, a budget of 16,384, the pair cost of Qwen2.5-1.5B,
    ten seeds: 6.9 micro-batches per rank, and ranks in lockstep take 0.5 % longer than the mean rank alone (7.0 % when
    balanced by tokens). To pack before distributing left the most expensive rank 4.8 % above the mean; this order
    leaves it 0.02 % above.
    """
    computed = [sum(lengths[index] - common for index, common in one.items()) for one in bundles]
    sizes = [n + _COPIED * sum(one.values()) for n, one in zip(computed, bundles, strict=True)]
    costs = [n + pair_cost * sum(lengths[i] ** 2 for i in one) for n, one in zip(computed, bundles, strict=True)]
    largest_first = sorted(range(len(bundles)), key=lambda number: (-sizes[number], tuple(bundles[number])))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for number in largest_first:  # to the rank with the lowest cost: within 4/3 of the best balance (Graham 1969)
        load, rank = loads[0]
        shares[rank].append(number)
        heapq.heapreplace(loads, (load + costs[number], rank))
    micro_batches = [_first_fit(sizes, share, max_tokens) for share in shares]
    count = max(len(share) for share in micro_batches)
    for share in micro_batches:
        while len(share) < count:
            most = max(range(len(share)), key=lambda at: len(share[at]), default=-1)
            if most < 0 or len(share[most]) < 2:
                share.append([])
                continue
            chosen = share.pop(most)
            share += [chosen[::2], chosen[1::2]]
        share.sort(key=lambda chosen: -sum(costs[number] for number in chosen))

    def members(chosen: list[int]) -> list[int]:
        found = [index for number in chosen for index in bundles[number]]
        return sorted(found, key=lambda index: (-lengths[index], index))

    return [[members(chosen) for chosen in share] for share in micro_batches]


def _first_fit(sizes: Sequence[float], share: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each bundle into the first micro-batch with room: for decreasing sizes at most 11/9 of the optimum."""
    micro_batches: list[list[int]] = []
    room: list[float] = []
    for index in share:
        at = next((at for at, free in enumerate(room) if sizes[index] <= free), len(room))
        if at == len(room):
            micro_batches.append([])
            room.append(max_tokens)
        micro_batches[at].append(index)
        room[at] -= sizes[index]
    return micro_batches


def pack(
    flat: FlatTrajectories, indices: Sequence[int], max_tokens: float = math.inf, *, shares: bool = True
) -> MicroBatch:
    """Pack the sequences ``indices`` into one row; without any, return a dummy of weight 0.

    The row has the sequences in the order of ``indices`` if it holds them whole, else by the number of their own tokens
    in it. It holds them whole without ``shares``, or if they have less than ``MIN_SHARED`` in common and fit into
    ``max_tokens``: bundles are planned as if every common beginning were computed once.
    """
    chosen = list(indices) if len(indices) else [int(np.diff(flat.offsets).argmin())]
    num_common, lengths_N = _num_common(flat, chosen), flat.lengths
    num_tokens = sum(lengths_N[index] for index in chosen)
    if not shares or (num_tokens <= max_tokens and sum(num_common.values()) < MIN_SHARED * num_tokens):
        num_common = dict.fromkeys(chosen, 0)
    else:
        chosen.sort(key=lambda index: (num_common[index] - lengths_N[index], -lengths_N[index], index))
    order = np.asarray(chosen)
    starts, lengths = flat.offsets[order], np.diff(flat.offsets)[order]
    sequence_starts = np.cumsum(lengths) - lengths
    num_models = np.diff(flat.model_offsets)[order]
    column_index = _ranges(flat.model_offsets[order], num_models)
    in_sequences = flat.model_positions[column_index] + np.repeat(sequence_starts - starts, num_models)
    places = _ranges(starts, lengths)
    token_ids = flat.token_ids[places]
    position_ids = _ranges(np.zeros_like(starts), lengths)
    target_ids, predicting, shared, predicted_by = token_ids[in_sequences], in_sequences - 1, None, None
    if any(num_common.values()):
        shared = _share(flat, chosen, num_common)
        origin = shared.origin.numpy()
        token_ids, position_ids, places = token_ids[origin], position_ids[origin], places[origin]
        pairs, entries = np.unique(shared.spread.numpy()[predicting] << 32 | target_ids, return_inverse=True)
        predicting, target_ids = pairs >> 32, pairs & (2**32 - 1)
        predicted_by = torch.from_numpy(entries)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        predict_positions=torch.from_numpy(predicting),
        target_ids=torch.from_numpy(target_ids),
        column_index=torch.from_numpy(column_index),
        layout=packed_layout(lengths.tolist(), [num_common[index] for index in chosen], shared),
        weight=1.0 if len(indices) else 0.0,
        predicted_by=predicted_by,
        rope_ids=None if flat.rope_ids is None else torch.from_numpy(flat.rope_ids[:, places]),
        images=_images_at(flat, places),
    )


def _images_at(flat: FlatTrajectories, places: NDArray[np.int64]) -> tuple[PlacedImage, ...]:
    """Return the images of a row, whose tokens come from ``places`` of the batch."""
    if not flat.images:
        return ()
    starts = {one.start: one for one in flat.images}
    positions = np.flatnonzero(np.isin(places, [*starts])).tolist()
    return tuple(replace(starts[int(places[position])], start=position) for position in positions)


def _num_common(flat: FlatTrajectories, indices: Sequence[int]) -> dict[int, int]:
    """Return for every sequence, sorted by tokens, how many tokens at its beginning the sequence before it also has.

    They are sorted as texts are: the one with the smaller token at their first difference comes first.
    """

    def key(index: int) -> bytes:  # big-endian bytes compare as the numbers do
        return flat.contents[flat.offsets[index] : flat.offsets[index + 1]].astype(">u8").tobytes()

    found, before = {}, -1
    for index in sorted(indices, key=key):
        found[index] = _common(flat, before, index) if before >= 0 else 0
        before = index
    return found


def _share(flat: FlatTrajectories, chosen: list[int], num_common: dict[int, int]) -> SharedTokens:
    """Give the tokens that sequences have in common, ``num_common``, to the first of them in the order of tokens."""
    lengths = flat.lengths
    own = [lengths[index] - num_common[index] for index in chosen]
    own_lengths = np.array(own, np.int64)
    row_starts = dict(zip(chosen, accumulate(own[:-1], initial=0), strict=True))
    in_row: dict[int, NDArray[np.int64]] = {}
    before = -1
    for index, common in num_common.items():
        new = row_starts[index] + np.arange(lengths[index] - common)
        in_row[index] = np.concatenate([in_row[before][:common], new]) if common else new
        before = index
    ends = np.cumsum([lengths[index] for index in chosen])
    origin = _ranges(ends - own_lengths, own_lengths)
    return SharedTokens(torch.from_numpy(np.concatenate([in_row[index] for index in chosen])), torch.from_numpy(origin))


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate ``arange(start, start + length)`` of every pair."""
    ends = np.cumsum(lengths)
    ranges: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - (ends - lengths), lengths)
    return ranges


def packed_layout(
    lengths: Sequence[int], num_common: Sequence[int] | None = None, shared: SharedTokens | None = None
) -> PackedLayout:
    """Group neighbouring sequences into blocks. Sorted lengths give the fewest blocks; the result is the same.

    ``num_common`` counts, per sequence, the tokens at its beginning that belong to another one; see ``shared``.
    """
    common = [0] * len(lengths) if num_common is None else num_common
    own = [length - count for length, count in zip(lengths, common, strict=True)]
    parts: list[tuple[int, int]] = []
    first = 0
    for stop in range(1, len(lengths) + 1):
        if stop - first > 1 and any(_padding(counts[first:stop]) > MAX_BLOCK_PADDING for counts in (own, lengths)):
            parts.append((first, stop - 1))
            first = stop - 1
    parts.append((first, len(lengths)))
    row_starts, starts = ([*accumulate(counts, initial=0)] for counts in (own, lengths))
    blocks = []
    for first, stop in parts:
        block = _block(row_starts[first], own[first:stop], lengths[first:stop])
        if shared is not None and block is not None and any(common[first:stop]):
            block = _with_keys(block, common[first:stop], lengths[first:stop], shared.spread[starts[first] :])
        blocks += [block] if block is not None else []
    return PackedLayout(
        tuple(blocks),
        boundaries=torch.tensor(starts, dtype=torch.int32),
        max_len=max(lengths),
        padded_cells=sum(block.num_seqs * block.num_queries * block.num_keys for block in blocks),
        useful_cells=sum(count * length for count, length in zip(own, lengths, strict=True)),
        num_tokens=sum(lengths),
        shared=shared,
    )


def _padding(counts: Sequence[int]) -> float:
    padded = len(counts) * max(counts)
    return 1 - sum(counts) / padded if padded else 0.0


def _block(start: int, own: Sequence[int], lengths: Sequence[int]) -> Block | None:
    """Return the block of sequences; None if none of them has a token in the row."""
    used, num_queries = sum(own), max(own)
    if not used:
        return None
    slots = None
    if used != len(own) * num_queries:
        slots = torch.cat([torch.arange(count) + row * num_queries for row, count in enumerate(own)])
    return Block(start, start + used, len(own), num_queries, max(lengths), slots)


def _with_keys(block: Block, common: Sequence[int], lengths: Sequence[int], spread: torch.Tensor) -> Block:
    """Return the block with the keys of its sequences; ``spread`` begins with their positions in the row."""
    keys = torch.zeros(block.num_seqs, block.num_keys, dtype=torch.int64)
    for row, part in enumerate(spread[: sum(lengths)].split(list(lengths))):
        keys[row, : len(part)] = part
    return replace(block, keys=keys.flatten(), num_common=torch.tensor(common))
