"""Attention over a packed row: many sequences one after another, without padding, none seeing another.

transformers calls the function registered here once a layer. The linear layers around it run on the packed tokens, so
nothing is padded there. On a GPU in half precision torch's ``varlen_attn`` (flash attention, arXiv:2307.08691) takes
the row as it is; **that branch has not been run on a GPU yet**. Anywhere else the sequences of one ``Block`` are laid
side by side (padded to the longest of the block) for one causal ``scaled_dot_product_attention``, and gathered back::

    packed row      [ a a a a a | b b b b | c c | d d ]        T = 13
    blocks          [ ---- 0 ----------- ] [ --- 1 -- ]
    block 0         a a a a a       padding stands after a sequence, where a causal query never looks
                    b b b b .

Nothing of size T x T exists: transformers builds no mask for an attention function without a registered mask function.

Notation: T tokens of the row, S sequences of a block, L longest of a block, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ragr1_actors.core.errors import LearnerError

PACKED_ATTENTION = "ragr1_packed"
"""Value of ``attn_implementation`` under which transformers finds ``packed_attention``."""

MAX_BLOCK_PADDING = 0.125
"""Share of a block that may be padding before another block is opened: more blocks, more calls of the kernel."""


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences of similar length."""

    start: int
    """First token in the row."""
    stop: int
    num_seqs: int
    max_len: int
    slots: torch.Tensor | None  # [stop - start] of int64
    """Place of every token in the padded ``[S * L]``; None where all the sequences have the same length."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a packed row lie; travels to the attention function as the keyword ``packing``."""

    blocks: tuple[Block, ...]
    boundaries: torch.Tensor  # [num_seqs + 1] of int32
    """Where the sequences begin, and where the last one ends: ``[0, 5, 9, 11, 13]``."""
    max_len: int
    padded_cells: int
    """Query-key pairs of all the blocks, padding included."""
    useful_cells: int
    """Query-key pairs of all the sequences alone."""

    def to(self, device: torch.device) -> PackedLayout:
        """Copy to ``device``."""
        blocks = (replace(b, slots=None if b.slots is None else b.slots.to(device)) for b in self.blocks)
        return replace(self, blocks=tuple(blocks), boundaries=self.boundaries.to(device))


def packed_layout(lengths: Sequence[int], max_padding: float = MAX_BLOCK_PADDING) -> PackedLayout:
    """Group neighbouring sequences into blocks. Sorted lengths give few blocks; any order gives the same result."""
    blocks: list[Block] = []
    first, start, longest, used = 0, 0, 0, 0
    for index in range(len(lengths) + 1):
        if index < len(lengths):
            new_longest = max(longest, lengths[index])
            padded = (index - first + 1) * new_longest
            if index == first or padded - used - lengths[index] <= max_padding * padded:
                longest, used = new_longest, used + lengths[index]
                continue
        if index > first:
            blocks.append(_block(start, lengths[first:index], longest))
        if index < len(lengths):
            first, start, longest, used = index, start + used, lengths[index], lengths[index]
    return PackedLayout(
        tuple(blocks),
        boundaries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_len=max(lengths),
        padded_cells=sum(block.num_seqs * block.max_len**2 for block in blocks),
        useful_cells=sum(length**2 for length in lengths),
    )


def _block(start: int, lengths: Sequence[int], longest: int) -> Block:
    used = sum(lengths)
    slots = None
    if used != len(lengths) * longest:
        slots = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])
    return Block(start, start + used, len(lengths), longest, slots)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,  # [1, H_kv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    packing: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside every sequence of the row. Returns ``[1, T, H, D]``, as transformers expects it.

    Raises:
        LearnerError: the model's attention is another one.
    """
    if softcap or s_aux is not None or (sliding_window and packing.max_len > sliding_window):
        raise LearnerError(
            "policy.model: its attention has a sliding window shorter than a trajectory, soft caps or sinks, which "
            "packed rows have not; take a model with plain causal attention"
        )
    assert attention_mask is None, "a packed row takes no mask: the layout says where sequences end"
    query_THD, key_THD, value_THD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if takes_rows(query.device, query.dtype) and not dropout:
        return flash_attention(query_THD, key_THD, value_THD, packing, scaling).unsqueeze(0), None
    return block_attention(query_THD, key_THD, value_THD, packing, scaling, dropout).unsqueeze(0), None


def takes_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention takes the row as it is there; else it is laid out in blocks, with their padding."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def flash_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, as has value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attend with flash attention over the boundaries of the sequences: one kernel a layer, nothing padded."""
    output_THD: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only where more is asked for
        query_THD,
        key_THD,
        value_THD,
        packing.boundaries,
        packing.boundaries,
        packing.max_len,
        packing.max_len,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=key_THD.shape[1] != query_THD.shape[1],
    )
    return output_THD


def block_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, as has value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend block by block, on any device and in any dtype."""
    groups = query_THD.shape[1] // key_THD.shape[1]
    if groups > 1:
        key_THD, value_THD = key_THD.repeat_interleave(groups, dim=1), value_THD.repeat_interleave(groups, dim=1)
    outputs = []
    for block in packing.blocks:
        output_SHLD = scaled_dot_product_attention(
            _spread(query_THD, block),
            _spread(key_THD, block),
            _spread(value_THD, block),
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
        )
        flat = output_SHLD.transpose(1, 2).flatten(0, 1)  # [S * L, H, D]
        outputs.append(flat if block.slots is None else flat.index_select(0, block.slots))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _spread(packed_THD: torch.Tensor, block: Block) -> torch.Tensor:
    """Lay the sequences of a block side by side: ``[T, H, D]`` to ``[S, H, L, D]``."""
    tokens = packed_THD[block.start : block.stop]
    if block.slots is not None:
        padded = tokens.new_zeros(block.num_seqs * block.max_len, *tokens.shape[1:])
        tokens = padded.index_copy(0, block.slots, tokens)
    return tokens.view(block.num_seqs, block.max_len, *tokens.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
