"""Uploads and lease of a run at a URI, which is kept up to date with the folder into which this process writes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster.node_cache import FileContent
from cluster.storage import Storage, StoredFolder
from ragr1_actors.core.disk.files import FOLDERS, INDEX, MCP_FILE, POLICY, WRITING, stamp_of
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import DataError, RunDirectoryError, UserError
from ragr1_actors.core.schema import TRAJECTORIES
from ragr1_actors.runs.telemetry.trackers import TENSORBOARD_DIRECTORY, TRACKERS_FILE

LEASE_FILE = "lease.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger(__name__)


def this_machine() -> str:
    """Return the host's name and the id of its last boot, if the system has one: ``gpu-7 4f5c2b1e-...``."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}".strip()


class Lease:
    """Lease of a run at a URI, which shows its machine: file locks are not seen from other machines.

    An object beside the run, ``lease.json``, is replaced every few seconds while a process works in it, and removed at
    its end: ``{"machine": "gpu-7 4f5c2b1e-...", "renewals": 12}``. A process that finds the lease of another machine
    waits for two renewals: if one comes, the run is in use; if none comes, that process was killed. No clocks are
    compared. A storage that does not answer says nothing about the other process: it is asked again. Two processes of
    one machine are kept apart by a lock, see ``RunStore.held``.
    """

    def __init__(self, storage: Storage, interval_s: float) -> None:
        """Prepare the lease at ``storage``, which the caller renews every ``interval_s``."""
        self._storage = replace(storage, retry_s=0)  # a run continues without its lease
        self._interval_s = interval_s
        self._machine = this_machine()
        self._num_renewals = 0
        self._holder = ""

    def take(self) -> None:
        """Begin to hold the run; raises ``RunDirectoryError`` if a process of another machine works in it.

        A run begins, too, on a storage that does not answer for ``_FIRST_ANSWER_S``; its end says what is not uploaded.
        """
        try:
            found = self._read(_FIRST_ANSWER_S)
        except UserError:
            found = None
        if found is not None and found.get("machine") != self._machine:
            self._wait_for_end_of(found)
        self._write()

    def _wait_for_end_of(self, found: dict[str, object]) -> None:
        wait_s = 2.5 * self._interval_s
        logger.warning(
            "%s was used from %s, and was not given back: waiting up to %.0f s to see whether it is in use",
            *(self._storage, _host(found), wait_s),
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._interval_s / 4))
            try:
                newest = self._read()
            except UserError:  # the storage does not answer
                continue
            if newest is None:
                return
            if newest != found:
                raise RunDirectoryError(
                    f"a process on {_host(newest)} works in {self._storage}; wait until it ends, or choose another "
                    "--run-dir"
                )

    def renew(self) -> None:
        """Tell other machines that the run is in use, unless one has taken it; errors of the storage are ignored.

        A machine takes a run whose lease was not renewed, as it cannot know that the storage did not answer this one.
        """
        try:
            found = self._read()
        except UserError as error:
            logger.warning("%s; other machines do not see that the run is in use", error)
            return
        if found and found.get("machine") != self._machine:  # an empty one is half written
            self._holder = _host(found)
        else:
            self._write()

    def check(self) -> None:
        """Raise ``RunDirectoryError`` if another machine has taken the run."""
        if self._holder:
            raise RunDirectoryError(
                f"a process on {self._holder} has taken {self._storage} meanwhile, as this machine did not reach the "
                "storage; this process ends: two would write over each other"
            )

    def _write(self) -> None:
        self._num_renewals += 1
        content = {"machine": self._machine, "renewals": self._num_renewals}
        try:
            self._storage.write(LEASE_FILE, json.dumps(content).encode())
        except UserError as error:
            logger.warning("%s; other machines do not see that the run is in use", error)

    def give_back(self) -> None:
        """Remove the lease, so that other machines can begin at once; another machine's stays."""
        if self._holder:
            return
        try:
            self._storage.remove([LEASE_FILE])
        except UserError as error:
            logger.warning("%s; another machine waits for it when it continues the run", error)

    def _read(self, retry_s: float = 0.0) -> dict[str, object] | None:
        """Return the lease, ``{}`` if another object is in its place, or None; ``UserError`` without an answer."""
        content = replace(self._storage, retry_s=retry_s).read(LEASE_FILE)
        try:
            return None if content is None else validated(dict[str, object], content, LEASE_FILE)
        except DataError:
            return {}


def _host(lease: dict[str, object]) -> str:
    return str(lease.get("machine") or "unknown").partition(" ")[0]


_FIRST_ANSWER_S = 5.0
INTERVAL_S = 30.0
"""Seconds between two uploads of changed files; a checkpoint uploads too."""
_FIRST_FILES = ("config.yaml", MCP_FILE, "starts.jsonl", "metrics.jsonl", "report.json", "report.html", TRACKERS_FILE)
"""Files of an earlier process that this process reads or continues."""


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
        # an upload may take longer than another machine waits
        works = {"lease": self._renew, "upload": self._upload_changes}
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]

    def load(self) -> None:
        """Download the files of an earlier process that this process reads or continues."""
        if self._is_loaded:
            return
        remote = replace(self.remote, retry_s=0)  # a wrong name or credential fails at once
        for name in _FIRST_FILES:
            if (content := remote.read(name)) is not None:
                (self._path / name).write_bytes(content)
                self._uploaded[name] = stamp_of(self._path / name)
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
        for thread in self._threads:
            thread.start()

    def end(self, *, retry: bool) -> None:
        """Upload the remaining files, with one try unless ``retry``; raises ``UserError`` if that fails."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        try:
            self.upload(self.remote if retry else replace(self.remote, retry_s=0))
        finally:
            self._lease.give_back()

    def _renew(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._lease.renew()

    def _upload_changes(self) -> None:
        while not self._stop.wait(INTERVAL_S):
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
                self._uploaded[name] = stamp_of(self._path / name)

    def upload(self, remote: Storage) -> None:
        """Upload changed files to ``remote``; raises ``UserError`` if that fails, or if another machine has the run."""
        self._lease.check()
        with self.lock:
            for name in (INDEX, POLICY):
                if name not in self._uploaded and (self._path / name).is_dir():
                    remote.put(self._path / name, name)
                    self._uploaded[name] = stamp_of(self._path / name)
            for path in self._files():
                with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                    name, version = path.relative_to(self._path).as_posix(), stamp_of(path)
                    if self._uploaded.get(name) != version:
                        remote.upload(name, path)
                        if path.parent.name == TRAJECTORIES:
                            self._recorded[path.name] = FileContent.of(path.parent, path.name)
                        self._uploaded[name] = version
            if self._listed != self._recorded:
                remote.link(TRAJECTORIES, StoredFolder(tuple(sorted(self._recorded.values())), "", prefix=TRAJECTORIES))
                self._listed = dict(self._recorded)
            for path in sorted(self._path.glob(f"{TRAJECTORIES}/iteration_*.arrow"))[:-1]:
                is_newest = self._uploaded.get(f"{TRAJECTORIES}/{path.name}") == stamp_of(path)  # not after a roll-back
                if path.name in self._listed and is_newest:
                    path.unlink()  # in a long run they would fill the disk

    def _files(self) -> Iterator[Path]:
        for folder, below, names in os.walk(self._path):  # it passes over a folder that is removed meanwhile
            if Path(folder) == self._path:
                below[:] = [name for name in below if name not in FOLDERS]
            below.sort()
            for path in (Path(folder, name) for name in sorted(names)):
                if path.is_file() and WRITING not in str(path):
                    yield path
