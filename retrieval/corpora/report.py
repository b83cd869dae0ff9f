"""Report on a corpus file that was read: its shape, its passages, its faults and their first places.

::

    corpus file ─► readers.read_passages ─► passages ─► corpus.arrow
                          └─► CorpusTally ─► CorpusReport ─► manifest.json, and one printed line
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ragr1_actors.core.disk.data_files import FaultCounts, described_faults
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
    """Name of the file."""
    shapes: tuple[str, ...]
    """Shapes of its records, the most frequent first: ``('{"id", "contents"}',)``."""
    num_records: int
    """Number of lines, rows or entries."""
    num_passages: int
    """Number of passages read from them, after splitting, with the empty ones."""
    num_empty: int = 0
    """Passages without a letter or digit in title and text. A built index omits them; an adopted one finds none."""
    num_titles: int = 0
    """Passages kept with a title, but no letter or digit in the text."""
    num_repeated_ids: int = 0
    """Passages kept with ``#2`` after the ``docid`` or title that is their id, because another passage had it."""
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Places of the first records with each fault, by its count: ``{"num_empty": ("line 2", "line 9")}``."""

    def __str__(self) -> str:
        """Return the counts in one line."""
        head = f"{self.source} ({', '.join(self.shapes)})"
        counts = {name: getattr(self, name) for name in _FAULTS}
        faults = described_faults(counts, _FAULTS, self.places, total=self.num_passages)
        return "; ".join([f"{head}: {self.num_passages:,} passages of {self.num_records:,} records", *faults])


class CorpusTally:
    """Counts the records and passages of one file while it is read."""

    def __init__(self, source: str) -> None:
        """Begin at zero; ``source`` is the name of the file."""
        self._source = source
        self._shapes: Counter[str] = Counter()
        self._place = ""
        self._num_passages = 0
        self._faults = FaultCounts()

    def begin(self, place: str, looks: str) -> None:
        """Count a record; the counts until the next record belong to its ``place``, such as ``line 3``."""
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
        """Return the counts so far."""
        return CorpusReport(
            source=self._source,
            shapes=tuple(looks for looks, _ in self._shapes.most_common()),
            num_records=self._shapes.total(),
            num_passages=self._num_passages,
            places=self._faults.places,
            **self._faults.counts,
        )
