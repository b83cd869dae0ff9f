"""Ctrl-C and SIGTERM, held back while state is between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TerminationError(KeyboardInterrupt):
    """SIGTERM: an interrupt that did not come from a keyboard."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """Return what a shell reports of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, TerminationError) else signal.SIGINT)


class InterruptGuard:
    """Turns SIGINT into ``KeyboardInterrupt`` and SIGTERM into ``TerminationError``, which is one.

    At once, or at the end of a ``held()`` block; a second signal inside the block is not held back. Used as a context
    manager in the main thread; without that it holds nothing and changes no handler.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.is_torn = False
        """Whether a second signal broke a ``held()`` block off, which leaves its states apart."""
        self._depth = 0
        self._pending: KeyboardInterrupt | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals over."""
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def take_over(self) -> None:
        """Take the signals again, where something has put handlers of its own in place, as Ray does when it starts."""
        if self._previous:
            for number in _SIGNALS:
                signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an interrupt back until the block is done."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            interrupt, self._pending = self._pending, None
            raise interrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        interrupt = TerminationError() if number == signal.SIGTERM else KeyboardInterrupt()
        if self._depth and not self._pending:
            self._pending = interrupt
            return
        self.is_torn = self.is_torn or self._depth > 0
        raise interrupt
