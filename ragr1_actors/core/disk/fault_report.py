"""Faults in a data file: the number of each, and its first places. For reports on task files and corpora."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

MAX_PLACES = 3
"""Limit of the places of a fault that a report names."""


class FaultCounts:
    """Counts faults by name while a file is read."""

    def __init__(self) -> None:
        """Begin without faults."""
        self.counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, fault: str, place: str) -> None:
        """Count a fault; ``place`` is where it is, such as ``line 3``."""
        self.counts[fault] += 1
        places = self._places.setdefault(fault, [])
        if len(places) < MAX_PLACES:
            places.append(place)

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """First places of each fault, at most ``MAX_PLACES``."""
        return {fault: tuple(places) for fault, places in self._places.items()}


def described(count: int, what: str, places: Sequence[str] = (), total: int = 0) -> str:
    """Return ``"5 answers with a comma (1%; line 2, line 7, line 9, ...)"``; without ``total`` there is no share."""
    more = ["..."] if count > len(places) else []
    details = [f"{count / total:.0%}"] if total else []
    details += [", ".join([*places, *more])] if places else []
    return f"{count:,} {what}" + (f" ({'; '.join(details)})" if details else "")


def described_faults(
    counts: Mapping[str, int], words: Mapping[str, str], places: Mapping[str, Sequence[str]], total: int = 0
) -> list[str]:
    """Return ``described`` for each fault that was found, in the order of ``words``, the names of faults."""
    return [described(counts[name], what, places.get(name, ()), total) for name, what in words.items() if counts[name]]
