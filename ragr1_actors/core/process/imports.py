"""Installed packages: faster imports of large ones, and faster exits, as every process pays for them; versions.

``python -c "import time; t = time.time(); import torch, ragr1_actors.core.models.huggingface; print(time.time() - t)"``
prints 2.23 s with ``quick_imports``, and 2.59 s with a collector that runs (medians of five, two cores).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_COUNTS_LEAKS = "triton._C.libtriton"
"""Module made by nanobind, which reports each of its objects that are left at the end of the process."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage in this block, as its objects mostly live as long as the process.

    Its objects count as old afterwards, as if the collector had visited them twice.
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


@contextmanager
def quick_exit() -> Iterator[None]:
    """Collect no garbage when the process ends, which saves ``ragr1 ask`` a second; the system frees the memory.

    The block is all that the process does. Where triton is loaded, as by vLLM, the process ends once all that is
    registered for its end has run: Python would take the modules apart, and then triton's library prints 40 lines about
    objects that are left, and vLLM's objects a traceback each, as what they call is gone.
    """
    status = [0]
    atexit.register(_leave, status)  # the first handler, which runs last
    try:
        yield
    except SystemExit as end:
        status[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:  # Python prints it
        status[0] = 1
        raise


def _leave(status: list[int]) -> None:
    if _COUNTS_LEAKS in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed by its reader, earlier, or from the start
                stream.flush()
        os._exit(status[0])
    gc.freeze()


@contextmanager
def hidden(*packages: str, checks: tuple[Any, ...] = ()) -> Iterator[None]:
    """Make packages that are not loaded yet look as if they were not installed, so that others do not import them.

    ``checks`` are cached functions that look for a package.
    """
    absent = [name for name in packages if name not in sys.modules]
    # A module that is None counts as not installed.
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


def installed_version(name: str) -> str:
    """Return the version of an installed distribution, without importing it; empty if there is none."""
    from importlib import metadata  # ``ragr1 --help`` does without it

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
