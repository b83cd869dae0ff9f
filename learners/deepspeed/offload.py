"""Device memory lent to somebody else for a while: what it holds waits in the host's memory.

::

    tensors ──offload──► their storages are copied to the host and emptied     (an engine on the same GPU generates)
            ◄──reload──  the storages are filled again, in place

The storages are emptied, not the tensors replaced: every view of them, such as a parameter that is a slice of ZeRO's
flat buffer, is valid again after ``reload``, and nobody who holds one has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class OffloadedTensors:
    """The storages of some tensors, while they are empty."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Empty the storages of those tensors that are on ``device``; nobody may use them before ``reload``.

        A storage that cannot be resized is a mapped file or page-locked, in the host's memory already: it is left.
        """
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device != device or storage.data_ptr() in self._copies:
                continue
            if storage.nbytes() and storage.resizable():
                self._copies[storage.data_ptr()] = (storage, _bytes_of(storage).to("cpu", copy=True))
        for storage, _ in self._copies.values():
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # to the device, not only to this process

    @property
    def num_bytes(self) -> int:
        """Of device memory that were given back."""
        return sum(copy.numel() for _, copy in self._copies.values())

    def reload(self) -> None:
        """Fill the storages again; this object is of no use afterwards."""
        for storage, copy in self._copies.values():
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        self._copies.clear()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
