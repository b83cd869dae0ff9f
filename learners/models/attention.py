"""Attention over a packed row: many sequences one after another without padding; no sequence attends to another.

transformers calls the function registered here once per layer. The linear layers run on the packed tokens, without
padding. On a GPU in half precision torch's ``varlen_attn`` (flash attention, arXiv:2307.08691) takes the row directly.
Elsewhere the sequences of one ``Block`` are stacked (padded to the longest of the block) for one causal
``scaled_dot_product_attention``, then unstacked::

    packed row      [ a a a a a | b b b b | c c | d d ]        T = 13
    blocks          [ ---- 0 ----------- ] [ --- 1 -- ]
    block 0         a a a a a       padding follows a sequence, where causal attention never looks
                    b b b b .

Where sequences begin alike, the row holds their common tokens once (``SharedTokens``). Queries, keys and values are
copied to whole sequences before attention, and the first copy of every token is taken after it: linear layers run once
per token, attention once per sequence.

No tensor of size T x T exists: transformers builds no mask for an attention function without a mask function.

Notation: T tokens of the row, S sequences of a block, L longest of a block, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from learners.packing import Block, PackedLayout
from ragr1_actors.core.errors import LearnerError
from ragr1_actors.core.models.huggingface import AttentionInterface

PACKED_ATTENTION = "ragr1_packed"
"""The ``attn_implementation`` with which transformers calls ``packed_attention``."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,  # [1, H_kv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    packing: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Apply causal attention within every sequence of the row; return ``[1, T, H, D]`` as transformers expects.

    The model's attention dropout is ignored: the tokens were sampled without it.

    Raises:
        LearnerError: the model needs another attention: a short sliding window, soft caps or sinks.
    """
    if softcap or s_aux is not None or (sliding_window and packing.max_len > sliding_window):
        raise LearnerError(
            "policy.model: its attention has a sliding window shorter than a trajectory, soft caps or sinks; expected "
            "plain causal attention; take another model"
        )
    assert attention_mask is None, "a packed row has no mask: the layout holds the ends of the sequences"
    parts_THD = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    shared = packing.shared
    if shared is not None:
        parts_THD = tuple(part.index_select(0, shared.spread) for part in parts_THD)
    if takes_rows(query.device, query.dtype):
        output_THD = flash_attention(*parts_THD, packing, scaling)
    else:
        # a module in training mode is computed again in the backward pass, so that nothing of it is kept
        output_THD = block_attention(*parts_THD, packing, scaling, keeps_small=not module.training)
    if shared is not None:
        output_THD = output_THD.index_select(0, shared.origin)
    return output_THD.unsqueeze(0), None


def takes_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash attention takes the row directly; else attention runs on padded blocks."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class _Repeated(NamedTuple):
    """A tensor that is ``origin`` with every head repeated."""

    origin: torch.Tensor
    groups: int


def flash_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
) -> torch.Tensor:
    """Run flash attention over the boundaries of the sequences: one kernel per layer, no padding; ``[T, H, D]``."""
    output_THD: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with other arguments
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
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    *,
    keeps_small: bool = True,
) -> torch.Tensor:
    """Run attention block by block, on any device and in any dtype; ``[T, H, D]``.

    With ``keeps_small`` the backward pass repeats keys and values again for the heads of a group.
    """
    groups = query_THD.shape[1] // key_THD.shape[1]
    outputs = []
    for block in packing.blocks:
        query_SHLD, *small = (_spread(packed, block) for packed in (query_THD, key_THD, value_THD))
        key_SHLD, value_SHLD = (tensor.repeat_interleave(groups, dim=1) for tensor in small) if groups > 1 else small
        with _keeping(small, (key_SHLD, value_SHLD), groups) if keeps_small and groups > 1 else nullcontext():
            output_SHLD = scaled_dot_product_attention(query_SHLD, key_SHLD, value_SHLD, is_causal=True, scale=scaling)
        flat = output_SHLD.transpose(1, 2).flatten(0, 1)  # [S * L, H, D]
        outputs.append(flat if block.slots is None else flat.index_select(0, block.slots))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _keeping(small: Sequence[torch.Tensor], repeated: Sequence[torch.Tensor], groups: int) -> saved_tensors_hooks:
    """Return a context in which autograd keeps ``small`` for tensors that are ``repeated`` from them: bit for bit."""
    origins = {tensor.data_ptr(): origin.detach() for tensor, origin in zip(repeated, small, strict=True)}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Repeated:
        origin = origins.get(tensor.data_ptr())
        return tensor if origin is None else _Repeated(origin, groups)

    def unpack(kept: torch.Tensor | _Repeated) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.origin.repeat_interleave(kept.groups, dim=1)

    return saved_tensors_hooks(pack, unpack)


def _spread(packed_THD: torch.Tensor, block: Block) -> torch.Tensor:
    """Stack the sequences of a block: ``[T, H, D]`` to ``[S, H, L, D]``."""
    tokens = packed_THD[block.start : block.stop]
    if block.slots is not None:
        padded = tokens.new_zeros(block.num_seqs * block.max_len, *tokens.shape[1:])
        tokens = padded.index_copy(0, block.slots, tokens)
    return tokens.view(block.num_seqs, block.max_len, *tokens.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
