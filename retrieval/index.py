"""Vectors to rows: the exact index and its manifest. The only door to faiss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.errors import ConfigError, DataError

INDEX_FILE = "index.faiss"
MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
INDEX_TYPES = {"flat": "Flat"}
"""Names in a recipe, and faiss's factory strings."""

_BLAS_FROM = 4
"""Queries from which a matrix product beats one scan a query (by 10 times at 64)."""
_SCAN_THRESHOLD = faiss.cvar.distance_compute_blas_threshold
_SPARE = 8
"""Candidates beyond ``k`` that are scored again, so that rounding cannot push one of the best ``k`` out."""


@dataclass(frozen=True)
class Manifest:
    """What an index directory holds, and what it must be used with."""

    format_version: int
    index_type: str
    metric: str
    encoder: str
    """A folder relative to the index directory, a folder, or a hub name."""
    encoder_fingerprint: str
    dimension: int
    count: int
    """Passages, each a vector."""
    corpus_hash: str
    index_hash: str
    index_bytes: int

    def write(self, directory: Path) -> None:
        """Write ``directory/manifest.json``."""
        (directory / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Read ``directory/manifest.json``.

        Raises:
            DataError: there is none, or another version of the project wrote it.
        """
        path = Path(directory) / MANIFEST_FILE
        if not path.is_file():
            raise DataError(f"no index in {directory}: {MANIFEST_FILE} is missing; make one with `ragr1 index build`")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}); build the index again") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise DataError(f"{path}: got format version {version}, expected {FORMAT_VERSION}; build the index again")
        expected = {field.name for field in fields(cls)}
        if set(content) != expected:
            odd = ", ".join(sorted(set(content) ^ expected))
            raise DataError(f"{path}: keys missing or unknown: {odd}; build the index again")
        return cls(**content)

    def check_encoder(self, name: str, fingerprint: str, dimension: int) -> None:
        """Compare an encoder with the one the index was built with.

        Raises:
            DataError: it is another one: its vectors would find passages at random.
        """
        if (fingerprint, dimension) != (self.encoder_fingerprint, self.dimension):
            raise DataError(
                f"encoder {name!r} has fingerprint {fingerprint[:12]} and dimension {dimension}, but the index was "
                f"built with {self.encoder!r}, {self.encoder_fingerprint[:12]} and {self.dimension}; use that encoder "
                "or build the index again"
            )

    def check_corpus(self, path: Path, count: int) -> None:
        """Compare the corpus file with the one the index was built over.

        Raises:
            DataError: its rows have changed, so that row numbers mean other passages.
        """
        found = file_hash(path)
        if (found, count) != (self.corpus_hash, self.count):
            raise DataError(
                f"{path}: got {count} passages with hash {found[:12]}, but the index was built over {self.count} with "
                f"hash {self.corpus_hash[:12]}; the rows changed, so build the index again"
            )


class VectorIndex:
    """Exact inner-product search over vectors of length 1; row i is passage i of the corpus."""

    def __init__(self, index: Any) -> None:
        """Wrap a faiss index; use ``build`` or ``load``."""
        self._index = index
        # A view, not a copy. It lives as long as the faiss index does.
        self._vectors = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)

    @classmethod
    def build(cls, blocks: Iterable[NDArray[np.float32]], dimension: int, index_type: str = "flat") -> VectorIndex:
        """Index blocks of vectors, float32 ``[n, dimension]`` each, in that order.

        Raises:
            ConfigError: an unknown index type.
        """
        if index_type not in INDEX_TYPES:
            raise ConfigError(f"unknown index type {index_type!r}; expected one of {', '.join(INDEX_TYPES)}")
        index = faiss.index_factory(dimension, INDEX_TYPES[index_type], faiss.METRIC_INNER_PRODUCT)
        for block in blocks:
            index.add(block)
        return cls(index)

    def save(self, path: Path) -> None:
        """Write the index file.

        Raises:
            OSError: no room, or no right to write.
        """
        try:
            faiss.write_index(self._index, str(path))
        except RuntimeError as error:  # faiss's only exception, without an errno
            raise OSError(f"{path} could not be written: {_first_line(error)}") from error

    @classmethod
    def load(cls, directory: str | Path, manifest: Manifest) -> VectorIndex:
        """Map ``directory/index.faiss``, after a check of every byte against the manifest.

        Raises:
            DataError: the file is missing, truncated, or not the one the manifest describes.
        """
        path = Path(directory) / INDEX_FILE
        if not path.is_file():
            raise DataError(f"no {path}; build the index again")
        size = path.stat().st_size
        if size != manifest.index_bytes:
            raise DataError(
                f"{path}: got {size} bytes, expected {manifest.index_bytes}; copy it again or build it again"
            )
        found = file_hash(path)
        if found != manifest.index_hash:
            raise DataError(
                f"{path}: got hash {found[:12]}, expected {manifest.index_hash[:12]}; it belongs to another index, so "
                "copy the directory as a whole or build it again"
            )
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise DataError(f"{path}: faiss cannot read it ({_first_line(error)}); build it again") from error
        if (index.ntotal, index.d) != (manifest.count, manifest.dimension):
            raise DataError(
                f"{path}: got {index.ntotal} vectors of dimension {index.d}, expected {manifest.count} of "
                f"{manifest.dimension}; build the index again"
            )
        return cls(index)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self._index.ntotal)

    def search(
        self, queries: NDArray[np.float32], k: int, num_threads: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the ``min(k, count)`` nearest rows of each query, best first, equal scores by row.

        A query's answer is the same in any batch.

        Args:
            queries: float32 ``[n, dimension]``, each of length 1.
            k: at least 1.
            num_threads: of faiss, in the calling thread.

        Returns:
            scores float32 ``[n, min(k, count)]`` and rows int64 of the same shape.
        """
        # OpenMP keeps this number a thread: setting it once at start would not reach the thread that searches.
        faiss.omp_set_num_threads(num_threads)
        # faiss scans once a query unless n * dimension is over this; its default makes batches of 64 no faster than 1.
        faiss.cvar.distance_compute_blas_threshold = 1 if len(queries) >= _BLAS_FROM else _SCAN_THRESHOLD
        _, candidates = self._index.search(np.ascontiguousarray(queries), min(k + _SPARE, self.count))
        # Scans and matrix products of different sizes round differently; one more sum in double precision does not.
        exact = (self._vectors[candidates].astype(np.float64) * queries[:, None, :]).sum(axis=-1)
        scores = exact.astype(np.float32)
        order = np.lexsort((candidates, -scores), axis=-1)[:, :k]
        return np.take_along_axis(scores, order, axis=-1), np.take_along_axis(candidates, order, axis=-1)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]
