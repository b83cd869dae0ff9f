"""The bar of every long command: how many of how many are done, the rate, the time so far and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

CountOf = Callable[[str, int, int], None]
"""Takes what is counted, the number of those done and the number of all: ``("questions", 128, 1000)``."""


def uncounted(what: str, done: int, total: int) -> None:
    """Show nothing."""


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
def counted_bars(console: Console) -> Iterator[CountOf]:
    """Yield a function that shows what it is given in bars: ``show("questions", 128, 1000)``.

    A bar appears with the first call of its title, so that what comes before it can show another display.
    """
    with ExitStack() as stack:
        display: list[Progress] = []
        bars: dict[str, TaskID] = {}

        def show(title: str, done: int, total: int) -> None:
            if not display:
                display.append(stack.enter_context(progress_bar(console)))
            if title not in bars:
                bars[title] = display[0].add_task(title, total=total, completed=done)
            display[0].update(bars[title], completed=done, total=total)

        yield show


@contextmanager
def counted_bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield ``counted_bars`` of one title: it takes the number of things done and the number of all."""
    with counted_bars(console) as show:
        yield partial(show, title)
