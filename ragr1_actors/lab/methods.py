"""Methods for which the project has recipes: one folder each in ``ragr1_actors/recipes``."""

from __future__ import annotations

import shutil
from pathlib import Path

from ragr1_actors.core.errors import ConfigError, nearest, one_line
from ragr1_actors.core.resolve import RECIPES, recipe_files

_NOT_COPIED = ("__init__.py", "__pycache__")


def recipe_methods() -> dict[str, str]:
    """Return the method of every recipe, or "": ``{"rank_r1_7b": "rank_r1", "hotpotqa_small": ""}``."""
    folders = {name: file.parent for name, file in recipe_files().items()}
    return {name: "" if folder == RECIPES else folder.name for name, folder in folders.items()}


def method_recipes() -> dict[str, list[str]]:
    """Return the recipes of every method by its name: ``{"rank_r1": ["rank_r1", "rank_r1_7b"]}``."""
    found: dict[str, list[str]] = {}
    for name, method in recipe_methods().items():
        if method:
            found.setdefault(method, []).append(name)
    return dict(sorted(found.items()))


def copy_method(method: str, folder: Path) -> list[Path]:
    """Copy the recipes, the Python and the claim of a method to a new folder, and return its recipes.

    Raises:
        ConfigError: there is no such method, or the folder is not empty or cannot be written.
    """
    known = method_recipes()
    if method not in known:
        raise ConfigError(f"unknown method {method!r}{nearest(method, known)}; see: ragr1 recipes")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name a new folder")
    ignored = shutil.ignore_patterns(*_NOT_COPIED)
    try:
        shutil.copytree(RECIPES / method, folder, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {one_line(error)}; name another folder") from error
    return [folder / f"{name}.yaml" for name in known[method]]
