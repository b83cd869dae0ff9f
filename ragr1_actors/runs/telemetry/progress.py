"""Progress of a stage: a bar on a terminal, and lines in a log, such as the log of a job on a cluster."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import TextColumn

from ragr1_actors.core.process.progress_bar import progress_bar

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
