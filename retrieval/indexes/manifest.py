"""What an index directory holds, and the checks that its parts belong together.

::

    index/
      manifest.json         this file's subject; written last
      corpus.arrow          the passages, a row each            corpus.ids   id -> row
      encoder/              only for ``static``: the encoder made from the corpus
      shard-0000.faiss ...  vectors of consecutive rows         (dense and hybrid)
      bm25/                 the inverted index                  (bm25 and hybrid)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.files import fingerprint_file
from ragr1_actors.core.text import nearest

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 2
BM25_FOLDER = "bm25"
ENCODER_FOLDER = "encoder"


@dataclass(frozen=True)
class FileRecord:
    """A file of the directory: ``FileRecord("shard-0000.faiss", 307200045, "9f2c...")``."""

    name: str
    """Relative to the index directory, with ``/``."""
    num_bytes: int
    fingerprint: str
    """See ``fingerprint_file``."""

    @classmethod
    def of(cls, directory: Path, name: str) -> FileRecord:
        """Describe ``directory/name``."""
        path = directory / name
        return cls(name, path.stat().st_size, fingerprint_file(path))

    def check(self, directory: Path) -> None:
        """Compare the file with what it was when the index was built.

        Raises:
            DataError: it is missing, truncated or another one.
        """
        path = directory / self.name
        if not path.is_file():
            raise DataError(f"no {path}; copy the index as a whole or build it again")
        size = path.stat().st_size
        if size != self.num_bytes:
            raise DataError(f"{path}: got {size} bytes, expected {self.num_bytes}; copy it again or build it again")
        found = fingerprint_file(path)
        if found != self.fingerprint:
            raise DataError(
                f"{path}: got fingerprint {found[:12]}, expected {self.fingerprint[:12]}; it was changed or belongs to "
                "another index, so copy the directory as a whole or build it again"
            )


@dataclass(frozen=True)
class Shard:
    """Vectors of the rows ``start`` to ``start + count - 1``, in one file."""

    start: int
    count: int
    file: FileRecord


@dataclass(frozen=True)
class Manifest:
    """What an index directory holds, and what it must be used with."""

    index_type: str
    """A key of ``retrieval.index.INDEX_TYPES``, ``bm25`` or ``hybrid``."""
    count: int
    """Passages."""
    corpus: FileRecord
    files: tuple[FileRecord, ...]
    """Every other file that is no shard: ids, inverted index."""
    metric: str = ""
    """``inner_product``, of vectors of length 1; empty for ``bm25``, as is all that follows."""
    vector_type: str = ""
    """The dense part of a ``hybrid``; else the index type itself."""
    encoder: str = ""
    """A folder relative to the index directory, a folder, or a hub name."""
    encoder_fingerprint: str = ""
    pooling: str = ""
    """Of the encoder: ``mean``, ``cls``, ``lasttoken`` or ``static``."""
    query_prompt: str = ""
    passage_prompt: str = ""
    dimension: int = 0
    shards: tuple[Shard, ...] = ()

    @property
    def version(self) -> str:
        """Name of the evidence itself, 12 hexadecimal digits: equal for two directories that answer alike."""
        parts = [self.index_type, self.encoder_fingerprint, self.pooling, self.query_prompt, self.corpus.fingerprint]
        parts += [shard.file.fingerprint for shard in self.shards] + [file.fingerprint for file in self.files]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @property
    def is_dense(self) -> bool:
        """Whether there are vectors."""
        return bool(self.shards)

    @property
    def has_bm25(self) -> bool:
        """Whether there is an inverted index."""
        return self.index_type in ("bm25", "hybrid")

    def write(self, directory: Path) -> None:
        """Write ``directory/manifest.json``."""
        content = {"format_version": FORMAT_VERSION, "version": self.version, **asdict(self)}
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Read ``directory/manifest.json``.

        Raises:
            DataError: there is none, it is damaged, or another version of the project wrote it.
        """
        path = Path(directory) / MANIFEST_FILE
        if not path.is_file():
            raise DataError(f"no index in {directory}: {MANIFEST_FILE} is missing; make one with `ragr1 index build`")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not valid JSON ({error}); build the index again") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise DataError(f"{path}: got format version {version}, expected {FORMAT_VERSION}; build the index again")
        try:
            manifest = _from_json(content)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path}: damaged ({error}); build the index again") from error
        if content["version"] != manifest.version:
            raise DataError(
                f"{path}: says version {content['version']}, but its parts make {manifest.version}; it was edited, so "
                "build the index again"
            )
        return manifest

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

    def check_files(self, directory: str | Path) -> None:
        """Compare every file but the shards, which are checked as they are opened.

        Raises:
            DataError: one is missing, truncated or changed.
        """
        for file in (self.corpus, *self.files):
            file.check(Path(directory))


def _from_json(content: dict[str, Any]) -> Manifest:
    values = {key: value for key, value in content.items() if key not in ("format_version", "version")}
    expected = {field.name for field in fields(Manifest)}
    if set(values) != expected:
        raise ValueError(f"keys missing or unknown: {', '.join(sorted(set(values) ^ expected))}")
    values["corpus"] = _file(values["corpus"])
    values["files"] = tuple(_file(file) for file in values["files"])
    values["shards"] = tuple(
        Shard(_int(shard["start"]), _int(shard["count"]), _file(shard["file"])) for shard in values["shards"]
    )
    for name in ("count", "dimension"):
        _int(values[name])
    for name in ("index_type", "metric", "vector_type", "encoder", "encoder_fingerprint", "pooling"):
        _str(values[name])
    return Manifest(**values)


def _file(values: dict[str, Any]) -> FileRecord:
    return FileRecord(_str(values["name"]), _int(values["num_bytes"]), _str(values["fingerprint"]))


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"got {value!r}, expected a whole number")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"got {value!r}, expected text")
    return value


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
