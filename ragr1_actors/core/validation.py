"""Checks of single values: YAML that cannot be read, values that no key accepts, and the nearest known name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ragr1_actors.core.errors import ConfigError

MAX_DEPTH = 16
"""Of lists and mappings in one another: ``engine_options`` may hold some, nothing needs more."""
_MAX_BITS = 64


def read_yaml_file(path: Path, instead: str) -> Any:
    """Return what a YAML file holds.

    Args:
        path: of the file.
        instead: what to do where there is no such file, for the message.

    Raises:
        ConfigError: it is missing, cannot be read, or is not YAML in UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no recipe file {path}; {instead}") from error
    except OSError as error:
        raise ConfigError(f"recipe file {shortened(str(path))} cannot be read: {error.strerror}; {instead}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ConfigError: it is not YAML; the message begins with ``source``.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply, expected sections of keys") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}; quote what is text") from error


def check_value(name: str, value: Any) -> None:
    """Refuse what a recipe's key cannot hold: a date, a set, bytes, keys that are no text, NaN, bottomless nesting.

    Raises:
        ConfigError: names the key and what stands there.
    """
    level: list[tuple[str, Any]] = [(name, value)]
    for _ in range(MAX_DEPTH):  # level by level: deep nesting must not exhaust the stack
        below: dict[int, tuple[str, Any]] = {}  # by identity: YAML's aliases may repeat one list a billion times
        for where, item in level:
            _check_kind(where, item)
            if isinstance(item, dict):
                below |= {id(child): (f"{where}.{key}", child) for key, child in item.items()}
            elif isinstance(item, list | tuple):
                below |= {id(child): (f"{where}[{index}]", child) for index, child in enumerate(item)}
        if not below:
            return
        level = list(below.values())
    raise ConfigError(f"{name}: nested more than {MAX_DEPTH} levels deep; write it flatter")


def _check_kind(where: str, item: Any) -> None:
    if isinstance(item, dict):
        for key in item:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: got the key {key!r}, expected text; quote it")
    elif isinstance(item, float | int):
        _check_number(where, item)
    elif isinstance(item, str):
        if any("\ud800" <= char <= "\udfff" or char == "\0" for char in item):
            raise ConfigError(f"{where}: got {shortened(repr(item))}, expected text without lone surrogates and NUL")
    elif item is not None and not isinstance(item, list | tuple):
        raise ConfigError(
            f"{where}: got {shortened(str(item))}, a {type(item).__name__}, expected text, a number, true, false, a "
            "list or a mapping; quote it if it is text"
        )


def _check_number(where: str, number: float | int) -> None:
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{where}: got {number}, expected a finite number")
    if isinstance(number, int) and number.bit_length() > _MAX_BITS:
        raise ConfigError(f"{where}: got a number of {number.bit_length()} bits, expected one of at most {_MAX_BITS}")


def first_problem(error: ValidationError) -> tuple[str, Any, str]:
    """Return the first key that does not fit, such as ``training.lr``, what stands there, and what is wrong with it."""
    first = error.errors()[0]
    message = first["msg"]
    return ".".join(str(part) for part in first["loc"]), first["input"], f"{message[:1].lower()}{message[1:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest there is, or all of them."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; expected one of: {', '.join(known)}"


def shortened(text: str, length: int = 80) -> str:
    """Return the text, cut to ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
