"""Cache of a node: fetched folders, named by their content and shared by all processes of one user.

::

    <cache>/
      3f09.../                 an entry: whole, and read-only by convention; processes map its files
      .writing_77ab....1048576/   being fetched, with the bytes that are reserved for it; never read
      .locks/3f09....fetch     held while a process looks at the entry, fetches it or removes it
      .locks/3f09....use       held, shared, by every process that uses the entry, until the process ends
      .locks/room              held while room is made

A process that is killed releases its locks, and the next one fetches again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ragr1_actors.core.disk.files import (
    REMOVED,
    WRITING,
    fingerprint_file,
    is_no_room,
    lock,
    locked,
    publish,
    remove_folder,
)
from ragr1_actors.core.errors import DataError, UserError

CACHE_VARIABLE = "RAGR1_CACHE"
"""Environment variable with the folder of this node's cache, on a local disk; the default is ``~/.cache/ragr1``."""
BYTES_VARIABLE = "RAGR1_CACHE_BYTES"
"""Environment variable with the limit of the cache in bytes; the default is half of its disk."""
_LOCKS = ".locks"


@dataclass(frozen=True, slots=True, order=True)
class FileContent:
    """File of a folder: ``FileContent("model.safetensors", 5242880, "9f2c...", "9f2c...")``."""

    name: str
    """Path relative to the folder, with ``/``."""
    num_bytes: int
    sha256: str
    """SHA-256 of all bytes."""
    fingerprint: str
    """Value of ``fingerprint_file``: equal to ``sha256`` up to 64 MiB, of samples of larger files."""

    def __post_init__(self) -> None:
        """Refuse a name that leaves the folder; names may come from a storage."""
        check_inside(self.name)

    @classmethod
    def of(cls, folder: Path, name: str) -> FileContent:
        """Read ``folder/name``."""
        path = folder / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(name, path.stat().st_size, digest, fingerprint_file(path))

    def is_in(self, folder: Path) -> bool:
        """Return whether ``folder`` has this file; of more than 64 MiB only samples are compared."""
        path = folder / self.name
        try:
            return path.stat().st_size == self.num_bytes and fingerprint_file(path) == self.fingerprint
        except OSError:
            return False


def has_files(folder: Path, files: Sequence[FileContent]) -> bool:
    """Return whether ``folder`` exists and has these files, which may be none."""
    return folder.is_dir() and all(file.is_in(folder) for file in files)


def check_inside(name: str) -> None:
    """Refuse, with a ``DataError``, a relative name that is outside of its folder, or the folder itself."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or set("\\\0") & set(name):
        raise DataError(f"got the name {name!r}, expected one inside a folder; the listing was tampered with")


class NodeCache:
    """Entries in one directory. Any number of processes and threads may use it at the same time."""

    def __init__(self, directory: Path, max_bytes: int = 0) -> None:
        """Use ``directory``, which is made if it is missing, for at most ``max_bytes``; 0 is half of its disk.

        Raises:
            UserError: the directory belongs to another user, is open to others, or cannot be made.
        """
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / _LOCKS).mkdir(exist_ok=True)
            found = directory.stat()
            self._max_bytes = max_bytes or shutil.disk_usage(directory).total // 2
        except OSError as error:
            raise UserError(
                f"the cache {directory} cannot be used ({error.strerror}); set {CACHE_VARIABLE} to a local folder"
            ) from error
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(
                f"the cache {directory} belongs to another user or others may write to it; set {CACHE_VARIABLE} to a "
                "folder that only you can write to"
            )

    @classmethod
    def of_this_node(cls) -> NodeCache:
        """Return the cache that the environment names."""
        given = os.environ.get(BYTES_VARIABLE) or "0"
        if not given.isdecimal():
            raise UserError(f"{BYTES_VARIABLE}: got {given!r}, expected a whole number of bytes")
        try:
            directory = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "ragr1")
        except RuntimeError as error:  # such as in a container whose user has no entry in /etc/passwd
            raise UserError(
                f"user {os.getuid()} of node {socket.gethostname()} has no home directory for the cache; set "
                f"{CACHE_VARIABLE} to a local folder"
            ) from error
        return cls(directory.absolute(), int(given))

    def get(self, name: str, files: Sequence[FileContent], fetch: Callable[[Path], None]) -> Path:
        """Return the folder of an entry, which stays in the cache until this process ends.

        The entry is compared with ``files``; ``fetch`` is called with an empty folder to fill if it is missing or
        damaged. If several processes ask for it, one fetches and the others wait.

        Raises:
            DataError: there is no room, or the fetched files are not the expected ones.
        """
        entry = self.directory / name
        if entry in _IN_USE:
            return entry
        try:
            with locked(self.lock_path(f"{name}.fetch")):
                if not has_files(entry, files):
                    self._replace(entry, files, fetch)
                # at once: who removes the entry holds the other lock, too
                descriptor = lock(self.lock_path(f"{name}.use"), is_shared=True, waits=True)
                os.utime(descriptor)  # sets the time of the last use
        except OSError as error:
            if not is_no_room(error):
                raise
            num_bytes = sum(file.num_bytes for file in files)
            raise DataError(
                f"the disk of the cache {self.directory} of node {socket.gethostname()} has no room to fetch "
                f"{num_bytes:,} bytes ({error.strerror}); free some, or set {CACHE_VARIABLE} to a larger disk"
            ) from error
        _IN_USE[entry] = descriptor
        return entry

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Return a context with an empty folder on the disk of the cache, removed at the end; ``name`` is used once."""
        folder = self.directory / f"{WRITING}{name}.0"
        with locked(self.lock_path(f"{name}.fetch")):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self.lock_path(f"{name}.fetch").unlink()  # the name is not used again

    def _replace(self, entry: Path, files: Sequence[FileContent], fetch: Callable[[Path], None]) -> None:
        """Fetch into a folder with a temporary name, and give it its name once it is whole."""
        for leftover in self.directory.glob(f"{WRITING}{entry.name}.*"):  # left by a killed process
            shutil.rmtree(leftover)
        num_bytes = sum(file.num_bytes for file in files)
        writing = self.directory / f"{WRITING}{entry.name}.{num_bytes}"
        with locked(self.lock_path("room")):
            if entry.exists():
                remove_folder(entry)  # damaged; processes that have mapped its files keep them
            self._make_room(num_bytes)
            writing.mkdir()
        try:
            fetch(writing)
            if wrong := [file.name for file in files if not file.is_in(writing)]:
                raise DataError(f"{', '.join(wrong)} came with another content than expected; fetch it again")
            publish(writing, entry, is_on_disk=True)  # what is read is compared with its list again
        finally:
            shutil.rmtree(writing, ignore_errors=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used entries that no process uses, until there is room."""
        for removed in self.directory.glob(f"{REMOVED}*"):
            shutil.rmtree(removed)
        for leftover in self.directory.glob(f"{WRITING}*.*"):
            self._if_free([f"{leftover.name.removeprefix(WRITING).rpartition('.')[0]}.fetch"], leftover)
        entries = [path for path in self.directory.iterdir() if not path.name.startswith(".")]
        kept = [path for path in self.directory.iterdir() if path.name != _LOCKS]  # there files vanish meanwhile
        room = self._max_bytes - sum(map(self._size, kept))
        for entry in sorted(entries, key=self._last_use):
            if room >= num_bytes:
                return
            size = self._size(entry)
            if self._if_free([f"{entry.name}.fetch", f"{entry.name}.use"], entry):
                room += size
        if room < num_bytes:
            raise DataError(
                f"the cache {self.directory} has room for {max(0, room):,} of {num_bytes:,} bytes beside what is in "
                f"use; set {BYTES_VARIABLE} higher, or {CACHE_VARIABLE} to a larger disk"
            )

    def _if_free(self, locks: Sequence[str], folder: Path) -> bool:
        """Remove a folder if no process holds one of its locks; return whether it was removed."""
        with ExitStack() as held:
            try:
                for name in locks:
                    held.enter_context(locked(self.lock_path(name), waits=False))
            except BlockingIOError:
                return False
            if folder.exists():
                remove_folder(folder)
        return True

    def _last_use(self, entry: Path) -> float:
        path = self.lock_path(f"{entry.name}.use")
        return path.stat().st_mtime if path.exists() else 0.0

    def _size(self, folder: Path) -> int:
        """Return the bytes of an entry, or the bytes reserved for one that is being fetched."""
        reserved = folder.name.rpartition(".")[2]
        if folder.name.startswith(WRITING) and reserved.isdecimal():
            return int(reserved)
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def lock_path(self, name: str) -> Path:
        """Return the file of a lock."""
        return self.directory / _LOCKS / name


_IN_USE: dict[Path, int] = {}
"""Entries that this process uses, with the descriptors of their locks, which close when it ends."""
