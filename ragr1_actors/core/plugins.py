"""Names in a recipe become objects here: a word of a table, or ``my_module:MyThing``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import TypeVar

from ragr1_actors.core.errors import ConfigError

T = TypeVar("T")


def load_object(name: str, known: Mapping[str, T | str]) -> T:
    """Return ``known[name]``, or import ``name`` where it has the form ``module:attribute``.

    Entries of ``known`` may themselves have that form: what they pull in is then imported only where it is wanted. The
    current folder is importable, so that ``my_env:MyEnv`` finds ``./my_env.py``.

    Raises:
        ConfigError: the name is neither, the module or attribute does not exist, or the module cannot be imported.
    """
    entry = known.get(name, name)
    if not isinstance(entry, str):
        return entry
    module_name, colon, attribute = entry.partition(":")
    if not colon:
        raise ConfigError(f"got {name!r}, expected one of {', '.join(sorted(known))} or my_module:MyName")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(name, module_name, is_known=name in known)
    if attribute not in vars(module):
        raise ConfigError(f"{name!r}: module {module_name} has no {attribute!r}; write it there, or mend the name")
    found: T = vars(module)[attribute]
    return found


def _import(name: str, module_name: str, is_known: bool) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not is_known and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{name!r}: {error}; put {module_name}.py into the folder you start from") from error
        raise ConfigError(f"{name!r} needs the package {missing!r}; install it beside this one") from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ConfigError(f"{name!r}: {where} is not Python ({error.msg}); mend it") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{name!r}: importing {module_name!r} failed at {last.filename}, line {last.lineno}: "
            f"{type(error).__name__}: {error}"
        ) from error
