"""The memory that torch's operators take, counted while they run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class TensorBytes(TorchDispatchMode):
    """A context that counts the bytes of all tensors that operators return; views of a storage count once."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """Leave out the storages of ``known``."""
        super().__init__()
        self.now = self.peak = 0
        """Bytes alive, and the most that were alive at a time."""
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, found)
        return found
