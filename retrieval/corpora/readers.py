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

A record keeps the id it has. Without one its title is the id, and from the title's second use on ``title#2``,
``title#3``; the pieces of a document, which have its ``docid``, are named in the same way. A paragraph of many
questions is one passage, and the same title with another text is ``title#2``.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ragr1_actors.core.errors import ConfigError, DataError, nearest, shortened
from ragr1_actors.core.files import is_parquet, opened, parquet_rows, unpacked_name
from retrieval.base import Passage
from retrieval.corpora.text import HashTable, hash_text, split_passages, valid_unicode

Record = dict[str, Any]

MAX_ENTRY = 64 * 2**20
"""Bytes of a line and characters of an entry, at most: what is longer lacks a quote, a bracket or its line ends."""

_CHUNK = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = 16  # "-Infinity" and half a surrogate pair fit
_DOCUMENT_KEY = "docid"
_ID_KEYS = ("id", "_id", "wikipedia_id", _DOCUMENT_KEY)
_MARK = re.compile(r"\s*(?:Section|BULLET|[A-Z]+)::::[-*\s]*")


class RecordError(ValueError):
    """A record that is not of its shape; the message says what was got and what was expected, not where."""


class Namer:
    """Ids for passages that have none, and the paragraphs seen before.

    Only hashes are kept. Should two titles share one (see ``hash_text``), the second becomes ``title#2``; should two
    paragraphs, the second is left out.
    """

    def __init__(self) -> None:
        """Know no title and no paragraph."""
        self._uses = HashTable()
        self._paragraphs = HashTable()

    def name(self, title: str) -> str:
        """Return an id not returned before: the title, ``title#2`` from its second use on; ``#1`` for an empty one."""
        uses = _count(self._uses, title)
        if title and uses == 1:
            return title
        while _count(self._uses, name := f"{title}#{uses}") > 1:  # another passage has this name as its title
            uses = _count(self._uses, title)
        return name

    def is_new(self, title: str, text: str) -> bool:
        """Return whether this paragraph comes for the first time."""
        return _count(self._paragraphs, f"{title}\0{text}") == 1


def _count(table: HashTable, text: str) -> int:
    """Count a text, and return how often it has come."""
    key = hash_text(text)
    times = table.get(key) + 1
    table.set(key, times)
    return times


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: how it looks, how to tell it, and how to read it."""

    looks: str
    fits: Callable[[Record], bool]
    passages: Callable[[Record, Namer], Iterator[Passage]]
    """Raises ``RecordError``."""


def join_sentences(sentences: list[str]) -> str:
    """Join sentences, with a blank where neither brings one: HotpotQA's begin with it, those of 2Wiki do not."""
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
    """Search-R1's ``"Riga"\\nRiga lies in Latvia.``: the first line is the title in quotes."""
    title, text = _title(record), record["contents"]
    head, newline, rest = text.partition("\n")
    head = head.strip()
    if len(head) > 1 and head[0] == head[-1] == '"':
        head = head[1:-1]  # one pair only: a title may contain quotes
    if newline and title in ("", head):
        title, text = head, rest
    yield _passage(record, title, text, namer)


def _article(record: Record, namer: Namer) -> Iterator[Passage]:
    """KILT's: the title is the first paragraph again; headings and list items are marked ``Section::::History.``."""
    title = record["wikipedia_title"]
    paragraphs = list(map(_unmarked, record["text"]))
    if paragraphs and paragraphs[0] == title.strip():
        del paragraphs[0]
    yield _passage(record, title, "\n".join(filter(None, paragraphs)), namer)


def _unmarked(paragraph: str) -> str:
    """Return ``"History: Early years."`` of ``"Section::::History.:Early years."``."""
    mark = _MARK.match(paragraph)
    return (paragraph[mark.end() :].replace(".:", ": ", 1) if mark else paragraph).strip()


def _context(record: Record, namer: Namer) -> Iterator[Passage]:
    """A question of HotpotQA or 2Wiki; on the data sets hub its context is two columns."""
    context = record["context"]
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
    """A question of MuSiQue."""
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
        lambda r: isinstance(r.get("context"), list | dict),
        _context,
    ),
    "paragraphs": Shape(
        '{"question", "paragraphs": [{"title", "paragraph_text"}, ...]}',
        lambda r: isinstance(r.get("paragraphs"), list),
        _paragraphs,
    ),
}


def _shape_of(record: Any, shapes: tuple[str, ...]) -> Shape:
    """Return the one of some shapes that a record has; ``RecordError`` if it has none of them, or more than one."""
    if not isinstance(record, dict):
        raise RecordError(f"got a JSON {type(record).__name__}, expected an object with title and text")
    fitting = [name for name in shapes if SHAPES[name].fits(record)]
    if fitting == ["plain", "contents"]:  # FlashRAG writes the passage both ways
        fitting = ["plain"]
    if not fitting:
        raise RecordError(f"got keys {_shown(sorted(record))}, expected {_looks(shapes)}, texts being strings")
    if len(fitting) > 1:
        raise RecordError(
            f"got keys {_shown(sorted(record))}, which could be {_looks(fitting)}; name the corpus format"
        )
    return SHAPES[fitting[0]]


def _passage(record: Record, title: str, text: str, namer: Namer) -> Passage:
    title = valid_unicode(title)
    key = next((key for key in _ID_KEYS if record.get(key) is not None), None)
    if key is None:
        return Passage(namer.name(title), title, valid_unicode(text))
    given = record[key]
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
"""Names of the formats, and the shapes in ``SHAPES`` that a JSON record of theirs may have."""

_COLUMNS = ("id", "text", "title")
_FIRST_LINE = 4 * 2**20
_KNOWN = (
    "a JSON list or JSON lines of "
    + ", ".join(shape.looks for shape in SHAPES.values())
    + "; a JSON object {title: [sentence, ...]}; or tab-separated lines under the header id, text, title"
)


def read_passages(path: str | Path, *, corpus_format: str = "auto", split_words: int = 0) -> Iterator[Passage]:
    """Read a corpus file. Memory holds one record, and hashes of what was named (see ``Namer``).

    Args:
        path: the file, compressed with gzip, bzip2 or xz, or not.
        corpus_format: a key of ``CORPUS_FORMATS``. A file that is not of it is an error, never read as something else.
        split_words: longer passages are cut into pieces of so many words (see ``split_passages``); 0 leaves them whole.

    Raises:
        DataError: the file is missing, empty, not UTF-8, broken or of no known format; the message names the line or
            the entry. That ids are unique is seen by ``write_corpus``.
        ConfigError: an unknown format, or a negative number of words.
    """
    path = Path(path)
    if corpus_format not in CORPUS_FORMATS:
        raise ConfigError(f"unknown corpus format {corpus_format!r}{nearest(corpus_format, CORPUS_FORMATS)}")
    if not path.is_file():
        raise DataError(f"no corpus file {path}; give an existing file with {_KNOWN}")
    passages = _read(path, corpus_format)
    return split_passages(passages, split_words) if split_words else passages


def _read(path: Path, corpus_format: str) -> Iterator[Passage]:
    is_empty = True
    with opened(path) as file:
        kind = _kind(file, path, corpus_format)
        file.seek(0)
        if kind == "parquet":
            passages = _read_parquet(path, corpus_format)
        elif kind == "table":
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


def _kind(file: BinaryIO, path: Path, corpus_format: str) -> str:
    """Return ``parquet``, ``table``, ``lines`` (JSON lines) or ``json`` (one JSON value)."""
    if is_parquet(path):
        return "parquet"
    suffix = unpacked_name(path).suffix
    if corpus_format == "dpr":
        return "table"
    # A longer line is no record, so it is one JSON value: what is read here must not grow with the file.
    while (line := file.readline(_FIRST_LINE)) and not line.strip():
        pass
    text = line.decode("utf-8-sig", "replace") if len(line) < _FIRST_LINE else ""
    is_header = set(_COLUMNS) <= {cell.strip('"\r\n ') for cell in text.split("\t")}
    if corpus_format == "auto" and (suffix == ".tsv" or is_header):
        return "table"
    record = None
    if text.startswith("{"):
        with suppress(ValueError, RecursionError):
            record = _DECODER.decode(text)
    # In HotpotQA's one object a passage called "text" maps to a list, which is not a record either.
    if suffix == ".jsonl" or (isinstance(record, dict) and any(shape.fits(record) for shape in SHAPES.values())):
        return "lines"
    return "json"


def _read_table(file: BinaryIO, path: Path) -> Iterator[Passage]:
    # Strict: a quote that is not closed or not doubled is an error and does not swallow lines.
    rows = csv.reader((line for _, line in _text_lines(file, path)), delimiter="\t", strict=True)
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
                yield Passage(passage_id, title, text)
            else:
                raise DataError(f"{path}, line {rows.line_num}: got {len(row)} columns, expected {len(_COLUMNS)}")
    except csv.Error as error:
        raise DataError(
            f"{path}, line {rows.line_num}: not tab-separated text with quotes doubled ({error})"
        ) from error


def _read_lines(file: BinaryIO, path: Path, corpus_format: str) -> Iterator[Passage]:
    namer = Namer()
    for number, line in _text_lines(file, path):
        if line.strip():
            try:
                record = _DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                raise _not_json(path, number, _cause(error)) from error
            yield from _placed(record, corpus_format, namer, f"{path}, line {number}")


def _read_parquet(path: Path, corpus_format: str) -> Iterator[Passage]:
    namer = Namer()
    for number, record in enumerate(parquet_rows(path), 1):
        present = {key: value for key, value in record.items() if value is not None}
        yield from _placed(present, corpus_format, namer, f"{path}, row {number}")


def _read_json(file: BinaryIO, path: Path, corpus_format: str) -> Iterator[Passage]:
    stream = JsonStream(file, path)
    start = stream.peek()
    if start == "[":
        namer = Namer()
        for number, record in enumerate(stream.elements(), 1):
            yield from _placed(record, corpus_format, namer, f"{path}, entry {number}")
    elif start == "{":
        if corpus_format not in ("auto", "hotpotqa"):
            expected = _looks(CORPUS_FORMATS[corpus_format])
            raise DataError(f"{path}: got one JSON object, expected a list or lines of {expected}; known are {_KNOWN}")
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
    """Yield the passages of a record; an error names the line or the entry."""
    try:
        yield from _shape_of(record, CORPUS_FORMATS[corpus_format]).passages(record, namer)
    except RecordError as error:
        raise DataError(f"{where}: {error}") from error


def _looks(shapes: Iterable[str]) -> str:
    return " or ".join(SHAPES[name].looks for name in shapes)


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"key {repeated!r} is used twice")
    return record


# Real corpora hold raw tabs inside strings, which strict parsing refuses.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_no_repeated_keys)


def _text_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line number, line)``, the first without a byte order mark; lines must be UTF-8 and not too long."""
    number = 0
    while line := file.readline(MAX_ENTRY + 1):
        number += 1
        if len(line) > MAX_ENTRY:
            raise DataError(f"{path}, line {number}: longer than {MAX_ENTRY // 2**20} MiB; put one record on each line")
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error.start) from error


class JsonStream:
    """One JSON value in a file, an entry at a time: memory holds a chunk or an entry, whichever is longer."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Read from ``file``; ``path`` is named in errors."""
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._position = "", 0
        self._line = 1  # where the buffer begins
        self._is_end = False

    def peek(self) -> str:
        """Return the next character that is no space, empty at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._position)
            self._position = space.end() if space else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._refill():
                return ""

    def value(self) -> Any:
        """Return the value that begins at the next character. ``DataError``: no JSON, a key twice, too deep or long."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos + _LONGEST_TOKEN > len(self._buffer)
                if is_cut and self._refill():
                    continue
                raise self._error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self._error(_cause(error), self._position) from error
            may_go_on = isinstance(value, int | float) and end + _LONGEST_TOKEN > len(self._buffer)
            if may_go_on and self._refill():  # 1 of 1.5
                continue
            self._position = end
            return value

    def elements(self) -> Iterator[Any]:
        """Yield the elements of the list that begins at the next character, and see that nothing follows it."""
        for _ in self._entries("]"):
            yield self.value()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys and values of the object that begins at the next character; repeated keys are yielded too."""
        for _ in self._entries("}"):
            if self.peek() != '"':
                raise self._error("Expecting property name enclosed in double quotes", self._position)
            key = self.value()
            if self.peek() != ":":
                raise self._error("Expecting ':' delimiter", self._position)
            self._position += 1
            yield key, self.value()

    def _entries(self, closing: str) -> Iterator[None]:
        """Stop before every entry of the list or object that begins at the next character."""
        self.peek()
        self._position += 1
        mark = ","
        if self.peek() == closing:
            mark = closing
            self._position += 1
        while mark == ",":
            yield
            mark = self.peek()
            if mark not in (",", closing):
                raise self._error("Expecting ',' delimiter", self._position)
            self._position += 1
        if self.peek():
            raise self._error("Extra data", self._position)

    def _refill(self) -> bool:
        """Drop what was read and append what comes next; return whether there may have been something."""
        if self._is_end:
            return False
        kept = self._buffer[self._position :]
        self._line += self._buffer.count("\n", 0, self._position)
        if len(kept) > MAX_ENTRY:
            raise _not_json(self._path, self._line, f"an entry longer than {MAX_ENTRY // 2**20} MiB")
        # As much again as is kept: an entry of any length is parsed a few times, not once a chunk.
        data = self._file.read(max(_CHUNK, len(kept)))
        self._is_end = not data
        try:
            self._buffer, self._position = kept + self._decoder.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            line = self._line + kept.count("\n") + error.object.count(b"\n", 0, error.start)
            # The object is this chunk and the bytes of a character that was cut before it.
            raise _not_utf8(self._path, line, self._file.tell() - len(error.object) + error.start) from error
        return True

    def _error(self, cause: str, position: int) -> DataError:
        return _not_json(self._path, self._line + self._buffer.count("\n", 0, position), cause)


def _cause(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


def _not_json(path: Path, line: int, cause: str) -> DataError:
    return DataError(f"{path}, line {line}: not valid JSON ({cause}); fix or remove it")


def _not_utf8(path: Path, line: int, byte: int) -> DataError:
    return DataError(f"{path}, line {line}: not UTF-8 text (byte {byte}); save the file as UTF-8")
