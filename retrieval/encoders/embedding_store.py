"""The vectors of a corpus on disk while an index is built: shards that are whole or absent. Pure.

::

    embeddings/
      store.json           StoreHeader: of which corpus, by which encoder
      shard-000000.npy     rows 0 to rows_per_shard - 1, float32 or float16 [rows, dimension]
      shard-000001.npy     ...; the last one may be shorter

A shard gets its name by a rename once all of it is on disk, so whoever was interrupted goes on with the missing ones,
and several processes may fill one store.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError

HEADER_FILE = "store.json"
_WRITING = ".writing-"


@dataclass(frozen=True)
class StoreHeader:
    """What the vectors of a store are."""

    corpus_fingerprint: str
    """``fingerprint_file`` of the corpus."""
    encoder_fingerprint: str
    dimension: int
    count: int
    """Rows of the corpus."""
    dtype: str = "float32"
    """``float32`` or ``float16``, on disk."""
    rows_per_shard: int = 4096
    """What is lost, per process, by an interruption."""


class StoredVectors:
    """The vectors of consecutive rows, to be iterated over any number of times: float32 ``[n, dimension]`` each."""

    def __init__(self, store: EmbeddingStore, start: int, stop: int) -> None:
        """Name the rows; see ``EmbeddingStore.blocks``."""
        self._store = store
        self._start = start
        self._stop = stop

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors shard by shard, in row order.

        Raises:
            DataError: a shard is missing or damaged.
        """
        rows_per_shard = self._store.header.rows_per_shard
        for number in range(self._start // rows_per_shard, -(-self._stop // rows_per_shard)):
            rows = self._store.rows(number)
            block = self._store.read(number)[max(self._start - rows.start, 0) : self._stop - rows.start]
            yield np.asarray(block, np.float32)


class EmbeddingStore:
    """A directory with the vectors of a corpus, complete or on the way there."""

    def __init__(self, directory: Path, header: StoreHeader) -> None:
        """Hold a directory; use ``create`` or ``open``."""
        self.directory = directory
        self.header = header

    @classmethod
    def create(cls, directory: str | Path, header: StoreHeader) -> Self:
        """Begin a store, or go on with the one that is there. No other process may be writing to it.

        Raises:
            DataError: the one that is there is of another corpus or encoder.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"*{_WRITING}*"):
            leftover.unlink()
        if (directory / HEADER_FILE).is_file():
            store = cls.open(directory)
            if store.header != header:
                kept, wanted = asdict(store.header), asdict(header)
                differing = ", ".join(f"{name} {kept[name]!r}" for name in kept if kept[name] != wanted[name])
                raise DataError(
                    f"{directory} holds vectors of another corpus or encoder ({differing} differs); remove it to "
                    "encode anew"
                )
            return store
        content = json.dumps(asdict(header), indent=2) + "\n"
        _write_durably(directory / HEADER_FILE, lambda file: file.write(content.encode()))
        return cls(directory, header)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open a store that was created.

        Raises:
            DataError: there is none, or its header is damaged.
        """
        path = Path(directory) / HEADER_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no readable header of stored vectors ({error}); remove the directory") from error
        expected = {field.name for field in fields(StoreHeader)}
        if not isinstance(content, dict) or set(content) != expected:
            raise DataError(f"{path}: expected the keys {', '.join(sorted(expected))}; remove the directory")
        return cls(Path(directory), StoreHeader(**content))

    @property
    def num_shards(self) -> int:
        """Shards of a complete store."""
        return -(-self.header.count // self.header.rows_per_shard)

    def rows(self, number: int) -> range:
        """Return the corpus rows of a shard."""
        start = number * self.header.rows_per_shard
        return range(start, min(start + self.header.rows_per_shard, self.header.count))

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not there, or not whole."""
        return [number for number in range(self.num_shards) if self._map(number) is None]

    def write(self, number: int, vectors: NDArray[np.float32]) -> None:
        """Write a shard: float32 ``[len(rows(number)), dimension]``.

        Raises:
            DataError: NaN or infinity.
            OSError: it cannot be written; ``ENOSPC`` where there is no room. Nothing is left behind.
        """
        rows = self.rows(number)
        if vectors.shape != (len(rows), self.header.dimension):
            raise ValueError(f"got vectors of shape {vectors.shape}, expected {(len(rows), self.header.dimension)}")
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            row = rows[int(np.argmin(is_finite))]
            raise DataError(f"the vector of row {row} holds NaN or infinity; the encoder is broken, so check its files")
        stored = vectors.astype(self.header.dtype)
        _write_durably(self._path(number), lambda file: np.save(file, stored))

    def read(self, number: int) -> NDArray[Any]:
        """Map a shard: ``[len(rows(number)), dimension]`` of the store's dtype.

        Raises:
            DataError: it is missing or damaged.
        """
        shard = self._map(number)
        if shard is None:
            raise DataError(f"{self._path(number)} is missing or damaged; run the build again, which fills it")
        return shard

    def blocks(self, start: int = 0, stop: int | None = None) -> StoredVectors:
        """Return the vectors of the rows ``start`` to ``stop - 1``, by default of all."""
        return StoredVectors(self, start, self.header.count if stop is None else stop)

    def _path(self, number: int) -> Path:
        return self.directory / f"shard-{number:06d}.npy"

    def _map(self, number: int) -> NDArray[Any] | None:
        try:
            shard: NDArray[Any] = np.load(self._path(number), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        is_whole = shard.shape == (len(self.rows(number)), self.header.dimension) and shard.dtype == self.header.dtype
        return shard if is_whole else None


def publish(partial: Path, final: Path) -> None:
    """Give a file, or a folder with all in it, its final name once it is on disk.

    Raises:
        OSError: it could not be written out or renamed.
    """
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    partial.replace(final)
    _sync(final.parent)


def _write_durably(path: Path, write: Any) -> None:
    # A name of its own: an actor that was given up may still be writing the same shard.
    partial = path.with_name(f"{path.name}{_WRITING}{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            write(file)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
