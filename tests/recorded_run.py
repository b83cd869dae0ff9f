"""A run that recorded one turn of searches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fakes import DictRetriever

from envs.base import EnvContext
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import StopReason, Task, ToolCall, Trajectory, TrajectoryGroup, Turn
from retrieval.base import Passage

PASSAGES = [Passage("p1", "Riga", "Riga lies in Latvia.", 0.5), Passage("p2", "Oslo", "Oslo lies in Norway.", 0.25)]


async def record(run_dir: Path, queries: list[str], calls: tuple[ToolCall, ...] = ()) -> None:
    """Let an environment search, and write its trajectory, with further calls, as a run does."""
    context = EnvContext(DictRetriever(PASSAGES), lambda text: list(text.encode()))
    env = SearchEnv(EnvironmentSettings(options={"top_k": 2}), context)
    task = Task("t", "Where?", ("Latvia",))
    await env.reset(task)
    result = await env.step(queries)
    turn = Turn("<search>..</search>", 3, "search", (*result.calls, *calls), result.observation)
    tokens = np.zeros(0, np.int32)
    trajectory = Trajectory(
        trajectory_id="t/0",
        task=task,
        token_ids=tokens,
        kinds=tokens.astype(np.uint8),
        logprobs=tokens.astype(np.float32),
        policy_versions=tokens,
        turns=(turn,),
        stop_reason=StopReason.ANSWERED,
        reward=1.0,
        answer="Latvia",
        error="",
        metrics={},
    )
    (run_dir / "trajectories").mkdir(parents=True)
    batch = groups_to_record_batch([TrajectoryGroup(task, (trajectory,))])
    write_trajectories(run_dir / "trajectories" / "iteration_00001.arrow", [batch])
