r"""Corpus files in the formats they are published in, read as a stream of passages.

=============  ===================================================================================================
``plain``      a JSON list or JSON lines of ``{"title", "text"[, "id"]}``
``search_r1``  Search-R1 and FlashRAG: JSON lines of ``{"id", "contents": "\"Title\"\ntext"}``
``dpr``        DPR's ``psgs_w100.tsv``: tab-separated columns ``id``, ``text``, ``title``
``kilt``       KILT's knowledge source: JSON lines of ``{"_id", "wikipedia_title", "text": [paragraph, ...]}``
``hotpotqa``   ``{title: [sentence, ...]}``, or questions with a ``context`` of ``[title, [sentence, ...]]``
``2wiki``      questions with such a ``context``, or a JSON list of ``{"title", "text"}``
``musique``    JSON lines of questions with ``paragraphs`` of ``{"title", "paragraph_text"}``
``auto``       tells by the keys of every record which of these it is
=============  ===================================================================================================

All of them may be compressed with gzip. A record keeps the id it has; without one its title is the id, and from the
title's second use on ``title#2``, ``title#3``. A paragraph that stands in many questions is one passage, and the same
title with another text is ``title#2``.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.base import Passage
from retrieval.corpora.formats import SHAPES, Namer, RecordError, is_texts, join_sentences, passages_of
from retrieval.corpora.json_stream import JsonStream, parse_line, read_lines, try_parse
from retrieval.corpora.splitter import split_passages
from retrieval.corpora.texts import HashTable, hash_text, valid_unicode

CORPUS_FORMATS: dict[str, tuple[str, ...]] = {
    "auto": tuple(SHAPES),
    "plain": ("plain",),
    "search_r1": ("contents",),
    "dpr": (),
    "kilt": ("article",),
    "hotpotqa": ("context",),
    "2wiki": ("context", "plain"),
    "musique": ("paragraphs",),
}
"""Names of the formats, and the shapes of ``retrieval.shapes`` that a JSON record of theirs may have."""

_COLUMNS = ("id", "text", "title")
_FIRST_LINE = 4 * 2**20
_MAGIC = b"\x1f\x8b"
_KNOWN = (
    "a JSON list or JSON lines of "
    + ", ".join(shape.looks for shape in SHAPES.values())
    + "; a JSON object {title: [sentence, ...]}; or tab-separated lines under the header id, text, title"
)


def read_passages(path: str | Path, *, corpus_format: str = "auto", split_words: int = 0) -> Iterator[Passage]:
    """Read a corpus file. Memory holds one record, and hashes of what was named (see ``Namer``).

    Args:
        path: the file, compressed with gzip or not.
        corpus_format: a key of ``CORPUS_FORMATS``. A file that is not of it is an error, never read as something else.
        split_words: longer passages are cut into pieces of so many words (see ``split_passages``); 0 leaves them whole.

    Raises:
        DataError: the file is missing, empty, not UTF-8, broken or of no known format; the message names the line or
            the entry. That ids are unique is seen by ``write_corpus``.
        ConfigError: an unknown format, or a negative number of words.
    """
    path = Path(path)
    if corpus_format not in CORPUS_FORMATS:
        nearest = difflib.get_close_matches(corpus_format, CORPUS_FORMATS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(CORPUS_FORMATS)}"
        raise ConfigError(f"unknown corpus format {corpus_format!r}; {hint}")
    if not path.is_file():
        raise DataError(f"no corpus file {path}; give an existing file with {_KNOWN}")
    passages = _read(path, corpus_format)
    return split_passages(passages, split_words) if split_words else passages


def _read(path: Path, corpus_format: str) -> Iterator[Passage]:
    is_empty = True
    with _opened(path) as file:
        kind = _kind(file, path, corpus_format)
        file.seek(0)
        if kind == "table":
            passages = _read_table(file, path)
        elif kind == "lines":
            passages = _read_lines(file, path, corpus_format)
        else:
            passages = _read_json(file, path, corpus_format)
        for passage in passages:
            is_empty = False
            yield passage
    if is_empty:
        raise DataError(f"{path}: no passages in it; expected {_KNOWN}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed where its first bytes say gzip."""
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        is_gzip = file.read(2) == _MAGIC
        file.seek(0)
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: not a whole gzip file ({error}); fetch it again") from error


def _kind(file: BinaryIO, path: Path, corpus_format: str) -> str:
    """Return ``table``, ``lines`` (JSON lines) or ``json`` (one JSON value)."""
    suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if corpus_format == "dpr":
        return "table"
    # A longer line is no record, so it is one JSON value: what is read here must not grow with the file.
    while (line := file.readline(_FIRST_LINE)) and not line.strip():
        pass
    text = line.decode("utf-8-sig", "replace") if len(line) < _FIRST_LINE else ""
    is_header = set(_COLUMNS) <= {cell.strip('"\r\n ') for cell in text.split("\t")}
    if corpus_format == "auto" and (suffix == ".tsv" or is_header):
        return "table"
    record = try_parse(text) if text.startswith("{") else None
    # In HotpotQA's one object a passage called "text" maps to a list, which is no record either.
    if suffix == ".jsonl" or (isinstance(record, dict) and any(shape.fits(record) for shape in SHAPES.values())):
        return "lines"
    return "json"


def _read_table(file: BinaryIO, path: Path) -> Iterator[Passage]:
    # Strict: a quote that is not closed or not doubled is an error and does not swallow lines.
    rows = csv.reader((line for _, line in read_lines(file, path)), delimiter="\t", strict=True)
    columns: list[int] = []
    try:
        for row in filter(None, rows):
            if not columns:
                columns = _columns(row, path)
            elif len(row) == len(_COLUMNS):
                passage_id, text, title = (row[column] for column in columns)
                yield Passage(passage_id, title, text)
            else:
                raise DataError(f"{path}, line {rows.line_num}: got {len(row)} columns, expected {len(_COLUMNS)}")
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}: not tab-separated text with quotes doubled ({error})"
        ) from error


def _columns(header: list[str], path: Path) -> list[int]:
    """Return where id, text and title stand."""
    if sorted(header) != sorted(_COLUMNS):
        shown = ", ".join(header)[:200]
        raise DataError(f"{path}, line 1: got the columns {shown!r}, expected a header of {', '.join(_COLUMNS)}")
    return [header.index(name) for name in _COLUMNS]


def _read_lines(file: BinaryIO, path: Path, corpus_format: str) -> Iterator[Passage]:
    namer = Namer()
    for number, line in read_lines(file, path):
        if line.strip():
            record = parse_line(line, path, number)
            yield from _placed(record, corpus_format, namer, f"{path}, line {number}")


def _read_json(file: BinaryIO, path: Path, corpus_format: str) -> Iterator[Passage]:
    stream = JsonStream(file, path)
    start = stream.peek()
    if start == "[":
        namer = Namer()
        for number, record in enumerate(stream.elements(), 1):
            yield from _placed(record, corpus_format, namer, f"{path}, entry {number}")
    elif start == "{":
        if corpus_format not in ("auto", "hotpotqa"):
            raise DataError(
                f"{path}: got one JSON object, expected a list or lines of {_looks(corpus_format)}; known are {_KNOWN}"
            )
        yield from _read_object(stream, path)
    elif start:
        try:
            got = f"a JSON {type(stream.value()).__name__}"
        except DataError:
            got = f"something that begins with {start!r}"
        raise DataError(f"{path}: got {got}, expected {_KNOWN}")


def _read_object(stream: JsonStream, path: Path) -> Iterator[Passage]:
    entries = HashTable()
    for number, (key, sentences) in enumerate(stream.items(), 1):
        if not is_texts(sentences):
            raise DataError(f"{path}: entry {number} ({key!r}): expected a list of sentences; known are {_KNOWN}")
        title = valid_unicode(key)
        title_hash = hash_text(title)
        if first := entries.get(title_hash):
            raise DataError(f"{path}: {title!r} is used twice, as entry {first} and entry {number}; keep one")
        entries.set(title_hash, number)
        yield Passage(title, title, valid_unicode(join_sentences(sentences)))


def _placed(record: Any, corpus_format: str, namer: Namer, where: str) -> Iterator[Passage]:
    """Yield the passages of a record; what is wrong with it is said with the place."""
    try:
        yield from passages_of(record, CORPUS_FORMATS[corpus_format], namer)
    except RecordError as error:
        raise DataError(f"{where}: {error}") from error


def _looks(corpus_format: str) -> str:
    return " or ".join(SHAPES[name].looks for name in CORPUS_FORMATS[corpus_format])
