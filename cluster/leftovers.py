"""Leftovers of killed processes: Ray's processes of a local session, the folder of their files, scratch folders.

A process holds a lock on each folder that it makes here; a folder without a lock belongs to a killed process.

A session starts this module as a process, which outlives the driver, ends those processes and removes the folder. Ray's
own processes that share the driver's fate do not suffice: its agents go on for minutes, and the folder stays. The
module imports the standard library only, so that the process starts at once and takes little memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TEMP = Path("/tmp")
"""Folder of Ray's files, short because the paths of its sockets have at most 107 characters."""
PREFIX = "ragr1-ray-"
SCRATCH, KEPT = "ragr1-scratch-", "ragr1-kept-"
"""Beginnings of names in the folder for temporary files; ``KEPT`` folders hold files that a person may still need."""
_NEW = "ragr1-new-"
KILL_TIMEOUT_S = 60.0
"""Longest wait in seconds: a process that a device driver holds in the kernel ends late, or never."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Folder of a dead process; it is removed unless a process that writes in it does not end."""

    folder: Path
    killed: frozenset[int]
    is_gone: bool


def lock(folder: Path) -> int:
    """Lock a folder and return the descriptor that holds it; ``OSError`` if another process does, or it is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Make a folder, and return it with the descriptor of this process's lock on it."""
    made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    descriptor = lock(made)
    return made.rename(made.with_name(made.name.replace(_NEW, prefix))), descriptor  # never without its lock


def make_scratch() -> tuple[Path, int]:
    """Make a scratch folder of this process by ``make_folder``."""
    return make_folder(SCRATCH, Path(tempfile.gettempdir()))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for a process's own files, and remove it when the block ends."""
    folder, descriptor = make_scratch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def watched(folder: Path, descriptor: int) -> Iterator[None]:
    """Remove the folder and the processes of a session when the block or this process ends.

    ``descriptor`` is the folder's lock. The watching process holds it, too, until it has done its work.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-P", __file__, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,  # it ends with this process, however that ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C and the end of a terminal do not reach it
    )
    try:
        yield
    finally:
        watcher.communicate()
        if watcher.returncode:  # a signal killed it
            end(folder, spared=os.getpid())


def remove_leftovers() -> Iterator[Leftover]:
    """End the sessions of this user whose drivers are gone, and remove such scratch folders."""
    for folder in [*sorted(TEMP.glob(f"{PREFIX}*")), *sorted(Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"))]:
        try:
            descriptor = lock(folder)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                yield end(folder)
        finally:
            os.close(descriptor)


def end(folder: Path, spared: int = 0) -> Leftover:
    """Kill the processes of a session except ``spared``, then remove its folder; the caller holds the lock."""
    killed = kill_processes(folder, spared)
    if not processes_of(folder) - {spared}:
        shutil.rmtree(folder, ignore_errors=True)
    return Leftover(folder, killed, not folder.exists())


def kill_processes(folder: Path, spared: int) -> frozenset[int]:
    """Kill the processes of a session except ``spared``, wait for their end and return them."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (found := processes_of(folder) - {spared}) and time.monotonic() < deadline:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed |= found
        time.sleep(0.05)
    return frozenset(killed)


def processes_of(folder: Path) -> set[int]:
    """Return the processes of this user that have a file in a session's folder open for writing: their logs.

    Ray's processes overwrite their command lines and environments. A person may read the files.
    """
    return {
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and _writes_in(folder, process)
    }


def _writes_in(folder: Path, process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid() and any(
            opened.lstat().st_mode & stat.S_IWUSR and os.readlink(opened).startswith(f"{folder}/")
            for opened in (process / "fd").iterdir()
        )
    except OSError:  # the process has ended
        return False


def main() -> None:
    """Wait for the end of standard input, which the session holds open, then end the session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(Path(sys.argv[1]), spared=int(sys.argv[2]))


if __name__ == "__main__":
    main()
