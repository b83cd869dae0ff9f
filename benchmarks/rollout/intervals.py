"""Arithmetic of time intervals: how much of one set of them another leaves uncovered."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge what overlaps: ``union([(0, 2), (1, 3), (5, 6)]) == [(0, 3), (5, 6)]``."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def uncovered_s(pending: Iterable[Interval], busy: Iterable[Interval]) -> float:
    """Seconds in which something is pending and nothing busy."""
    covers, both = union(busy), union(pending)
    overlap = sum(max(0.0, min(end, b) - max(start, a)) for start, end in both for a, b in covers)
    return sum(end - start for start, end in both) - overlap
