"""Data files of users, told by their first bytes: text, compressed text and Parquet tables; their faults."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ragr1_actors.core.errors import DataError, one_line

_PACKED: dict[bytes, tuple[str, Callable[[BinaryIO], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda file: gzip.GzipFile(fileobj=file)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
}
_FOREIGN = {
    b"version https://git-lfs": "a Git LFS pointer in place of the file; fetch the file with `git lfs pull`",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it, or compress it with gzip",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"ARROW1\0\0": "an Arrow file; write it as Parquet or JSON lines",
    b"\xff\xff\xff\xff": "a stream of Arrow, as save_to_disk writes it; write it as Parquet or JSON lines",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
}
"""First bytes of files that no reader of tasks or passages knows, and what to do about each."""
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
_PARQUET = b"PAR1"
_SAMPLE_BYTES = 2**23
"""Bytes of text that ``text_bytes`` reads: bzip2 decompresses up to 0.9 MB more than is read."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open text or a Parquet table for reading bytes, decompressed if the first bytes mean gzip, bzip2 or xz.

    Raises:
        DataError: it cannot be read, also within the block, it is compressed and damaged or cut off, or its first bytes
            mean another format.
    """
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        start = file.read(32)
        file.seek(0)
        if known := next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), ""):
            raise DataError(f"{path}: {known}")
        name, unpack = next((found for magic, found in _PACKED.items() if start.startswith(magic)), ("", None))
        if unpack is None:
            yield file
            return
        try:
            yield unpack(file)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: not a whole {name} file ({error}); fetch it again") from error


def text_bytes(path: Path) -> int:
    """Return the bytes of a file's text; of a compressed one an estimate from its beginning. Raises ``DataError``."""
    with opened(path) as file:
        num_read = len(file.read(_SAMPLE_BYTES))
        num_packed = os.lseek(file.fileno(), 0, os.SEEK_CUR)  # bytes of the file itself that this took
    return path.stat().st_size * num_read // max(1, num_packed)


def unpacked_name(path: Path) -> Path:
    """Return a path without the ending of a compression: ``popqa.tsv`` for ``popqa.tsv.gz``."""
    return path.with_suffix("") if path.suffix in _PACKED_SUFFIXES else path


def is_parquet(path: Path) -> bool:
    """Return whether a file begins like a Parquet table."""
    with opened(path) as file:
        return file.read(len(_PARQUET)) == _PARQUET


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet table; memory holds a thousand. Raises ``DataError``."""
    with _table(path) as file:
        for batch in file.iter_batches(1024):
            yield from batch.to_pylist()


def num_parquet_rows(path: Path) -> int:
    """Return the number of rows of a Parquet table, of which only the end is read. Raises ``DataError``."""
    with _table(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    """Open a Parquet table; ``DataError`` if it cannot be read or is damaged, also within the block."""
    import pyarrow as pa  # takes a quarter of a second that other readers of this module do not need
    import pyarrow.parquet as pq

    with opened(path) as content:
        if isinstance(content, gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile):
            raise DataError(f"{path}: a Parquet table that is compressed as a whole; decompress it")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no Parquet file that can be read ({one_line(error)}); fetch it again") from error


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
        if self.counts[fault] <= MAX_PLACES:
            self._places.setdefault(fault, []).append(place)

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
