"""The files that ``environment.tasks`` and ``--tasks`` name: one, several, a folder of shards, or a pattern.

::

    train.parquet                      ids train/0, train/1 ...
    data/nq            train-*.parquet shards, which end in .json, .jsonl, .csv, .tsv or .parquet, also compressed
    data/*/train.jsonl                 ids nq/train/0 ..., hotpotqa/train/0 ...
    [a.json, data/nq]                  each in its turn
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.tasks.formats import ALIAS_FILE, PARQUET, TABLES
from ragr1_actors.core.disk.data_files import unpacked_name
from ragr1_actors.core.errors import DataError, shortened

NamedTasks = str | Path | Sequence[str | Path]
"""Name of task files: a path or a pattern, or several of them."""
ENDINGS = (".json", ".jsonl", *TABLES, PARQUET)
"""Endings of the task files in a folder; other files in it are not read."""
_EXPECTED = (
    "a task file (JSON, JSONL, CSV, TSV or Parquet), a folder of them, or a pattern such as data/train-*.parquet"
)
_SPLITS = {
    "train": "train",
    "dev": "dev",
    "validation": "dev",
    "valid": "dev",
    "val": "dev",
    "eval": "eval",
    "evaluation": "eval",
    "test": "test",
}


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One task file and its source."""

    path: Path
    source: str
    """Beginning of the ids of its tasks: ``nq/train``."""


def as_list(named: NamedTasks) -> list[str | Path]:
    """Return the names in a list."""
    return [named] if isinstance(named, str | Path) else list(named)


def shown(named: NamedTasks) -> str:
    """Return the names for people: ``"a.json, data/nq"``."""
    return shortened(", ".join(map(str, as_list(named))), 200)


def task_files(named: NamedTasks, *words: str) -> list[TaskFile]:
    """Return the named files in the given order; the files of a folder or a pattern are ordered by name.

    The source of a file is its name without endings or, where several files would share it, with the folders before it
    that tell them apart. ``words`` may be given instead of a file, and are named in the error.

    Raises:
        DataError: a file is missing or named twice, or a folder or a pattern has no files or files of several splits.
    """
    paths = [path for one in as_list(named) or [""] for path in _paths(one, words)]
    absolute = [Path(os.path.abspath(path)) for path in paths]  # not resolved, because a hub's cache consists of links
    if len(set(absolute)) < len(paths):
        again = next(path for index, path in enumerate(absolute) if path in absolute[:index])
        raise DataError(f"{again} is named twice in {shown(named)}; name it once")
    return [TaskFile(path, source) for path, source in zip(paths, _sources(absolute), strict=True)]


def _paths(one: str | Path, words: Sequence[str]) -> list[Path]:
    path, name = Path(one), shortened(str(one), 200)
    expected = " or ".join([*words, _EXPECTED])
    if one == "":
        raise DataError(f"got nothing, expected {expected}")
    try:
        if path.is_file():
            return [path]
        is_folder = path.is_dir()
        candidates = path.iterdir() if is_folder else map(Path, glob.iglob(str(one), recursive=True))
        found = sorted(each for each in candidates if each.is_file() and each.name != ALIAS_FILE)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror}; expected {expected}") from error
    if is_folder:
        found = [each for each in found if unpacked_name(each).suffix in ENDINGS and not each.name.startswith(".")]
    elif not glob.has_magic(str(one)):
        raise DataError(f"there is no file {name}, expected {expected}")
    if not found:
        lacking = f"the folder {name} holds no file that ends in {', '.join(ENDINGS)}"
        raise DataError(f"{lacking if is_folder else f'no file fits {name}'}; expected {expected}")
    splits = {split for each in found if (split := _split(each))}
    if len(splits) > 1:
        raise DataError(
            f"{name} has files of the splits {', '.join(sorted(splits))}; name those of one, such as "
            f"{found[0].parent / '*train*'}, or a list of files"
        )
    return found


def _split(path: Path) -> str:
    """Return the split in a file's name: ``"train"`` for ``nq-train-00000-of-00003.parquet``."""
    return next((_SPLITS[word] for word in re.split("[^a-z]+", path.name.lower()) if word in _SPLITS), "")


def _sources(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of some paths that differ between all of them, without endings if that is enough."""
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [Path(*path.parts[-num_parts:]) for path in paths]
        for sources in ([unpacked_name(name).with_suffix("") for name in names], names):
            if len(set(sources)) == len(paths):
                return [source.as_posix() for source in sources]
    raise AssertionError("two files of one path")
