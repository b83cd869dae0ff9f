"""List of a stored folder's files with their sizes and digests: damaged and missing files are refused by name.

::

    step_10/
      digests.json          of state.json, learner.safetensors, policy/digests.json
      policy/
        digests.json        of config.json, model.safetensors, ...: this folder may be used by itself

A writer digests its files from the page cache, while they go to disk; a reader compares them first. Files that a person
adds are in no list, and are no error. ``docs/decisions/digests.md`` says why it is XXH3.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import xxhash

from ragr1_actors.core.disk.files import WRITING, sync
from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import DataError

LIST_FILE = "digests.json"
_BUFFER_BYTES = 2**20
_SMALL_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileDigest:
    """Size and XXH3-128 of a file, 32 hexadecimal digits: ``FileDigest(5242880, "9f2c...")``."""

    num_bytes: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a file; a file that this process has read, and that did not change since, is not read again."""
        found = path.stat()
        digest = _digest(path.absolute(), (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        return cls(found.st_size, digest)


Digests = dict[str, FileDigest]
"""Digests by name relative to a folder, with ``/``."""


@dataclass(frozen=True)
class _List:
    format_version: Literal[1]
    files: Digests
    digest: str
    """Digest of ``files``, so that a damaged list does not blame a file."""


@lru_cache(maxsize=1024)
def _digest(path: Path, version: tuple[int, ...]) -> str:
    num_bytes = min(_BUFFER_BYTES, path.stat().st_size + 1)
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(num_bytes))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])  # without Python's lock
    return digest.hexdigest()


def digest_files(folder: Path, names: Collection[str]) -> Digests:
    """Digest files of a folder and wait until they are on disk; ``OSError`` if one cannot be read or written.

    Large files are digested while they go to disk, which takes longer. For small ones threads would cost more.
    """
    if sum((folder / name).stat().st_size for name in names) < _SMALL_BYTES:
        for name in names:
            sync(folder / name)
        return {name: FileDigest.of(folder / name) for name in names}
    with ThreadPoolExecutor() as pool:
        syncing = [pool.submit(sync, folder / name) for name in names]
        digests = dict(zip(names, pool.map(lambda name: FileDigest.of(folder / name), names), strict=True))
        for synced in syncing:
            synced.result()
    return digests


def write_list(folder: Path, digests: Digests | None = None) -> None:
    """Write the list of a folder; without ``digests``, it lists all files in it and below it.

    The folder gets its name later, once it is synced, so the list is not written atomically.

    Raises:
        OSError: a file cannot be read, or the list cannot be written.
    """
    if digests is None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and WRITING not in path.name)
        digests = digest_files(
            folder, [path.relative_to(folder).as_posix() for path in paths if path.name != LIST_FILE]
        )
    content = asdict(_List(1, digests, _digest_of_list(digests)))
    write_json(folder / LIST_FILE, content)


def read_list(folder: Path) -> Digests:
    """Read the list of a folder; ``DataError`` if it is missing or damaged."""
    path = folder / LIST_FILE
    found = read_json_as(_List, path)
    if found.digest != _digest_of_list(found.files):
        raise DataError(f"{path} is damaged: got another digest of its lines than the {found.digest[:12]} it ends with")
    return found.files


def _digest_of_list(digests: Mapping[str, FileDigest]) -> str:
    lines = {name: asdict(found) for name, found in digests.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(lines, sort_keys=True).encode())


def check_digests(
    folder: Path,
    is_wanted: Callable[[str], bool] = lambda name: True,
    is_read: Callable[[str], bool] = lambda name: True,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Compare files of a folder with its list; without a list nothing is compared.

    Args:
        folder: if the folder around it lists a list that it lacks, a warning says so.
        is_wanted: whether a file of this name is compared.
        is_read: whether its content is, too, and not only its size.
        share: ``(2, 8)`` is every eighth file from the third on; other ranks compare the others.

    Raises:
        DataError: a file is missing, or has another size or content. The message names the first one.
    """
    if not (folder / LIST_FILE).is_file():
        if _is_expected(folder):
            warn_unlisted(str(folder))
        return
    digests = read_list(folder)
    start, step = share
    names = [name for name in sorted(digests) if is_wanted(name)][start::step]
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(lambda name: _problem(folder / name, digests[name], is_read=is_read(name)), names):
            if problem:
                raise DataError(problem)


@cache
def warn_unlisted(*folders: str) -> None:
    """Warn, once, that files of these folders cannot be checked."""
    logger.warning(
        "%s: no %s, so that damaged files are not noticed: an earlier version wrote it, or the list was removed",
        *(" and ".join(folders), LIST_FILE),
    )


def _is_expected(folder: Path) -> bool:
    """Return whether the folder around it lists the list of ``folder``."""
    try:
        return folder.is_dir() and f"{folder.name}/{LIST_FILE}" in read_list(folder.parent)
    except DataError:  # there is no list
        return False


def _problem(path: Path, expected: FileDigest, *, is_read: bool) -> str:
    try:
        num_bytes = path.stat().st_size
        found = FileDigest.of(path) if is_read and num_bytes == expected.num_bytes else expected
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); expected a file of {expected.num_bytes:,} bytes"
    if num_bytes != expected.num_bytes:
        return f"{path} is damaged: got {num_bytes:,} bytes, expected {expected.num_bytes:,}"
    if found != expected:
        return f"{path} is damaged: got digest {found.digest[:12]}, expected {expected.digest[:12]}"
    return ""
