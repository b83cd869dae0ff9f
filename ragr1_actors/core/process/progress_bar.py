"""Progress bar of long commands: done and total numbers, the rate, the time so far and the time left; and a display for
work that cannot be counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Shown = Callable[[str], AbstractContextManager[None]]
"""Context that shows current work until the block ends: ``with shown("loading 2 env runners"):``."""
CountOf = Callable[[str, int, int], None]
"""Function that takes the name of the counted things, the number done and the total: ``("questions", 128, 1000)``."""


def uncounted(what: str, done: int, total: int) -> None:
    """Show nothing."""


def unseen(what: str) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


class RateColumn(ProgressColumn):
    """Number of things done per second or minute, over the last ones."""

    def render(self, task: Task) -> Text:
        """Return ``310/s`` or ``12.5/min``; empty before the second thing."""
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:,.0f}/s" if task.speed >= 10 else f"{60 * task.speed:.1f}/min")


def progress_bar(console: Console, *more: ProgressColumn, hidden: bool = False) -> Progress:
    """Return a display of bars with ``more`` columns at the end; if the console is not a terminal, it shows nothing."""
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
def elapsed_time(console: Console, what: str, *, in_logs: bool = False) -> Iterator[None]:
    """Show current work, such as ``loading 2 env runners``, and its time; the display is removed at the end.

    If the console is not a terminal, a line shows it if ``in_logs``.
    """
    if not console.is_terminal:
        if in_logs:
            console.print(what, soft_wrap=True, highlight=False, markup=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # an engine may fork meanwhile: a child that prints must not wait for a lock of the display's thread
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def counted_bars(console: Console) -> Iterator[CountOf]:
    """Yield a function that shows its counts in bars: ``show("questions", 128, 1000)``.

    A bar appears with the first call of its title, so that another display can be shown before.
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
    """Yield ``counted_bars`` for one title: it takes the number of things done and the total."""
    with counted_bars(console) as show:
        yield partial(show, title)
