"""One question to a trained policy, with its searches shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
from rich.text import Text

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.files import POLICY_FOLDER
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import Task, Trajectory
from ragr1_actors.rollout.env_runner import EnvRunner, GroupRequest
from ragr1_actors.rollout.task_sampler import Issue
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory
from retrieval.fleet.group import RetrieverGroup
from retrieval.registry import needs_index

NO_EXAMPLE = "YOUR QUESTION"


def ask(path: Path, question: str) -> Trajectory:
    """Answer ``question`` greedily, in this process, with the newest checkpoint of a run or with the one named.

    Raises:
        RunDirectoryError: there is no run, or it has no checkpoint yet.
    """
    run_dir, checkpoint = find_checkpoint(path)
    return asyncio.run(_ask(open_run_directory(run_dir), run_dir, checkpoint / POLICY_FOLDER, question))


async def _ask(config: RunConfig, run_dir: Path, policy_dir: Path, question: str) -> Trajectory:
    settings = config.retrieval.model_copy(update={"num_retrievers": 0})
    index_dir = None
    if needs_index(settings.type):
        index_dir = Path(settings.index) if settings.index else run_dir / "index"
    runner = EnvRunner.load(config, policy_dir, RetrieverGroup.create(index_dir, settings).retriever())
    task = Task("ask", question, ())
    group = await runner.sample_group(GroupRequest(Issue("ask", task, 0), 1, 0.0))
    await runner.close()
    return group.trajectories[0]


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
