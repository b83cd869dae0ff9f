"""The index types, and the options of each: names, defaults and bounds. Pure: a recipe is checked without faiss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.validation import nearest

BM25 = "bm25"
HYBRID = "hybrid"
FLAT = "flat"


@dataclass(frozen=True)
class Option:
    """A whole number that a user may set."""

    default: int
    low: int
    """The least that makes sense."""
    summary: str


@dataclass(frozen=True)
class IndexType:
    """A way to keep vectors."""

    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)


_NUM_LISTS = Option(0, 0, "lists the vectors are sorted into; 0 is 4 * sqrt(passages). Set at the build")
_NUM_PROBES = Option(0, 0, "lists that a query looks into; 0 is a sixteenth of them")
_REFINE_FACTOR = Option(8, 1, "candidates that are scored again for each passage asked for")

INDEX_TYPES: dict[str, IndexType] = {
    FLAT: IndexType("exact; 4 bytes a number"),
    "fp16": IndexType("every vector is scanned; 2 bytes a number"),
    "sq8": IndexType("every vector is scanned; 1 byte a number"),
    "pq": IndexType(
        "every vector is scanned by 2-bit codes, the best are scored again by bytes; 1.25 bytes a number",
        {"refine_factor": _REFINE_FACTOR},
    ),
    "ivf": IndexType(
        "the nearest lists are scanned; 4 bytes a number", {"num_lists": _NUM_LISTS, "num_probes": _NUM_PROBES}
    ),
    "ivf_pq": IndexType(
        "the nearest lists are scanned by 2-bit codes, the best are scored again by bytes; 1.25 bytes a number",
        {"num_lists": _NUM_LISTS, "num_probes": _NUM_PROBES, "refine_factor": _REFINE_FACTOR},
    ),
    "hnsw": IndexType(
        "a graph of neighbours is walked; 4 bytes a number and 8 * m a vector",
        {
            "m": Option(32, 2, "neighbours of a vector. Set at the build"),
            "ef_construction": Option(200, 1, "candidates for these neighbours. Set at the build"),
            "ef_search": Option(128, 1, "candidates that a query keeps while it walks"),
        },
    ),
}
"""By the names that users type."""

RETRIEVER_OPTIONS: dict[str, Option] = {
    "rerank_candidates": Option(20, 1, "passages that a reranker orders anew for each query"),
    "fusion_depth": Option(100, 1, "passages of each ranking that a hybrid index fuses"),
}
"""Of a retriever over any index. One table of options goes to builder, index and retriever; each takes its own."""


def parse_options(index_type: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Check options by name and value, and fill in the defaults of the others.

    Args:
        index_type: a key of ``INDEX_TYPES``, or ``bm25``. For ``hybrid``, that of its vectors.
        options: of the index type or of ``RETRIEVER_OPTIONS``.

    Returns:
        Every option there is for the type.

    Raises:
        ConfigError: an unknown type, an unknown option, or a value that makes no sense.
    """
    if index_type != BM25 and index_type not in INDEX_TYPES:
        raise ConfigError(f"unknown index type {index_type!r}{nearest(index_type, INDEX_TYPES)}")
    known = RETRIEVER_OPTIONS if index_type == BM25 else {**INDEX_TYPES[index_type].options, **RETRIEVER_OPTIONS}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r} of index type {index_type!r}{nearest(name, known)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < known[name].low:
            raise ConfigError(
                f"option {name!r} of index type {index_type!r}: got {value!r}, expected a whole number of at least "
                f"{known[name].low}"
            )
    return {name: options.get(name, option.default) for name, option in known.items()}
