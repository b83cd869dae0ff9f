"""Progress of long commands and of stages: bars on a terminal, with rate and times, and lines in the log of a job."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
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


LINE_INTERVAL_S = 5.0
SAMPLED_TOKENS = "env_runners/sampled_tokens"
"""Metric of all tokens that runners sampled in an iteration. With lag, failures and hedging it depends on timing."""
_LINE = re.compile(r"(SFT|RL) +\d+/\d+  ")

Report = Callable[[int, str], None]
"""Function that takes the number of steps done and a short text: ``report(3, "loss 0.512")``."""


PARTS = {"time/sample_s": "samples", "time/learn_s": "the learner", "time/publish_s": "the weight sync"}
"""Parts of an iteration, with a name for the cause of each wait."""


@contextmanager
def show_progress(
    console: Console, title: str, total: int, done: int, line_interval_s: float = LINE_INTERVAL_S
) -> Iterator[Report]:
    """Show a stage of ``total`` steps, of which ``done`` were done earlier, with its rate and the time left.

    If the console is not a terminal, a line is printed at most every ``line_interval_s``, and at the end:
    ``RL    3/100  reward 0.312``.
    """
    if not console.is_terminal:
        printed = -math.inf

        def print_line(step: int, status: str) -> None:
            nonlocal printed
            if step == total or time.monotonic() - printed >= line_interval_s:
                printed = time.monotonic()
                console.print(f"{title:<4}{step:>{len(str(total))}}/{total}  {status}", soft_wrap=True, highlight=False)

        yield print_line
        return
    with progress_bar(console, TextColumn("{task.fields[status]}")) as progress:
        bar = progress.add_task(title, total=total, completed=done, status="")
        yield lambda step, status: progress.update(bar, completed=step, status=status)


def describe_iteration(metrics: Mapping[str, float]) -> str:
    """Return the status of an iteration of RL from its metrics; missing ones are left out.

    ``reward 0.312 em 0.250 searches 1.90 tokens/s 5,120 waits for samples 81%``: the searches are queries per
    trajectory, the tokens are all that the runners sampled, and the last part is the longest of the iteration.
    """
    named = (("reward", "rollout/reward", ".3f"), ("em", "rollout/em", ".3f"), ("searches", "rollout/queries", ".2f"))
    said = [f"{title} {metrics[name]:{form}}" for title, name, form in named if name in metrics]
    total_s = metrics.get("time/iteration_s", 0.0)
    if total_s > 0:
        longest = max(PARTS, key=lambda part: metrics.get(part, 0.0))
        said.append(f"tokens/s {metrics.get(SAMPLED_TOKENS, 0.0) / total_s:,.0f}")
        said.append(f"waits for {PARTS[longest]} {metrics.get(longest, 0.0) / total_s:.0%}")
    return "  ".join(said)


def is_progress(line: str) -> bool:
    """Return whether a line of a log is from ``show_progress``, so that the next such line replaces it."""
    return _LINE.match(line) is not None
