"""The bar of every long command: how many of how many are done, the rate, the time so far and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class RateColumn(ProgressColumn):
    """Things done in a second or a minute, over the last ones."""

    def render(self, task: Task) -> Text:
        """Return ``310/s`` or ``12.5/min``; empty before the second thing."""
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:,.0f}/s" if task.speed >= 10 else f"{60 * task.speed:.1f}/min")


def progress_bar(console: Console, *more: ProgressColumn, hidden: bool = False) -> Progress:
    """Return a display of bars with ``more`` columns at the end; where the console is no terminal it shows nothing."""
    return Progress(
        TextColumn("{task.description:<4}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *more,
        console=console,
        disable=hidden or not console.is_terminal,
    )


@contextmanager
def counted_bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what takes the number of things done and the number of all, and shows them in a bar.

    The bar appears with the first call, so that what comes before it can show another bar.
    """
    with ExitStack() as stack:
        shown: list[Progress] = []

        def show(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(progress_bar(console)))
                shown[0].add_task(title, total=total, completed=done)
            shown[0].update(shown[0].task_ids[0], completed=done, total=total)

        yield show
