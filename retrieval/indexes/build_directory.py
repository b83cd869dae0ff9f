"""``<out>.building/``: where an index is built, by one process at a time, and what an interruption leaves there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragr1_actors.core.errors import DataError, UserError
from retrieval.corpora.corpus import CORPUS_FILE, IDS_FILE
from retrieval.encoders.embedding_store import publish
from retrieval.indexes.manifest import FORMAT_VERSION

ARGUMENTS_FILE = "arguments.json"
_LOCK_FILE = "lock"


@dataclass(frozen=True)
class BuildArguments:
    """What an index depends on beside its passages."""

    encoder: str
    """``static``, a folder or a hub name; empty for ``bm25``."""
    index_type: str
    vector_type: str
    """Empty for ``bm25``."""
    num_shards: int
    options: dict[str, Any]
    seed: int


def building_dir(out_dir: str | Path) -> Path:
    """Return where ``out_dir`` is built: beside it, as a rename is atomic within one file system only."""
    absolute = Path(os.path.abspath(out_dir))
    return absolute.with_name(f"{absolute.name}.building")


def check_free(out_dir: Path) -> None:
    """Make sure that ``out_dir`` is a new or an empty directory.

    Raises:
        DataError: it holds something.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise DataError(f"{out_dir} exists already and is not overwritten; remove it or choose another directory")


def has_costly_work(directory: Path) -> bool:
    """Whether a directory under construction holds more than can be made again in no time."""
    return any(any(directory.glob(pattern)) for pattern in ("embeddings/*.npy", "*.faiss", "bm25"))


@contextmanager
def work_directory(out_dir: Path, arguments: BuildArguments, restart: bool) -> Iterator[Path]:
    """Lock ``building_dir(out_dir)``, and rename it to ``out_dir`` once the block has filled it.

    Whatever ends the block, a directory with costly work in it stays. One with only a whole corpus stays where the
    block was interrupted; where it was refused, or there is not even that, nothing does.

    Raises:
        DataError: another process builds there, it is of a build with other arguments, or ``out_dir`` holds something.
        OSError: no room, or no right to write.
    """
    directory = building_dir(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK_FILE).open("a") as lock:
        _lock(lock.fileno(), directory, out_dir)
        is_begun = not restart and _is_begun(directory, arguments)
        try:
            check_free(out_dir)
            if not is_begun:
                _begin(directory, arguments)
            yield directory
            publish(directory, out_dir)
        except BaseException as error:
            is_refused = isinstance(error, UserError)
            has_corpus = (directory / CORPUS_FILE).is_file() and (directory / IDS_FILE).is_file()
            if not has_costly_work(directory) and (is_refused or not has_corpus):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        for name in (ARGUMENTS_FILE, _LOCK_FILE):
            (out_dir / name).unlink()


def _lock(descriptor: int, directory: Path, out_dir: Path) -> None:
    """Take the lock, which ends with the process however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), (directory / _LOCK_FILE).stat())
    except (BlockingIOError, FileNotFoundError) as error:
        raise DataError(f"another process builds {out_dir}; wait for it or choose another directory") from error
    if not is_there:
        raise DataError(f"another process has just built {out_dir}; choose another directory")


def _is_begun(directory: Path, arguments: BuildArguments) -> bool:
    """Whether a build of these arguments left something there.

    Raises:
        DataError: one of others did.
    """
    path = directory / ARGUMENTS_FILE
    if not path.is_file():  # it did not come far enough to say what it is
        return False
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        kept = None
    wanted = _to_json(arguments)
    if kept == wanted:
        return True
    kept = kept if isinstance(kept, dict) else {}
    differing = [f"{key} {kept.get(key)!r}, now {wanted[key]!r}" for key in wanted if kept.get(key) != wanted[key]]
    raise DataError(
        f"{directory} is of an unfinished build with other arguments ({'; '.join(differing)}); give those to go on, or "
        "start anew by removing it or by restart"
    )


def _begin(directory: Path, arguments: BuildArguments) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK_FILE:
            path.unlink()
    partial = directory / f"{ARGUMENTS_FILE}.partial"
    partial.write_text(json.dumps(_to_json(arguments), indent=2) + "\n", encoding="utf-8")
    publish(partial, directory / ARGUMENTS_FILE)


def _to_json(arguments: BuildArguments) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(arguments)}
