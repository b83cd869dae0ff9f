"""``Manifest``, the description of an index directory; the index types, and the options of each type.

::

    index/
      manifest.json         written last by ``retrieval.build``, read by every retriever
      corpus.arrow          the passages, one row each
      titles.npy            the rows of the passages in the order of their titles
      encoder/              only with ``static``: the encoder made from the corpus
      shard-0000.faiss ...  vectors of consecutive rows         (dense and hybrid)
      bm25/                 the inverted index                  (bm25 and hybrid)
      rows.npy, empty.npy   of an adopted index, where needed: ``ROWS_FILE``, ``EMPTY_FILE``

Imports no faiss: a recipe's options are checked without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, create_model
from pydantic.dataclasses import dataclass

from ragr1_actors.core.disk.digests import LIST_FILE
from ragr1_actors.core.disk.files import fingerprint_file
from ragr1_actors.core.disk.json_files import read_json, validated
from ragr1_actors.core.errors import ConfigError, DataError, nearest
from ragr1_actors.core.section import Section
from retrieval.corpora.report import CorpusReport
from retrieval.corpora.text import LAYOUTS

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 2
BM25_FOLDER = "bm25"
ENCODER_FOLDER = "encoder"
ENCODER_LIST = f"{ENCODER_FOLDER}/{LIST_FILE}"
"""List of the files in the folder of the encoder, which ``Encoder.load`` compares."""
TITLES_FILE = "titles.npy"
"""File of ``retrieval.corpora.corpus``. An index of an earlier version has none."""
ROWS_FILE = "rows.npy"
"""File with int64 ``[2, count]``: the ids of the FAISS file's vectors, ascending, and the corpus row of each. Without
this file the ids are the rows."""
EMPTY_FILE = "empty.npy"
"""File with int64 ``[n]``, ascending: corpus rows without a letter or a digit, which are never found."""
BM25 = "bm25"
HYBRID = "hybrid"
FLAT = "flat"
FOREIGN = "faiss"
"""Type of an adopted file that is none of ``INDEX_TYPES``; faiss searches it as it is."""
GPU_TYPES = (FLAT, "fp16")
"""Types whose vectors a GPU scans in half precision, with torch."""

_REMEDY = "build the index again"
STRICT = ConfigDict(extra="forbid")
"""Configuration of records that are read from an index directory: an unknown key is an error."""


def _inside(name: str) -> str:
    """Refuse a name that leads out of the directory, since an index may come from other people."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or name in ("", "."):
        raise ValueError("it leads out of the index directory")
    return name


def _known_layout(layout: str) -> str:
    if layout not in ("", *LAYOUTS):
        raise ValueError(f"not one of {LAYOUTS}")
    return layout


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    """File of the directory: ``FileRecord("shard-0000.faiss", 307200045, "9f2c...")``."""

    name: Annotated[str, AfterValidator(_inside)]
    """Path relative to the index directory, with ``/``."""
    num_bytes: int
    fingerprint: str
    """Fingerprint of the content by ``fingerprint_file``."""

    @classmethod
    def of(cls, directory: Path, name: str) -> FileRecord:
        """Describe ``directory/name``."""
        path = directory / name
        return cls(name, path.stat().st_size, fingerprint_file(path))

    def check(self, directory: Path) -> None:
        """Compare the file with the record made at the build.

        Raises:
            DataError: the file is missing, truncated, or another file.
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


@dataclass(frozen=True, config=STRICT)
class Shard:
    """File with the vectors of the rows ``start`` to ``start + count - 1``."""

    start: int
    count: int
    file: FileRecord


@dataclass(frozen=True, config=STRICT)
class Manifest:
    """Files of an index directory, and the encoder that its vectors need."""

    index_type: str
    """Type of the index: a key of ``INDEX_TYPES``, ``bm25``, ``hybrid`` or ``faiss``."""
    count: int
    """Number of passages."""
    corpus: FileRecord
    files: tuple[FileRecord, ...]
    """All other files except the shards: order of the titles, inverted index, list of the encoder's files, files of an
    adopted index."""
    metric: str = ""
    """``inner_product`` over vectors of length 1, or an adopted index's metric. Empty for ``bm25``, like all below."""
    vector_type: str = ""
    """Type of the vectors: for ``hybrid`` the type of its dense part, else ``index_type``."""
    encoder: str = ""
    """Encoder: a folder relative to the index directory, a folder elsewhere, or a hub name."""
    encoder_fingerprint: str = ""
    pooling: str = ""
    """Pooling of the encoder: ``mean``, ``cls``, ``lasttoken`` or ``static``."""
    query_prompt: str = ""
    passage_prompt: str = ""
    dimension: int = 0
    shards: tuple[Shard, ...] = ()
    layout: Annotated[str, AfterValidator(_known_layout)] = ""
    """Layout of the passages for the encoder of an adopted index, one of ``LAYOUTS``; else empty."""
    options: dict[str, int] = field(default_factory=dict)
    """Options of the search of an adopted index, used unless a retriever is given others."""
    corpus_report: CorpusReport | None = None
    """Report on the file of the passages; None if they did not come from a file."""

    @property
    def version(self) -> str:
        """Name of the evidence, 12 hexadecimal digits: equal for two directories that give equal answers."""
        parts = [self.index_type, self.encoder_fingerprint, self.pooling, self.query_prompt, self.corpus.fingerprint]
        parts += [shard.file.fingerprint for shard in self.shards]
        # it has a fingerprint of the encoder already, and the titles belong to the corpus
        parts += [file.fingerprint for file in self.files if file.name not in (ENCODER_LIST, TITLES_FILE)]
        parts += [f"{name}={value}" for name, value in sorted(self.options.items())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @property
    def is_dense(self) -> bool:
        """Whether the index has vectors."""
        return bool(self.shards)

    @property
    def is_adopted(self) -> bool:
        """Whether the vectors are in a FAISS file that was made elsewhere."""
        return bool(self.layout)

    @property
    def has_bm25(self) -> bool:
        """Whether the index has an inverted index."""
        return self.index_type in (BM25, HYBRID)

    def write(self, directory: Path) -> None:
        """Write ``directory/manifest.json``."""
        content = {"format_version": FORMAT_VERSION, "version": self.version, **asdict(self)}
        if self.corpus_report is None:
            del content["corpus_report"]
        content["digest"] = _digest(content)
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Read ``directory/manifest.json``.

        Raises:
            DataError: the file is missing, damaged, or written by another version of the project.
        """
        path = Path(directory) / MANIFEST_FILE
        if not path.is_file():
            raise DataError(f"no index in {directory}: {MANIFEST_FILE} is missing; make one with `ragr1 index build`")
        content = read_json(path, _REMEDY)
        content = content if isinstance(content, dict) else {}
        digest, found = content.pop("digest", None), _digest(content)  # earlier versions wrote none
        format_version = content.pop("format_version", None)
        if format_version != FORMAT_VERSION:
            raise DataError(f"{path}: got format version {format_version}, expected {FORMAT_VERSION}; {_REMEDY}")
        if digest not in (None, found):
            raise DataError(f"{path}: damaged or edited: its digest is of another content; {_REMEDY}")
        version = content.pop("version", None)
        manifest = validated(Manifest, content, str(path), _REMEDY)
        if version != manifest.version:
            raise DataError(
                f"{path}: records version {version}, but its parts make {manifest.version}; it was edited, so build "
                "the index again"
            )
        return manifest


def _digest(content: dict[str, Any]) -> str:
    """Return a digest of all fields that no other file confirms; the encoder may move, and has a fingerprint."""
    content = {name: value for name, value in content.items() if name != "encoder"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _whole(default: int, low: int, summary: str) -> tuple[Any, int]:
    """Return type and default of an option: a whole number of at least ``low``."""
    return Annotated[int, Field(strict=True, ge=low, description=summary)], default


_NUM_LISTS = _whole(0, 0, "lists the vectors are sorted into; 0 is 4 * sqrt(passages). Set at the build")
_NUM_PROBES = _whole(0, 0, "lists that a query looks into; 0 is a sixteenth of them")
_REFINE_FACTOR = _whole(8, 1, "candidates that are scored again for each passage asked for")

INDEX_TYPES: dict[str, dict[str, tuple[Any, int]]] = {
    FLAT: {},  # exact; 4 bytes per number
    "fp16": {},  # every vector is scanned; 2 bytes per number
    "sq8": {},  # every vector is scanned; 1 byte per number
    # every vector is scanned by 2-bit codes, the best are scored again by bytes; 1.25 bytes per number
    "pq": {"refine_factor": _REFINE_FACTOR},
    # the nearest lists are scanned; 4 bytes per number
    "ivf": {"num_lists": _NUM_LISTS, "num_probes": _NUM_PROBES},
    # the nearest lists are scanned by 2-bit codes, the best are scored again by bytes; 1.25 bytes per number
    "ivf_pq": {"num_lists": _NUM_LISTS, "num_probes": _NUM_PROBES, "refine_factor": _REFINE_FACTOR},
    # a graph of neighbours is walked; 4 bytes per number and 8 * m per vector
    "hnsw": {
        "m": _whole(32, 2, "neighbours of a vector. Set at the build"),
        "ef_construction": _whole(200, 1, "candidates for these neighbours. Set at the build"),
        "ef_search": _whole(128, 1, "candidates that a query keeps while it walks"),
    },
}
"""Types of vectors by the names that users type, with the options of each."""

FOREIGN_OPTIONS = {
    "num_probes": INDEX_TYPES["ivf"]["num_probes"],
    "ef_search": INDEX_TYPES["hnsw"]["ef_search"],
    "refine_factor": _REFINE_FACTOR,
}
"""Options of an adopted file of type ``faiss``; each works only if the file has the part that it sets."""

RETRIEVER_OPTIONS: dict[str, tuple[Any, int]] = {
    "rerank_candidates": _whole(20, 1, "passages per query that a reranker orders again"),
    "fusion_depth": _whole(100, 1, "passages of each ranking that a hybrid index fuses"),
}
"""Options of a retriever over any index type. Builder, index and retriever get one mapping; each reads its part."""


def parse_options(index_type: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Check options by name and value, and return the value of every option of the type, or its default.

    The type is a key of ``INDEX_TYPES`` (for ``hybrid`` the type of its vectors), ``faiss`` or ``bm25``. Options of
    ``RETRIEVER_OPTIONS`` are known for every type.

    Raises:
        ConfigError: a type or option is unknown, or a value is illegal.
    """
    known = options_of(index_type)
    try:
        return known.read(options, "options").model_dump()
    except ConfigError as error:
        raise ConfigError(f"index type {index_type!r}: {error}") from error


@cache
def options_of(index_type: str) -> type[Section]:
    """Return the options of a type as keys with defaults; ``ConfigError`` if the type is unknown."""
    types = {**INDEX_TYPES, FOREIGN: FOREIGN_OPTIONS, BM25: {}}
    if index_type not in types:
        raise ConfigError(f"unknown index type {index_type!r}{nearest(index_type, INDEX_TYPES)}")
    fields: dict[str, Any] = {**types[index_type], **RETRIEVER_OPTIONS}
    return create_model(index_type, __base__=Section, **fields)
