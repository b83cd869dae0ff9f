"""A bar on the terminal for the long steps of a build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(
    title: str, total: int | None, done: int = 0, *, is_shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield what is to be called with the number of things that were done since the last call.

    Args:
        title: what is done.
        total: things to do; None where it is not known.
        done: of them, before.
        is_shown: False shows nothing.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=not is_shown) as progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda number: progress.advance(task, number)
