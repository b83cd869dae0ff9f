"""FAISS files that were made elsewhere: their kind, their ids and vectors, and the options of their search.

::

    IndexIDMap, IndexPreTransform, IndexRefine        any of them, one around the other
        ─► IndexFlat, IndexScalarQuantizer, IndexPQ, IndexIVF..., IndexHNSW...          see ``_KINDS``

A vector's id is what a search returns for it. The file is mapped, and read by faiss alone. Imports faiss, as
``faiss_build`` and ``vector_index`` do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.disk.files import stamp_of
from ragr1_actors.core.errors import DataError, one_line
from retrieval.indexes.faiss_build import Floats, codes_of, usual_probes
from retrieval.indexes.manifest import FLAT, FOREIGN, parse_options

Ids = NDArray[np.int64]

_WRAPPERS = (
    faiss.IndexIDMap,
    faiss.IndexIDMap2,
    faiss.IndexPreTransform,
    faiss.IndexRefine,
    faiss.IndexRefineFlat,
)
_CODES = (
    faiss.IndexFlat,
    faiss.IndexFlatIP,
    faiss.IndexFlatL2,
    faiss.IndexPQ,
    faiss.IndexPQFastScan,
    faiss.IndexScalarQuantizer,
)
_GRAPHS = (faiss.IndexHNSWFlat, faiss.IndexHNSWPQ, faiss.IndexHNSWSQ)
_LISTS = (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFPQFastScan, faiss.IndexIVFScalarQuantizer)
_FAST_SCANS = (faiss.IndexIVFPQFastScan,)
_KINDS = (*_WRAPPERS, *_CODES, *_GRAPHS, *_LISTS)
_HALVES = (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16)
_SCALAR_TYPES = {faiss.ScalarQuantizer.QT_fp16: "fp16", faiss.ScalarQuantizer.QT_8bit: "sq8"}
_METRICS = (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2)
_FLOAT32: tuple[Any, int] = (np.uint32, 0x7F800000)
_EXPONENTS: dict[int, tuple[Any, int]] = {
    faiss.ScalarQuantizer.QT_fp16: (np.uint16, 0x7C00),
    faiss.ScalarQuantizer.QT_bf16: (np.uint16, 0x7F80),
}
"""Bits of the exponent, by type of number: a number is not finite if all of these are set."""
_SCANNED_ROWS = 8192

_FAISS_PROBES, _FAISS_EF_SEARCH, _FAISS_FACTOR = 1, 16, 1
"""Values of a file whose maker has set none."""

_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer in place of the file; fetch the file with `git lfs pull`",
    b"\x80": "a pickle, which is never opened, as it could run code; write the index with faiss.write_index",
    b"\x93NUMPY": "an array of NumPy; put it into an index and write that with faiss.write_index",
    b"\x1f\x8b": "compressed with gzip; decompress it",
    b"BZh": "compressed with bzip2; decompress it",
    b"\xfd7zXZ": "compressed with xz; decompress it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it",
    b"PK\x03\x04": "a zip archive; unpack it",
}
"""First bytes of other files that users give in place of an index, and what to do about each."""


def parts_of(index: Any) -> list[Any]:
    """Return a faiss index and the indexes inside it, from the outside in; only the first stage of an IndexRefine."""
    parts = [faiss.downcast_index(index)]
    while (inner := _inside(parts[-1])) is not None:
        parts.append(inner)
    return parts


def _inside(index: Any) -> Any:
    if isinstance(index, faiss.IndexIDMap | faiss.IndexPreTransform):
        return faiss.downcast_index(index.index)
    return faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else None


def without_id_maps(index: Any) -> tuple[Any, Ids | None]:
    """Take off the IndexIDMaps around a faiss index, which must outlive the result.

    Returns:
        The index inside, and the outer id of each inner id, ``[ntotal]``; None if they are the same.
    """
    ids: Ids | None = None
    while isinstance(index, faiss.IndexIDMap):
        own: Ids = faiss.vector_to_array(index.id_map)
        ids = own if ids is None else ids[own]
        index = faiss.downcast_index(index.index)
    return index, None if ids is None or _are_rows(ids) else ids


def _are_rows(ids: Ids) -> bool:
    return np.array_equal(ids, np.arange(len(ids)))


@dataclass(frozen=True)
class FaissFile:
    """FAISS file of a kind that can be searched here."""

    path: Path
    index: Any
    """Index as faiss read it."""
    mapped: NDArray[np.uint8]
    """Bytes of the file; ``index`` has views of them."""
    stamp: tuple[int, ...]
    """Result of ``stamp_of`` for the file, taken when it was mapped."""

    @classmethod
    def open(cls, path: Path) -> FaissFile:
        """Map a file, and check its kind and metric; the file is not changed.

        Raises:
            DataError: it is missing, not readable, cut off or not a FAISS index, or it has no vectors or another kind
                or metric.
        """
        try:
            _check_start(path)
            stamp = stamp_of(path)
            mapped = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); give a file that this user may read") from error
        # Faiss's own mapping of files, which opens built indexes, reads beyond the end of one that is cut off.
        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(mapped), len(mapped))  # type: ignore[attr-defined]
        try:
            index: Any = faiss.read_index(reader, faiss.IO_FLAG_READ_ONLY)
        except (RuntimeError, MemoryError) as error:
            raise DataError(
                f"{path}: no whole FAISS index ({_cause(error)}); give a file that faiss.write_index wrote, all of its "
                "parts joined in order"
            ) from error
        if reader.rp_ != len(mapped):
            raise DataError(
                f"{path}: got {len(mapped):,} bytes, but the FAISS index in it has {reader.rp_:,}; fetch it again, and "
                "join all of its parts in order"
            )
        file = cls(path, index, mapped, stamp)
        file._check_kind()
        if not file.count:
            raise DataError(f"{path}: {file.kind} holds no vectors; give the file that they were added to")
        return file

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self.index.ntotal)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.index.d)

    @property
    def kind(self) -> str:
        """Names of faiss's classes, such as ``"IndexIDMap of IndexFlatIP"``."""
        return _names(parts_of(self.index))

    @property
    def is_l2(self) -> bool:
        """Whether the nearest vectors have the least distance, and not the largest inner product."""
        return bool(self.index.metric_type == faiss.METRIC_L2)

    @property
    def is_lossless(self) -> bool:
        """Whether ``vectors`` returns the vectors of ``transformed`` without loss, or in half precision."""
        keeper = self._keeper
        if isinstance(keeper, faiss.IndexScalarQuantizer | faiss.IndexIVFScalarQuantizer):
            return keeper.sq.qtype in _HALVES
        return isinstance(keeper, faiss.IndexFlat | faiss.IndexIVFFlat)

    @property
    def _keeper(self) -> Any:
        """Part of the index from which ``vectors`` reads."""
        parts = parts_of(self.index)
        refined = [part for part in parts if isinstance(part, faiss.IndexRefine)]
        last = faiss.downcast_index(refined[0].refine_index) if refined else parts[-1]
        return faiss.downcast_index(last.storage) if isinstance(last, faiss.IndexHNSW) else last

    @property
    def keeps_lengths(self) -> bool:
        """Whether ``vectors`` have the lengths of the vectors that the file was made from."""
        is_transformed = any(isinstance(part, faiss.IndexPreTransform) for part in parts_of(self.index))
        return self.is_lossless and not is_transformed

    def index_type(self, *, ids_are_rows: bool) -> str:
        """Return the key of ``INDEX_TYPES`` that searches this file, or ``faiss``.

        ``ids_are_rows``: whether the ids are 0 to ``count - 1``, in any order.
        """
        inner, _ = without_id_maps(self.index)
        if isinstance(inner, faiss.IndexFlat):
            return FLAT
        if isinstance(inner, faiss.IndexScalarQuantizer):
            return _SCALAR_TYPES.get(inner.sq.qtype, FOREIGN)
        if isinstance(inner, faiss.IndexHNSWFlat):
            return "hnsw"
        return "ivf" if isinstance(inner, faiss.IndexIVFFlat) and ids_are_rows else FOREIGN

    def options(self) -> dict[str, int]:
        """Return the options of a search: the values that the file's maker has set, else those of a built index."""
        found: dict[str, int] = {}
        for part in parts_of(self.index):
            if isinstance(part, faiss.IndexIVF):
                is_set = part.nprobe != _FAISS_PROBES
                found["num_probes"] = int(part.nprobe) if is_set else usual_probes(part.nlist)
            elif isinstance(part, faiss.IndexHNSW):
                is_set = part.hnsw.efSearch != _FAISS_EF_SEARCH
                found["ef_search"] = int(part.hnsw.efSearch) if is_set else parse_options(FOREIGN, {})["ef_search"]
            elif isinstance(part, faiss.IndexRefine):
                is_set = part.k_factor != _FAISS_FACTOR
                default = parse_options(FOREIGN, {})["refine_factor"]
                found["refine_factor"] = math.ceil(part.k_factor) if is_set else default
        return found

    def ids(self) -> Ids | None:
        """Return all ids, in any order; None if they are 0 to ``count - 1``, in any order.

        Raises:
            DataError: an id occurs twice, ids and vectors differ in number, or an IndexRefine cannot have such ids.
        """
        found = self._ids(self.index)
        if found is None:
            return None
        ordered = np.sort(found)
        if len(found) != self.count or np.any(ordered[1:] == ordered[:-1]):
            raise DataError(f"{self.path}: got {len(np.unique(found)):,} ids for {self.count:,} vectors; make it again")
        return None if _are_rows(ordered) else found

    def _ids(self, index: Any) -> Ids | None:
        """Return the ids of a part; None if they are 0, 1, 2, ..."""
        if type(index) in _LISTS:
            lists = index.invlists
            sizes = [lists.list_size(number) for number in range(index.nlist)]
            each = [faiss.rev_swig_ptr(lists.get_ids(number), size) for number, size in enumerate(sizes) if size]
            return np.concatenate(each) if each else np.zeros(0, np.int64)
        inner = _inside(index)
        if inner is None:
            return None
        found = self._ids(inner)
        if found is not None and not isinstance(index, faiss.IndexPreTransform) and not _are_rows(np.sort(found)):
            raise DataError(
                f"{self.path}: {_names([index, *parts_of(inner)])}, whose inner ids are not 0 to {len(found) - 1:,}; "
                "make it again without ids of its own"
            )
        if not isinstance(index, faiss.IndexIDMap):
            return found
        own: Ids = faiss.vector_to_array(index.id_map)
        return own

    def vectors(self, ids: Ids) -> Floats:
        """Return the vectors of some ids, as the file has kept them: float32 ``[len(ids), width]``.

        The width is ``dimension`` unless an IndexPreTransform changes it.
        """
        return _vectors(self.index, ids)

    def check_finite(self, advance: Callable[[int], None]) -> None:
        """Check every vector that is kept without loss; ``advance`` is called with the number of checked vectors.

        An encoder in half precision may overflow in one batch of thousands, and a scan takes NaN for the best score.

        Raises:
            DataError: a vector holds NaN or infinity.
        """
        if not self.is_lossless:
            return
        keeper = self._keeper
        is_half = isinstance(keeper, faiss.IndexScalarQuantizer | faiss.IndexIVFScalarQuantizer)
        dtype, exponent = _EXPONENTS[keeper.sq.qtype] if is_half else _FLOAT32
        for codes in _code_blocks(keeper):
            numbers: NDArray[Any] = codes.view(dtype)
            if np.any(numbers & dtype(exponent) == exponent):
                raise self.not_finite()
            advance(len(codes))

    def not_finite(self) -> DataError:
        """Return the error for vectors that a search cannot order."""
        return DataError(f"{self.path}: its vectors hold NaN or infinity; make the file again")

    def transformed(self, vectors: Floats) -> Floats:
        """Return the vectors that the file would keep, before its rounding: ``[n, dimension]`` to ``[n, width]``."""
        for part in parts_of(self.index):
            if isinstance(part, faiss.IndexRefine):  # its second stage keeps vectors before the transform
                break
            if isinstance(part, faiss.IndexPreTransform):
                chain: Any = part.chain
                for number in range(chain.size()):
                    vectors = faiss.downcast_VectorTransform(chain.at(number)).apply(vectors)
        return vectors

    def _check_kind(self) -> None:
        parts = parts_of(self.index)
        refines = [part for part in parts if isinstance(part, faiss.IndexRefine)]
        refined = [faiss.downcast_index(part.refine_index) for part in refines]
        stored = [faiss.downcast_index(part.storage) for part in parts if isinstance(part, faiss.IndexHNSW)]
        for part in (*parts, *refined, *stored):
            if type(part) not in _KINDS:
                raise DataError(
                    f"{self.path}: got a FAISS index of kind {type(part).__name__} (in {self.kind}), expected "
                    f"{', '.join(kind.__name__ for kind in (*_CODES, *_LISTS, *_GRAPHS))}, also within "
                    f"{', '.join(kind.__name__ for kind in _WRAPPERS)}; build another index"
                )
        for refine, second in zip(refines, refined, strict=True):
            if refine.d != second.d:  # such as ``pq`` makes
                raise DataError(
                    f"{self.path}: its IndexRefine has a second stage of dimension {second.d} and not {refine.d}, as "
                    "only `ragr1 index build` makes and reads it; build the index with that"
                )
        lists = faiss.downcast_InvertedLists(parts[-1].invlists) if type(parts[-1]) in _LISTS else None
        if isinstance(lists, faiss.OnDiskInvertedLists):
            raise DataError(
                f"{self.path}: its lists are in another file, {lists.filename}; merge them into this one first"
            )
        metrics = {part.metric_type for part in (*parts, *refined)}
        if len(metrics) > 1 or not metrics <= {*_METRICS}:
            raise DataError(
                f"{self.path}: got faiss's metrics {sorted(metrics)} in {self.kind}, expected inner product "
                f"({faiss.METRIC_INNER_PRODUCT}) or L2 ({faiss.METRIC_L2}); build another index"
            )


def _vectors(index: Any, ids: Ids) -> Floats:
    if isinstance(index, faiss.IndexIDMap):
        return _vectors(faiss.downcast_index(index.index), _places(faiss.vector_to_array(index.id_map), ids))
    if isinstance(index, faiss.IndexPreTransform):
        return _vectors(faiss.downcast_index(index.index), ids)
    if isinstance(index, faiss.IndexRefine):
        return _vectors(faiss.downcast_index(index.refine_index), ids)
    if type(index) in _LISTS:
        return _listed_vectors(index, ids)
    # One by one, as some of faiss's functions that read many end the process for some kinds.
    return np.stack([index.reconstruct(int(number)) for number in ids])


def _code_blocks(index: Any) -> Iterator[NDArray[np.uint8]]:
    """Yield the codes of an index, uint8 ``[n, code_size]``."""
    if type(index) not in _LISTS:
        codes = codes_of(index)
        yield from (codes[start : start + _SCANNED_ROWS] for start in range(0, len(codes), _SCANNED_ROWS))
        return
    lists, width = index.invlists, index.code_size
    for number in range(index.nlist):
        if size := lists.list_size(number):
            yield faiss.rev_swig_ptr(lists.get_codes(number), size * width).reshape(size, width)


def _places(all_ids: Ids, ids: Ids) -> Ids:
    """Return the positions of some ids among all."""
    found = np.flatnonzero(np.isin(all_ids, ids))
    order = np.argsort(all_ids[found])
    return found[order][np.searchsorted(all_ids[found], ids, sorter=order)]


def _listed_vectors(index: Any, ids: Ids) -> Floats:
    if type(index) in _FAST_SCANS:
        index.fine_quantizer = index.pq  # faiss 1.15 does not set it when it reads a file, but uses it here
    found = np.zeros((len(ids), index.d), np.float32)
    order = np.argsort(ids)
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        here: Ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size) if size else np.zeros(0, np.int64)
        for offset in np.flatnonzero(np.isin(here, ids)).tolist():
            row = order[np.searchsorted(ids, here[offset], sorter=order)]
            index.reconstruct_from_offset(number, offset, faiss.swig_ptr(found[row]))
    return found


def _names(parts: Iterable[Any]) -> str:
    return " of ".join(type(part).__name__ for part in parts)


def _cause(error: BaseException) -> str:
    """Return faiss's description of an error, without the place in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: ", "", one_line(error))


def _check_start(path: Path) -> None:
    """Refuse a file whose first bytes show that it is not a FAISS index, without reading more."""
    if not path.is_file():
        raise DataError(f"no index file {path}; give a file that faiss.write_index wrote")
    with path.open("rb") as file:
        start = file.read(max(map(len, _STARTS)))
    if not start:
        raise DataError(f"{path}: an empty file; fetch it again")
    for known, what in _STARTS.items():
        if start.startswith(known):
            raise DataError(f"{path}: {what}")
