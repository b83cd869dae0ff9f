"""Passages on disk: the corpus formats in use, and one memory-mapped Arrow file that any number of processes share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ragr1_actors.errors import DataError
from retrieval.base import Passage

CORPUS_FILE = "corpus.arrow"
SCHEMA = pa.schema([("id", pa.large_string()), ("title", pa.large_string()), ("text", pa.large_string())])
TAKE_FROM = 50
"""Rows from which Arrow's ``take`` beats one scalar access a row."""

_FORMATS = (
    'a JSON list of {"title", "text"}, a JSON object {title: [sentence, ...]}, or JSON lines of {"title", "text"} or '
    '{"id", "contents"}'
)


def read_passages(path: str | Path) -> Iterator[Passage]:
    r"""Read a corpus file, whichever of the known formats it has.

    * HotpotQA: ``{title: [sentence, ...]}``; the id is the title.
    * A JSON list or JSON lines of ``{"title", "text"[, "id"]}``. Without an id the title is the id, and from its second
      use on ``title#2``, ``title#3``.
    * Search-R1: JSON lines of ``{"id", "contents": "\"Title\"\ntext"}``.

    Raises:
        DataError: the file is missing, empty, not UTF-8, broken (the message names the line), or uses an id twice.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no corpus file {path}; give an existing file with {_FORMATS}")
    count = 0
    for passage in _check_unique(_read_records(path), str(path)):
        count += 1
        yield passage
    if count == 0:
        raise DataError(f"{path}: no passages in it; expected {_FORMATS}")


def write_corpus(passages: Iterable[Passage], directory: str | Path) -> Path:
    """Write ``directory/corpus.arrow``, a row a passage in the order given. Scores are not kept.

    Raises:
        DataError: no passages, or one id twice.
    """
    columns: tuple[list[str], list[str], list[str]] = ([], [], [])
    numbered = ((f"passage {number}", passage) for number, passage in enumerate(passages, 1))
    for passage in _check_unique(numbered, "corpus"):
        for column, value in zip(columns, (passage.id, passage.title, passage.text), strict=True):
            column.append(_valid_unicode(value))
    if not columns[0]:
        raise DataError("the corpus has no passages; give at least one")
    batch = pa.record_batch([pa.array(column, pa.large_string()) for column in columns], schema=SCHEMA)
    path = Path(directory) / CORPUS_FILE
    # A file of many chunks makes every take() concatenate the whole column: 650 times slower at 192 rows.
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return path


class Corpus(Sequence[Passage]):
    """The passages of an index, memory-mapped: opening costs nothing and replicas on one node share the pages."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Wrap a record batch of ``SCHEMA``; use ``Corpus.open``."""
        self._columns = batch.columns
        self._row_of: dict[str, int] | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Corpus:
        """Map ``directory/corpus.arrow``.

        Raises:
            DataError: the file is missing, is not an Arrow file, or does not hold one chunk of ``SCHEMA``.
        """
        path = Path(directory) / CORPUS_FILE
        if not path.is_file():
            raise DataError(f"no corpus {path}; build the index with `ragr1 index build`")
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            schema, num_chunks = reader.schema, reader.num_record_batches
            if schema != SCHEMA or num_chunks != 1:
                raise DataError(
                    f"{path}: got columns {schema.names} in {num_chunks} chunks, expected {SCHEMA.names} in one; "
                    "build the index again"
                )
            return cls(reader.get_batch(0))
        except (pa.ArrowInvalid, OSError) as error:
            cause = " ".join(str(error).split())
            raise DataError(f"{path}: not a whole Arrow file ({cause}); build the index again") from error

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._columns[0])

    def __getitem__(self, row: Any) -> Any:
        """Return the passage of a row, or a list of passages for a slice."""
        if isinstance(row, slice):
            return self.take(list(range(len(self))[row]))
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        return self._scalar(row % len(self))

    def __iter__(self) -> Iterator[Passage]:
        """Yield the passages in row order."""
        for start in range(0, len(self), 4096):
            yield from self.take(range(start, min(start + 4096, len(self))))

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """Return the passages of many rows, in that order."""
        if len(rows) < TAKE_FROM:
            return [self._scalar(row) for row in rows]
        indices = pa.array(rows, pa.int64())
        ids, titles, texts = (column.take(indices).to_pylist() for column in self._columns)
        return [Passage(*fields) for fields in zip(ids, titles, texts, strict=True)]

    def row_of(self, passage_id: str) -> int:
        """Return the row of an id.

        The first call builds a dictionary of all ids in private memory: searching never needs it.

        Raises:
            KeyError: no passage has this id.
        """
        if self._row_of is None:
            self._row_of = {known: row for row, known in enumerate(self._columns[0].to_pylist())}
        return self._row_of[passage_id]

    def _scalar(self, row: int) -> Passage:
        ids, titles, texts = self._columns
        return Passage(ids[row].as_py(), titles[row].as_py(), texts[row].as_py())


def _read_records(path: Path) -> Iterator[tuple[str, Passage]]:
    """Yield ``("line 3" or "entry 3", passage)``."""
    with path.open("rb") as file:
        first = file.readline().removeprefix(b"\xef\xbb\xbf").strip()
    if path.suffix == ".jsonl" or _is_record(first):
        return _read_json_lines(path)
    return _read_json(path)


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line, strict=False)
    except ValueError:  # JSONDecodeError or UnicodeDecodeError
        return False
    # In HotpotQA's one object a passage called "text" would map to a list.
    return isinstance(record, dict) and any(isinstance(record.get(key), str) for key in ("text", "contents"))


def _read_json_lines(path: Path) -> Iterator[tuple[str, Passage]]:
    namer = _Namer()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number}"
            record = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, path, number)
            yield where, _to_passage(record, namer, path, where)


def _read_json(path: Path) -> Iterator[tuple[str, Passage]]:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        return
    content = _parse(data, path, 1)
    namer = _Namer()
    if isinstance(content, dict):
        for number, (title, sentences) in enumerate(content.items(), 1):
            if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
                raise DataError(
                    f"{path}: entry {number} ({title!r}): expected a list of sentences; known are {_FORMATS}"
                )
            text = "".join(sentences).strip()
            yield f"entry {number}", Passage(_valid_unicode(title), _valid_unicode(title), _valid_unicode(text))
    elif isinstance(content, list):
        for number, record in enumerate(content, 1):
            yield f"entry {number}", _to_passage(record, namer, path, f"entry {number}")
    else:
        raise DataError(f"{path}: got a JSON {type(content).__name__}, expected {_FORMATS}")


def _parse(data: bytes, path: Path, first_line: int) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            seen: dict[str, int] = {}
            for position, (key, _) in enumerate(pairs, 1):
                if key in seen:
                    raise DataError(
                        f"{path}: {key!r} is used twice, as entry {seen[key]} and entry {position}; keep one"
                    )
                seen[key] = position
        return unique

    try:
        # Real corpora hold raw tabs inside strings, which strict parsing refuses.
        return json.loads(data.decode("utf-8"), strict=False, object_pairs_hook=no_duplicates)
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(f"{path}, line {line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {first_line + error.lineno - 1}: not valid JSON ({error.msg}); fix or remove it"
        ) from error


class _Namer:
    """Ids for passages that have none: the title, ``title#2`` from its second use on."""

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}

    def name(self, title: str) -> str:
        uses = self._uses[title] = self._uses.get(title, 0) + 1
        return f"{title}#{uses}" if uses > 1 or not title else title


def _to_passage(record: Any, namer: _Namer, path: Path, where: str) -> Passage:
    if not isinstance(record, dict):
        raise DataError(f"{path}, {where}: got a JSON {type(record).__name__}, expected an object with title and text")
    title, text = record.get("title", ""), record.get("text")
    if text is None and isinstance(record.get("contents"), str):
        head, _, text = record["contents"].partition("\n")
        title = title or head.strip().strip('"')
    if not isinstance(title, str) or not isinstance(text, str):
        raise DataError(f"{path}, {where}: got keys {sorted(record)}, expected title and text (or contents) as strings")
    given_id = record.get("id", record.get("_id"))
    if given_id is not None and not isinstance(given_id, str | int):
        raise DataError(f"{path}, {where}: the id is {given_id!r}, expected a string or a whole number")
    title = _valid_unicode(title)
    passage_id = namer.name(title) if given_id is None else _valid_unicode(str(given_id))
    return Passage(passage_id, title, _valid_unicode(text))


def _check_unique(records: Iterable[tuple[str, Passage]], source: str) -> Iterator[Passage]:
    seen: dict[str, str] = {}
    for where, passage in records:
        if passage.id in seen:
            raise DataError(
                f"{source}: passage id {passage.id!r} is used twice, at {seen[passage.id]} and at {where}; "
                "ids must be unique"
            )
        seen[passage.id] = where
        yield passage


def _valid_unicode(text: str) -> str:
    r"""Join surrogate pairs and replace lone ones (JSON's ``"\ud800"``), which no UTF-8 file can hold."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
