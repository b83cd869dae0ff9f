"""Folders that actors of other nodes read and write: by path if their node sees it, else by a ``Folder``.

The packages that only read or write such a folder know these protocols; ``cluster/storage.py`` implements them over a
storage URI and Ray's object store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ragr1_actors.core.disk.digests import LIST_FILE, check_digests, warn_unlisted
from ragr1_actors.core.disk.files import sync
from ragr1_actors.core.errors import DataError, UserError


@runtime_checkable
class Folder(Protocol):
    """Folder that any node can have. ``str(folder)`` is its name for people, without secrets."""

    def fetch(self) -> Path:
        """Return the folder on this node, read-only; it is copied here if the node does not have it.

        Raises:
            UserError: there is no connection, no room, or other content than expected.
        """

    def only(self, *prefixes: str) -> Folder:
        """Return the folder with only the files whose names start with one of ``prefixes``."""

    def reference(self) -> str:
        """Return a text from which a process without Ray can fetch the folder; empty if it needs Ray."""


AnyFolder = str | Path | Folder
"""Folder as a path, a name on a model hub, or a ``Folder``."""
Share = Callable[[str | Path], AnyFolder]
"""Function that returns the form in which actors on any node get a folder of this node; a hub name is unchanged."""


def on_this_node(folder: AnyFolder) -> str | Path:
    """Return the path of a folder on this node, or the name on a model hub that was given.

    Raises:
        DataError: this node does not see the absolute path; and as in ``Folder.fetch``.
    """
    if isinstance(folder, Folder):
        return folder.fetch()
    if Path(folder).is_absolute() and not Path(folder).is_dir():  # else it may be a name on a model hub
        raise DataError(
            f"node {socket.gethostname()} does not see the folder {folder}; put it on a file system that all nodes "
            "share or --run-dir on a storage, such as s3://bucket/runs/mine"
        )
    return folder


def part_of(folder: AnyFolder, *prefixes: str) -> AnyFolder:
    """Return ``folder.only(*prefixes)``; a path is unchanged, because it is not copied."""
    return folder.only(*prefixes) if isinstance(folder, Folder) else folder


def compared(folder: AnyFolder, prefix: str, share: tuple[int, int] = (0, 1)) -> Path:
    """Return a folder on this node after comparing its files that start with ``prefix`` with its list.

    ``share`` is as in ``check_digests``. A copy in this node's cache is compared whole: other nodes have others.

    Raises:
        DataError: a file is damaged or gone.
        UserError: a file of a copy is; the original was compared when it was fetched.
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
    """Warn that folders of a run have no list of their files: an earlier version wrote them."""
    found = [
        str(folder) for folder in folders if not (Path(on_this_node(part_of(folder, LIST_FILE))) / LIST_FILE).is_file()
    ]
    if found:
        warn_unlisted(*found)


@runtime_checkable
class FolderWriter(Protocol):
    """Writer with which processes on several nodes write one folder."""

    def part(self, name: str) -> AbstractContextManager[Path]:
        """Return a context with a folder of this node; the files in it are delivered when the context ends.

        Raises:
            OSError: they cannot be written on this node.
            UserError: they cannot be delivered.
        """


@dataclass(frozen=True)
class SharedFolderWriter:
    """Folder that the nodes share. It is a ``FolderWriter``."""

    path: Path

    @contextmanager
    def part(self, name: str) -> Iterator[Path]:
        """Return a context with the folder itself."""
        self.path.mkdir(parents=True, exist_ok=True)
        yield self.path
        sync(self.path)


def answer_probe(probe: Path, *, replies: bool) -> str:
    """Return the name of this node if it does not see the file ``probe``, else an empty text.

    With ``replies`` it writes ``reply_to(probe)``; a node that cannot is returned, too.
    """
    try:
        if not probe.is_file():
            return socket.gethostname()
        if replies:
            reply_to(probe).touch()
    except OSError:
        return socket.gethostname()
    return ""


def reply_to(probe: Path) -> Path:
    """Return the file that ``answer_probe`` writes."""
    return probe.with_name(f"{probe.name}_reply")
