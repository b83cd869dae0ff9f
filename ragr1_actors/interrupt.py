"""Ctrl-C and SIGTERM, held back while state is between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt``, at once or at the end of a ``held()`` block.

    A second signal inside the block is not held back. Used as a context manager in the main thread; without that it
    holds nothing and changes no handler.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._depth = 0
        self._pending = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals over."""
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an interrupt back until the block is done."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth and not self._pending:
            self._pending = True
            return
        raise KeyboardInterrupt
