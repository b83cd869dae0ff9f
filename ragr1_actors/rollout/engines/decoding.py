"""Tensors of the transformers engine: key-value cache, attention over shared heads, and the draw of the next tokens.

transformers repeats the keys and values for every head of a group (arXiv:2305.13245) before it attends with a mask.
Here the heads of a group are further queries over the same keys and values, so nothing is copied::

    query [n, kv_heads * groups, new, D] ──► [n, kv_heads, groups * new, D]      key, value [n, kv_heads, length, D]

A decoding step of one layer, 128 rows of 400 tokens, nine heads over three in bf16, takes 13 ms instead of 79 on two
cores, and in float32 28 instead of 130: `python -m benchmarks.rollout.grouped_attention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ragr1_actors.core.models.huggingface import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    CacheLayerMixin,
    PretrainedConfig,
    sdpa_attention_forward,
    sdpa_mask,
)
from ragr1_actors.core.models.process_memory import release_cache

_BLOCK = 64
"""Number of tokens of the vocabulary whose probabilities are added up together."""
_MIN_COLUMNS = 64
"""Number of tokens for which the shortest row of a cache has room."""


class RowCache(Cache):
    """Keys and values of all resident trajectories: per layer ``[2, rows, kv_heads, length, head_dim]``.

    Before a forward pass the caller selects the rows to run and the column of each new token. The model then calls
    ``update`` once per layer. Active rows are kept in front (``swap``), so that a decoding step reads a view and copies
    nothing. The last column is scratch: padding is written there and never attended to.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, most_rows: int, most_tokens: int
    ) -> None:
        """Make an empty cache for a model; it grows on demand, to ``most_rows`` of ``most_tokens``."""
        self._shape = (
            config.num_key_value_heads,
            config.head_dim if "head_dim" in config.to_dict() else config.hidden_size // config.num_attention_heads,
        )
        self._dtype, self._device = dtype, device
        self._most_rows, self._most_tokens = most_rows, most_tokens
        self._data = [self._allocate(0, 0) for _ in range(config.num_hidden_layers)]
        self._rows: slice | Tensor = slice(0, 0)
        self._row_index = self._positions = torch.zeros(0, dtype=torch.long)
        self.length = 0
        """Number of columns that the next forward pass reads."""
        super().__init__(layers=[_RowLayer(self, index) for index in range(config.num_hidden_layers)])

    def _allocate(self, rows: int, length: int) -> Tensor:
        heads, head_dim = self._shape
        return torch.zeros((2, rows, heads, length, head_dim), dtype=self._dtype, device=self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(layer.nbytes for layer in self._data)

    @property
    def scratch(self) -> int:
        """Column to which padding is written."""
        return self._data[0].shape[3] - 1

    def reserve(self, rows: int, length: int) -> None:
        """Grow to at least ``rows`` rows of ``length`` tokens, by a quarter at a time.

        It grows layer by layer, as all layers at once would need memory for the old and the new cache.
        """
        old_rows, old_length = self._data[0].shape[1], max(0, self.scratch)
        if rows <= old_rows and length <= old_length:
            return
        new_rows = _grown(old_rows, rows, self._most_rows)
        new_length = _grown(old_length, max(length, _MIN_COLUMNS), self._most_tokens)
        for index, old in enumerate(self._data):
            new = self._allocate(new_rows, new_length + 1)
            new[:, :old_rows, :, :old_length] = old[:, :, :, :old_length]
            self._data[index] = new

    def clear(self) -> None:
        """Drop all rows, and free the memory of cache and forward passes for other processes."""
        self._data = [self._allocate(0, 0) for _ in self._data]
        release_cache(self._device)

    def swap(self, row_a: int, row_b: int, length: int) -> None:
        """Exchange the first ``length`` columns of two rows."""
        if row_a != row_b and length:
            for layer in self._data:
                used = layer[:, :, :, :length]
                used[:, [row_a, row_b]] = used[:, [row_b, row_a]]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns of a row to another."""
        if length:
            for layer in self._data:
                layer[:, target, :, :length] = layer[:, source, :, :length]

    def select(self, rows: slice | Tensor, positions: Tensor, length: int) -> None:
        """Select ``rows``, ``[n]``, of the next forward pass, which reads ``length`` columns, a slice without a copy.

        ``positions``, ``[n, num_new]``, are the columns to which the new tokens are written.
        """
        self._rows, self._positions, self.length = rows, positions, length
        index = torch.arange(rows.start, rows.stop, device=self._device) if isinstance(rows, slice) else rows
        self._row_index = index.unsqueeze(1).expand_as(positions)

    def write_and_read(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values ``[n, heads, num_new, head_dim]``; return the selected rows' whole context."""
        stored = self._data[layer]
        stored[0].transpose(1, 2)[self._row_index, self._positions] = keys.transpose(1, 2)
        stored[1].transpose(1, 2)[self._row_index, self._positions] = values.transpose(1, 2)
        return stored[0][self._rows][:, :, : self.length], stored[1][self._rows][:, :, : self.length]


def _grown(size: int, needed: int, most: int) -> int:
    """Return ``size`` if it is enough, else a quarter more, at least ``needed`` and at most ``most``."""
    return size if needed <= size else max(needed, min(size + size // 4, most))


class _RowLayer(CacheLayerMixin):
    """View of the shared tensor for one layer. The engine makes the masks itself, so the model never asks for sizes."""

    def __init__(self, cache: RowCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the cache owns the tensor."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this layer's new keys and values, and return those of the whole context."""
        return self._cache.write_and_read(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns read, and their offset."""
        return self._cache.length, 0

    def get_seq_length(self) -> int:
        """Return 0: every row has another length, and positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1


def uniform(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, step), ``[n]`` each, by splitmix64 (Steele et al. 2014).

    So a token depends only on its request's seed and its index, not on the requests beside it.
    """
    with np.errstate(over="ignore"):
        z = seeds * np.uint64(0xD1342543DE82EF95) + (steps + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    mantissas: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64)
    return mantissas * np.float64(2.0**-53)


def sample(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token per row of ``logits``, ``[n, vocab]``; return ids, ``[n]`` int64, and log-probs, ``[n]`` float32.

    The log-probs are under the sampled distribution. ``temperatures``, ``[n]``: 0 is greedy, with the log-prob of
    temperature 1. ``top_ps``, ``[n]``: 1 keeps all tokens. ``uniforms``, ``[n]`` float64, are in [0, 1).
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    if bool((top_ps < 1).any()):
        logprobs = _restrict(logprobs, top_ps)
    tokens = _draw(logprobs.exp(), uniforms)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token in whose interval of the cumulative distribution each draw is, ``[n]``.

    Sums are in float64: over a vocabulary of 152,000 tokens, sums in float32 are wrong by up to 1e-3. The block of
    tokens is found before the token in it, as the whole distribution in float64 would take 8 bytes per token.
    """
    vocab_size = probabilities.shape[1]
    if missing := -vocab_size % _BLOCK:
        probabilities = pad(probabilities, (0, missing))
    blocks = probabilities.unflatten(1, (-1, _BLOCK))
    borders = pad(blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1), (1, 0))  # [n, 1 + num_blocks]
    # The total is 1 only up to rounding: scaled by it, a draw reaches the last possible token and never more
    draws = uniforms.unsqueeze(1) * borders[:, -1:]
    block = torch.searchsorted(borders[:, 1:].contiguous(), draws, right=True)
    block.clamp_(max=blocks.shape[1] - 1)  # if logits are NaN; the log-prob reports it
    ends = blocks.take_along_dim(block.unsqueeze(-1), dim=1).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    largest = torch.nextafter(ends[:, -1:], torch.zeros_like(draws))  # the two sums of a block differ in rounding
    token = torch.searchsorted(ends, torch.minimum(draws - borders.gather(1, block), largest), right=True)
    return (block * _BLOCK + token).squeeze(1).clamp_(max=vocab_size - 1)


def _restrict(logprobs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2020), renormalised."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1, dtype=torch.float64) - ordered.exp()
    is_above = before >= top_ps.unsqueeze(1).clamp(min=1e-30)  # 0, as float32 has for less, would drop every token
    dropped = torch.zeros_like(is_above).scatter(1, order, is_above)
    return torch.log_softmax(logprobs.masked_fill(dropped, float("-inf")), dim=-1)


GROUPED_ATTENTION = "ragr1_grouped"
"""Name of the ``attn_implementation`` with which transformers calls ``grouped_attention``."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [n, heads, new, D]
    key: torch.Tensor,  # [n, kv_heads, length, D]
    value: torch.Tensor,  # [n, kv_heads, length, D_value]
    attention_mask: torch.Tensor | None,  # [n, 1, new, length]
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend like transformers' ``sdpa``, up to rounding; return ``[n, new, heads, D_value]``.

    The mask of the engine shows a query all tokens up to its own, so the window of this layer is laid over it.
    """
    num_rows, num_heads, num_new, _ = query.shape
    if sliding_window and attention_mask is not None and sliding_window < key.shape[2]:
        first = attention_mask.sum(-1, keepdim=True) - sliding_window
        attention_mask = attention_mask & (torch.arange(key.shape[2], device=key.device) >= first)
    num_kv_heads = key.shape[1]
    is_plain = attention_mask is not None and attention_mask.shape[1] == 1 and options.get("position_bias") is None
    if num_heads == num_kv_heads or not is_plain:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    assert attention_mask is not None
    groups = num_heads // num_kv_heads
    grouped = query.reshape(num_rows, num_kv_heads, groups * num_new, -1)
    mask = attention_mask.repeat(1, 1, groups, 1)  # the queries of a group follow one another, head by head
    attended = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(num_rows, num_heads, num_new, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
