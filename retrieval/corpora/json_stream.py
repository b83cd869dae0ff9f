"""Text and JSON in files of any size: lines, or one value an entry at a time. Errors name the line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ragr1_actors.core.disk.data_files import FaultCounts, described
from ragr1_actors.core.errors import DataError

MAX_ENTRY = 64 * 2**20
"""Limit of a line in bytes and of an entry in characters: a longer one lacks a quote, a bracket or its line ends."""

_CHUNK = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = 16  # "-Infinity" and half a surrogate pair fit
_LOOKED_AHEAD = 100_000
"""Lines after a line that is not JSON that are checked for the error message: about a second."""


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"key {repeated!r} is used twice")
    return record


# Real corpora have raw tabs inside strings, which strict parsing refuses.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_no_repeated_keys)


def text_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
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


def decode_json(text: str) -> Any:
    """Return the JSON value of a text; ``ValueError`` or ``RecursionError`` if it is not JSON or has a key twice."""
    return _DECODER.decode(text)


def json_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(line number, value)`` of each line that is not blank; errors name ``path``.

    Raises:
        DataError: a line is not JSON. The message also says which of the next lines are not.
    """
    lines = text_lines(file, path)
    for number, line in lines:
        if line.strip():
            try:
                value = decode_json(line)
            except (ValueError, RecursionError) as error:
                raise _not_json(path, number, _cause(error), _others_not_json(lines)) from error
            yield number, value


def _others_not_json(lines: Iterator[tuple[int, str]]) -> str:
    """Return a text that names the next lines that are not JSON, so that all can be mended at once; empty if none."""
    faults, number_seen = FaultCounts(), 0
    with suppress(DataError):  # bytes that are not text are reported once the lines before them are mended
        for number, line in islice(lines, _LOOKED_AHEAD):
            number_seen += 1
            try:
                decode_json(line if line.strip() else "0")
            except (ValueError, RecursionError):
                faults.add("", f"line {number}")
    found = described(faults.counts[""], f"of the next {number_seen:,} lines", faults.places.get("", ()))
    return f", and {found}" if faults.counts[""] else ""


class JsonStream:
    """One JSON value in a file, an entry at a time: memory holds a chunk or an entry, whichever is longer."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Read from ``file``; errors name ``path``."""
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._position = "", 0
        self._line = 1  # where the buffer begins
        self._is_end = False

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._position)
            self._position = space.end() if space else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._refill():
                return ""

    def value(self) -> Any:
        """Return the value at the next character; ``DataError`` if it is no JSON, too long, or repeats a key."""
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
            if may_go_on and self._refill():  # 1 may be the beginning of 1.5
                continue
            self._position = end
            return value

    def elements(self) -> Iterator[Any]:
        """Yield the elements of the list that begins at the next character; the file must end after the list."""
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
        """Drop the text that was read and append the next chunk; return False at the end of the file."""
        if self._is_end:
            return False
        kept = self._buffer[self._position :]
        self._line += self._buffer.count("\n", 0, self._position)
        if len(kept) > MAX_ENTRY:
            raise _not_json(self._path, self._line, f"an entry longer than {MAX_ENTRY // 2**20} MiB")
        # Read as much as is kept: an entry of any length is then parsed a few times, not once per chunk.
        data = self._file.read(max(_CHUNK, len(kept)))
        self._is_end = not data
        try:
            self._buffer, self._position = kept + self._decoder.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            line = self._line + kept.count("\n") + error.object.count(b"\n", 0, error.start)
            # The bytes are this chunk, after the bytes of a character that was cut before it.
            raise _not_utf8(self._path, line, self._file.tell() - len(error.object) + error.start) from error
        return True

    def _error(self, cause: str, position: int) -> DataError:
        return _not_json(self._path, self._line + self._buffer.count("\n", 0, position), cause)


def _cause(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).split(";")[0]


def _not_json(path: Path, line: int, cause: str, others: str = "") -> DataError:
    return DataError(f"{path}, line {line}: not valid JSON ({cause}); fix or remove it{others}")


def _not_utf8(path: Path, line: int, byte: int) -> DataError:
    return DataError(f"{path}, line {line}: not UTF-8 text (byte {byte}); save the file as UTF-8")
