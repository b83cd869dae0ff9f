"""Passages on disk: one memory-mapped Arrow file, which any number of processes share.

::

    passages ──► ids, titles, texts: bytes and offsets on disk ──► corpus.arrow   one chunk, one row per passage
    titles.npy   int32 [num_passages], of the index directory, mapped: 84 MB for 21 million passages

Pages are found by their titles with a binary search among the rows in the order of their titles. A look-up reads about
100 titles of the mapped corpus, which takes 0.7 ms among 21 million, and keeps none in memory.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, one_line, valid_unicode
from retrieval.base import HEADING, Page, Passage, page_title
from retrieval.corpora.text import hash_text

CORPUS_FILE = "corpus.arrow"
SCHEMA = pa.schema([("id", pa.large_string()), ("title", pa.large_string()), ("text", pa.large_string())])
_TAKE_FROM = 50
"""Rows from which Arrow's ``take`` beats one scalar access a row."""

SPILL_PREFIX = ".corpus-"
"""Beginning of the name of the folder in which the corpus is written. A killed process leaves its folder behind."""
_BLOCK = 4096
_PARTS = ("offsets", "data")
_HASH = np.dtype("<u8")


def write_corpus(passages: Iterable[Passage], directory: str | Path) -> int:
    """Write ``corpus.arrow``, one row per passage in the given order. Scores are not kept.

    Memory holds a few thousand passages, however many there are. While it is written, the directory needs room for two
    copies of the corpus and 8 bytes per passage; the file appears once it is whole.

    Returns:
        The number of passages.

    Raises:
        DataError: there are no passages, or an id occurs twice.
        OSError: the file cannot be written; ``ENOSPC`` if the disk is full. No partial file remains.
    """
    directory = Path(directory)
    # Not in the system's temporary directory, which may be small, or in memory.
    spill = Path(tempfile.mkdtemp(prefix=SPILL_PREFIX, dir=directory))
    try:
        count = _spill(passages, spill)
        if count == 0:
            raise DataError("the corpus has no passages; give at least one")
        _assemble(spill, count)
        _check_unique(Corpus.open(spill).ids, spill / "hashes")
        (spill / CORPUS_FILE).replace(directory / CORPUS_FILE)
    finally:
        shutil.rmtree(spill, ignore_errors=True)
    return count


class Corpus(Sequence[Passage]):
    """The passages of an index, memory-mapped: opening costs nothing and replicas on one node share the pages."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Wrap a record batch of ``SCHEMA``; use ``Corpus.open``."""
        self._columns = batch.columns
        self.ids: pa.LargeStringArray = batch.column(0)
        """Ids, ``[len(self)]``, in row order."""
        self.title_column: pa.LargeStringArray = batch.column(1)
        """Titles, ``[len(self)]``, in row order."""

    @classmethod
    def open(cls, directory: str | Path) -> Corpus:
        """Map ``directory/corpus.arrow``.

        Raises:
            DataError: the file is missing, truncated or not Arrow, or the passages are not one chunk of ``SCHEMA``.
        """
        path = Path(directory) / CORPUS_FILE
        if not path.is_file():
            raise DataError(f"no corpus {path}; build the index with `ragr1 index build`")
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            schema, num_chunks = reader.schema, reader.num_record_batches
            if schema != SCHEMA or num_chunks != 1:
                raise DataError(
                    f"{path}: got columns {schema.names} in {num_chunks} chunks, expected {SCHEMA.names} in one; "
                    "build the index again"
                )
            batch = reader.get_batch(0)
            batch.validate()
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: not a whole Arrow file ({one_line(error)}); build the index again") from error
        return cls(batch)

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.ids)

    def __getitem__(self, row: Any) -> Any:
        """Return the passage of a row, or a list of passages for a slice."""
        if isinstance(row, slice):
            return self.take(range(len(self))[row])
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        return self.take([row % len(self)])[0]

    def __iter__(self) -> Iterator[Passage]:
        """Yield the passages in row order."""
        for start in range(0, len(self), _BLOCK):
            yield from self.take(range(start, min(start + _BLOCK, len(self))))

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of ``rows``, in that order."""
        return [Passage(*fields) for fields in zip(*self.fields(rows), strict=True)]

    @property
    def has_headings(self) -> bool:
        """Return whether a title has a heading after it, after one pass over all titles."""
        return bool(pc.any(pc.match_substring(self.title_column, HEADING)).as_py())

    def whole_ids(self) -> NDArray[np.int64] | None:
        """Return the ids as whole numbers, ``[len(self)]``; None if one of them is not a whole number."""
        try:
            numbers: NDArray[np.int64] = pc.cast(self.ids, pa.int64()).to_numpy()
        except pa.ArrowInvalid:
            return None
        return numbers

    def titles(self, ids: Iterable[str]) -> dict[str, str]:
        """Return ``{id: title}`` of the ids that passages have, after one pass over all ids of the corpus."""
        is_wanted = pc.is_in(self.ids, value_set=pa.array(list(ids), pa.large_string()))
        columns = (column.filter(is_wanted).to_pylist() for column in (self.ids, self.title_column))
        return dict(zip(*columns, strict=True))

    def fields(self, rows: Sequence[int]) -> list[list[str]]:
        """Return the ids, titles and texts of ``rows``, in that order: three lists of ``len(rows)``."""
        if isinstance(rows, range) and rows.step == 1:
            return [column.slice(rows.start, len(rows)).to_pylist() for column in self._columns]
        if len(rows) < _TAKE_FROM:
            return [[column[row].as_py() for row in rows] for column in self._columns]
        indices = pa.array(rows, pa.int64())
        return [column.take(indices).to_pylist() for column in self._columns]


def _spill(passages: Iterable[Passage], folder: Path) -> int:
    """Write each column into two files, in Arrow's layout of strings: the bytes of all values, and where each ends."""
    remaining = iter(passages)
    count, ends = 0, [0] * len(SCHEMA)
    with ExitStack() as stack:
        files = [
            [stack.enter_context((folder / f"{name}.{part}").open("wb")) for part in _PARTS] for name in SCHEMA.names
        ]
        for offsets, _ in files:
            offsets.write(bytes(8))
        while block := list(islice(remaining, _BLOCK)):
            columns = ([p.id for p in block], [p.title for p in block], [p.text for p in block])
            for number, (texts, (offsets, data)) in enumerate(zip(columns, files, strict=True)):
                encoded = [valid_unicode(text).encode() for text in texts]
                data.write(b"".join(encoded))
                stops = ends[number] + np.cumsum([len(value) for value in encoded], dtype="<i8")
                offsets.write(stops.tobytes())
                ends[number] = int(stops[-1])
            count += len(block)
    return count


def _assemble(folder: Path, count: int) -> None:
    """Write ``corpus.arrow`` from the spilled columns, which are mapped, not read."""
    arrays = [
        pa.Array.from_buffers(
            pa.large_string(), count, [None, *(_mapped(folder / f"{name}.{part}") for part in _PARTS)]
        )
        for name in SCHEMA.names
    ]
    # With many chunks every take() would concatenate the whole column: 650 times slower at 192 rows.
    with pa.OSFile(str(folder / CORPUS_FILE), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))


def _mapped(path: Path) -> pa.Buffer:
    return pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")


def _check_unique(ids: pa.LargeStringArray, path: Path) -> None:
    """Raise for the first passage whose id occurred before. ``path`` is a file for the hashes of the ids."""
    with path.open("wb") as file:
        for _, hashes in _hashed(ids):
            file.write(hashes.tobytes())
    # Sorted in the mapped file: its pages are written already, so the disk cannot be full here.
    ordered = np.memmap(path, _HASH, "r+")
    ordered.sort()
    repeated = [ordered[:0]]
    for start in range(0, len(ordered) - 1, _BLOCK):
        block = ordered[start : start + _BLOCK + 1]
        repeated.append(block[1:][block[1:] == block[:-1]])
    shared = np.unique(np.concatenate(repeated))
    if not shared.size:
        return
    first_rows: dict[str, int] = {}  # first row by id, for ids that share a hash
    for start, hashes in _hashed(ids):
        for row in (start + np.flatnonzero(np.isin(hashes, shared))).tolist():
            passage_id = ids[row].as_py()
            first = first_rows.setdefault(passage_id, row)
            if first != row:
                raise DataError(
                    f"passage id {passage_id!r} is used twice, as passage {first + 1} and passage {row + 1}; ids must "
                    "be unique"
                )


def _hashed(ids: pa.LargeStringArray) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yield the first row of each block of ids, and their hashes."""
    for start in range(0, len(ids), _BLOCK):
        yield start, np.array([hash_text(text) for text in ids.slice(start, _BLOCK).to_pylist()], _HASH)


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
        return bisect_left(self._rows, key, key=lambda row: _lowered(self._title(row)))

    def _title(self, row: np.int32) -> str:
        title: str = self._corpus.title_column[int(row)].as_py()
        return title

    def _near(self, key: str) -> list[str]:
        """Return the titles around the place of ``key`` that are most similar to it."""
        place = self._place(key)
        around = self._rows[max(0, place - _NUM_COMPARED) : place + _NUM_COMPARED]
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
