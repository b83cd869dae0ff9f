"""Ctrl-C and SIGTERM: exceptions that end a command, whose actors and files its ``finally`` blocks clean up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_newest: int = signal.SIGINT
"""Signal of the newest interrupt. If one arrives while Ray waits, Ray raises a plain ``KeyboardInterrupt``."""


class TerminationError(KeyboardInterrupt):
    """SIGTERM, as an interrupt that does not come from a keyboard."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, TerminationError) else _newest)


class InterruptGuard:
    """Turns SIGINT into ``KeyboardInterrupt`` and SIGTERM into ``TerminationError``, which is a ``KeyboardInterrupt``.

    The interrupt is raised at once, or at the end of a ``held()`` block; a second signal inside the block is raised at
    once. A library may catch it and go on (for example a C extension that imports an optional module), so every later
    ``held()`` block raises it again at its end, until ``acknowledge``. It is used as a context manager; in a thread
    other than the main one, which gets no signals, it does nothing.
    """

    def __init__(self) -> None:
        """Begin without a held interrupt."""
        self.is_torn = False
        """Whether a second signal ended a ``held()`` block in the middle, so that its states may differ."""
        self._depth = 0
        self._is_pending = False
        self._newest: KeyboardInterrupt | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an interrupt back until the end of the block, and raise one that was lost earlier."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._newest and not self._depth:
            self._is_pending = False
            raise self._newest

    def acknowledge(self) -> None:
        """Note that the interrupt was answered: ``held()`` blocks do not raise it again."""
        self._newest = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global _newest  # set per process, like signals: an inner guard gets it, an outer one asks for the status
        _newest = number
        self._newest = TerminationError() if number == signal.SIGTERM else KeyboardInterrupt()
        if self._depth and not self._is_pending:
            self._is_pending = True
            return
        self.is_torn = self.is_torn or self._depth > 0
        raise self._newest


@contextmanager
def ended_during_imports(advice: str) -> Iterator[None]:
    """Let an interrupt in the block end the process at once, with one line that ends with ``advice``.

    Imports take more than a minute on a busy machine, and Python and libraries may lose an exception inside one. The
    block must make nothing that needs cleaning up, since no ``finally`` runs. In a thread other than the main one,
    which gets no signals, it does nothing.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"interrupted; {advice}\n".encode())
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
