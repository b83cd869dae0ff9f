"""Texts of similar length side by side, so that little of a batch is padding. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def batch_by_length(lengths: Sequence[int], max_tokens: int, spare_tokens: int) -> list[list[int]]:
    """Cut texts into batches, longest first.

    A batch ends where it would hold more than ``max_tokens``, or more padding than ``spare_tokens``: from there on,
    padding costs more than a batch of its own.

    Args:
        lengths: of the texts, in tokens.
        max_tokens: of a batch with its padding; a longer text is a batch on its own.
        spare_tokens: padding that costs as much as one more batch.

    Returns:
        Positions in ``lengths``, a list a batch; every position once, equal lengths in order.
    """
    batches: list[list[int]] = []
    longest = padding = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        padding += longest - lengths[position]
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens or padding > spare_tokens:
            batches.append([])
            longest, padding = lengths[position], 0
        batches[-1].append(position)
    return batches
