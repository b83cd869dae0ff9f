"""JSON: written to and read from files, and checked against dataclasses and pydantic models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ragr1_actors.core.errors import DataError, shortened

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON with sorted keys. Numbers must be finite."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def read_json(path: Path, remedy: str = "") -> Any:
    """Read a JSON file; ``DataError`` if it is missing or is not JSON. ``remedy`` ends its message: what to do."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}{remedy and f'; {remedy}'}") from error


def read_json_as(kind: type[T], path: Path, remedy: str = "") -> T:
    """Read a JSON file as a dataclass or pydantic model; raises ``DataError`` as ``read_json`` and ``validated``."""
    return validated(kind, read_json(path, remedy), str(path), remedy)


def read_json_lines(kind: type[T], path: Path, remedy: str) -> list[T]:
    """Read the lines of a file of JSON lines, but one that a crash cut off; ``remedy`` says what to do with a bad line.

    Raises:
        DataError: a line is no ``kind``; the message has its number.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # the text after the last newline is empty or cut off
    return [validated(kind, line, f"{path}, line {number}", remedy) for number, line in enumerate(lines, start=1)]


def validated(kind: type[T], value: Any, where: str, remedy: str = "") -> T:
    """Return what ``checked`` does, read from the file ``where``; ``DataError`` on the first wrong key."""

    def refuse(name: str, got: Any, problem: str) -> DataError:
        what = f"{name}: {problem}, got {shortened(repr(got))}" if name else problem
        return DataError(f"{where} is damaged: {what}{remedy and f'; {remedy}'}")

    return checked(kind, value, refuse)


def checked(kind: type[T], value: Any, refuse: Callable[[str, Any, str], Exception]) -> T:
    """Return a value, or what JSON in UTF-8 says (``bytes``), as a dataclass, a model or a collection of these.

    Raises:
        Exception: what ``refuse`` makes of the first wrong key (empty if it is the whole), its value and what is wrong.
    """
    adapter: TypeAdapter[T] = _adapter(kind)
    try:
        return adapter.validate_json(value) if isinstance(value, bytes) else adapter.validate_python(value)
    except ValidationError as error:
        problem = first_problem(error)
        assert problem is not None
        raise refuse(*problem) from error


def first_problem(error: object) -> tuple[str, Any, str] | None:
    """Return what ``checked`` tells of pydantic's error, which a library may raise, too; None of anything else."""
    if not isinstance(error, ValidationError):
        return None
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":  # pydantic names our class, which is not a word of a recipe
        message = "expected keys with values, such as {key: value}"
    return ".".join(str(part) for part in first["loc"]), first["input"], f"{message[:1].lower()}{message[1:]}"
