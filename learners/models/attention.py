"""Attention over a packed row: many sequences one after another without padding; no sequence attends to another.

transformers calls the function registered here once per layer. The linear layers run on the packed tokens, without
padding. On a GPU in half precision torch's ``varlen_attn`` (flash attention, arXiv:2307.08691) takes the row directly.
Elsewhere the sequences of one ``Block`` are stacked (padded to the longest of the block) for one causal
``scaled_dot_product_attention``, then unstacked::

    packed row      [ a a a a a | b b b b | c c | d d ]        T = 13
    blocks          [ ---- 0 ----------- ] [ --- 1 -- ]
    block 0         a a a a a       padding follows a sequence, where causal attention never looks
                    b b b b .

If sequences begin alike, the row holds their common tokens once (``SharedTokens``), and linear layers run once per
token. In blocks, the queries of a sequence are its own tokens in the row, and its keys are copied from the row::

    sequences       [ a b c d ] [ a b e ]
    packed row      [ a b c d e ]
    queries, keys   a b c d, a b c d;   e, a b e

Flash attention takes whole sequences: queries, too, are copied before it, and the tokens of the row are taken from its
output. A sliding window is an argument of it, and a bias of the blocks; it counts positions in a sequence, not in the
row. Attention sinks (a logit per head in the softmax's denominator, arXiv:2508.10925) need the blocks.

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
from torch.nn.functional import pad, scaled_dot_product_attention

from learners.packing import Block, PackedLayout
from ragr1_actors.core.errors import LearnerError
from ragr1_actors.core.models.huggingface import AttentionInterface

PACKED_ATTENTION = "ragr1_packed"
"""Name of the ``attn_implementation`` with which transformers calls ``packed_attention``."""
_SINK_WIDTH = 8
"""Number of dimensions that sinks add to heads; kernels of GPUs take multiples of 8."""


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

    ``sliding_window`` and ``s_aux``, the sinks, are this layer's. The model's attention dropout is ignored: the tokens
    were sampled without it.

    Raises:
        LearnerError: the model needs soft caps.
    """
    if softcap:
        raise LearnerError("policy.model: its attention has soft caps, which the learner lacks; take another model")
    assert attention_mask is None, "a packed row has no mask: the layout holds the ends of the sequences"
    parts_THD = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    window = sliding_window or None
    if s_aux is None and takes_rows(query.device, query.dtype):
        return flash_attention(*parts_THD, packing, scaling, window).unsqueeze(0), None
    # a module in training mode is computed again in the backward pass, so nothing of it is kept
    output_THD = block_attention(*parts_THD, packing, scaling, window, s_aux, keeps_small=not module.training)
    return output_THD.unsqueeze(0), None


def takes_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash attention takes the row directly; else attention runs on padded blocks."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class _Copied(NamedTuple):
    """Keys or values of a block, copied from ``packed_THD`` with every head repeated."""

    packed_THD: torch.Tensor
    block: Block
    groups: int


def flash_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Run flash attention over the boundaries of the sequences: one kernel per layer, no padding; ``[T, H, D]``."""
    shared = packing.shared
    if shared is not None:
        query_THD, key_THD, value_THD = (
            part.index_select(0, shared.spread) for part in (query_THD, key_THD, value_THD)
        )
    output_THD: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with other arguments
        query_THD,
        key_THD,
        value_THD,
        packing.boundaries,
        packing.boundaries,
        packing.max_len,
        packing.max_len,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),  # keys before and behind a query's; causal
        enable_gqa=key_THD.shape[1] != query_THD.shape[1],
    )
    return output_THD if shared is None else output_THD.index_select(0, shared.origin)


def block_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    *,
    keeps_small: bool = True,
) -> torch.Tensor:
    """Run attention block by block, on any device and in any dtype; ``[T, H, D]``.

    A query sees the last ``window`` keys of its sequence, its own included. ``sinks_H`` are further terms of the
    softmax's denominator, as logits. With ``keeps_small`` the backward pass copies keys and values again, and repeats
    them for the heads of a group; not with sinks.
    """
    groups = query_THD.shape[1] // key_THD.shape[1]
    outputs = []
    for block in packing.blocks:
        query_SHLD = _spread(query_THD, block)
        key_SHLD, value_SHLD = (_copies(packed_THD, block, groups) for packed_THD in (key_THD, value_THD))
        copied = ((key_THD, key_SHLD), (value_THD, value_SHLD)) if groups > 1 or block.keys is not None else ()
        bias = block.bias(query_THD, window, num_sinks=sinks_H is not None)
        if sinks_H is not None:
            scaling = scaling or query_THD.shape[-1] ** -0.5
            query_SHLD, key_SHLD, value_SHLD = _with_sinks(query_SHLD, key_SHLD, value_SHLD, sinks_H / scaling)
        with _keeping(copied, block, groups) if keeps_small and copied else nullcontext():
            output_SHLD = scaled_dot_product_attention(
                query_SHLD,
                key_SHLD,
                value_SHLD,
                attn_mask=bias,
                is_causal=bias is None,
                scale=scaling,
            )
        flat = output_SHLD[..., : value_THD.shape[-1]].transpose(1, 2).flatten(0, 1)  # [S * L, H, D]
        outputs.append(flat if block.slots is None else flat.index_select(0, block.slots))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _with_sinks(
    query_SHLD: torch.Tensor, key_SHLD: torch.Tensor, value_SHLD: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a key to every head whose product with each query is its sink, and whose value is 0.

    The product takes ``_SINK_WIDTH`` more dimensions, which are 0 in the other keys.
    """
    queries = pad(query_SHLD, (0, _SINK_WIDTH), value=1.0)
    shares_H1 = (sinks_H.to(key_SHLD.dtype) / _SINK_WIDTH)[:, None, None].expand(len(key_SHLD), -1, 1, _SINK_WIDTH)
    sink_SH1D = pad(shares_H1, (key_SHLD.shape[-1], 0))
    keys = torch.cat((pad(key_SHLD, (0, _SINK_WIDTH)), sink_SH1D), dim=2)
    return queries, keys, pad(value_SHLD, (0, _SINK_WIDTH, 0, 1))


def _keeping(copied: Sequence[tuple[torch.Tensor, torch.Tensor]], block: Block, groups: int) -> saved_tensors_hooks:
    """Return a context in which autograd saves each tensor instead of its copies, bit for bit.

    The copies are saved if a kernel saves them in another shape, as torch's plain one does.
    """
    origins = {_place(copies): _Copied(packed_THD.detach(), block, groups) for packed_THD, copies in copied}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Copied:
        return origins.get(_place(tensor), tensor)

    def unpack(kept: torch.Tensor | _Copied) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else _copies(*kept)

    return saved_tensors_hooks(pack, unpack)


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the identity of a tensor: address, shape and strides."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _copies(packed_THD: torch.Tensor, block: Block, groups: int) -> torch.Tensor:
    """Copy the keys of a block, or its values, and repeat every head ``groups`` times: ``[S, H, L, D]``."""
    if block.keys is None:
        spread_SHLD = _spread(packed_THD, block)
    else:
        tokens = packed_THD.index_select(0, block.keys)
        spread_SHLD = tokens.view(block.num_seqs, block.num_keys, *tokens.shape[1:]).transpose(1, 2)
    return spread_SHLD.repeat_interleave(groups, dim=1) if groups > 1 else spread_SHLD


def _spread(packed_THD: torch.Tensor, block: Block) -> torch.Tensor:
    """Stack the tokens of the sequences of a block from the row: ``[T, H, D]`` to ``[S, H, L, D]``."""
    tokens = packed_THD[block.start : block.stop]
    if block.slots is not None:
        padded = tokens.new_zeros(block.num_seqs * block.num_queries, *tokens.shape[1:])
        tokens = padded.index_copy(0, block.slots, tokens)
    return tokens.view(block.num_seqs, block.num_queries, *tokens.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
