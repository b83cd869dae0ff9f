"""Names in a recipe become objects here: a word of a table, or ``my_module:MyThing``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TypeVar

from ragr1_actors.errors import ConfigError

T = TypeVar("T")


def load_object(name: str, known: Mapping[str, T | str]) -> T:
    """Return ``known[name]``, or import ``name`` where it has the form ``module:attribute``.

    Entries of ``known`` may themselves have that form: what they pull in is then imported only where it is wanted. The
    current folder is importable, so that ``my_env:MyEnv`` finds ``./my_env.py``.

    Raises:
        ConfigError: the name is neither, or the module or attribute does not exist.
    """
    entry = known.get(name, name)
    if not isinstance(entry, str):
        return entry
    module_name, colon, attribute = entry.partition(":")
    if not colon:
        raise ConfigError(f"got {name!r}, expected one of {', '.join(sorted(known))} or my_module:MyName")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: T = vars(importlib.import_module(module_name))[attribute]
    except ModuleNotFoundError as error:
        if name in known:
            raise ConfigError(f"{name!r} needs the package {error.name!r}; install it beside this one") from error
        raise ConfigError(f"{name!r}: {error}; put {module_name}.py into the folder you start from") from error
    except KeyError as error:
        raise ConfigError(f"{name!r}: module {module_name} has no {attribute!r}") from error
    return found
