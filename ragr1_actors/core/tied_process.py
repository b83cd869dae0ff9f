"""Runs a command so that it ends with the process that started it, and all that it started ends with it.

::

    env runner ──► this module, two processes ──► the command ──► its children, also those in sessions of their own
        standard input and output of the command are the env runner's pipes

Linux gives orphans of the command to the second process (``PR_SET_CHILD_SUBREAPER``), so that none escapes. It sees the
end of the env runner as that of standard input, also where it was killed. The module imports the standard library
only, so that the process starts at once and takes little memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 1
"""For a command whose standard input has ended: it may end by itself."""
_KILL_TIMEOUT_S = 10.0
_POLL_MS = 1000
"""Between two looks at the parent, where another process holds standard input open."""
_MAX_SAID_BYTES = 4096
_PIPE_BYTES = 65536
_PR_SET_CHILD_SUBREAPER = 36


def tied(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` tied to the process that starts it.

    Its standard error gets the last 4 KiB that the command wrote there, once that has ended.
    """
    return [sys.executable, "-I", "-S", __file__, *command]


def descendants() -> set[int]:
    """Return the processes that this one started, and those that they started."""
    parents: dict[int, int] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            parents[int(process)] = int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])
    found, newest = set[int](), {os.getpid()}
    while newest := {process for process, parent in parents.items() if parent in newest} - found:
        found |= newest
    return found


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (found := descendants()) and time.monotonic() < deadline:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def main() -> None:
    """Run the command of the arguments until it ends, or the process that started this one does.

    A child does it, in a session of its own: Ray kills the children of an actor that ends, and others kill the groups.
    """
    parent = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    _keep(sys.argv[1:], parent)


def _keep(arguments: list[str], parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit())
    try:
        command = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    except OSError as error:
        sys.exit(f"{arguments[0]}: {error.strerror}")
    assert command.stderr is not None
    ended, heard, given = os.pidfd_open(command.pid), command.stderr.fileno(), sys.stdin.fileno()
    events = select.poll()
    for descriptor, event in ((ended, select.POLLIN), (heard, select.POLLIN), (given, 0)):  # of ``given`` only its end
        events.register(descriptor, event)
    said, is_ending, found = b"", False, set[int]()
    try:
        while ended not in found:
            found = {descriptor for descriptor, _ in events.poll(_POLL_MS)}
            if heard in found:
                read = os.read(heard, _PIPE_BYTES)
                said = (said + read)[-_MAX_SAID_BYTES:]
                if not read:
                    events.unregister(heard)
            if not is_ending and (given in found or os.getppid() != parent):
                is_ending = True
                events.unregister(given)
                signal.alarm(GRACE_S)
    finally:
        _kill_descendants()
        os.set_blocking(heard, False)
        with suppress(BlockingIOError):
            said += os.read(heard, _PIPE_BYTES)
        os.write(sys.stderr.fileno(), said[-_MAX_SAID_BYTES:])


if __name__ == "__main__":
    main()
