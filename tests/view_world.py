"""Trajectories of every outcome, written as a run writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ragr1_actors.core.schema import LEARNED_SCHEMA, groups_to_record_batch
from ragr1_actors.core.types import Record, StopReason, Task, ToolCall, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.runs.run_directory import keep_trajectories

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title="taken"</script>'
TASK = Task("nq/1", "Who directed Endless Horizon?", ("Tom Moss",), "one_hop", ("film391",))


def attempt(
    name: str,
    *,
    answer: str = "Tom Moss",
    passages: tuple[str, ...] | None = ("film391",),
    stop: StopReason = StopReason.ANSWERED,
    action: str = "search",
    text: str = "<search>Endless Horizon</search>",
    task: Task = TASK,
    document: str = "Endless Horizon was filmed by Tom Moss.",
) -> Trajectory:
    """Make an attempt of two turns; ``passages=None`` is one without a search."""
    records = tuple(Record(p, "Title of " + p, document, 0.5) for p in passages or ())
    found = ToolCall("search", {"query": "Endless Horizon", "k": 3}, "", records, 0.25, 0.1, is_cached=True)
    turns = (
        Turn(text, 2, action, () if passages is None else (found,), "<information>..</information>"),
        Turn(f"<answer>{answer}</answer>", 1, "answer"),
    )
    return Trajectory(
        trajectory_id=name,
        task=task,
        token_ids=np.array([5, 6, 7, 8, 9], np.int32),
        kinds=np.array([0, 1, 1, 2, 1], np.uint8),
        logprobs=np.array([0, -0.5, -2.0, 0, -0.25], np.float32),
        policy_versions=np.array([-1, 3, 3, -1, 4], np.int32),
        turns=turns,
        stop_reason=stop,
        reward=float(answer == "Tom Moss"),
        answer=answer,
        error="engine lost" if stop.is_failure else "",
        metrics={"duplicate_queries": 0.0},
    )


def every_outcome(prefix: str = "nq/1#0") -> list[Trajectory]:
    """A group with one attempt of each outcome."""
    return [
        attempt(f"{prefix}/correct"),
        attempt(f"{prefix}/unsearched", passages=None, text="I know Ünïque"),
        attempt(f"{prefix}/ignored", answer="Ana Bell"),
        attempt(f"{prefix}/unlucky", answer="Ana Bell", passages=("film1",)),
        attempt(f"{prefix}/malformed", answer="Bo", passages=None, action="malformed", text=HOSTILE),
        attempt(f"{prefix}/failed", answer="", stop=StopReason.ENGINE_ERROR, passages=("film1",)),
        attempt(f"{prefix}/truncated", answer="", stop=StopReason.MAX_TURNS, passages=("film1",)),
    ]


def keep(run_dir: Path, name: str, *groups: list[Trajectory], learned: pa.RecordBatch | None = None) -> None:
    """Write groups as one file of a run, a record batch per group."""
    run_dir.mkdir(exist_ok=True)
    batches = [groups_to_record_batch([TrajectoryGroup(group[0].task, tuple(group))]) for group in groups]
    keep_trajectories(run_dir, name, batches, learned)


def keep_tokenizer(folder: Path) -> None:
    """Write a tokenizer of which token 5 is "five"."""
    folder.mkdir(parents=True)
    Tokenizer(WordLevel({"five": 5, "six": 6}, unk_token="six")).save(str(folder / "tokenizer.json"))


def learned_from(name: str, advantages: list[float], ratios: list[float]) -> pa.RecordBatch:
    """What a learner computed of one trajectory, per MODEL token."""
    values = zip(LEARNED_SCHEMA.names, ([name], [advantages], [ratios]), strict=True)
    return pa.RecordBatch.from_pydict(dict(values), schema=LEARNED_SCHEMA)
