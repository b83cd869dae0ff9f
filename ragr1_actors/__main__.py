"""``python -m ragr1_actors`` is ``ragr1``. An interrupt while its modules are imported ends it with one line, too."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from ragr1_actors.cli.main import main as run
    from ragr1_actors.core.imports import quick_exit

    quick_exit()
    run()


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing is made yet, and an exception may be lost while Python imports a module."""
    os.write(2, b"interrupted; start the same command again\n")
    os._exit(128 + number)


if __name__ == "__main__":  # processes that ragr1 spawns import this module, too
    main()
