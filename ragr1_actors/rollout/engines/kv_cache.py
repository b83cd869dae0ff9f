"""A key-value cache with a row a trajectory, so that a turn never computes its prefix again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin


class RowCache(Cache):
    """Keys and values of every resident trajectory, ``[layers, 2, rows, kv_heads, length, head_dim]``.

    Before a forward pass the caller selects the rows it runs over and where each new token goes; the model then calls
    ``update`` once a layer. Active rows are kept in front (``swap``), so that a decode step reads a view, not a gather.
    The last column is scratch: padding is written there and never attended to.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty cache for a model; it grows on demand."""
        self._shape = (
            config.num_hidden_layers,
            2,
            config.num_key_value_heads,
            config.head_dim if "head_dim" in config.to_dict() else config.hidden_size // config.num_attention_heads,
        )
        self._dtype, self._device = dtype, device
        self._data = self._allocate(0, 0)
        self._rows: slice | Tensor = slice(0, 0)
        self._row_index = self._positions = torch.zeros(0, dtype=torch.long)
        self._length = 0
        super().__init__(layers=[_RowLayer(self, index) for index in range(config.num_hidden_layers)])

    def _allocate(self, rows: int, length: int) -> Tensor:
        layers, two, heads, head_dim = self._shape
        return torch.zeros((layers, two, rows, heads, length, head_dim), dtype=self._dtype, device=self._device)

    @property
    def scratch(self) -> int:
        """The column that padding is written to."""
        return self._data.shape[4] - 1

    def reserve(self, rows: int, length: int) -> None:
        """Grow to at least ``rows`` rows of ``length`` tokens, by doubling."""
        old_rows, old_length = self._data.shape[2], max(0, self.scratch)
        if rows <= old_rows and length <= old_length:
            return
        new_rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        new_length = old_length if length <= old_length else max(length, 2 * old_length, 64)
        data = self._allocate(new_rows, new_length + 1)
        data[:, :, :old_rows, :, :old_length] = self._data[:, :, :, :, :old_length]
        self._data = data

    def clear(self) -> None:
        """Hold nothing, and no memory."""
        self._data = self._allocate(0, 0)

    def swap(self, row_a: int, row_b: int, length: int) -> None:
        """Exchange the first ``length`` columns of two rows."""
        if row_a != row_b and length:
            used = self._data[:, :, :, :, :length]
            used[:, :, [row_a, row_b]] = used[:, :, [row_b, row_a]]

    def select(self, rows: slice | Tensor, positions: Tensor, length: int) -> None:
        """Say what the next forward pass runs over.

        Args:
            rows: the rows, ``[n]``; a slice is read without a copy.
            positions: the column each new token is written to, ``[n, num_new]``.
            length: columns to read.
        """
        self._rows, self._positions, self._length = rows, positions, length
        index = torch.arange(rows.start, rows.stop, device=self._device) if isinstance(rows, slice) else rows
        self._row_index = index.unsqueeze(1).expand_as(positions)

    def write_and_read(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values ``[n, heads, num_new, head_dim]``; return the selected rows' whole context."""
        stored = self._data[layer]
        stored[0].transpose(1, 2)[self._row_index, self._positions] = keys.transpose(1, 2)
        stored[1].transpose(1, 2)[self._row_index, self._positions] = values.transpose(1, 2)
        return stored[0][self._rows][:, :, : self._length], stored[1][self._rows][:, :, : self._length]


class _RowLayer(CacheLayerMixin):
    """One layer's door into the shared tensor; the masks are the engine's own, so the sizes are never asked for."""

    def __init__(self, cache: RowCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The tensor is the cache's."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this layer's new keys and values and return the context's."""
        return self._cache.write_and_read(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns read, and their offset."""
        return self._cache._length, 0

    def get_seq_length(self) -> int:
        """Unknown to a layer: every row has its own; positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """It grows."""
        return -1
