"""Search by vectors: ``DenseRanker`` over the shards of an index directory, a ``VectorIndex`` for each.

Imports faiss, as ``faiss_build`` does.

::

    search ─► candidates of a scanner ─► scored again from the vectors, in double precision ─► best first, ties by row

    flat, fp16, sq8   a scan of every vector        from the vectors kept (flat: as they were given)
    pq, ivf_pq        a scan of 2-bit codes         from bytes: what the codes leave over, or the vector itself
    ivf, hnsw         some lists, a graph           not again: faiss's own scores are float32
    faiss             whatever the file has         not again
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError, one_line
from retrieval.indexes.faiss_build import (
    CODED,
    CodedParts,
    Floats,
    build_faiss_index,
    codes_of,
    decode_bytes,
    half_precision_lists,
)
from retrieval.indexes.faiss_file import parts_of, without_id_maps
from retrieval.indexes.manifest import (
    EMPTY_FILE,
    ENCODER_FOLDER,
    FLAT,
    FOREIGN,
    FOREIGN_OPTIONS,
    GPU_TYPES,
    ROWS_FILE,
    Manifest,
    Shard,
    parse_options,
)
from retrieval.indexes.ranking import ABSENT, SPARE, Ranking, best_of, merge_rankings, without_rows

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

Rows = NDArray[np.int64]

BLOCK_ROWS = 8192
"""Number of vectors that are decoded at once; in float32 they stay in the processor's cache."""
_RESCORED_NUMBERS = 2**20
"""Numbers decoded at once when candidates are scored again: 12 MB for any batch and ``k``."""
LEAST_CANDIDATES = 64
"""Least number of candidates of a compressed index: on weak clusters 40 lose .0005 of the best 3, and 64 none."""
_MANY_EQUAL = 1000
"""Candidates beyond ``k`` of a full scan where a row that was left out of ``SPARE`` may equal the k-th."""
_ROUNDING = 1e-6
"""Limit of the difference between scores of the same vectors in products of different sizes."""
_PRODUCT_FROM = 4
"""Number of queries from which a matrix product beats faiss's scan, which decodes the vectors for each query."""
_SEARCHED_BY_FAISS = ("ivf", "hnsw", FOREIGN)
_MAX_GPU_K = 2048
"""Limit of faiss-gpu, for results and for lists that a query looks into."""


class Scanner(ABC):
    """Interface of a faiss index for ``VectorIndex``."""

    is_lossless: bool
    """Whether ``vectors`` returns the given vectors exactly."""

    def __init__(self, index: Any) -> None:
        """Take the faiss index to search."""
        self._index = index

    @abstractmethod
    def find(self, queries: Floats, k: int) -> Ranking:
        """Return at least ``k`` candidates of each query, if there are so many, in any order, with absent ones."""

    @abstractmethod
    def vectors(self, rows: Rows) -> Floats:
        """Return the vectors of rows, float32 ``[len(rows), dimension]``."""

    def blocks(self) -> Iterator[Floats]:
        """Yield all vectors in row order, float32 ``[<= BLOCK_ROWS, dimension]``."""
        for start in range(0, self._index.ntotal, BLOCK_ROWS):
            yield self.vectors(np.arange(start, min(start + BLOCK_ROWS, self._index.ntotal)))

    def rescored(self, queries: Floats, rows: Rows) -> Ranking:
        """Score candidates ``[num_queries, num_candidates]`` again, from ``vectors``.

        Scans and matrix products of different sizes round differently; a second sum in double precision does not.
        """
        scores = np.empty(rows.shape, np.float32)
        dimension = queries.shape[1]
        step = max(1, _RESCORED_NUMBERS // (rows.shape[1] * dimension))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            # Row 0 stands for absent rows; its scores are not used.
            vectors = self.vectors(np.maximum(some, 0).ravel()).reshape(*some.shape, dimension)
            wide = queries[start : start + step].astype(np.float64)
            scores[start : start + step] = np.einsum("qcd,qd->qc", vectors.astype(np.float64), wide)
        return Ranking(scores, rows)


class VectorIndex:
    """Inner-product search over vectors of length 1; row i is the i-th vector that was given."""

    def __init__(
        self, index: Any, index_type: str, *, device: str = "cpu", options: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap a faiss index of a type of ``INDEX_TYPES``, or an adopted one, around which an IndexIDMap may be.

        Raises:
            DataError: the faiss index is of another kind.
            ConfigError: an option is unknown or the index has no part for it, or there is no GPU.
        """
        self._owner = index
        """Owner of all parts, which faiss frees with it."""
        index, self._ids = without_id_maps(index)
        if not isinstance(index, _FAISS_CLASSES[index_type]):
            raise DataError(
                f"got a faiss index of kind {type(index).__name__}, expected one that `ragr1 index build` makes for "
                f"type {index_type!r}; build it again"
            )
        parse_options(index_type, options or {})
        self._index: Any = index
        self.scanner = _make_scanner(index, index_type, options or {})
        """Scanner that keeps the vectors, and finds them unless a GPU does."""
        self._find = self.scanner.find
        self._is_full_scan = isinstance(self.scanner, _FullScan)
        if device != "cpu" and index_type in GPU_TYPES:
            from retrieval.indexes.torch_index import TorchFlatIndex  # torch takes seconds to import

            self._find = TorchFlatIndex(self.scanner.blocks(), self.count, index.d, device=device).find
        elif device != "cpu" and index_type == "ivf" and faiss.get_num_gpus():
            self._find = _GpuLists(self.scanner, index, device).find

    @classmethod
    def build(
        cls,
        blocks: Iterable[Floats],
        dimension: int,
        index_type: str = FLAT,
        *,
        count: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> VectorIndex:
        """Index blocks of vectors, float32 ``[n, dimension]`` each, in that order.

        Args:
            blocks: an iterable that can be iterated over twice, such as a list, since all types but ``flat``, ``fp16``
                and ``hnsw`` first learn from a sample. The vectors of a generator are all kept meanwhile.
            dimension: length of a vector.
            index_type: a key of ``INDEX_TYPES``, which also has its ``options``.
            count: number of all vectors; if given, memory holds only the index and a block.

        Raises:
            ConfigError: the index type or an option is unknown, or the type cannot take the dimension.
            DataError: a number is not finite, or the number of vectors is 0 or not ``count``.
        """
        values = parse_options(index_type, options or {})
        return cls(build_faiss_index(blocks, dimension, index_type, count, values), index_type)

    def save(self, path: Path) -> None:
        """Write the index file; raises ``OSError`` if the disk is full or the file may not be written."""
        try:
            faiss.write_index(self._index, str(path))
        except RuntimeError as error:  # faiss's only exception, without an errno
            raise OSError(f"{path} could not be written: {one_line(error)}") from error

    @classmethod
    def load(
        cls,
        directory: Path,
        shard: Shard,
        index_type: str,
        dimension: int,
        *,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
    ) -> VectorIndex:
        """Map an index file, after a check against the manifest.

        Args:
            directory: of the index.
            shard: one of the manifest's, as ``index_type`` and ``dimension``.
            device: ``cpu``, or ``cuda`` for ``flat`` and ``fp16`` (torch) and ``ivf`` (faiss-gpu, else the CPU), which
                are in half precision there. The other types are made for CPUs and stay there.
            options: of the search; they take the place of those that the index was built with.

        Raises:
            DataError: the file is missing, truncated, or not the one the manifest describes.
            ConfigError: an unknown option, or no GPU.
        """
        shard.file.check(directory)
        path = directory / shard.file.name
        try:
            index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise DataError(f"{path}: faiss cannot read it ({one_line(error)}); build it again") from error
        if (index.ntotal, index.d) != (shard.count, dimension):
            raise DataError(
                f"{path}: got {index.ntotal} vectors of dimension {index.d}, expected {shard.count} of {dimension}; "
                "build the index again"
            )
        return cls(index, index_type, device=device, options=options)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self._index.ntotal)

    def search(self, queries: Floats, k: int, num_threads: int) -> Ranking:
        """Find the ``min(k, count)`` nearest rows of each query.

        ``flat`` finds exactly these, and the answer to a query does not depend on its batch, if at most 1,000 rows are
        as near as the last. Other types may miss some; if too few lists were searched, the last rows are absent.

        Args:
            queries: float32 ``[n, dimension]``, each of length 1.
            k: number of rows, at least 1.
            num_threads: threads of faiss in this call. ``flat`` uses torch's setting for the process.
        """
        k = min(k, self.count)
        if k == 0 or not len(queries):
            return Ranking(np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64))
        # OpenMP keeps this number per thread, also for torch: for an engine or a learner in this thread
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(num_threads)
        try:
            # torch warns about read-only memory, such as the memory of a message
            return self._ranked(np.require(queries, np.float32, ["C", "W"]), k, SPARE if self._is_full_scan else 0)
        finally:
            faiss.omp_set_num_threads(before)

    def _ranked(self, queries: Floats, k: int, spare: int) -> Ranking:
        """Order ``k + spare`` candidates; of a full scan, more if a row that is left out may equal the k-th."""
        depth = min(k + spare, self.count)
        scores, rows = self._find(queries, depth)
        best = best_of(scores, self._named(rows), k)
        if self._is_full_scan and depth < min(k + _MANY_EQUAL, self.count):
            is_open = (best.scores[:, -1] - scores.min(axis=1) <= _ROUNDING) & queries.any(axis=1)
            if is_open.any():
                best.scores[is_open], best.rows[is_open] = self._ranked(queries[is_open], k, _MANY_EQUAL)
        return best

    def blocks(self) -> Iterator[tuple[Rows, Floats]]:
        """Yield all vectors, float32 ``[n, dimension]``, with the row that ``search`` returns for each, ``[n]``."""
        start = 0
        for block in self.scanner.blocks():
            yield self._named(np.arange(start, start + len(block))), block
            start += len(block)

    def _named(self, rows: Rows) -> Rows:
        """Return the ids of an IndexIDMap for the rows inside it."""
        return rows if self._ids is None else np.where(rows == ABSENT, ABSENT, self._ids[rows])


class _FullScan(Scanner):
    """Scan of every vector, one code after another: ``flat``, ``fp16`` and ``sq8``."""

    def __init__(self, index: Any) -> None:
        super().__init__(index)
        self._codes = codes_of(index)
        self.is_lossless = isinstance(index, faiss.IndexFlat)

    def find(self, queries: Floats, k: int) -> Ranking:
        if not self.is_lossless and len(queries) < _PRODUCT_FROM:
            return self.rescored(queries, self._index.search(queries, k)[1])
        # This is faster than faiss's product: docs/decisions/retrieval-libraries.md has the figures.
        from retrieval.indexes.torch_index import best_of_block  # torch takes seconds to import

        start, best = 0, list[Ranking]()
        for block in self.blocks():
            scores, rows = best_of_block(queries, block, k)
            best = [merge_rankings([*best, Ranking(scores, rows + start)], k)]
            start += len(block)
        return self.rescored(queries, best[0].rows)

    def blocks(self) -> Iterator[Floats]:
        for start in range(0, self._index.ntotal, BLOCK_ROWS):
            yield self.vectors(slice(start, start + BLOCK_ROWS))  # not copied, where they are as they were given

    def vectors(self, rows: Rows | slice) -> Floats:
        codes = self._codes[rows]
        found: Floats = codes.view(np.float32) if self.is_lossless else self._index.sa_decode(codes)
        return found


class _CodeScan(Scanner):
    """Scan of 2-bit codes, of all vectors or of some lists; one byte per number scores candidates again."""

    is_lossless = False

    def __init__(self, index: Any, options: Mapping[str, Any]) -> None:
        super().__init__(index)
        self._parts = CodedParts.of(index)
        self._base = self._parts.base
        # Double precision, so that products of different sizes round alike.
        self._rotation = self._parts.rotation.astype(np.float64)
        self._bytes = codes_of(self._parts.table)
        self._factor = int(options.get("refine_factor", self._parts.refine.k_factor))

    def find(self, queries: Floats, k: int) -> Ranking:
        rotated = (queries @ self._rotation).astype(np.float32)
        num_candidates = max(LEAST_CANDIDATES, k * self._factor)
        if num_candidates < self._base.ntotal:
            rows = self._base.search(rotated, num_candidates)[1]
        else:  # all rows, without a scan: faiss's fast scan drops those that its rounded scores put last
            rows = np.tile(np.arange(self._base.ntotal), (len(queries), 1))
        return self.rescored(rotated, rows)

    def vectors(self, rows: Rows) -> Floats:
        """Return the vectors of rows in the rotated space, float32 ``[len(rows), dimension]``."""
        decoded = decode_bytes(self._bytes[rows])
        if self._parts.is_residual:
            decoded += self._base.reconstruct_batch(rows)
        return decoded


class _FaissSearch(Scanner):
    """Search by faiss itself: ``ivf``, ``hnsw`` and ``faiss``."""

    def __init__(self, index: Any, index_type: str, options: Mapping[str, Any]) -> None:
        super().__init__(index)
        self.is_lossless = index_type != FOREIGN
        parts = parts_of(index)
        self._graphs = [part for part in parts if isinstance(part, faiss.IndexHNSW)]
        self._refines = [part for part in parts if isinstance(part, faiss.IndexRefine)]
        lists = [part for part in parts if isinstance(part, faiss.IndexIVF)]
        for name, users in zip(FOREIGN_OPTIONS, (lists, self._graphs, self._refines), strict=True):
            if name in options and not users:
                raise ConfigError(
                    f"option {name!r}: the index, {' of '.join(type(part).__name__ for part in parts)}, has no part "
                    "for it; leave it out"
                )
        for part in lists:
            _set_probes(part, options)
        for refine in self._refines:
            refine.k_factor = options.get("refine_factor", refine.k_factor)
        self._ef_search = [options.get("ef_search", part.hnsw.efSearch) for part in self._graphs]

    def find(self, queries: Floats, k: int) -> Ranking:
        depth = k * max((math.ceil(part.k_factor) for part in self._refines), default=1)
        for part, ef_search in zip(self._graphs, self._ef_search, strict=True):
            part.hnsw.efSearch = max(ef_search, depth)
        return _as_products(self._index, *self._index.search(queries, k))

    def vectors(self, rows: Rows) -> Floats:
        # Rows are consecutive, since faiss reads all lists once to find the rows in them.
        decoded: Floats = self._index.reconstruct_n(int(rows[0]), len(rows))
        return decoded


class _GpuLists:
    """Lists of ``ivf`` in half precision on a GPU. Needs faiss-gpu.

    Only one thread may search at a time, as faiss does not lock the resources of this index. Scores are half precision.
    """

    def __init__(self, scanner: Scanner, index: Any, device: str) -> None:
        self._cpu = scanner
        self._resources = faiss.StandardGpuResources()
        _, _, number = device.partition(":")
        self._index: Any = faiss.index_cpu_to_gpu(self._resources, int(number or 0), half_precision_lists(index))

    def find(self, queries: Floats, k: int) -> Ranking:
        if max(k, self._index.nprobe) > _MAX_GPU_K:
            return self._cpu.find(queries, k)
        return _as_products(self._index, *self._index.search(queries, k))


def _as_products(index: Any, scores: Floats, rows: Rows) -> Ranking:
    """Return inner products for the squared distances of vectors of length 1, which an adopted index may return."""
    is_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
    return Ranking(scores if is_product else np.float32(1) - np.float32(0.5) * scores, rows)


_FAISS_CLASSES: dict[str, Any] = {
    FLAT: faiss.IndexFlat,
    "fp16": faiss.IndexScalarQuantizer,
    "sq8": faiss.IndexScalarQuantizer,
    "pq": faiss.IndexPreTransform,
    "ivf": faiss.IndexIVFFlat,
    "ivf_pq": faiss.IndexPreTransform,
    "hnsw": faiss.IndexHNSWFlat,
    FOREIGN: faiss.Index,
}


def _make_scanner(index: Any, index_type: str, options: Mapping[str, Any]) -> Scanner:
    if index_type == "ivf_pq":
        _set_probes(CodedParts.of(index).base, options)
    if index_type in CODED:
        return _CodeScan(index, options)
    return _FaissSearch(index, index_type, options) if index_type in _SEARCHED_BY_FAISS else _FullScan(index)


def _set_probes(lists: Any, options: Mapping[str, Any]) -> None:
    lists.nprobe = min(options.get("num_probes") or lists.nprobe, lists.nlist)


class DenseRanker:
    """Ranker by the inner product of the vectors of rows and query."""

    def __init__(
        self,
        directory: str | Path,
        manifest: Manifest,
        *,
        num_threads: int = 1,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        shards: Sequence[int] | None = None,
        load_encoder: bool = True,
        encoder_dir: str = "",
        shards_dir: str = "",
    ) -> None:
        """Open shards, and the encoder with which the index was built.

        Args:
            directory: directory made by ``build_index``; ``manifest`` is its manifest.
            num_threads: threads of the search. The host process sets torch's threads.
            device: ``cpu`` or ``cuda``, for encoder and index.
            options: options of the search; see ``INDEX_TYPES`` and ``FOREIGN_OPTIONS``.
            shards: numbers of the shards to open; the default is all.
            load_encoder: whether to load the encoder; without it, ``rank`` needs vectors.
            encoder_dir: see ``open_encoder``.
            shards_dir: folder of the shard files; the default is ``directory``.

        Raises:
            DataError: a shard or the encoder is missing, damaged or replaced.
            ConfigError: an option is unknown.
        """
        directory = Path(directory)
        numbers = range(len(manifest.shards)) if shards is None else shards
        if not numbers or not all(0 <= number < len(manifest.shards) for number in numbers):
            raise DataError(
                f"{directory}: got shards {list(numbers)}, but the index has {len(manifest.shards)}, numbered from 0; "
                "build it with more shards or ask for fewer"
            )
        if sum(shard.count for shard in manifest.shards) != manifest.count:
            raise DataError(f"{directory}: its shards do not hold {manifest.count} vectors; build the index again")
        self._num_threads = num_threads
        self._dimension = manifest.dimension
        adopted = {file.name for file in manifest.files} & {ROWS_FILE, EMPTY_FILE}
        arrays: dict[str, Rows] = {name: np.load(directory / name, mmap_mode="r") for name in adopted}
        self._row_of_id = arrays.get(ROWS_FILE)
        """Ids of an adopted index's vectors, ascending, and the corpus row of each; None if the ids are the rows."""
        self.empty_rows = arrays.get(EMPTY_FILE, np.zeros(0, np.int64))
        """Rows of an adopted index that are never found, ascending."""
        options = manifest.options | {name: value for name, value in (options or {}).items() if value}  # 0: the default
        folder = Path(shards_dir or directory)
        self._shards = [
            (
                shard.start,
                VectorIndex.load(
                    folder, shard, manifest.vector_type, manifest.dimension, device=device, options=options
                ),
            )
            for shard in (manifest.shards[number] for number in numbers)
        ]
        self._encoder = open_encoder(directory, manifest, device, encoder_dir) if load_encoder else None

    @property
    def encoder(self) -> Encoder:
        """Encoder of the index; raises ``ValueError`` if the ranker was opened without one."""
        if self._encoder is None:
            raise ValueError("the ranker was opened without an encoder; hand it the vectors of the queries")
        return self._encoder

    @property
    def is_lossless(self) -> bool:
        """Whether the index keeps the given vectors exactly."""
        return all(index.scanner.is_lossless for _, index in self._shards)

    def blocks(self) -> Iterator[tuple[Rows, Floats]]:
        """Yield all vectors of a lossless index, float32 ``[n, dimension]``, and their rows, ``[n]``."""
        for start, index in self._shards:
            for ids, vectors in index.blocks():
                yield self._corpus_rows(ids + start), vectors

    def _corpus_rows(self, ids: Rows) -> Rows:
        """Return the corpus rows of ids of any shape; ``ABSENT`` stays."""
        if self._row_of_id is None:
            return ids
        known, rows = self._row_of_id
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(ids == ABSENT, ABSENT, rows[places])

    def rank(self, queries: list[str], k: int, vectors: Floats | None = None) -> Ranking:
        """Return the best ``min(k, count)`` rows of each query, numbered as in the whole corpus; see ``Rank``.

        Raises:
            RetrievalError: the vectors have another shape, or hold NaN or infinity.
        """
        if not queries:
            return Ranking(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))
        vectors = self.encoder.encode_queries(queries) if vectors is None else vectors
        expected = (len(queries), self._dimension)
        if vectors.shape != expected:
            raise RetrievalError(
                f"got query vectors of shape {vectors.shape}, expected {expected}; encode with the index's encoder"
            )
        if not np.isfinite(vectors).all():
            raise RetrievalError("a query's vector holds NaN or infinity; the encoder is broken, so check its files")
        ranking = self._filled(vectors, k)
        # Every row is equally near to the zero vector, and no evidence is better than the first k rows.
        unknown = ~np.any(vectors, axis=1)
        ranking.rows[unknown] = ABSENT
        ranking.scores[unknown] = -np.inf
        return ranking

    def _filled(self, vectors: Floats, k: int) -> Ranking:
        """Search deeper until each query has ``k`` rows besides the empty ones, or there are no more rows."""
        empty = self.empty_rows
        depth = k + min(SPARE, len(empty))
        while True:
            found = self._search(vectors, depth)
            kept = without_rows(found, empty, k)
            is_cut = (kept.rows == ABSENT).any(axis=1) & (found.rows[:, -1] != ABSENT)
            if depth >= k + len(empty) or not is_cut.any():
                return kept
            depth = min(2 * depth, k + len(empty))

    def _search(self, vectors: Floats, k: int) -> Ranking:
        found = []
        for start, index in self._shards:
            scores, rows = index.search(vectors, k, self._num_threads)
            found.append(Ranking(scores, np.where(rows == ABSENT, ABSENT, rows + start)))
        ranking = merge_rankings(found, k)
        return ranking if self._row_of_id is None else best_of(ranking.scores, self._corpus_rows(ranking.rows), k)


def open_encoder(directory: Path, manifest: Manifest, device: str = "cpu", encoder_dir: str = "") -> Encoder:
    """Load the encoder of an index: from its directory, from ``encoder_dir``, or from where it was at the build.

    Raises:
        DataError: it is another encoder, whose vectors would find passages at random.
    """
    from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds to import

    inside = directory / manifest.encoder
    if manifest.encoder == ENCODER_FOLDER and not inside.is_dir():
        raise DataError(f"no {inside}; copy the index as a whole or build it again")
    encoder = Encoder.load(inside if inside.is_dir() else encoder_dir or manifest.encoder, device=device)
    if (encoder.fingerprint, encoder.dimension) != (manifest.encoder_fingerprint, manifest.dimension):
        raise DataError(
            f"encoder {encoder.name!r} has fingerprint {encoder.fingerprint[:12]} and dimension {encoder.dimension}, "
            f"but the index was built with {manifest.encoder!r}, {manifest.encoder_fingerprint[:12]} and "
            f"{manifest.dimension}; use that encoder or build the index again"
        )
    return encoder
