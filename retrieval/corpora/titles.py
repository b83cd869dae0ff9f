"""Pages by their titles: a binary search among the rows of a corpus in the order of their titles.

::

    titles.npy   int32 [num_passages], of the index directory, mapped: 84 MB for 21 million passages

A look-up reads about 100 titles of the mapped corpus, which takes 0.7 ms among 21 million, and keeps none in memory.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, valid_unicode
from retrieval.base import HEADING, Page, page_title
from retrieval.corpora.corpus import Corpus

MAX_PIECES = 1000
"""Limit of the passages that a page returns: a corpus may give all its passages one title."""
_NUM_NEAR, _NUM_COMPARED, _LEAST_LIKENESS = 3, 16, 0.6
_LAST = "\U0010ffff"


class Titles:
    """Pages of a corpus, found by title."""

    def __init__(self, corpus: Corpus, rows: NDArray[np.int32]) -> None:
        """Take a corpus and the result of ``rows_by_title`` for it."""
        self._corpus, self._rows = corpus, rows

    @classmethod
    def open(cls, corpus: Corpus, path: Path) -> Titles:
        """Map a file of ``write_titles``; without one, sort in memory: 30 s and 1.5 GB for 21 million passages.

        Raises:
            DataError: the file belongs to another corpus.
        """
        if not path.is_file():
            return cls(corpus, rows_by_title(corpus))
        rows = np.load(path, mmap_mode="r")
        if rows.shape != (len(corpus),):
            raise DataError(
                f"{path}: got {rows.shape} rows, but the corpus has {len(corpus)} passages; build the index again"
            )
        return cls(corpus, rows)

    def page(self, title: str, index_version: str = "") -> Page:
        """Return the passages of a title and of its sections, at most ``MAX_PIECES``; without any, similar titles."""
        title = valid_unicode(title)
        key = _lowered(title)
        if not key:
            return Page(index_version=index_version)
        ranges = self._between(key, key + "\0"), self._between(key + HEADING, key + HEADING + _LAST)
        places = list(islice(chain(*ranges), MAX_PIECES))
        if not places:
            return Page(near=self._near(key), index_version=index_version)
        found = self._corpus.take(sorted(self._rows[places].tolist()))
        exact = [passage for passage in found if (passage.title + HEADING).startswith(title + HEADING)]
        return Page(exact or found, index_version=index_version)

    def _between(self, first: str, end: str) -> range:
        return range(self._place(first), self._place(end))

    def _place(self, key: str) -> int:
        """Return the number of titles that come before ``key``."""
        return bisect_left(range(len(self._rows)), key, key=self._key)

    def _key(self, place: int) -> str:
        return _lowered(self._title(place))

    def _title(self, place: int) -> str:
        title: str = self._corpus.title_column[int(self._rows[place])].as_py()
        return title

    def _near(self, key: str) -> list[str]:
        """Return the titles around the place of ``key`` that are most similar to it."""
        place = self._place(key)
        around = range(max(0, place - _NUM_COMPARED), min(len(self._rows), place + _NUM_COMPARED))
        titles = {_lowered(title): title for title in map(page_title, map(self._title, around)) if title}
        found = difflib.get_close_matches(key, titles, _NUM_NEAR, _LEAST_LIKENESS)
        return [" ".join(titles[one].split()) for one in found]


def rows_by_title(corpus: Corpus) -> NDArray[np.int32]:
    """Return the rows by their titles in lower case; rows of one title keep their order."""
    order: NDArray[np.int32] = pc.sort_indices(pc.utf8_lower(corpus.title_column)).to_numpy().astype(np.int32)
    return order


def write_titles(corpus: Corpus, path: Path) -> None:
    """Write ``rows_by_title`` to a file of any name."""
    with path.open("wb") as file:
        np.save(file, rows_by_title(corpus))


def _lowered(title: str) -> str:
    lowered: str = pc.utf8_lower(title).as_py()  # like the sorted rows; Python's lower() differs for some letters
    return lowered
