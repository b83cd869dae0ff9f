"""RunStore: the directory of a run on this machine, and the URI at which the run is also kept, if it has one.

::

    run directory      path                          whole folders          what actors get
    a folder           the run directory             folders, by rename     its paths; small folders by the object store
    a URI              a folder of this process      objects, by listings   folders on the storage

Every writer of a run's files writes into ``RunStore.path``. At a URI ``Uploads`` stores what changed: an object store
can neither append nor rename.

A folder of a run (an index, a policy, a checkpoint) becomes whole once every required file was delivered::

                    being written                       whole
    LocalFolders    checkpoints/.writing_step_20/       checkpoints/step_20/, by rename
    StoredFolders   checkpoints/step_20-3fa9c1d2/...    checkpoints/step_20.json, a listing: objects have no rename

Folders that are being written, or were left by a crash, are not read, and are removed before the next one is written.
Both classes take the same calls, with names such as ``checkpoints/step_20``.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from cluster.node_cache import NodeCache
from cluster.session import leftovers
from cluster.storage import Storage, StorageWriter, StoredFolder, check_uri, is_uri, share, with_name
from ragr1_actors.core.disk import files as on_disk
from ragr1_actors.core.disk.digests import check_digests
from ragr1_actors.core.disk.files import (
    CHECKPOINTS,
    FOLDERS,
    POLICY_FILES,
    POLICY_FOLDER,
    SFT_POLICY,
    held_alone,
    write_file,
)
from ragr1_actors.core.disk.folders import AnyFolder, FolderWriter, SharedFolderWriter
from ragr1_actors.core.errors import RunDirectoryError, UserError
from ragr1_actors.runs.storage.uploads import Uploads

logger = logging.getLogger(__name__)


class RunStore:
    """Place of a run. As a context manager it keeps a URI up to date until the block ends."""

    def __init__(self, run_dir: str | Path) -> None:
        """Take the path or URI of a run; nothing is read or made there yet.

        Raises:
            ConfigError: the URI cannot be used.
        """
        self.remote: Storage | None = None
        """Storage at the URI; None for a run directory on a file system."""
        self.path: Path
        """Folder of this machine into which the files of the run are written."""
        self.folders: LocalFolders | StoredFolders
        """Folders of the run that are whole or absent."""
        self._shared: dict[Path, AnyFolder] = {}
        if isinstance(run_dir, Path) or not is_uri(run_dir):
            self.path = Path(run_dir)
            self.folders = LocalFolders(self.path)
            return
        check_uri(run_dir)
        self.remote = Storage(run_dir)
        parent, self._lock = leftovers.make_scratch()
        last = str(self.remote).partition("?")[0].rpartition("/")[2]
        self.path = parent / (re.sub(r"[^\w-]+", "_", last).strip("_") or "run")
        self.path.mkdir()
        atexit.register(self._clean_up)
        self._use(self.remote)
        self._uploads = Uploads(self.path, self.remote)

    def _use(self, remote: Storage) -> None:
        self.remote, self.folders = remote, StoredFolders(remote)

    def __str__(self) -> str:
        """Return the path, or the URI without secrets."""
        return str(self.remote or self.path)

    def __enter__(self) -> Self:
        """Upload in the background; ``RunDirectoryError`` if another machine works in the run at the URI."""
        if self.remote is not None:
            self._uploads.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, /, *error: object) -> None:
        """Upload the remaining files; ``UserError`` if that fails, unless another error is raised."""
        if self.remote is None:
            return
        try:
            self._uploads.end(retry=kind is None)
        except UserError as problem:
            atexit.unregister(self._clean_up)
            self.path = leftovers.keep(self.path.parent) / self.path.name
            message = f"{problem}; what was not uploaded is in {self.path}"
            if kind is None:
                raise UserError(message) from None
            logger.warning("%s", message)

    def _clean_up(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)
        os.close(self._lock)

    def at(self, name: str) -> str:
        """Return the path or URI of a folder of the run, for people and ``ragr1 ask``."""
        return str(self.path / name) if self.remote is None else with_name(str(self.remote), name)

    def share(self, folder: str | Path, name: str = "") -> AnyFolder:
        """Return the form in which an actor on any node gets a folder of this node; see ``cluster.storage.share``.

        At a URI the folder is stored: under ``name`` or its name in the run, others under their content.
        """
        if self.remote is None:
            return share(folder)
        path = Path(folder).absolute()
        with self._uploads.lock:  # not twice
            if path not in self._shared:
                name = name or (path.name if path.parent == self.path else "")
                self._shared[path] = share(folder, self.remote, name)
            return self._shared[path]

    def load(self) -> None:
        """Download the files of an earlier process to ``path``; raises ``UserError`` if the URI cannot be reached."""
        if self.remote is not None:
            self._uploads.load()

    def bring(self, name: str) -> Path:
        """Download a folder of the run, such as ``index``, to this machine, and return its path, if there is one."""
        path = self.path / name
        if self.remote is not None and not path.exists() and (found := self.remote.find(name)) is not None:
            path.symlink_to(found.fetch())
        return path

    def find(self, name: str) -> AnyFolder | None:
        """Return a whole folder of the run, such as ``policy_sft``, for actors; None if it does not exist yet."""
        found = self.folders.find(name)
        return None if found is None else self._for_actors(found)

    def _for_actors(self, folder: AnyFolder) -> AnyFolder:
        return self.share(folder.absolute()) if isinstance(folder, Path) else folder

    def write_policy(self, name: str, write: Callable[[FolderWriter], None]) -> AnyFolder:
        """Let the learners write a policy, which replaces a folder of that name, and return it."""
        try:
            write(self.folders.begin(name))
            found = self.folders.commit(name, POLICY_FILES)
        except BaseException:
            self.folders.discard(name)
            raise
        return self._for_actors(found)

    def upload(self) -> None:
        """Upload the files that changed, if the run is at a URI; ``UserError`` if that fails."""
        if self.remote is not None:
            self._uploads.upload(self.remote)

    def remove(self, name: str) -> None:
        """Remove a file or folder of the run from the directory and the URI."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        if self.remote is not None:
            (self.folders if name in FOLDERS else self.remote).remove([name])

    def write_now(self, name: str, content: str) -> None:
        """Replace a small file that other processes wait for; raises ``UserError`` or ``OSError`` if that fails."""
        if self.remote is None:
            write_file(self.path / name, lambda writing: writing.write_text(content, encoding="utf-8"))
        else:
            self.remote.write(name, content.encode())

    def read_now(self, name: str) -> bytes | None:
        """Return the present content of a file, or None. A call to a URI is not repeated, as the caller reads again."""
        if self.remote is not None:
            return replace(self.remote, retry_s=0).read(name)
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove_now(self, name: str) -> None:
        """Remove the file of ``write_now``, if it exists."""
        if self.remote is None:
            (self.path / name).unlink(missing_ok=True)
        else:
            self.remote.remove([name])

    def retry_for(self, duration_s: float) -> None:
        """Repeat a failing call to the URI for ``duration_s`` before the run ends."""
        if self.remote is not None:
            self._use(replace(self.remote, retry_s=duration_s))
            self._uploads.remote = self.remote

    def held(self) -> AbstractContextManager[None]:
        """Return a context that holds the run; ``RunDirectoryError`` if another process of this machine works in it.

        At a URI it locks a file of this machine's cache; a process on another machine is noticed by its ``Lease``.
        """
        taken = RunDirectoryError(f"another process works in {self}; wait until it ends, or choose another --run-dir")
        if self.remote is None:
            return held_alone(self.path.resolve(), taken, is_folder=True)
        name = f"run_{hashlib.sha256(_place(str(self)).encode()).hexdigest()}"
        return held_alone(NodeCache.of_this_node().lock_path(name), taken)


def _place(uri: str) -> str:
    """Return the place that a URI names, however it is written: without ``//`` and parameters but for the server."""
    parts = urlsplit(uri)
    servers = parse_qs(parts.query).get("endpoint_override", [])
    path = posixpath.normpath("/" + unquote(parts.path).lstrip("/"))
    return " ".join([parts.scheme, parts.hostname or "", path, *servers])


def find_store(run_dir: str | Path | RunStore) -> RunStore:
    """Return the store of a run, given its path, URI or store."""
    return run_dir if isinstance(run_dir, RunStore) else RunStore(run_dir)


def split_checkpoint(uri: str) -> tuple[str, str]:
    """Return the URI of a run and the name of the part: a checkpoint, ``policy_sft``, or "".

    ``split_checkpoint("s3://b/run/checkpoints/best?region=eu") == ("s3://b/run?region=eu", "checkpoints/best")``, also
    with ``/policy`` at the end.
    """
    check_uri(uri)
    parts = urlsplit(uri)
    path = parts.path.rstrip("/")
    run, separator, checkpoint = path.rpartition(f"/{CHECKPOINTS}/")
    if separator:
        return parts._replace(path=run).geturl(), f"{CHECKPOINTS}/{checkpoint.removesuffix(f'/{POLICY_FOLDER}')}"
    run, separator, _ = path.rpartition(f"/{SFT_POLICY}")
    if separator and path.endswith(f"/{SFT_POLICY}"):
        return parts._replace(path=run).geturl(), SFT_POLICY
    return uri, ""


@dataclass(frozen=True)
class LocalFolders:
    """Folders below a path that all writing nodes share."""

    root: Path

    def begin(self, name: str) -> SharedFolderWriter:
        """Return a writer with which processes of a run fill an empty folder beside the final one."""
        self.discard(name)
        return SharedFolderWriter(on_disk.begin_folder(self.root / name).absolute())

    def commit(self, name: str, files: Collection[str]) -> Path:
        """Rename the begun folder once ``files`` are in it and on disk; it replaces a folder of that name.

        Raises:
            UserError: a file was not delivered.
        """
        on_disk.finish_folder(self.root / name, files)
        return self.root / name

    def discard(self, name: str) -> None:
        """Remove a begun folder that cannot become whole."""
        self.clean(str(Path(name).parent))

    def find(self, name: str) -> Path | None:
        """Return a whole folder, or None. Nothing is changed."""
        return on_disk.find_folder(self.root / name)

    def names(self, parent: str) -> list[str]:
        """Return the names of the whole folders in a folder: ``["checkpoints/step_10", ...]``."""
        directory = self.root / parent
        found = directory.iterdir() if directory.is_dir() else ()
        whole = {one.name.removeprefix(on_disk.REPLACED) for one in found}
        return sorted(f"{parent}/{name}" for name in whole if not name.startswith("."))  # else it is not whole

    def read(self, folder: AnyFolder, file: str) -> bytes | None:
        """Return a file of a whole folder; None if it has none, ``DataError`` if it is not as it was written."""
        path = Path(str(folder))
        check_digests(path, file.__eq__)
        return (path / file).read_bytes() if (path / file).is_file() else None

    def remove(self, names: Collection[str]) -> None:
        """Remove whole folders."""
        for path in [found for name in names if (found := self.find(name)) is not None]:
            on_disk.remove_folder(path)

    def link(self, link: str, name: str | None) -> None:
        """Make ``link``, such as ``checkpoints/best``, a symbolic link to a folder beside it; None removes the link."""
        path = self.root / link
        if name is None:
            path.unlink(missing_ok=True)
        elif not path.is_symlink() or path.readlink() != Path(Path(name).name):
            target = Path(name).name
            on_disk.write_file(path, lambda writing: writing.symlink_to(target))

    def clean(self, parent: str) -> None:
        """Remove begun folders, and finish the renames of a ``commit`` that a crash interrupted."""
        on_disk.settle_folders(self.root / parent)

    def handle(self, folder: AnyFolder) -> str:
        """Return what a person deletes to remove a folder: ``the folder runs/mine/checkpoints/step_20``."""
        return f"the folder {folder}"


class StoredFolders:
    """Folders on a storage."""

    def __init__(self, storage: Storage) -> None:
        """Begin with no folder."""
        self.storage = storage
        self._begun: dict[str, StorageWriter] = {}

    def begin(self, name: str) -> StorageWriter:
        """Return a writer for a new prefix of objects."""
        self._begun[name] = self.storage.writer(name)
        return self._begun[name]

    def commit(self, name: str, files: Collection[str]) -> StoredFolder:
        """Write the listing, and remove the objects of the replaced folder; ``UserError`` if a file is missing."""
        return self.storage.finish(self._begun.pop(name), files, before=self.storage.find(name))

    def discard(self, name: str) -> None:
        """Drop the begun folder; ``clean`` removes its objects, as a storage that failed may fail again."""
        self._begun.pop(name, None)

    def find(self, name: str) -> StoredFolder | None:
        """Return the folder of a listing."""
        return self.storage.find(name)

    def names(self, parent: str) -> list[str]:
        """Return the names of the listings in a folder."""
        depth = parent.count("/") + 1
        listings = (one for one in self.storage.names(parent) if one.endswith(".json") and one.count("/") == depth)
        return [name.removesuffix(".json") for name in listings]

    def read(self, folder: AnyFolder, file: str) -> bytes | None:
        """Read an object and compare it with the listing of its folder."""
        assert isinstance(folder, StoredFolder), folder
        return folder.read(file)

    def remove(self, names: Collection[str]) -> None:
        """Remove the listings, then the objects."""
        found = [one for name in names if (one := self.storage.find(name)) is not None]
        self.storage.remove([f"{name}.json" for name in names])
        for one in found:
            self.storage.remove(self.storage.names(one.prefix))

    def link(self, link: str, name: str | None) -> None:
        """Write the listing of a folder under another name."""
        found = None if name is None else self.storage.find(name)
        if found is None:
            self.storage.remove([f"{link}.json"])
        else:
            self.storage.link(link, found)

    def clean(self, parent: str) -> None:
        """Remove the objects of folders without a listing."""
        found = [self.storage.find(name) for name in self.names(parent)]
        whole = tuple(f"{one.prefix}/" for one in found if one is not None)
        begun = re.compile(rf"{re.escape(parent)}/[^/]+-[0-9a-f]{{8}}/.*")
        self.storage.remove(
            [one for one in self.storage.names(parent) if begun.fullmatch(one) and not one.startswith(whole)]
        )

    def handle(self, folder: AnyFolder) -> str:
        """Return the name of the listing, which a person deletes."""
        return f"{folder}.json"
