"""Unused memory of a process: it is given back, so that the other processes of a machine can have it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

NUM_KERNELS = 64
"""Number of matrix products, by shape and dtype, whose compiled code oneDNN keeps in a process."""
KERNEL_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables from which oneDNN, and torch for its own copies, read their limit at the first product."""


def limit_kernel_caches() -> None:
    """Let oneDNN keep the code of ``NUM_KERNELS`` matrix products, not of 1,024, unless the environment says otherwise.

    It compiles code for every number of rows, which differs between almost all micro-batches and prefills, and torch
    keeps a second copy: ``docs/decisions/heap.md``.
    """
    for name in KERNEL_LIMITS:
        os.environ.setdefault(name, str(NUM_KERNELS))


def release_cache(device: torch.device) -> None:
    """Give unused memory of this process to other processes: torch's on a GPU, and the heap's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Give the free memory of the heap back to the system, if the C library is glibc.

    glibc keeps blocks of up to 32 MiB, such as most activations, for later: ``docs/decisions/heap.md``.
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
