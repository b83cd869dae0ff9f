"""Runs a command that ends, with all its children, when the process that started it ends.

::

    env runner ──► this module, two processes ──► the command ──► its children, also those that called setsid
        standard input and output of the command are the env runner's pipes

Linux gives orphans of the command to the second process (``PR_SET_CHILD_SUBREAPER``), so that none escapes. This
process sees the end of its standard input when the env runner ends, even if it is killed. The module imports the
standard library only, so that the processes start at once and take little memory.
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

_GRACE_S = 1.0
"""Seconds for a command whose standard input has ended to end by itself."""
_POLL_MS = 1000
"""Milliseconds between two checks of the parent, in case another process holds standard input open."""
_KILL_TIMEOUT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


_NO_INPUT = "no input"


def tied(command: Sequence[str], *, has_input: bool = True) -> list[str]:
    """Return the command that runs ``command`` tied to the process that starts it, with a pipe as standard input.

    ``command`` gets this pipe as standard input if ``has_input``, else an empty one.
    """
    return [sys.executable, "-I", "-S", __file__, "input" if has_input else _NO_INPUT, *command]


def main() -> int:
    """Run the command of the arguments until it ends, or the process that started this one does.

    Returns the command's exit status, as a shell gives it.

    A child that calls ``setsid`` runs it: Ray kills the children of an actor that ends, others kill their groups.
    """
    parent = os.getpid()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kind, *arguments = sys.argv[1:]
    try:
        command = subprocess.Popen(arguments, stdin=subprocess.DEVNULL if kind == _NO_INPUT else None)
    except OSError as error:
        sys.exit(f"{arguments[0]}: {error.strerror}")
    ends = select.poll()
    ends.register(os.pidfd_open(command.pid), select.POLLIN)
    ends.register(sys.stdin.fileno(), 0)  # only its end is an event
    try:
        while not ends.poll(_POLL_MS) and os.getppid() == parent:
            pass
        with suppress(subprocess.TimeoutExpired):
            command.wait(_GRACE_S)
    finally:
        _kill_descendants()
    status = command.poll()
    return 1 if status is None else status if status >= 0 else 128 - status


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (found := _descendants()) and time.monotonic() < deadline:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants() -> set[int]:
    """Return the processes that this one started, and their descendants."""
    parents: dict[int, int] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            parents[int(process)] = int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])
    found, newest = set[int](), {os.getpid()}
    while newest := {process for process, parent in parents.items() if parent in newest} - found:
        found |= newest
    return found


if __name__ == "__main__":
    sys.exit(main())
