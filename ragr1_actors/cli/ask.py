"""How ``ragr1 ask`` shows a trajectory, and a question to try it with."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from rich.text import Text

from ragr1_actors.core.errors import DataError
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import Trajectory

NO_EXAMPLE = "YOUR QUESTION"


def render_trajectory(trajectory: Trajectory) -> Text:
    """Lay a trajectory out for a terminal: what the policy wrote, and in another colour what it was given."""
    text = Text(f"{trajectory.task.question}\n", style="bold")
    for turn in trajectory.turns:
        text.append(f"{turn.completion_text}\n", style="green")
        if turn.observation:
            text.append(f"{turn.observation.strip()}\n", style="cyan")
    if trajectory.answer:
        text.append(f"answer: {trajectory.answer}", style="bold")
    else:
        text.append(f"no answer ({trajectory.stop_reason.value}) {trajectory.error}".rstrip(), style="bold red")
    return text


def example_question(run_dir: Path) -> str:
    """A question of the run's last batch that was answered with a search, or any of it.

    Raises:
        DataError: the file of the last batch is damaged.
    """
    files = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))
    if not files:
        return NO_EXAMPLE
    try:
        trajectories = [t for group in read_trajectories(files[-1]) for t in group.trajectories]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{files[-1]} is damaged ({str(error).partition(chr(10))[0]}); delete it") from error
    if not trajectories:
        return NO_EXAMPLE
    best = max(trajectories, key=lambda t: (t.reward, t.num_queries))
    return best.task.question
