"""What was read from a corpus file: its shape, its passages, and what is odd in it, with the first places.

::

    corpus file ─► readers.read_passages ─► passages ─► corpus.arrow
                          └─► CorpusTally ─► CorpusReport ─► manifest.json, and one printed line
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ragr1_actors.core.fault_report import FaultCounts, described_faults
from retrieval.base import Passage
from retrieval.corpora.text import has_word

_FAULTS = {
    "num_empty": "passages without a letter or a digit, never found",
    "num_titles": "of a title without a text",
    "num_repeated_ids": 'ids that another passage had, with "#2" behind them',
}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CorpusReport:
    """Counts over a corpus file; ``str`` makes one line of those that are not zero."""

    source: str
    """The name of the file."""
    shapes: tuple[str, ...]
    """How its records look, the most frequent shape first: ``('{"id", "contents"}',)``."""
    num_records: int
    """Lines, rows or entries."""
    num_passages: int
    """Read from them, in pieces where they are split, the empty ones among them."""
    num_empty: int = 0
    """Without a letter or a digit in title and text. A built index leaves them out; an adopted one never finds them."""
    num_titles: int = 0
    """Kept: a title, and no letter or digit in the text."""
    num_repeated_ids: int = 0
    """Kept, with ``#2`` behind the ``docid`` or the title that is their id: another passage had it."""
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the first of each fault are, by the name of its count: ``{"num_empty": ("line 2", "line 9")}``."""

    def __str__(self) -> str:
        """One line."""
        head = f"{self.source} ({', '.join(self.shapes)})"
        counts = {name: getattr(self, name) for name in _FAULTS}
        faults = described_faults(counts, _FAULTS, self.places, total=self.num_passages)
        return "; ".join([f"{head}: {self.num_passages:,} passages of {self.num_records:,} records", *faults])


class CorpusTally:
    """Counts the records and passages of one file while it is read."""

    def __init__(self, source: str) -> None:
        """Nothing is counted; ``source`` is the name of the file."""
        self._source = source
        self._shapes: Counter[str] = Counter()
        self._place = ""
        self._num_passages = 0
        self._faults = FaultCounts()

    def begin(self, place: str, looks: str) -> None:
        """Count a record; what is counted until the next one is at its ``place``, such as ``line 3``."""
        self._place = place
        self._shapes[looks] += 1

    def add(self, passage: Passage) -> None:
        """Count a passage of the record."""
        self._num_passages += 1
        if not has_word(passage.text):
            self._faults.add("num_titles" if has_word(passage.title) else "num_empty", self._place)

    def add_repeated_id(self) -> None:
        """Count an id of the record that another passage had."""
        self._faults.add("num_repeated_ids", self._place)

    def report(self) -> CorpusReport:
        """Return what was counted so far."""
        return CorpusReport(
            source=self._source,
            shapes=tuple(looks for looks, _ in self._shapes.most_common()),
            num_records=self._shapes.total(),
            num_passages=self._num_passages,
            places=self._faults.places,
            **self._faults.counts,
        )
