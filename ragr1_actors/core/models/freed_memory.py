"""Memory that a process has freed and still holds: given back, so that the other processes of a machine can have it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch


def release_cache(device: torch.device) -> None:
    """Give memory that this process holds without using it to other processes: torch's on a GPU, and the heap's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Give the free memory of the heap back to the system, where the C library is glibc.

    It keeps blocks of up to 32 MiB, such as most activations, for later: ``docs/decisions/heap.md``.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows has no such library
        return None
    return found
