"""Tensors that rest in the host's memory while others need the device.

Their storages are copied to the host and emptied; the tensors stay. After ``reload`` every view of a storage is valid
again, such as a parameter that is a slice of ZeRO's flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ragr1_actors.core.models.process_memory import release_cache

BLOCK_BYTES = 2**28
"""Host memory is taken in blocks of this size: torch rounds page-locked memory up to a power of two."""


class Offloaded:
    """Tensors of one device that rest, and the host memory for them: page-locked for a GPU, and kept for the next time.

    Locking memory again would take longer than the copy. The path through page-locked memory has not run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with no resting tensor."""
        self._device = device
        self._blocks: list[torch.Tensor] = []  # uint8, BLOCK_BYTES each
        self._copied: list[tuple[torch.UntypedStorage, int]] = []  # storages that are empty, with their bytes
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self.num_bytes = 0
        """Bytes of the device that are free because tensors rest."""

    def offload(
        self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = (), *, is_changed: bool = True
    ) -> None:
        """Empty the storages of the tensors, which must not be used before ``reload``.

        Tensors of ``scratch`` are not copied, and are zero after ``reload``. Tensors that are not ``is_changed`` since
        the last ``reload`` are on the host already. A storage that cannot be resized is a mapped file or page-locked
        memory of the host, and stays.
        """
        self._copied = self._storages(tensors, set())
        self._dropped = self._storages(scratch, {storage.data_ptr() for storage, _ in self._copied})
        num_copied = sum(size for _, size in self._copied)
        self.num_bytes = num_copied + sum(size for _, size in self._dropped)
        num_blocks = -(-num_copied // BLOCK_BYTES)
        while len(self._blocks) < num_blocks:
            is_cuda = self._device.type == "cuda"
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_cuda))
        if is_changed:
            for on_device, on_host in self._pairs():
                on_host.copy_(on_device, non_blocking=True)
        self._wait()
        for storage, _ in (*self._copied, *self._dropped):
            storage.resize_(0)
        release_cache(self._device)

    def reload(self) -> None:
        """Fill the storages again."""
        for storage, size in (*self._copied, *self._dropped):
            storage.resize_(size)
        for on_device, on_host in self._pairs():
            on_device.copy_(on_host, non_blocking=True)
        for storage, _ in self._dropped:
            _bytes_of(storage).zero_()
        self._wait()  # DeepSpeed reads them on other streams
        self._copied, self._dropped, self.num_bytes = [], [], 0

    def _storages(self, tensors: Iterable[torch.Tensor], known: set[int]) -> list[tuple[torch.UntypedStorage, int]]:
        """Return each storage on the device once, without those that begin at an address in ``known``."""
        found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            is_new = storage.device == self._device and storage.data_ptr() not in known
            if is_new and storage.nbytes() and storage.resizable():
                found[storage.data_ptr()] = (storage, storage.nbytes())
        return list(found.values())

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of storages with the parts of blocks that hold them, one after the other, without gaps."""
        start = 0
        for storage, size in self._copied:
            on_device = _bytes_of(storage)
            done = 0
            while done < size:
                block, offset = divmod(start + done, BLOCK_BYTES)
                count = min(size - done, BLOCK_BYTES - offset)
                yield on_device[done : done + count], self._blocks[block][offset : offset + count]
                done += count
            start += size

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
