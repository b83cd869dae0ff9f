"""Watcher that outlives a driver: it ends Ray's processes of a local session, and removes the folder of its files.

Ray's own processes that share the driver's fate do not suffice: its agents run for minutes more, and the folder stays.
The module imports the standard library only, so that the process starts at once and takes little memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KILL_TIMEOUT_S = 60.0
"""Longest wait in seconds: a process that a device driver holds in the kernel ends late, or never."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Folder of a dead process; it is removed unless a process that writes in it does not end."""

    folder: Path
    killed: frozenset[int]
    is_gone: bool


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
