"""JSON files of any size, an entry at a time, with the line of whatever is wrong in them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ragr1_actors.core.errors import DataError

MAX_ENTRY = 64 * 2**20
"""Bytes of a line and characters of an entry, at most: what is longer lacks a quote, a bracket or its line ends."""

_CHUNK = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = 16  # "-Infinity" and half a surrogate pair fit


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"key {repeated!r} is used twice")
    return record


# Real corpora hold raw tabs inside strings, which strict parsing refuses.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_no_repeated_keys)


def read_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line number, line)``, the first without a byte order mark.

    Raises:
        DataError: a line is not UTF-8, or longer than ``MAX_ENTRY``.
    """
    number = 0
    while line := file.readline(MAX_ENTRY + 1):
        number += 1
        if len(line) > MAX_ENTRY:
            raise DataError(f"{path}, line {number}: longer than {MAX_ENTRY // 2**20} MiB; put one record on each line")
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error.start) from error


def parse_line(line: str, path: Path, number: int) -> Any:
    """Return the JSON value of line ``number``.

    Raises:
        DataError: it is not JSON, an object in it uses a key twice, or it is nested too deep.
    """
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise _not_json(path, number, _cause(error)) from error


def try_parse(line: str) -> Any:
    """Return the JSON value of a line, ``None`` where it is not a whole one."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None


class JsonStream:
    """One JSON value in a file, entered from outside: memory holds a chunk or an entry, whichever is longer."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Read from ``file``; ``path`` is named in errors."""
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._position = "", 0
        self._line = 1  # where the buffer begins
        self._num_bytes = self._num_newlines = 0  # read so far
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
        """Return the value that begins at the next character.

        Raises:
            DataError: it is not JSON, an object in it uses a key twice, or it is nested too deep or too long.
        """
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
        is_more = self._enter("]")
        while is_more:
            yield self.value()
            is_more = self._goes_on("]")
        self._expect_end()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys and values of the object that begins at the next character; repeated keys are yielded too."""
        is_more = self._enter("}")
        while is_more:
            if self.peek() != '"':
                raise self._error("Expecting property name enclosed in double quotes", self._position)
            key = self.value()
            if self.peek() != ":":
                raise self._error("Expecting ':' delimiter", self._position)
            self._position += 1
            yield key, self.value()
            is_more = self._goes_on("}")
        self._expect_end()

    def _enter(self, closing: str) -> bool:
        self.peek()
        self._position += 1
        is_empty = self.peek() == closing
        self._position += is_empty
        return not is_empty

    def _goes_on(self, closing: str) -> bool:
        mark = self.peek()
        if mark not in (",", closing):
            raise self._error("Expecting ',' delimiter", self._position)
        self._position += 1
        return mark == ","

    def _expect_end(self) -> None:
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
        self._buffer, self._position = kept + self._decode(data), 0
        return True

    def _decode(self, data: bytes) -> str:
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = 1 + self._num_newlines + error.object.count(b"\n", 0, error.start)
            # The object is this chunk and the bytes of a character that was cut before it.
            byte = self._num_bytes + len(data) - len(error.object) + error.start
            raise _not_utf8(self._path, line, byte) from error
        self._num_bytes += len(data)
        self._num_newlines += data.count(b"\n")
        return text

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
