"""Import large packages in less time, and leave them: every process pays for its imports once per start.

``python -c "import time; t = time.time(); import torch, ragr1_actors.core.models.huggingface; print(time.time() - t)"``
prints 2.23 s with ``quick_imports``, and 2.59 s with a collector that runs (medians of five, two cores).
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COUNTS_LEAKS = "triton._C.libtriton"
"""A module made by nanobind, which names each of its objects that are left at the end of the process."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage in this block, whose objects mostly stay as long as the process.

    What it made counts as old afterwards, as if the collector had visited it twice.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, unvisited
            gc.enable()


def quick_exit() -> None:
    """Look for no garbage when the process ends: a second of ``ragr1 ask``, whose memory the system takes anyway.

    But where triton is loaded, as by vLLM: its library prints 40 lines about leaks if nothing is collected.
    """
    atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    if _COUNTS_LEAKS not in sys.modules:
        gc.freeze()


@contextmanager
def hidden(*packages: str, checks: tuple[Any, ...] = ()) -> Iterator[None]:
    """Have packages that are not loaded yet look as if they were not installed, so that others do not import them.

    ``checks`` are cached functions that look for a package.
    """
    absent = [name for name in packages if name not in sys.modules]
    # Python takes a module that is None for one that is not installed.
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]
    for check in checks:
        check.cache_clear()
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        for check in checks:
            check.cache_clear()
