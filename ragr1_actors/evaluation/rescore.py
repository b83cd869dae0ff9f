"""Rewards of the trajectories that a run has kept, computed again with another reward.

Nothing is sampled: the answers are from a policy trained with the run's reward.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from envs.measures import Reward, RewardContext, Split
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import WRITING, write_folder
from ragr1_actors.core.errors import DataError, ServiceError
from ragr1_actors.core.resolve import raised_at
from ragr1_actors.core.schema import TRAJECTORIES, groups_to_record_batch, read_trajectories, write_trajectories
from ragr1_actors.core.types import Trajectory, TrajectoryGroup
from ragr1_actors.rollout.engines.chat_client import open_models

MAX_AT_ONCE = 256
"""Number of rewards awaited at once; ``environment.models`` have limits in addition."""
_ITERATION = re.compile(r"(eval_)?iteration_(\d+)")


@dataclass(frozen=True, slots=True)
class Rescored:
    """File of trajectories under both rewards."""

    file: str
    num_trajectories: int
    """Number of trajectories that did not fail."""
    before: float
    after: float
    """Means of the rewards."""
    changed: float
    """Share of the trajectories whose reward differs."""
    correlation: float | None
    """Pearson correlation of both rewards over the trajectories; None if one of them is constant."""


def rescore(
    config: RunConfig,
    folder: Path,
    out: Path | None = None,
    on_file: Callable[[Rescored], None] = lambda rescored: None,
) -> list[Rescored]:
    """Compute ``config.environment.reward`` for every trajectory in a run's folder that did not fail.

    With ``out`` the trajectories are written there with the new rewards, as ``out/trajectories/*.arrow``: all, or none
    if it fails. The new reward replaces the whole old one, including the environment's rewards.

    Raises:
        UserError: there are no trajectories, a file is damaged, ``out`` has other files, or the reward cannot be used.
        DataError: the reward fails for a trajectory; the message has its id.
        ServiceError: a service that the reward needs did not answer; the message has the trajectory's id.
    """
    files = sorted(path for path in (folder / TRAJECTORIES).glob("*.arrow") if not path.name.startswith(WRITING))
    if not files:
        raise DataError(f"{folder} has no trajectories; rescore a run with checkpointing.keep_trajectories")
    found: list[Rescored] = []

    async def compute(into: Path | None) -> None:
        reward, models = Reward(config.environment), open_models(config.environment.models)
        for path in files:
            groups = read_trajectories(path)
            new = await _rescored(groups, reward, replace(_context(path.stem, config), models=models))
            if into is not None:
                write_trajectories(into / path.name, [groups_to_record_batch(new)] if new else [])
            found.append(_compared(path.name, groups, new))
            on_file(found[-1])

    def run(into: Path | None) -> None:
        asyncio.run(compute(into))  # of all files: a reward's client or lock belongs to the loop that first used it

    if out is None:
        run(None)
    else:
        _check_out(out, folder)
        write_folder(out / TRAJECTORIES, run, [path.name for path in files])
    return found


def _check_out(out: Path, folder: Path) -> None:
    if out.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"--out: got {out}, which is in the run's own folder; name a folder outside of {folder}")
    if (out / TRAJECTORIES).exists():
        raise DataError(f"{out / TRAJECTORIES} is there already; name another --out, or delete it")


def _context(name: str, config: RunConfig) -> RewardContext:
    """Return the context of the reward at the time when the file was written."""
    split: Split = "eval" if name.startswith("eval_") else "demonstration" if name == "demonstrations" else "train"
    iteration, num_iterations = _ITERATION.fullmatch(name), config.training.num_iterations
    done = int(iteration[2]) - (split == "train") if iteration else num_iterations if name == "eval_rl" else 0
    return RewardContext(split, min(1.0, done / max(1, num_iterations)))


async def _rescored(groups: Sequence[TrajectoryGroup], reward: Reward, context: RewardContext) -> list[TrajectoryGroup]:
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def of(trajectory: Trajectory) -> Trajectory:
        if trajectory.stop_reason.is_failure:
            return trajectory
        plain = replace(trajectory, reward=0.0, turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns))
        async with room:
            try:
                result = await reward(plain, context)
            except ServiceError as error:
                raise ServiceError(f"{trajectory.trajectory_id}: {error}") from error
            except Exception as error:  # a user's reward may raise anything
                raise DataError(
                    f"{trajectory.trajectory_id}: the reward {reward.name} failed: {raised_at(error)}; mend it"
                ) from error
        per_turn = result.per_turn or [0.0] * len(plain.turns)
        turns = tuple(replace(turn, reward=own) for turn, own in zip(plain.turns, per_turn, strict=True))
        return replace(plain, reward=result.total, turns=turns)

    async def of_group(group: TrajectoryGroup) -> TrajectoryGroup:
        return replace(group, trajectories=tuple(await asyncio.gather(*map(of, group.trajectories))))

    return list(await asyncio.gather(*map(of_group, groups)))


def _compared(name: str, before: Sequence[TrajectoryGroup], after: Sequence[TrajectoryGroup]) -> Rescored:
    old, new = (
        np.array([t.reward for group in groups for t in group.trajectories if not t.stop_reason.is_failure])
        for groups in (before, after)
    )
    if not len(old):
        return Rescored(name, 0, 0.0, 0.0, 0.0, None)
    varies = old.std() > 0 and new.std() > 0
    correlation = float(np.corrcoef(old, new)[0, 1]) if varies else None
    return Rescored(name, len(old), float(old.mean()), float(new.mean()), float((old != new).mean()), correlation)
