"""From queries to rows by vectors: ``DenseRanker`` over the shards of an index directory, ``VectorIndex`` in each.

Imports faiss, as ``faiss_build`` does.

::

    search ─► candidates of a scanner ─► scored again from the vectors, in double precision ─► best first, ties by row

    flat, fp16, sq8   a scan of every vector        from the vectors kept (flat: as they were given)
    pq, ivf_pq        a scan of 2-bit codes         from bytes: what the codes leave over, or the vector itself
    ivf, hnsw         some lists, a graph           not again: faiss's own scores are float32
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, RetrievalError, one_line
from retrieval.base import Passage
from retrieval.indexes.faiss_build import CODED, CodedParts, build_faiss_index, codes_of, decode_bytes
from retrieval.indexes.manifest import ENCODER_FOLDER, FLAT, Manifest, Shard, parse_options
from retrieval.indexes.ranking import ABSENT, SPARE, Ranking, best_of, merge_rankings

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

BLOCK_ROWS = 8192
"""Vectors decoded at once; in float32 they stay in the processor's cache."""
_RESCORED_NUMBERS = 2**20
"""Decoded at once when candidates are scored again: 12 MB for any batch and ``k``."""
LEAST_CANDIDATES = 64
"""Least candidates of a compressed index for any ``k``: on weak clusters 40 lose .0005 of the best 3, and 64 none."""
_BLAS_FROM = 4
"""Queries from which a matrix product beats one scan per query (by 10 times at 64)."""
_SCAN_THRESHOLD = faiss.cvar.distance_compute_blas_threshold
_MAX_GPU_K = 2048
"""faiss-gpu's own limit."""


class Scanner(Protocol):
    """What finds candidates, and keeps vectors that score them."""

    is_lossless: bool
    """Whether ``vectors`` are those that were given."""
    rescores: bool
    """Whether ``find``'s scores are only good enough to choose candidates."""

    def turn(self, queries: Floats) -> Floats:
        """Return queries as ``find`` and ``vectors`` have them: some types turn the space first."""
        ...

    def find(self, queries: Floats, k: int) -> Ranking:
        """Return at least ``k`` candidates of each query where there are so many, absent ones anywhere."""
        ...

    def vectors(self, rows: Rows) -> Floats:
        """Return the vectors of rows, float32 ``[len(rows), dimension]``."""
        ...


class Unturned:
    """A scanner in the space that the vectors were given in."""

    def turn(self, queries: Floats) -> Floats:
        """Return them as they are."""
        return queries


class VectorIndex:
    """Inner-product search over vectors of length 1; row i is vector i as built."""

    def __init__(self, index: Any, *, device: str = "cpu", options: Mapping[str, Any] | None = None) -> None:
        """Wrap a faiss index. ``DataError``: one that ``build`` does not make; ``ConfigError``: an unknown option."""
        self._index = index
        self.index_type = _type_of(index)
        """A key of ``INDEX_TYPES``."""
        parse_options(self.index_type, options or {})
        scanner = _make_scanner(index, self.index_type, options or {})
        self._vectors = scanner
        self._scanner: Scanner = scanner if device == "cpu" else _on_gpu(scanner, index, self.index_type, device)

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
            blocks: something to iterate over more than once, such as a list: all types but ``flat``, ``fp16`` and
                ``hnsw`` first learn from a sample. Of a generator they keep all vectors meanwhile.
            dimension: of a vector.
            index_type: a key of ``INDEX_TYPES``, which ``options`` belong to.
            count: of all vectors; given it, memory never holds more than the index and a block.

        Raises:
            ConfigError: an unknown index type or option, or a dimension that the type cannot take.
            DataError: NaN or infinity, no vectors, or another number of them than ``count``.
        """
        values = parse_options(index_type, options or {})
        faiss.cvar.distance_compute_blas_threshold = _SCAN_THRESHOLD  # a search before must not change what is built
        return cls(build_faiss_index(blocks, dimension, index_type, count, values))

    def save(self, path: Path) -> None:
        """Write the index file. Raises ``OSError``: no room, or no right to write."""
        try:
            faiss.write_index(self._index, str(path))
        except RuntimeError as error:  # faiss's only exception, without an errno
            raise OSError(f"{path} could not be written: {one_line(error)}") from error

    @classmethod
    def load(
        cls,
        path: Path,
        shard: Shard,
        dimension: int,
        *,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
    ) -> VectorIndex:
        """Map an index file, after a check against the manifest.

        Args:
            path: of the file.
            shard: what the manifest says of it; ``dimension`` is that of the manifest.
            device: ``cpu``, or ``cuda`` for ``flat`` (faiss-gpu, or torch without it), ``fp16`` (torch) and ``ivf``
                (faiss-gpu, else the CPU). The other types are made for CPUs and stay there.
            options: of the index type. Those of the search take the place of the ones it was built with.

        Raises:
            DataError: the file is missing, truncated, or not the one the manifest describes.
            ConfigError: an unknown option, or no GPU.
        """
        shard.file.check(path.parents[len(Path(shard.file.name).parts) - 1])
        try:
            index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise DataError(f"{path}: faiss cannot read it ({one_line(error)}); build it again") from error
        if (index.ntotal, index.d) != (shard.count, dimension):
            raise DataError(
                f"{path}: got {index.ntotal} vectors of dimension {index.d}, expected {shard.count} of {dimension}; "
                "build the index again"
            )
        return cls(index, device=device, options=options)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self._index.ntotal)

    @property
    def is_lossless(self) -> bool:
        """Whether the vectors themselves are kept, as they were given."""
        return self._vectors.is_lossless

    def blocks(self) -> Iterator[Floats]:
        """Yield all vectors as the index keeps them, float32 ``[<= BLOCK_ROWS, dimension]``, in row order."""
        return _scan_blocks(self._vectors, self.count)

    def search(self, queries: Floats, k: int, num_threads: int) -> tuple[Floats, Rows]:
        """Find the ``min(k, count)`` nearest rows of each query, best first, equal scores by row.

        ``flat`` finds exactly these, and the answer of a query does not depend on its batch. The others may miss some.

        Args:
            queries: float32 ``[n, dimension]``, each of length 1.
            k: at least 1.
            num_threads: of faiss, in the calling thread.

        Returns:
            scores float32 ``[n, min(k, count)]`` and rows int64 of the same shape. Where too few lists were looked
            into the last ones are absent: row -1, score ``-inf``.
        """
        # OpenMP keeps this number per thread: it must be set in the thread that searches.
        faiss.omp_set_num_threads(num_threads)
        k = min(k, self.count)
        if k == 0 or not len(queries):
            return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
        # faiss scans once per query unless n * dimension is over this; its default makes batches no faster.
        faiss.cvar.distance_compute_blas_threshold = 1 if len(queries) >= _BLAS_FROM else _SCAN_THRESHOLD
        queries = self._scanner.turn(np.ascontiguousarray(queries, np.float32))
        found = self._scanner.find(queries, k)
        scores = _rescore(self._scanner, queries, found.rows) if self._scanner.rescores else found.scores
        ranking = best_of(scores, found.rows, k)
        return ranking.scores, ranking.rows


class _FullScan(Unturned):
    """Every vector, one code after another: ``flat``, ``fp16`` and ``sq8``."""

    rescores = True

    def __init__(self, index: Any) -> None:
        self._index = index
        self._codes = codes_of(index)
        self.is_lossless = isinstance(index, faiss.IndexFlat)

    def find(self, queries: Floats, k: int) -> Ranking:
        k = min(k + SPARE, self._index.ntotal)
        if self.is_lossless or len(queries) < _BLAS_FROM:
            return Ranking(*self._index.search(queries, k))
        # faiss scans compressed vectors once per query and decodes each again; decoding them once is 4 times faster.
        start, best = 0, list[Ranking]()
        for block in _scan_blocks(self, self._index.ntotal):
            scores, rows = faiss.knn(queries, block, min(k, len(block)), faiss.METRIC_INNER_PRODUCT)
            best = [merge_rankings([*best, Ranking(scores, rows + start)], k)]
            start += len(block)
        return best[0]

    def vectors(self, rows: Rows) -> Floats:
        if self.is_lossless:
            view: Floats = self._codes.view(np.float32)
            return view[rows]
        decoded: Floats = self._index.sa_decode(self._codes[rows])
        return decoded


class _CodeScan:
    """2-bit codes, of all vectors or of some lists, and one byte per number to score candidates again."""

    is_lossless = False
    rescores = True

    def __init__(self, index: Any, options: Mapping[str, Any]) -> None:
        self._parts = CodedParts.of(index)
        self._base = self._parts.base
        # In double precision, so that products of different sizes round alike.
        self._rotation = self._parts.rotation.astype(np.float64)
        self._bytes = codes_of(self._parts.table)
        self._factor = int(options.get("refine_factor", self._parts.refine.k_factor))

    def turn(self, queries: Floats) -> Floats:
        turned: Floats = (queries @ self._rotation).astype(np.float32)
        return turned

    def find(self, queries: Floats, k: int) -> Ranking:
        num_candidates = max(LEAST_CANDIDATES, k * self._factor)
        if num_candidates < self._base.ntotal:
            return Ranking(*self._base.search(queries, num_candidates))
        # All of them, without a scan: faiss's fast scan drops what its rounded scores put last.
        rows = np.tile(np.arange(self._base.ntotal), (len(queries), 1))
        return Ranking(np.zeros(rows.shape, np.float32), rows)

    def vectors(self, rows: Rows) -> Floats:
        decoded = decode_bytes(self._bytes[rows])
        if self._parts.is_residual:
            decoded += self._base.reconstruct_batch(rows)
        return decoded


class _FaissSearch(Unturned):
    """The results of faiss itself: ``ivf`` and ``hnsw``."""

    is_lossless = True
    rescores = False

    def __init__(self, index: Any, options: Mapping[str, Any]) -> None:
        self._index = index
        self._ef_search = (
            int(options.get("ef_search", index.hnsw.efSearch)) if isinstance(index, faiss.IndexHNSW) else 0
        )

    def find(self, queries: Floats, k: int) -> Ranking:
        if self._ef_search:
            self._index.hnsw.efSearch = max(self._ef_search, k)
        return Ranking(*self._index.search(queries, k))

    def vectors(self, rows: Rows) -> Floats:
        # The rows are consecutive: faiss's lists have no row numbers, so it reads all of them once.
        decoded: Floats = self._index.reconstruct_n(int(rows[0]), len(rows))
        return decoded


class _GpuSearch(Unturned):
    """``flat`` and ``ivf`` in half precision on a GPU. Needs faiss-gpu.

    One thread may search at a time: faiss does not lock the resources of this index. Scores are
    half precision; those of ``flat`` are taken again from the mapped vectors.
    """

    is_lossless = False

    def __init__(self, scanner: Scanner, index: Any, device: str) -> None:
        self._cpu = scanner
        self.rescores = scanner.rescores
        self._resources = faiss.StandardGpuResources()
        options = faiss.GpuClonerOptions()
        options.useFloat16 = True
        _, _, number = device.partition(":")
        self._index = faiss.index_cpu_to_gpu(self._resources, int(number or 0), index, options)

    def find(self, queries: Floats, k: int) -> Ranking:
        num_candidates = min(k + SPARE, self._index.ntotal) if self.rescores else k
        if num_candidates > _MAX_GPU_K:
            return self._cpu.find(queries, k)
        return Ranking(*self._index.search(queries, num_candidates))

    def vectors(self, rows: Rows) -> Floats:
        return self._cpu.vectors(rows)


class _TorchSearch(Unturned):
    """``flat`` and ``fp16`` in half precision on a GPU, without faiss-gpu."""

    is_lossless = False
    rescores = False

    def __init__(self, scanner: Scanner, count: int, dimension: int, device: str) -> None:
        """Copy the vectors of another scanner to a device. Raises ``ConfigError`` if there is no such device."""
        from retrieval.indexes.torch_index import TorchFlatIndex  # torch takes seconds to import

        self._cpu = scanner
        self._index = TorchFlatIndex(_scan_blocks(scanner, count), count, dimension, device=device)

    def find(self, queries: Floats, k: int) -> Ranking:
        return Ranking(*self._index.search(queries, k))

    def vectors(self, rows: Rows) -> Floats:
        return self._cpu.vectors(rows)


def _type_of(index: Any) -> str:
    kind = type(index).__name__
    if kind == "IndexScalarQuantizer":
        kind += f" {index.sq.qtype}"
    elif kind == "IndexPreTransform":
        refine: Any = faiss.downcast_index(index.index)
        kind += f" {type(refine).__name__}"
        if isinstance(refine, faiss.IndexRefine):
            kind += f" {type(CodedParts.of(index).base).__name__}"
    known = {
        "IndexFlat": FLAT,
        "IndexFlatIP": FLAT,
        f"IndexScalarQuantizer {faiss.ScalarQuantizer.QT_fp16}": "fp16",
        f"IndexScalarQuantizer {faiss.ScalarQuantizer.QT_8bit}": "sq8",
        "IndexPreTransform IndexRefine IndexPQFastScan": "pq",
        "IndexPreTransform IndexRefine IndexIVFPQFastScan": "ivf_pq",
        "IndexIVFFlat": "ivf",
        "IndexHNSWFlat": "hnsw",
    }
    if kind not in known:
        raise DataError(
            f"got a faiss index of kind {kind}, expected one that `ragr1 index build` makes; build it again"
        )
    return known[kind]


def _make_scanner(index: Any, index_type: str, options: Mapping[str, Any]) -> Scanner:
    lists = CodedParts.of(index).base if index_type == "ivf_pq" else index
    if options.get("num_probes") and index_type in ("ivf", "ivf_pq"):
        lists.nprobe = min(options["num_probes"], lists.nlist)
    if index_type in CODED:
        return _CodeScan(index, options)
    return _FaissSearch(index, options) if index_type in ("ivf", "hnsw") else _FullScan(index)


def _on_gpu(scanner: Scanner, index: Any, index_type: str, device: str) -> Scanner:
    if faiss.get_num_gpus() and index_type in (FLAT, "ivf"):
        return _GpuSearch(scanner, index, device)
    if index_type in (FLAT, "fp16"):
        return _TorchSearch(scanner, index.ntotal, index.d, device)
    return scanner


def _scan_blocks(scanner: Scanner, count: int) -> Iterator[Floats]:
    """Yield the vectors of rows 0 to ``count - 1`` as a scanner keeps them."""
    for start in range(0, count, BLOCK_ROWS):
        yield scanner.vectors(np.arange(start, min(start + BLOCK_ROWS, count)))


def _rescore(scanner: Scanner, queries: Floats, rows: Rows) -> Floats:
    """Score candidates again: float32 ``[num_queries, num_candidates]``, as ``rows``.

    Scans and matrix products of different sizes round differently; one more sum in double precision does not.
    """
    scores = np.empty(rows.shape, np.float32)
    dimension = queries.shape[1]
    step = max(1, _RESCORED_NUMBERS // (rows.shape[1] * dimension))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        # Row 0 replaces absent rows; their scores are not used.
        vectors = scanner.vectors(np.maximum(some, 0).ravel()).reshape(*some.shape, dimension)
        wide = queries[start : start + step].astype(np.float64)
        scores[start : start + step] = np.einsum("qcd,qd->qc", vectors.astype(np.float64), wide)
    return scores


@dataclass(frozen=True)
class _OpenShard:
    start: int
    """Row of its first vector in the corpus."""
    index: VectorIndex


class DenseRanker:
    """Ranks rows by the inner product of their vectors with the query's. A ``Ranker``."""

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
    ) -> None:
        """Open shards, and the encoder the index was built with.

        Args:
            directory: made by ``build_index``; ``manifest`` is its manifest.
            num_threads: of the search. Torch's threads are set by the host process.
            device: ``cpu`` or ``cuda``, of encoder and index.
            options: of the index type; see ``INDEX_TYPES``.
            shards: numbers of the manifest's shards to open; by default all.
            load_encoder: without one, ``rank`` needs vectors.

        Raises:
            DataError: a shard or the encoder is missing, damaged or replaced.
            ConfigError: an unknown option.
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
        self._shards = [
            _OpenShard(
                shard.start,
                VectorIndex.load(
                    directory / shard.file.name, shard, manifest.dimension, device=device, options=options or {}
                ),
            )
            for shard in (manifest.shards[number] for number in numbers)
        ]
        self._encoder = open_encoder(directory, manifest, device) if load_encoder else None

    @property
    def count(self) -> int:
        """Rows that are ranked."""
        return sum(shard.index.count for shard in self._shards)

    def encode(self, queries: list[str]) -> Floats:
        """Return the vectors of queries, float32 ``[len(queries), dimension]``, zero where no word is known."""
        return self._open_encoder().encode_queries(queries)

    def encode_passages(self, passages: list[Passage]) -> Floats:
        """Return the vectors of passages, as encoded for the index: float32 ``[len(passages), dimension]``."""
        return self._open_encoder().encode_passages(passages)

    @property
    def is_lossless(self) -> bool:
        """Whether the index keeps the vectors as they were given."""
        return all(shard.index.is_lossless for shard in self._shards)

    def blocks(self) -> Iterator[Floats]:
        """Yield the vectors of a lossless index, float32 ``[n, dimension]`` each, in row order."""
        for shard in self._shards:
            yield from shard.index.blocks()

    def rank(self, queries: list[str], k: int, vectors: Floats | None = None) -> Ranking:
        """Return the best ``min(k, count)`` rows of each query, numbered as in the whole corpus; see ``Ranker.rank``.

        Raises:
            RetrievalError: vectors of another shape, or with NaN or infinity.
        """
        if not queries:
            return Ranking(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))
        vectors = self._check(self.encode(queries) if vectors is None else vectors, len(queries))
        found = [_search(shard, vectors, k, self._num_threads) for shard in self._shards]
        ranking = merge_rankings(found, k)
        # Every row is equally near to the zero vector: no evidence is better than the first k rows.
        unknown = ~np.any(vectors, axis=1)
        if unknown.any():
            ranking.rows[unknown] = ABSENT
            ranking.scores[unknown] = -np.inf
        return ranking

    def _open_encoder(self) -> Encoder:
        """Return the encoder; raises ``ValueError`` where the ranker was opened without one."""
        if self._encoder is None:
            raise ValueError("the ranker was opened without an encoder; hand it the vectors of the queries")
        return self._encoder

    def _check(self, vectors: Floats, num_queries: int) -> Floats:
        expected = (num_queries, self._dimension)
        if vectors.shape != expected:
            raise RetrievalError(
                f"got query vectors of shape {vectors.shape}, expected {expected}; encode with the index's encoder"
            )
        if not np.isfinite(vectors).all():
            raise RetrievalError("a query's vector holds NaN or infinity; the encoder is broken, so check its files")
        return vectors


def _search(shard: _OpenShard, vectors: Floats, k: int, num_threads: int) -> Ranking:
    scores, rows = shard.index.search(vectors, k, num_threads)
    return Ranking(scores, np.where(rows == ABSENT, ABSENT, rows + shard.start))


def open_encoder(directory: Path, manifest: Manifest, device: str = "cpu") -> Encoder:
    """Load the encoder of an index, from its directory or elsewhere; raises ``DataError`` if it is another one."""
    from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds to import

    inside = directory / manifest.encoder
    if manifest.encoder == ENCODER_FOLDER and not inside.is_dir():
        raise DataError(f"no {inside}; copy the index as a whole or build it again")
    encoder = Encoder.load(inside if inside.is_dir() else manifest.encoder, device=device)
    manifest.check_encoder(encoder.name, encoder.fingerprint, encoder.dimension)
    return encoder
