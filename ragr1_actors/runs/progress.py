"""The progress of a stage: a bar on a terminal, and lines in a log, such as that of a job on a cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_INTERVAL_S = 5.0
_LINE = re.compile(r"(SFT|RL) +\d+/\d+  ")

Report = Callable[[int, str], None]
"""Takes the number of steps done and a short text: ``report(3, "loss 0.512")``."""


@contextmanager
def show_progress(console: Console, title: str, total: int, done: int) -> Iterator[Report]:
    """Show a stage of ``total`` steps, of which ``done`` were done before.

    Where the console is no terminal, a line is printed every ``LINE_INTERVAL_S`` at most, and at the end:
    ``RL    3/100  reward 0.312``.
    """
    if not console.is_terminal:
        printed = -LINE_INTERVAL_S

        def print_line(step: int, status: str) -> None:
            nonlocal printed
            if step == total or time.monotonic() - printed >= LINE_INTERVAL_S:
                printed = time.monotonic()
                console.print(f"{title:<4}{step:>{len(str(total))}}/{total}  {status}", soft_wrap=True, highlight=False)

        yield print_line
        return
    columns = (
        TextColumn("{task.description:<4}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=total, completed=done, status="")
        yield lambda step, status: progress.update(bar, completed=step, status=status)


def is_progress(line: str) -> bool:
    """Return whether a line of a log is one of ``show_progress``, which the next one replaces."""
    return _LINE.match(line) is not None
