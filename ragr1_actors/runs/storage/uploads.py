"""Uploads: keeps a run at a URI up to date with the folder into which this process writes its files."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster.node_cache import FileContent
from cluster.storage import Storage, StoredFolder
from ragr1_actors.core.disk.files import WRITING
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.schema import TRAJECTORIES
from ragr1_actors.runs.storage.layout import FOLDERS, INDEX, MCP_FILE, POLICY
from ragr1_actors.runs.storage.lease import Lease
from ragr1_actors.runs.telemetry.tensorboard import TENSORBOARD_DIRECTORY
from ragr1_actors.runs.telemetry.trackers import TRACKERS_FILE

INTERVAL_S = 30.0
"""Seconds between two uploads of changed files; a checkpoint uploads too."""
_FIRST_FILES = ("config.yaml", MCP_FILE, "starts.jsonl", "metrics.jsonl", "report.json", "report.html", TRACKERS_FILE)
"""Files of an earlier process that this process reads or continues."""

logger = logging.getLogger(__name__)


class Uploads:
    """Changed files of one run, uploaded from ``path`` to ``remote`` every ``INTERVAL_S``."""

    def __init__(self, path: Path, remote: Storage) -> None:
        """Take the folder and the storage; nothing is uploaded yet."""
        self.remote = remote
        self.lock = threading.Lock()
        """Lock that is held during an upload."""
        self._path = path
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._recorded: dict[str, FileContent] = {}  # files of trajectories, which other runs may replay
        self._listed: dict[str, FileContent] = {}  # files in the listing on the storage
        self._is_loaded = False
        self._lease = Lease(remote, INTERVAL_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def load(self) -> None:
        """Download the files of an earlier process that this process reads or continues."""
        if self._is_loaded:
            return
        remote = replace(self.remote, retry_s=0)  # a wrong name or credential fails at once
        for name in _FIRST_FILES:
            if (content := remote.read(name)) is not None:
                (self._path / name).write_bytes(content)
                self._uploaded[name] = _version(self._path / name)
        if (found := remote.find(TRAJECTORIES)) is not None:
            self._recorded = {file.name: file for file in found.files}
            self._listed = dict(self._recorded)
        self._is_loaded = True

    def start(self) -> None:
        """Begin to upload in the background; raises ``RunDirectoryError`` if another machine works in the run."""
        self._lease.take()
        try:
            self._bring_curves()
        except BaseException:
            self._lease.give_back()
            raise
        self._thread.start()

    def end(self, *, retry: bool) -> None:
        """Upload the remaining files, with one try unless ``retry``; raises ``UserError`` if that fails."""
        self._stop.set()
        self._thread.join()
        try:
            self.upload(self.remote if retry else replace(self.remote, retry_s=0))
        finally:
            self._lease.give_back()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._lease.renew()
            try:
                self.upload(replace(self.remote, retry_s=0))
            except UserError as error:
                logger.warning("%s; it is tried again in %g s", error, INTERVAL_S)

    def _bring_curves(self) -> None:
        """Download the event files of earlier processes, which TensorBoard would drop at the first one of this process.

        Only a process that works in the run needs them, so ``load`` does not download them.
        """
        for name in self.remote.names(TENSORBOARD_DIRECTORY):
            if WRITING not in name and name not in self._uploaded:
                self.remote.download(name, self._path / name)
                self._uploaded[name] = _version(self._path / name)

    def upload(self, remote: Storage) -> None:
        """Upload changed files to ``remote``; raises ``UserError`` if that fails."""
        with self.lock:
            for name in (INDEX, POLICY):
                if name not in self._uploaded and (self._path / name).is_dir():
                    remote.put(self._path / name, name)
                    self._uploaded[name] = _version(self._path / name)
            for path in self._files():
                with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                    name, version = path.relative_to(self._path).as_posix(), _version(path)
                    if self._uploaded.get(name) != version:
                        remote.upload(name, path)
                        if path.parent.name == TRAJECTORIES:
                            self._recorded[path.name] = FileContent.of(path.parent, path.name)
                        self._uploaded[name] = version
            if self._listed != self._recorded:
                remote.link(TRAJECTORIES, StoredFolder(tuple(sorted(self._recorded.values())), "", prefix=TRAJECTORIES))
                self._listed = dict(self._recorded)
            for path in sorted(self._path.glob(f"{TRAJECTORIES}/iteration_*.arrow"))[:-1]:
                if path.name in self._listed:
                    path.unlink()  # in a long run they would fill the disk

    def _files(self) -> Iterator[Path]:
        for path in sorted(self._path.rglob("*")):
            first, *_ = path.relative_to(self._path).parts
            if path.is_file() and first not in FOLDERS and WRITING not in str(path):
                yield path


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
