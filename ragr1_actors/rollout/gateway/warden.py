"""The process above an agent's program: it ends the program and all that it started, however they hid.

::

    env runner ── pipe ──► warden ──► program ──► children, also in sessions of their own, and orphans

Processes that lose their parent become the warden's children, since it is their subreaper. It kills all of them when
the program ends, and when its standard input ends: the env runner closed it, or was killed. The exit status is the
program's. It imports the standard library only, and is run with ``python -I -S``, so that it starts in about 15 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def descendants() -> list[int]:
    """Return the processes below this one, children before their children."""
    found = [os.getpid()]
    for process in found:
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as children:
                    found += map(int, children.read().split())
        except OSError:  # it has ended
            continue
    return found[1:]


def end_all() -> None:
    """Kill what is below this process until nothing is left; a process that starts others is stopped first."""
    while found := descendants():
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
        _reap()
        time.sleep(0.005)


def _reap() -> None:
    """Take the exit statuses of children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> int:
    """Run the program of the arguments and return its status, as a shell gives it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()  # a readable end says that a child has ended
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        program = subprocess.Popen(
            sys.argv[1:],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    except OSError as error:
        print(f"cannot run {sys.argv[1]}: {error.strerror}")
        return 127
    while program.poll() is None:
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
    status = program.poll()
    end_all()
    return 1 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
