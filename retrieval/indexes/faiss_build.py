"""Builds faiss indexes from blocks of vectors, and the byte codes that ``pq`` and ``ivf_pq`` score candidates with.

A byte code is one row of unsigned bytes per vector: ``dimension`` numbers (128 is 0), then the vector's own scale as a
float32. A scale per vector halves the error of faiss's SQ8, which has one range for all; it needs no training, and rows
of bytes are mapped from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.indexes.manifest import FLAT

Floats = NDArray[np.float32]

_SAMPLE_ROWS = {"sq8": 2**16, "pq": 2**14, "ivf": 2**14, "ivf_pq": 2**14}
"""Least number of vectors from which a type learns; lists need more."""
_SAMPLES_PER_LIST = 64
_LEAST_PER_LIST = 39
"""Average number of vectors per list, if the number of lists is not given."""
_LEAST_PROBES = 8
_PQ_CENTROIDS = 16
_ROTATION_SEED = 1234
CODED = ("pq", "ivf_pq")
"""Types of two stages: a scan of codes, then bytes to score the candidates again."""


@dataclass(frozen=True)
class CodedParts:
    """Parts of a ``pq`` or ``ivf_pq`` index.

    All parts are in a rotated space: faiss's fast scan rounds a query's table of partial scores to bytes with one
    scale. The vectors of many encoders vary most in their first dimensions, which would leave no bits for the others.
    """

    rotation: NDArray[np.float32]
    """Orthonormal matrix ``[dimension, dimension]``; it preserves inner products."""
    base: Any
    """2-bit codes of the vectors, without or with lists."""
    table: Any
    """Row of ``byte_codes`` per vector: of the residual that the codes leave, or (``ivf_pq``) of the vector itself."""
    refine: Any
    """Index that holds ``base`` and ``table``."""

    @classmethod
    def of(cls, index: Any) -> CodedParts:
        """Take a faiss index apart."""
        transform: Any = faiss.downcast_VectorTransform(index.chain.at(0))
        refine: Any = faiss.downcast_index(index.index)
        rotation = faiss.vector_to_array(transform.A).reshape(index.d, index.d).T
        base, table = faiss.downcast_index(refine.base_index), faiss.downcast_index(refine.refine_index)
        return cls(np.ascontiguousarray(rotation), base, table, refine)

    @property
    def is_residual(self) -> bool:
        """Whether the bytes encode residuals: not with lists, which cannot look up the codes of a row."""
        return isinstance(self.base, faiss.IndexPQFastScan)


def build_faiss_index(
    blocks: Iterable[Floats], dimension: int, index_type: str, count: int | None, values: Mapping[str, int]
) -> Any:
    """Build the index of ``VectorIndex.build``; ``values`` holds every option."""
    num_lists = 0
    if index_type in _SAMPLE_ROWS:
        blocks = list(blocks) if iter(blocks) is blocks else blocks
        count = sum(map(len, blocks)) if count is None else count
        usual = min(int(4 * count**0.5), count // _LEAST_PER_LIST)
        num_lists = max(1, min(values.get("num_lists", 0) or usual, count))
    index = _make_index(index_type, dimension, {**values, "num_lists": num_lists})
    coded = CodedParts.of(index) if index_type in CODED else None
    if index_type in _SAMPLE_ROWS and count:
        size = max(_SAMPLE_ROWS[index_type], _SAMPLES_PER_LIST * num_lists)
        drawn = sample(checked(blocks, dimension, count), dimension, count, size)
        if coded:
            # Repeated if there are fewer vectors than codes, since faiss refuses to learn 16 codes from 5 vectors.
            drawn = np.resize(drawn @ coded.rotation, (max(len(drawn), _PQ_CENTROIDS), dimension))
        (coded.base if coded else index).train(drawn)
    if coded and count:
        _fill_coded(index, coded, checked(blocks, dimension, count), count)
    else:
        _fill(index, checked(blocks, dimension, count), count)
    return index


def usual_probes(num_lists: int) -> int:
    """Return the default number of lists into which a query looks."""
    return min(max(_LEAST_PROBES, num_lists // 16), num_lists)


def half_precision_lists(index: Any) -> Any:
    """Return a copy of an ``ivf`` index in half precision, which shares its centroids and must not outlive it.

    faiss-gpu keeps such lists as they are; the lists of an ``IndexIVFFlat`` stay float32 under any cloner option
    (``ToGpuCloner::clone_Index`` in faiss 1.15).
    """
    half: Any = faiss.IndexIVFScalarQuantizer(
        index.quantizer, index.d, index.nlist, faiss.ScalarQuantizer.QT_fp16, index.metric_type, False
    )
    half.nprobe, half.is_trained, half.ntotal = index.nprobe, True, index.ntotal
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        if size:
            codes = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * index.code_size)
            halves = codes.view(np.float32).astype(np.float16).view(np.uint8)
            half.invlists.add_entries(number, size, index.invlists.get_ids(number), faiss.swig_ptr(halves))
    return half


def codes_of(index: Any) -> NDArray[np.uint8]:
    """Return a view of an index's codes, uint8 ``[ntotal, code_size]``, valid as long as the faiss index lives."""
    codes = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
    view: NDArray[np.uint8] = codes.reshape(index.ntotal, index.code_size)
    return view


def _make_index(index_type: str, dimension: int, values: Mapping[str, int]) -> Any:
    metric = faiss.METRIC_INNER_PRODUCT
    if index_type in CODED and dimension % 2:
        raise ConfigError(f"index type {index_type!r} needs an even dimension, got {dimension}; use 'sq8'")
    if index_type == FLAT:
        return faiss.IndexFlatIP(dimension)
    if index_type in ("fp16", "sq8"):
        quantizer = faiss.ScalarQuantizer
        kind = quantizer.QT_fp16 if index_type == "fp16" else quantizer.QT_8bit
        return faiss.IndexScalarQuantizer(dimension, kind, metric)
    if index_type == "hnsw":
        graph = faiss.IndexHNSWFlat(dimension, values["m"], metric)
        graph.hnsw.efConstruction, graph.hnsw.efSearch = values["ef_construction"], values["ef_search"]
        return graph
    codes = f"PQ{dimension // 2}x4fs"
    if index_type == "pq":
        return _with_bytes(faiss.index_factory(dimension, codes, metric), values["refine_factor"])
    num_lists = values["num_lists"]
    lists: Any = faiss.index_factory(dimension, f"IVF{num_lists},{'Flat' if index_type == 'ivf' else codes}", metric)
    lists.nprobe = min(values["num_probes"] or usual_probes(num_lists), num_lists)
    lists.cp.min_points_per_centroid = 1  # else faiss warns of few points on stderr
    return lists if index_type == "ivf" else _with_bytes(lists, values["refine_factor"])


def _with_bytes(base: Any, refine_factor: int) -> Any:
    """Put a rotation before an index and a table of bytes beside it: faiss keeps all in one file, and maps them."""
    base.pq.cp.min_points_per_centroid = 1
    refine: Any = faiss.IndexRefine(base, faiss.IndexFlatIP(base.d))
    table: Any = faiss.IndexScalarQuantizer(
        base.d + SCALE_BYTES, faiss.ScalarQuantizer.QT_8bit_direct, base.metric_type
    )
    refine.refine_index, refine.k_factor = table, refine_factor
    refine.own_fields = refine.own_refine_index = True
    rotation: Any = faiss.RandomRotationMatrix(base.d, base.d)
    rotation.init(_ROTATION_SEED)
    index: Any = faiss.IndexPreTransform(rotation, refine)
    index.own_fields = True
    for part in (base, table, refine, rotation):  # the index owns them, not Python
        part.this.disown()
    return index


def _fill(index: Any, blocks: Iterable[Floats], count: int | None) -> None:
    """Add all vectors. With ``count``, codes are written in place, since a growing array is twice its size at times."""
    if count is None or not isinstance(index, faiss.IndexFlatCodes):
        for block in blocks:
            index.add(block)
        return
    codes, start = _reserve(index, count), 0
    for block in blocks:
        codes[start : start + len(block)] = index.sa_encode(block)
        start += len(block)


def _fill_coded(index: Any, coded: CodedParts, blocks: Iterable[Floats], count: int) -> None:
    codes, start = _reserve(coded.table, count), 0
    for block in blocks:
        rotated: Floats = block @ coded.rotation
        coded.base.add(rotated)
        if coded.is_residual:
            rotated -= coded.base.reconstruct_n(start, len(block))  # the residual is a third as long
        codes[start : start + len(block)] = encode_bytes(rotated)
        start += len(block)
    index.ntotal = coded.refine.ntotal = count


def _reserve(index: Any, count: int) -> NDArray[np.uint8]:
    index.codes.resize(count * index.code_size)
    index.ntotal = count
    return codes_of(index)


def checked(blocks: Iterable[Floats], dimension: int, count: int | None) -> Iterator[Floats]:
    """Yield the blocks, contiguous float32 ``[n, dimension]``.

    Raises:
        DataError: a shape is wrong, a number is not finite, or the number of vectors is 0 or not ``count``.
    """
    start = 0
    for block in blocks:
        if block.ndim != 2 or block.shape[1] != dimension:
            raise DataError(
                f"vectors from {start}: got shape {block.shape}, expected [n, {dimension}]; encode all with one encoder"
            )
        is_finite = np.isfinite(block).all(axis=1)
        if not is_finite.all():
            row = start + int(np.argmin(is_finite))
            raise DataError(
                f"vector {row} holds NaN or infinity; the encoder is broken or overflows in half precision, so check "
                "its files or encode in float32"
            )
        start += len(block)
        if count is not None and start > count:
            break
        yield np.ascontiguousarray(block, np.float32)
    if start == 0 or (count is not None and start != count):
        raise DataError(f"got {start} vectors or more, expected {count or 'at least one'}; build the embeddings again")


def sample(blocks: Iterable[Floats], dimension: int, count: int, size: int) -> Floats:
    """Draw rows without replacement, every row as likely as any other, in one pass over ``count`` rows.

    It returns float32 ``[min(size, count), dimension]`` in row order; memory holds these rows and one block.
    """
    rows = np.sort(np.random.default_rng(0).choice(count, min(size, count), replace=False, shuffle=False))
    drawn = np.zeros((len(rows), dimension), np.float32)
    start = 0
    for block in blocks:
        first, last = np.searchsorted(rows, [start, start + len(block)])
        drawn[first:last] = block[rows[first:last] - start]
        start += len(block)
    return drawn


SCALE_BYTES = 4
_ZERO, _HIGHEST = 128, 127


def encode_bytes(vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round vectors, float32 ``[n, dimension]``, to codes, uint8 ``[n, dimension + 4]``."""
    scales = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float32) / np.float32(_HIGHEST)
    numbers = np.rint(vectors / np.where(scales > 0, scales, 1)) + _ZERO
    return np.concatenate([numbers.astype(np.uint8), scales.view(np.uint8)], axis=1)


def decode_bytes(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Undo ``encode_bytes`` except for the rounding: uint8 ``[n, dimension + 4]`` to float32 ``[n, dimension]``."""
    scales = np.ascontiguousarray(codes[:, -SCALE_BYTES:]).view(np.float32)
    numbers = codes[:, :-SCALE_BYTES].astype(np.float32)
    numbers -= _ZERO
    numbers *= scales
    return numbers
