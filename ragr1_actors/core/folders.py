"""Folders that actors of other nodes read and write: by path where their node sees it, else by what replaces a path.

The packages that only read or write such a folder know these protocols; ``cluster/storage.py`` implements them over a
storage URI and Ray's object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ragr1_actors.core.digests import LIST_FILE, check_digests, warn_unlisted
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.files import check_seen, sync


@runtime_checkable
class Folder(Protocol):
    """A folder that any node can have. ``str(folder)`` is its name for people, without secrets."""

    def fetch(self) -> Path:
        """Return the folder on this node, read-only; it is copied here if the node does not have it.

        Raises:
            UserError: it cannot be had: no connection, no room, or other content than expected.
        """
        ...

    def only(self, *prefixes: str) -> Folder:
        """Return the folder with those of its files whose names start with one of ``prefixes``."""
        ...

    def reference(self) -> str:
        """Return a text from which a process without Ray can fetch the folder; empty if it needs Ray."""
        ...


AnyFolder = str | Path | Folder
"""A path, a name on a model hub, or a ``Folder``."""
Share = Callable[[str | Path], AnyFolder]
"""Returns what an actor on any node is given for a folder of this node; a name on a model hub is returned as it is."""


def in_place(folder: str | Path) -> AnyFolder:
    """``Share`` for actors that see the folders of this node."""
    return folder


def on_this_node(folder: AnyFolder) -> str | Path:
    """Return the path of a folder on this node, or the name on a model hub that was given.

    Raises:
        DataError: an absolute path that this node does not see; and as of ``Folder.fetch``.
    """
    if isinstance(folder, Folder):
        return folder.fetch()
    check_seen(folder)
    return folder


def part_of(folder: AnyFolder, *prefixes: str) -> AnyFolder:
    """Return ``folder.only(*prefixes)``; a path as it is, because nothing of it is copied."""
    return folder.only(*prefixes) if isinstance(folder, Folder) else folder


def compared(folder: AnyFolder, prefix: str, share: tuple[int, int] = (0, 1)) -> Path:
    """Return a folder on this node whose files that start with ``prefix`` are those of its list.

    ``share`` is that of ``check_digests``. A copy in this node's cache is compared whole: other nodes have others.

    Raises:
        DataError: a file is damaged or gone.
        UserError: one of a copy is; what is stored was compared when it was fetched.
    """
    path = Path(on_this_node(folder))
    is_copy = isinstance(folder, Folder)
    try:
        check_digests(path, lambda name: name.startswith(prefix), share=(0, 1) if is_copy else share)
    except DataError as error:
        if is_copy:
            raise UserError(f"{error}; delete the copy {path}, and it is fetched again from {folder}") from error
        raise
    return path


def warn_of_unlisted(*folders: AnyFolder) -> None:
    """Say that folders of a run have no list of their files: those that an earlier version wrote."""
    found = [
        str(folder) for folder in folders if not (Path(on_this_node(part_of(folder, LIST_FILE))) / LIST_FILE).is_file()
    ]
    if found:
        warn_unlisted(*found)


@runtime_checkable
class FolderWriter(Protocol):
    """Where processes on several nodes write one folder."""

    def part(self, name: str) -> AbstractContextManager[Path]:
        """Return a context with a folder of this node; the files in it are delivered when the context ends.

        Raises:
            OSError: they cannot be written on this node.
            UserError: they cannot be delivered.
        """
        ...


@dataclass(frozen=True)
class SharedFolder:
    """A folder that the nodes share. It is a ``FolderWriter``."""

    path: Path

    @contextmanager
    def part(self, name: str) -> Iterator[Path]:
        """Return a context with the folder itself."""
        self.path.mkdir(parents=True, exist_ok=True)
        yield self.path
        sync(self.path)
