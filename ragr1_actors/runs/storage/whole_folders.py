"""Folders of a run that are whole or absent: an index, a policy, a checkpoint.

A folder becomes whole once every required file was delivered::

                    being written                       whole
    LocalFolders    checkpoints/.writing_step_20/       checkpoints/step_20/, by rename
    StoredFolders   checkpoints/step_20-3fa9c1d2/...    checkpoints/step_20.json, a listing: objects have no rename

Folders that are being written, or were left by a crash, are not read, and are removed before the next one is written.
Both classes take the same calls, with names such as ``checkpoints/step_20``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cluster.storage import Storage, StorageWriter, StoredFolder
from ragr1_actors.core.disk import files as on_disk
from ragr1_actors.core.disk.digests import check_digests
from ragr1_actors.core.disk.folders import AnyFolder, SharedFolderWriter


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
