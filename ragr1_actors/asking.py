"""One question to a trained policy, with its searches shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.text import Text

from ragr1_actors.checkpoint import CheckpointStore
from ragr1_actors.config import RunConfig
from ragr1_actors.env_runner import EnvRunner, GroupRequest
from ragr1_actors.errors import RunDirectoryError
from ragr1_actors.run_directory import open_run_directory
from ragr1_actors.schema import read_trajectories
from ragr1_actors.task_sampler import Issue
from ragr1_actors.types import Task, Trajectory
from retrieval.retriever import LocalRetriever


def ask(run_dir: Path, question: str) -> Trajectory:
    """Answer ``question`` greedily with the newest checkpoint of a run, in this process.

    Raises:
        RunDirectoryError: there is no run, or it has no checkpoint yet.
    """
    config = open_run_directory(run_dir)
    checkpoint = CheckpointStore(run_dir / "checkpoints").latest()
    if checkpoint is None:
        raise RunDirectoryError(f"{run_dir} has no checkpoint yet; let the run go on for a while")
    return asyncio.run(_ask(config, run_dir, checkpoint / "policy", question))


async def _ask(config: RunConfig, run_dir: Path, policy_dir: Path, question: str) -> Trajectory:
    index_dir = Path(config.retrieval.index) if config.retrieval.index else run_dir / "index"
    runner = EnvRunner.load(config, policy_dir, LocalRetriever(index_dir))
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
    """A question of the run's last batch that was answered with a search, or any of it."""
    files = sorted((run_dir / "trajectories").glob("*.arrow"))
    if not files:
        return "..."
    trajectories = [t for group in read_trajectories(files[-1]) for t in group.trajectories]
    best = max(trajectories, key=lambda t: (t.reward, t.num_queries))
    return best.task.question
