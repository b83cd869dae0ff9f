"""Bytes of an index and seconds of a search, computed from the number of passages. Imports neither faiss nor torch.

``OMP_NUM_THREADS=1 python -m benchmarks.retrieval.search_rates`` prints bytes and rates of a CPU core by type. Rates
are per number of a vector: a scan is linear in these. A GPU is taken at its memory bandwidth and half its peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError
from retrieval.indexes.manifest import BM25, GPU_TYPES, HYBRID, parse_options

PASSAGE_BYTES = 650
"""Bytes of a passage of 100 English words in ``corpus.arrow``, mapped from disk and shared by all actors of a machine.
Measured over 4,345 passages of Wikipedia (2WikiMultihopQA's, cut anew)."""
BM25_BYTES = 600
"""Bytes of such a passage in the inverted index: 73 postings of 8 bytes (6,659 passages of Wikipedia), stop words among
them, and its share of the distinct words of a large corpus."""

_BYTES_PER_NUMBER = {"flat": 4.0, "fp16": 2.0, "sq8": 1.0, "pq": 1.25, "ivf": 4.0, "ivf_pq": 1.25, "hnsw": 4.0}
_SCALE_BYTES = 4
"""Bytes of the scale that ``pq`` and ``ivf_pq`` keep for each vector."""
_ROW_ID_BYTES = 8
"""Bytes of the row id of a vector in a list."""
_GRAPH_BYTES = 16
"""Bytes of an ``hnsw`` vector besides its ``2 m`` neighbours: level, position of the neighbours, upper levels."""
_GPU_BYTES_PER_NUMBER = 2.0
"""Bytes of a number on a GPU, where ``GPU_TYPES`` and ``ivf`` are in half precision."""
_NUMBERS_PER_CORE_S = {
    "flat": 3.5e10,
    "fp16": 1.9e10,
    "sq8": 2.6e10,
    "pq": 6.8e10,
    "ivf": 7.5e9,
    "ivf_pq": 2.8e10,
    "hnsw": 2e9,  # half of the measured rate: among millions of vectors a walk finds fewer of them in the caches
}
"""Numbers that one core scans per second for one query of a batch of 64, over 100,000 vectors of 384 numbers."""
_BM25_PASSAGES_PER_S = 8e8
"""Passages per second that one thread ranks for a query of ten words, each of which is in one passage of 60."""
_GPU_EFFICIENCY = 0.5


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of a BERT-like encoder: vector length, layers and parameters."""

    dimension: int
    num_layers: int
    num_parameters: int

    @classmethod
    def of(cls, name: str) -> Self:
        """Read the folder of a BERT-like encoder, or a hub name of ``ENCODERS``.

        Raises:
            ConfigError: it is neither, so its sizes are not known.
        """
        if name in ENCODERS and not Path(name).is_dir():  # a folder of this name is what is loaded
            return cls(*ENCODERS[name])
        path = Path(name) / "config.json"
        try:
            config = read_json(path)
            width, layers, inner = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
            embeddings = (config["vocab_size"] + config["max_position_embeddings"] + 2) * width
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"retrieval.encoder: the sizes of {name!r} are not known ({type(error).__name__}); name a folder with "
                f"BERT's config.json, or one of {', '.join(ENCODERS)}"
            ) from error
        layer = 4 * width * width + 2 * width * inner + inner + 9 * width
        return cls(width, layers, embeddings + layers * layer + width * width + 3 * width)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward pass: 2 per parameter of the layers, 12 width^2 each."""
        return 2 * self.num_layers * 12 * self.dimension**2


ENCODERS: Mapping[str, tuple[int, int, int]] = {
    "intfloat/e5-base-v2": (768, 12, 109_482_240),
    "BAAI/bge-large-en-v1.5": (1024, 24, 335_141_888),
    "BAAI/bge-base-en-v1.5": (768, 12, 109_482_240),
    "sentence-transformers/all-MiniLM-L6-v2": (384, 6, 22_713_216),
}
"""Dimension, layers and parameters of encoders that recipes name, from their hub pages."""


def vector_bytes(vector_type: str, count: int, dimension: int, options: Mapping[str, Any], *, on_gpu: bool) -> int:
    """Return the bytes of the vectors of an index of ``count`` passages: in the host's memory, or on a GPU.

    ``vector_type`` is a key of ``INDEX_TYPES``, or ``bm25``, which has no vectors.
    """
    if vector_type == BM25:
        return 0
    if on_gpu and vector_type == "ivf":  # faiss-gpu is installed
        return int(count * (_GPU_BYTES_PER_NUMBER * dimension + _ROW_ID_BYTES))
    if on_gpu:
        if vector_type not in GPU_TYPES:
            return 0
        matrix = _GPU_BYTES_PER_NUMBER * dimension * count
        return int(matrix * 1.08)  # a block of scores and its selection take 4 % each
    other = 0
    if vector_type == "hnsw":
        other = 8 * parse_options(vector_type, options)["m"] + _GRAPH_BYTES
    if vector_type.endswith("pq"):
        other += _SCALE_BYTES
    if vector_type.startswith("ivf"):
        other += _ROW_ID_BYTES
    return int(count * (_BYTES_PER_NUMBER[vector_type] * dimension + other))


def index_bytes(index_type: str, vector_type: str, count: int, dimension: int, options: Mapping[str, Any]) -> int:
    """Return the bytes of an index directory: vectors, postings and passages; the types differ if it is ``hybrid``."""
    postings = BM25_BYTES if index_type in (BM25, HYBRID) else 0
    vectors = vector_bytes(vector_type, count, dimension, options, on_gpu=False)
    return vectors + count * (postings + PASSAGE_BYTES)


def scan_s(
    index_type: str,
    vector_type: str,
    count: int,
    dimension: int,
    num_queries: int,
    options: Mapping[str, Any],
    num_cpus: float,
) -> float:
    """Return the seconds in which ``num_cpus`` cores find ``num_queries`` queries among ``count`` passages."""
    words_s = num_queries * count / _BM25_PASSAGES_PER_S if index_type in (BM25, HYBRID) else 0.0  # by one thread
    if vector_type == BM25:
        return words_s
    numbers = scanned_numbers(vector_type, count, dimension, options)
    return words_s + num_queries * numbers / (_NUMBERS_PER_CORE_S[vector_type] * num_cpus)


def scanned_numbers(vector_type: str, count: int, dimension: int, options: Mapping[str, Any]) -> float:
    """Return the numbers of vectors that a search reads for one query: all of them, some lists, or part of a graph.

    A graph (``hnsw``) computes the distances to about 1.5 ``ef_search`` times ``m`` vectors.
    """
    values = parse_options(vector_type, options)
    if vector_type == "hnsw":
        return 1.5 * values["ef_search"] * values["m"] * dimension
    numbers = float(count) * dimension
    if not vector_type.startswith("ivf"):
        return numbers
    num_lists = values["num_lists"] or int(4 * count**0.5)
    probes = min(values["num_probes"] or max(8, num_lists // 16), num_lists)
    return numbers * probes / num_lists + num_lists * dimension


def gpu_scan_s(count: int, dimension: int, num_queries: int, bytes_per_s: float, flops: float) -> float:
    """Return the seconds in which a GPU scans half-precision vectors: reading them once, or multiplying them."""
    reading = _GPU_BYTES_PER_NUMBER * count * dimension / bytes_per_s
    multiplying = 2.0 * count * dimension * num_queries / flops
    return max(reading, multiplying) / _GPU_EFFICIENCY


def encode_s(encoder: EncoderShape, num_texts: int, tokens_per_text: int, flops: float) -> float:
    """Return the seconds of encoding at ``flops`` per second of peak, at the efficiency of a batch."""
    return num_texts * tokens_per_text * encoder.flops_per_token / (flops * 0.4)
