"""Passages on disk: one memory-mapped Arrow file and its ids, which any number of processes share.

::

    passages ──► ids, titles, texts: bytes and offsets on disk ──► corpus.arrow   one chunk, one row per passage
            └──► hashes of the ids on disk ──────────────────────► corpus.ids     hash and row, sorted

``corpus.ids`` is a NumPy file of one ``uint64`` per passage: its low bits hold the row, as many bits as the last row
needs, and the others the upper bits of the id's hash (``hash_text``). It is sorted, so a binary search finds the row
of an id. The ids themselves are in ``corpus.arrow``, so that two ids may share a hash.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, one_line
from retrieval.base import Passage
from retrieval.corpora.text import hash_text, valid_unicode

CORPUS_FILE = "corpus.arrow"
IDS_FILE = "corpus.ids"
SCHEMA = pa.schema([("id", pa.large_string()), ("title", pa.large_string()), ("text", pa.large_string())])
TAKE_FROM = 50
"""Rows from which Arrow's ``take`` beats one scalar access a row."""

_BLOCK = 4096
_IDS_BLOCK = 2**15
_KEY = np.dtype("<u8")
_NUM_PROBES = 16


def write_corpus(passages: Iterable[Passage], directory: str | Path) -> int:
    """Write ``corpus.arrow``, one row per passage in the given order, and ``corpus.ids``. Scores are not kept.

    Memory holds a few thousand passages, however many there are. On the way the directory needs room for the corpus
    twice, and 24 bytes per passage; both files appear in it once they are whole.

    Returns:
        The number of passages.

    Raises:
        DataError: no passages, or one id twice.
        OSError: the files cannot be written; ``ENOSPC`` where there is no room. No partial file remains.
    """
    directory = Path(directory)
    # Here and not in the temporary directory of the system, which may be small, or memory.
    spill = Path(tempfile.mkdtemp(prefix=".corpus-", dir=directory))
    try:
        count = _spill(passages, spill)
        if count == 0:
            raise DataError("the corpus has no passages; give at least one")
        _assemble(spill, count)
        _sort_ids(spill, count)
        _check_unique(_open_ids(spill / IDS_FILE, count), _open_batch(spill / CORPUS_FILE).column(0))
        for name in (CORPUS_FILE, IDS_FILE):
            (spill / name).replace(directory / name)
    finally:
        shutil.rmtree(spill, ignore_errors=True)
    return count


class Corpus(Sequence[Passage]):
    """The passages of an index, memory-mapped: opening costs nothing and replicas on one node share the pages."""

    def __init__(self, batch: pa.RecordBatch, ids: NDArray[np.uint64]) -> None:
        """Wrap a record batch of ``SCHEMA`` and the sorted keys of its ids, ``[len(batch)]``; use ``Corpus.open``."""
        self._columns = batch.columns
        self._ids = ids

    @classmethod
    def open(cls, directory: str | Path) -> Corpus:
        """Map ``directory/corpus.arrow`` and ``directory/corpus.ids``.

        Raises:
            DataError: a file is missing, foreign or truncated, the passages are not one chunk of ``SCHEMA``, or the
                ids are those of another corpus.
        """
        batch = _open_batch(Path(directory) / CORPUS_FILE)
        ids = _open_ids(Path(directory) / IDS_FILE, len(batch))
        _check_same(ids, batch.column(0), Path(directory) / IDS_FILE)
        return cls(batch, ids)

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._columns[0])

    def __getitem__(self, row: Any) -> Any:
        """Return the passage of a row, or a list of passages for a slice."""
        if isinstance(row, slice):
            rows = range(len(self))[row]
            return self._run(rows) if rows.step == 1 else self.take(rows)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        return self.take([row % len(self)])[0]

    def __iter__(self) -> Iterator[Passage]:
        """Yield the passages in row order."""
        for start in range(0, len(self), _BLOCK):
            yield from self._run(range(start, min(start + _BLOCK, len(self))))

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of many rows, in that order."""
        return [Passage(*fields) for fields in zip(*self.fields(rows), strict=True)]

    def row_of(self, passage_id: str) -> int:
        """Return the row of an id: a binary search in the mapped file. Raises ``KeyError``: no passage has this id."""
        row_bits = _row_bits(len(self))
        wanted = valid_unicode(passage_id)
        key = hash_text(wanted) >> row_bits
        first = int(np.searchsorted(self._ids, np.uint64(key << row_bits)))
        for position in range(first, len(self)):
            entry = int(self._ids[position])
            if entry >> row_bits != key:
                break
            row = entry & ((1 << row_bits) - 1)
            if self._columns[0][row].as_py() == wanted:
                return row
        raise KeyError(passage_id)

    def fields(self, rows: Sequence[int]) -> list[list[str]]:
        """Return the ids, the titles and the texts of many rows, each in that order: three lists of ``len(rows)``."""
        if len(rows) < TAKE_FROM:
            return [[column[row].as_py() for row in rows] for column in self._columns]
        indices = pa.array(rows, pa.int64())
        return [column.take(indices).to_pylist() for column in self._columns]

    def _run(self, rows: range) -> list[Passage]:
        columns = [column.slice(rows.start, len(rows)).to_pylist() for column in self._columns]
        return [Passage(*fields) for fields in zip(*columns, strict=True)]


def _spill(passages: Iterable[Passage], folder: Path) -> int:
    """Write the bytes and the ``int64`` end of every value, a file pair a column, and the ids' ``uint64`` hashes."""
    remaining = iter(passages)
    count = 0
    with (folder / "hashes").open("wb") as hashes, ExitStack() as stack:
        columns = [stack.enter_context(_Column(folder, name)) for name in SCHEMA.names]
        while block := list(islice(remaining, _BLOCK)):
            ids = [valid_unicode(passage.id) for passage in block]
            hashes.write(np.array([hash_text(passage_id) for passage_id in ids], _KEY).tobytes())
            columns[0].write(ids)
            columns[1].write([valid_unicode(passage.title) for passage in block])
            columns[2].write([valid_unicode(passage.text) for passage in block])
            count += len(block)
    return count


class _Column:
    """Two growing files, as Arrow lays a column of strings out: the bytes of all values, and where each ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._data: BinaryIO = (folder / f"{name}.data").open("wb")
        self._offsets: BinaryIO = (folder / f"{name}.offsets").open("wb")
        self._end = 0
        self._offsets.write(bytes(8))

    def write(self, texts: list[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._data.write(b"".join(encoded))
        ends = self._end + np.cumsum([len(value) for value in encoded], dtype="<i8")
        self._offsets.write(ends.tobytes())
        self._end = int(ends[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._data, self._offsets:  # both, also where the first has no room for what it held back
            pass


def _assemble(folder: Path, count: int) -> None:
    """Write ``corpus.arrow`` from the spilled columns, which are mapped and not read."""
    arrays = [
        pa.Array.from_buffers(
            pa.large_string(), count, [None, *(_mapped(folder / f"{name}.{part}") for part in ("offsets", "data"))]
        )
        for name in SCHEMA.names
    ]
    # A file of many chunks makes every take() concatenate the whole column: 650 times slower at 192 rows.
    with pa.OSFile(str(folder / CORPUS_FILE), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))


def _mapped(path: Path) -> pa.Buffer:
    return pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")


def _sort_ids(folder: Path, count: int) -> None:
    """Write ``corpus.ids`` from the spilled hashes."""
    path, row_bits = folder / IDS_FILE, np.uint64(_row_bits(count))
    with path.open("wb") as out, (folder / "hashes").open("rb") as hashes:
        npy.write_array_header_1_0(out, {"descr": _KEY.str, "fortran_order": False, "shape": (count,)})
        for start in range(0, count, _IDS_BLOCK):
            stop = min(start + _IDS_BLOCK, count)
            block = np.fromfile(hashes, _KEY, stop - start)
            out.write(((block >> row_bits << row_bits) | np.arange(start, stop, dtype=_KEY)).tobytes())
    # In place, on the mapped file: its pages are written already, so the disk cannot be full here.
    ids = npy.open_memmap(path, mode="r+")
    ids.sort()
    ids.flush()


def _row_bits(count: int) -> int:
    return (count - 1).bit_length()


def _open_batch(path: Path) -> pa.RecordBatch:
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
    return batch


def _open_ids(path: Path, count: int) -> NDArray[np.uint64]:
    if not path.is_file():
        raise DataError(f"no file {path}; build the index again")
    try:
        ids = npy.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise DataError(f"{path}: not a whole file of ids ({one_line(error)}); build the index again") from error
    if ids.dtype != _KEY or ids.shape != (count,):
        raise DataError(
            f"{path}: got {ids.dtype} of shape {ids.shape}, expected {_KEY} for {count} passages; build the index again"
        )
    return np.asarray(ids)


def _check_same(ids: NDArray[np.uint64], column: pa.Array, path: Path) -> None:
    """Look a few ids up where the file says that they stand."""
    row_bits = _row_bits(len(ids))
    for position in np.linspace(0, len(ids) - 1, min(_NUM_PROBES, len(ids)), dtype=np.int64):
        entry = int(ids[position])
        row = entry & ((1 << row_bits) - 1)
        if row >= len(ids) or hash_text(column[row].as_py()) >> row_bits != entry >> row_bits:
            raise DataError(f"{path}: these are not the ids of {CORPUS_FILE} beside it; build the index again")


def _check_unique(ids: NDArray[np.uint64], column: pa.Array) -> None:
    """Raise for the first passage, in row order, whose id was used before."""
    row_bits = _row_bits(len(ids))
    first, second = 0, len(ids)
    for start in range(0, len(ids) - 1, _IDS_BLOCK):
        hashes = ids[start : start + _IDS_BLOCK + 1] >> np.uint64(row_bits)
        for position in np.flatnonzero(hashes[1:] == hashes[:-1]) + start:
            pair = _first_repeat(ids, int(position), row_bits, second, column)
            first, second = pair or (first, second)
    if second < len(ids):
        raise DataError(
            f"passage id {column[second].as_py()!r} is used twice, as passage {first + 1} and passage {second + 1}; "
            "ids must be unique"
        )


def _first_repeat(
    ids: NDArray[np.uint64], position: int, row_bits: int, before: int, column: pa.Array
) -> tuple[int, int] | None:
    """Return the first two rows of one id among those of the hash at ``position``, the second below ``before``."""
    seen: dict[str, int] = {}
    hashed = int(ids[position]) >> row_bits
    for entry in map(int, ids[position:]):  # rows of one hash ascend
        row = entry & ((1 << row_bits) - 1)
        if entry >> row_bits != hashed or row >= before:
            return None
        passage_id = column[row].as_py()
        if passage_id in seen:
            return seen[passage_id], row
        seen[passage_id] = row
    return None
