"""Vectors as bytes: 8 bits a number, under a scale that is the vector's own. Pure.

A scale a vector halves the error of one range for all (faiss's SQ8), since that range is the widest outlier's; and no
training is needed. Kept as rows of unsigned bytes, so that they map from a file: ``dimension`` numbers (128 is 0), then
the scale as a float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCALE_BYTES = 4
_ZERO, _HIGHEST = 128, 127


def encode_bytes(vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round vectors, float32 ``[n, dimension]``, to codes, uint8 ``[n, dimension + 4]``."""
    scales = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float32) / np.float32(_HIGHEST)
    numbers = np.rint(vectors / np.where(scales > 0, scales, 1)) + _ZERO
    return np.concatenate([numbers.astype(np.uint8), scales.view(np.uint8)], axis=1)


def decode_bytes(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Undo ``encode_bytes`` but for the rounding: uint8 ``[n, dimension + 4]`` to float32 ``[n, dimension]``."""
    scales = np.ascontiguousarray(codes[:, -SCALE_BYTES:]).view(np.float32)
    numbers = codes[:, :-SCALE_BYTES].astype(np.float32)
    numbers -= _ZERO
    numbers *= scales
    return numbers
