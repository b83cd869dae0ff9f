"""Streams of vectors, block by block: checked, and sampled in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError

Floats = NDArray[np.float32]


def checked(blocks: Iterable[Floats], dimension: int) -> Iterator[Floats]:
    """Yield the blocks, contiguous float32 ``[n, dimension]``.

    Raises:
        DataError: another shape, or a number that is NaN or infinite.
    """
    start = 0
    for block in blocks:
        if block.ndim != 2 or block.shape[1] != dimension:
            raise DataError(
                f"vectors from {start}: got shape {block.shape}, expected [n, {dimension}]; encode all with one encoder"
            )
        is_finite = np.isfinite(block).all(axis=1)
        if not is_finite.all():
            row = start + int(np.argmin(is_finite))
            raise DataError(
                f"vector {row} holds NaN or infinity; the encoder is broken or overflows in half precision, so check "
                "its files or encode in float32"
            )
        yield np.ascontiguousarray(block, np.float32)
        start += len(block)


def sample(blocks: Iterable[Floats], dimension: int, count: int, size: int, seed: int = 0) -> Floats:
    """Draw rows without replacement, every row as likely as any other, in one pass.

    Args:
        blocks: float32 ``[n, dimension]`` each.
        dimension: of a vector.
        count: rows of all blocks together; rows beyond it are not drawn.
        size: rows to draw; memory holds these and a block.
        seed: the same one draws the same rows.

    Returns:
        float32 ``[min(size, count), dimension]`` in row order.
    """
    rows = np.sort(np.random.default_rng(seed).choice(count, min(size, count), replace=False, shuffle=False))
    drawn = np.zeros((len(rows), dimension), np.float32)
    start = 0
    for block in blocks:
        first, last = np.searchsorted(rows, [start, start + len(block)])
        drawn[first:last] = block[rows[first:last] - start]
        start += len(block)
    return drawn
