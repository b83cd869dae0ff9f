"""``python -m ragr1_actors`` is ``ragr1``. An interrupt while its modules are imported ends it with one line, too."""

from __future__ import annotations

import os
import signal
from types import FrameType

_SAID_BY_RAY = r"^(A worker died or was killed|\d+ worker\(s\) were killed due to the node running low on memory)"
"""Beginning of Ray's reports of up to 40 lines on ended processes; the run prints one line, and Ray logs them."""
SPIN_COUNT = "1000"
"""Turns of the loop in which an OpenMP thread waits before it sleeps: by default it would take a core from other
processes for milliseconds at each wait. docs/decisions/threads.md"""


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported, also by Ray's processes
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SAID_BY_RAY)  # Ray reads it when it is imported
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from ragr1_actors.core.process.imports import quick_exit

    with quick_exit():  # before multiprocessing is imported, which has something to do at the end, too
        from ragr1_actors.cli.main import main as run

        run()


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing is made yet, and an exception may be lost while Python imports a module."""
    os.write(2, b"interrupted; start the same command again\n")
    os._exit(128 + number)


if __name__ == "__main__":  # processes that ragr1 spawns import this module, too
    main()
