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

All of them may be compressed with gzip, bzip2 or xz, and JSON records may be the rows of a Parquet table.

A record with a title may have a ``heading``, that of its section: ``{"title": "Riga", "heading": "History"}`` is titled
``Riga § History``.

A record keeps the id it has. Without one its title is the id, and from the title's second use on ``title#2``,
``title#3``; the pieces of a document, which have its ``docid``, are named in the same way. A paragraph of many
questions is one passage, and the same title with another text is ``title#2``. A text that is null is empty. What is odd
in a file is counted::

    passages = read_passages("wiki-18.jsonl.gz")
    write_corpus(passages, folder)
    print(passages.report)  # wiki-18.jsonl.gz ({"id", "contents"}): 21,015,324 passages of 21,015,324 records
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ragr1_actors.core.disk.data_files import is_parquet, opened, parquet_rows, unpacked_name
from ragr1_actors.core.errors import ConfigError, DataError, nearest, shortened, valid_unicode
from retrieval.base import HEADING, Passage
from retrieval.corpora.json_stream import MAX_ENTRY, JsonStream, decode_json, json_lines, text_lines
from retrieval.corpora.report import CorpusReport, CorpusTally
from retrieval.corpora.text import HashTable, hash_text, split_passages

Record = dict[str, Any]

_DOCUMENT_KEY = "docid"
_ID_KEYS = ("id", "_id", "wikipedia_id", _DOCUMENT_KEY)
_TEXT_KEYS = ("text", "contents")
_MARK = re.compile(r"\s*(?:Section|BULLET|[A-Z]+)::::[-*\s]*")


class RecordError(ValueError):
    """A record does not have its shape; the message says what was got and what was expected, but not where."""


class Namer:
    """Makes ids for passages without one, and remembers the paragraphs seen before.

    Only hashes are kept. If two titles share a hash (see ``hash_text``), the second becomes ``title#2``; if two
    paragraphs do, the second is left out.
    """

    def __init__(self, on_repeated: Callable[[], None] | None = None) -> None:
        """Begin without titles and paragraphs; ``on_repeated`` is called for each title that gets a number."""
        self._on_repeated = on_repeated
        self._uses = HashTable()
        self._paragraphs = HashTable()

    def name(self, title: str) -> str:
        """Return an id not returned before: the title, ``title#2`` at its second use; ``#1`` for an empty title."""
        uses = _count(self._uses, title)
        if title and uses == 1:
            return title
        if title and self._on_repeated is not None:
            self._on_repeated()
        while _count(self._uses, name := f"{title}#{uses}") > 1:  # another passage has this name as its title
            uses = _count(self._uses, title)
        return name

    def is_new(self, title: str, text: str) -> bool:
        """Return whether this paragraph has not been seen before."""
        return _count(self._paragraphs, f"{title}\0{text}") == 1


def _count(table: HashTable, text: str) -> int:
    """Count a text, and return the number of its occurrences so far."""
    key = hash_text(text)
    times = table.get(key) + 1
    table.set(key, times)
    return times


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of records: its appearance, a test for it, and a reader."""

    looks: str
    fits: Callable[[Record], bool]
    passages: Callable[[Record, Namer], Iterator[Passage]]
    """Reads the passages of a record; raises ``RecordError``."""


def join_sentences(sentences: list[str]) -> str:
    """Join sentences, with a blank where both have none: HotpotQA's sentences begin with one, 2Wiki's do not."""
    joined: list[str] = []
    for sentence in filter(None, sentences):
        if joined and not (joined[-1][-1].isspace() or sentence[0].isspace()):
            joined.append(" ")
        joined.append(sentence)
    return "".join(joined).strip()


def is_texts(value: Any) -> bool:
    """Return whether this is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _plain(record: Record, namer: Namer) -> Iterator[Passage]:
    yield _passage(record, _title(record), record["text"], namer)


def _contents(record: Record, namer: Namer) -> Iterator[Passage]:
    """Read a record of Search-R1, ``"Riga"\nRiga lies in Latvia.``: the first line is the title in quotes."""
    title, text = _title(record), record["contents"]
    head, newline, rest = text.partition("\n")
    head = head.strip()
    if len(head) > 1 and head[0] == head[-1] == '"':
        head = head[1:-1]  # one pair only: a title may contain quotes
    if newline and title in ("", head):
        title, text = head, rest
    yield _passage(record, title, text, namer)


def _article(record: Record, namer: Namer) -> Iterator[Passage]:
    """Read an article of KILT: paragraph 1 repeats the title; headings and list items begin with ``Section::::``."""
    title = record["wikipedia_title"]
    paragraphs = list(map(_unmarked, record["text"]))
    if paragraphs and paragraphs[0] == title.strip():
        del paragraphs[0]
    yield _passage(record, title, "\n".join(filter(None, paragraphs)), namer)


def _unmarked(paragraph: str) -> str:
    """Return ``"History: Early years."`` for ``"Section::::History.:Early years."``."""
    mark = _MARK.match(paragraph)
    return (paragraph[mark.end() :].replace(".:", ": ", 1) if mark else paragraph).strip()


def _context(record: Record, namer: Namer) -> Iterator[Passage]:
    """Read a question of HotpotQA or 2Wiki; in files of the data sets hub its context is two columns or JSON text."""
    context = record["context"]
    if isinstance(context, str):
        try:
            context = decode_json(context)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"got the context {_shown(context)}, which is not JSON: {error}") from error
    if isinstance(context, dict):
        titles, texts = context.get("title"), context.get("sentences")
        if not isinstance(titles, list) or not isinstance(texts, list) or len(titles) != len(texts):
            raise RecordError(f"got the context {_shown(context)}, expected a list of [title, [sentence, ...]]")
        context = list(zip(titles, texts, strict=True))
    for item in context:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) and is_texts(item[1])):
            raise RecordError(f"got {_shown(item)} in the context, expected [title, [sentence, ...]]")
        yield from _paragraph(item[0], join_sentences(item[1]), namer)


def _paragraphs(record: Record, namer: Namer) -> Iterator[Passage]:
    """Read a question of MuSiQue."""
    for item in record["paragraphs"]:
        title, text = (item.get("title"), item.get("paragraph_text")) if isinstance(item, dict) else (None, None)
        if not isinstance(title, str) or not isinstance(text, str):
            raise RecordError(f"got {_shown(item)} among the paragraphs, expected title and paragraph_text as strings")
        yield from _paragraph(title, text, namer)


SHAPES = {
    "plain": Shape('{"title", "text"[, "id"]}', lambda r: isinstance(r.get("text"), str), _plain),
    "contents": Shape('{"id", "contents"}', lambda r: isinstance(r.get("contents"), str), _contents),
    "article": Shape(
        '{"_id", "wikipedia_title", "text": [paragraph, ...]}',
        lambda r: isinstance(r.get("wikipedia_title"), str) and is_texts(r.get("text")),
        _article,
    ),
    "context": Shape(
        '{"question", "context": [[title, [sentence, ...]], ...]}',
        lambda r: isinstance(r.get("context"), list | dict) or str(r.get("context")).startswith("[["),
        _context,
    ),
    "paragraphs": Shape(
        '{"question", "paragraphs": [{"title", "paragraph_text"}, ...]}',
        lambda r: isinstance(r.get("paragraphs"), list),
        _paragraphs,
    ),
}


def _shape_of(record: Any, shapes: tuple[str, ...]) -> Shape:
    """Return the only one of ``shapes`` that a record has; ``RecordError`` if it has none, or more than one."""
    if not isinstance(record, dict):
        raise RecordError(f"got a JSON {type(record).__name__}, expected an object with title and text")
    fitting = [name for name in shapes if SHAPES[name].fits(record)]
    if fitting == ["plain", "contents"]:  # FlashRAG writes the passage in both ways
        fitting = ["plain"]
    if not fitting:
        raise RecordError(f"got keys {_shown(sorted(record))}, expected {_looks(shapes)}, texts being strings")
    if len(fitting) > 1:
        raise RecordError(
            f"got keys {_shown(sorted(record))}, which could be {_looks(fitting)}; name the corpus format"
        )
    return SHAPES[fitting[0]]


def _passage(record: Record, title: str, text: str, namer: Namer) -> Passage:
    heading = record.get("heading", "")
    if not isinstance(heading, str):
        raise RecordError(f"the heading is {_shown(heading)}, expected a string")
    title = valid_unicode(HEADING.join(filter(None, (title, heading.strip()))))
    key = next((key for key in _ID_KEYS if record.get(key) is not None), None)
    if key is None:
        return Passage(namer.name(title), title, valid_unicode(text))
    given = record[key]
    if isinstance(given, float) and given.is_integer():  # the table has another row without an id, so ids are floats
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise RecordError(f"the id is {_shown(given)}, expected a string or a whole number")
    passage_id = valid_unicode(str(given))
    return Passage(namer.name(passage_id) if key == _DOCUMENT_KEY else passage_id, title, valid_unicode(text))


def _paragraph(title: str, text: str, namer: Namer) -> Iterator[Passage]:
    title, text = valid_unicode(title), valid_unicode(text)
    if namer.is_new(title, text):
        yield Passage(namer.name(title), title, text)


def _title(record: Record) -> str:
    title = record.get("title", "")
    if not isinstance(title, str):
        raise RecordError(f"the title is {_shown(title)}, expected a string")
    return title


def _shown(value: Any) -> str:
    return shortened(repr(value), 200)


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
"""Names of the formats, with the shapes in ``SHAPES`` that their JSON records may have."""

_COLUMNS = ("id", "text", "title")
_TABLE = "tab-separated id, text, title"
_OBJECT = "{title: [sentence, ...]}"
_FIRST_LINE = 4 * 2**20
_KNOWN = (
    "a JSON list or JSON lines of "
    + ", ".join(shape.looks for shape in SHAPES.values())
    + f"; a JSON object {_OBJECT}; or tab-separated lines under the header id, text, title"
)


class PassageFile(Iterator[Passage]):
    """Passages of a corpus file in its order, to be read once, with a report on those read so far."""

    def __init__(self, path: Path, corpus_format: str, split_words: int) -> None:
        """Open nothing yet; call ``read_passages`` to make one."""
        self._tally = CorpusTally(path.name)
        passages = _read(path, corpus_format, self._tally)
        self._passages = split_passages(passages, split_words) if split_words else passages

    def __next__(self) -> Passage:
        """Return the next passage."""
        passage = next(self._passages)
        self._tally.add(passage)
        return passage

    @property
    def report(self) -> CorpusReport:
        """Counts of the records read so far, and of their faults."""
        return self._tally.report()


def read_passages(path: str | Path, *, corpus_format: str = "auto", split_words: int = 0) -> PassageFile:
    """Read a corpus file. Memory holds one record, and the hashes of ``Namer``.

    Args:
        path: the file; it may be compressed with gzip, bzip2 or xz.
        corpus_format: a key of ``CORPUS_FORMATS``. A file of another format is an error and is not read as that format.
        split_words: longer passages are cut into pieces of this many words (see ``split_passages``); 0 cuts none.

    Raises:
        DataError: the file is missing, empty, not UTF-8, broken or of no known format; the message names the line or
            the entry. ``write_corpus`` checks that ids are unique.
        ConfigError: the format is unknown, or the number of words is negative.
    """
    path = Path(path)
    if corpus_format not in CORPUS_FORMATS:
        raise ConfigError(f"unknown corpus format {corpus_format!r}{nearest(corpus_format, CORPUS_FORMATS)}")
    if not path.is_file():
        raise DataError(f"no corpus file {path}; give an existing file with {_KNOWN}")
    return PassageFile(path, corpus_format, split_words)


def _read(path: Path, corpus_format: str, tally: CorpusTally) -> Iterator[Passage]:
    is_empty = True
    with opened(path) as file:
        kind = _kind(file, path, corpus_format)
        file.seek(0)
        reading = _Reading(path, corpus_format, tally, Namer(tally.add_repeated_id))
        if kind == "parquet":
            passages = _read_records(enumerate(parquet_rows(path), 1), reading, "row")
        elif kind == "table":
            passages = _read_table(file, reading)
        elif kind == "lines":
            passages = _read_records(json_lines(file, path), reading, "line")
        else:
            passages = _read_json(file, reading)
        for passage in passages:
            is_empty = False
            yield passage
    if is_empty:
        raise DataError(f"{path}: no passages in it; expected {_KNOWN}")


def _kind(file: BinaryIO, path: Path, corpus_format: str) -> str:
    """Return ``parquet``, ``table``, ``lines`` (JSON lines) or ``json`` (one JSON value)."""
    if is_parquet(path):
        return "parquet"
    suffix = unpacked_name(path).suffix
    if corpus_format == "dpr":
        return "table"
    # A longer line is not a record, so the file is one JSON value: memory must not grow with the file.
    while (line := file.readline(_FIRST_LINE)) and not line.strip():
        pass
    text = line.decode("utf-8-sig", "replace") if len(line) < _FIRST_LINE else ""
    is_header = set(_COLUMNS) <= {cell.strip('"\r\n ') for cell in text.split("\t")}
    if corpus_format == "auto" and (suffix == ".tsv" or is_header):
        return "table"
    record = None
    if text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            record = decode_json(text)
    # In HotpotQA's single object a passage called "text" maps to a list, so it is not a record either.
    if suffix == ".jsonl" or (isinstance(record, dict) and any(shape.fits(record) for shape in SHAPES.values())):
        return "lines"
    return "json"


@dataclass(frozen=True)
class _Reading:
    """State that the readers of one file share."""

    path: Path
    corpus_format: str
    tally: CorpusTally
    namer: Namer

    def passages(self, record: Any, place: str) -> Iterator[Passage]:
        """Yield the passages of a record; an error names its place: the line or the entry."""
        shapes = CORPUS_FORMATS[self.corpus_format]
        try:
            record = _without_nulls(record, shapes)
            shape = _shape_of(record, shapes)
            self.tally.begin(place, shape.looks)
            yield from shape.passages(record, self.namer)
        except RecordError as error:
            raise DataError(f"{self.path}, {place}: {error}") from error


def _without_nulls(record: Any, shapes: tuple[str, ...]) -> Any:
    """Remove null values, since each row of a table has all its columns; a null text becomes empty."""
    if not isinstance(record, dict) or None not in record.values():
        return record
    present = {key: value for key, value in record.items() if value is not None}
    is_article = "wikipedia_title" in present  # its text is a list
    if not is_article and not any(SHAPES[name].fits(present) for name in shapes):
        present |= {key: "" for key in _TEXT_KEYS if key in record and key not in present}
    return present


def _read_table(file: BinaryIO, reading: _Reading) -> Iterator[Passage]:
    path, tally = reading.path, reading.tally
    csv.field_size_limit(MAX_ENTRY)  # csv refuses fields of more than 131,072 characters unless told
    # Strict, so that a quote that is not closed or not doubled is an error and does not swallow lines.
    rows = csv.reader((line for _, line in text_lines(file, path)), delimiter="\t", strict=True)
    columns: list[int] = []
    try:
        for row in filter(None, rows):
            if not columns:
                if sorted(row) != sorted(_COLUMNS):
                    shown = ", ".join(row)[:200]
                    raise DataError(
                        f"{path}, line 1: got the columns {shown!r}, expected a header of {', '.join(_COLUMNS)}"
                    )
                columns = [row.index(name) for name in _COLUMNS]
            elif len(row) == len(_COLUMNS):
                passage_id, text, title = (row[column] for column in columns)
                tally.begin(f"line {rows.line_num}", _TABLE)
                yield Passage(passage_id, title, text)
            else:
                raise DataError(f"{path}, line {rows.line_num}: got {len(row)} columns, expected {len(_COLUMNS)}")
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}: not tab-separated text with quotes doubled ({error})"
        ) from error


def _read_records(records: Iterable[tuple[int, Any]], reading: _Reading, place: str) -> Iterator[Passage]:
    for number, record in records:
        yield from reading.passages(record, f"{place} {number}")


def _read_json(file: BinaryIO, reading: _Reading) -> Iterator[Passage]:
    path, corpus_format = reading.path, reading.corpus_format
    stream = JsonStream(file, path)
    start = stream.peek()
    if start == "[":
        yield from _read_records(enumerate(stream.elements(), 1), reading, "entry")
    elif start == "{":
        if corpus_format not in ("auto", "hotpotqa"):
            expected = _looks(CORPUS_FORMATS[corpus_format])
            raise DataError(f"{path}: got one JSON object, expected a list or lines of {expected}; known are {_KNOWN}")
        yield from _read_object(stream, reading)
    elif start:
        try:
            got = f"a JSON {type(stream.value()).__name__}"
        except DataError:
            got = f"something that begins with {start!r}"
        raise DataError(f"{path}: got {got}, expected {_KNOWN}")


def _read_object(stream: JsonStream, reading: _Reading) -> Iterator[Passage]:
    path, entries = reading.path, HashTable()
    for number, (key, sentences) in enumerate(stream.items(), 1):
        if not is_texts(sentences):
            raise DataError(f"{path}: entry {number} ({key!r}): expected a list of sentences; known are {_KNOWN}")
        title = valid_unicode(key)
        title_hash = hash_text(title)
        if first := entries.get(title_hash):
            raise DataError(f"{path}: {title!r} is used twice, as entry {first} and entry {number}; keep one")
        entries.set(title_hash, number)
        reading.tally.begin(f"entry {number}", _OBJECT)
        yield Passage(title, title, valid_unicode(join_sentences(sentences)))


def _looks(shapes: Iterable[str]) -> str:
    return " or ".join(SHAPES[name].looks for name in shapes)
