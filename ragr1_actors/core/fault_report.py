"""What is wrong in a data file: how often each fault was found, and where first. Reports on task files and corpora."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

MAX_PLACES = 3
"""Places of a fault that a report names."""


class FaultCounts:
    """Counts faults by name while a file is read."""

    def __init__(self) -> None:
        """Nothing is counted."""
        self.counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, fault: str, place: str) -> None:
        """Count one more; ``place`` is where it is, such as ``line 3``."""
        self.counts[fault] += 1
        places = self._places.setdefault(fault, [])
        if len(places) < MAX_PLACES:
            places.append(place)

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """The first places of each fault, at most ``MAX_PLACES``."""
        return {fault: tuple(places) for fault, places in self._places.items()}


def described(count: int, what: str, places: Sequence[str] = (), total: int = 0) -> str:
    """Return ``"5 answers with a comma (1%; line 2, line 7, line 9, ...)"``; without ``total``, without the share."""
    more = ["..."] if count > len(places) else []
    details = [f"{count / total:.0%}"] if total else []
    details += [", ".join([*places, *more])] if places else []
    return f"{count:,} {what}" + (f" ({'; '.join(details)})" if details else "")


def described_faults(
    counts: Mapping[str, int], words: Mapping[str, str], places: Mapping[str, Sequence[str]], total: int = 0
) -> list[str]:
    """Return ``described`` of each fault that was found, in the order of ``words``, which has what each is called."""
    return [described(counts[name], what, places.get(name, ()), total) for name, what in words.items() if counts[name]]
