"""Replay: a recorded query gets its recorded answer; a search for another query fails."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from fakes import DictRetriever

from envs.base import EnvContext
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import StopReason, Task, Trajectory, TrajectoryGroup, Turn
from retrieval.base import Passage
from retrieval.local import ReplayRetriever

PASSAGES = [Passage("p1", "Riga", "Riga lies in Latvia.", 0.5), Passage("p2", "Oslo", "Oslo lies in Norway.", 0.25)]


async def record(run_dir: Path, queries: list[str]) -> None:
    """Let an environment search, and write its trajectory as a run does."""
    env = SearchEnv(EnvironmentSettings(top_k=2), EnvContext(DictRetriever(PASSAGES), lambda text: list(text.encode())))
    task = Task("t", "Where?", ("Latvia",))
    await env.reset(task)
    result = await env.step(queries)
    turn = Turn("<search>..</search>", 3, "search", tuple(queries), result.retrievals, result.observation)
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


async def test_a_recorded_query_finds_again_what_it_found(tmp_path: Path) -> None:
    await record(tmp_path / "run", ["Riga", "nowhere", "Oslo"])
    replay = pickle.loads(pickle.dumps(ReplayRetriever({"run": str(tmp_path / "run")})))
    assert await replay.search([" Oslo", "Riga", "nowhere"], 2) == [[PASSAGES[1]], [PASSAGES[0]], []]
    with pytest.raises(RetrievalError, match="never asked for 2 passages for 'Rome'"):
        await replay.search(["Rome"], 2)
    with pytest.raises(RetrievalError, match="never asked for 5"):
        await replay.search(["Riga"], 5)


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no recorded searches"):
        ReplayRetriever({"run": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"expected \{run: DIR\}"):
        ReplayRetriever({"folder": str(tmp_path)})
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "iteration_00001.arrow").write_bytes(b"ARROW1 but no more")
    with pytest.raises(DataError, match="iteration_00001"):
        ReplayRetriever({"run": str(tmp_path)})
