"""What an update learns from: the trajectories that carry a gradient, and columns of numbers for their MODEL tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from learners.batches.packing import FlatTrajectories, flatten
from learners.meter import Columns, TokenLoss
from learners.models.scoring import TokenOutputs
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class TrainBatch:
    """The trajectories that an update learns from, and what is known of their MODEL tokens."""

    trajectories: list[Trajectory]  # [num_trajectories], no failures among them
    group_ids: list[int]  # [num_trajectories]
    flat: FlatTrajectories
    columns: Columns
    """What ``prepare`` and ``compute_advantages`` returned, and where an engine sampled the tokens:

    ``old_logprobs``: the engine's; with ``training.tis_clip``, in ``compute_loss``, the learner's before the update.
    ``engine_logprobs``: the engine's, with ``training.tis_clip`` in ``compute_loss``.
    ``is_fresh``: whether the newest version in the batch sampled the token, only where there is more than one.
    """


def select(
    groups: Sequence[TrajectoryGroup],
    select_members: Callable[[list[Trajectory]], list[Trajectory]],
    has_engine_logprobs: bool,
) -> TrainBatch | None:
    """Leave out what carries no gradient, before anything is computed; None where nothing is left.

    Args:
        groups: of an update.
        select_members: returns those to learn from, of a group's trajectories that did not fail and have MODEL tokens.
        has_engine_logprobs: whether an engine sampled the tokens.
    """
    trajectories: list[Trajectory] = []
    group_ids: list[int] = []
    for group_id, group in enumerate(groups):
        members = [t for t in group.trajectories if not t.stop_reason.is_failure and t.num_model_tokens > 0]
        members = select_members(members)
        trajectories += members
        group_ids += [group_id] * len(members)
    if not trajectories:
        return None
    flat = flatten(trajectories)
    columns: Columns = {}
    if has_engine_logprobs:
        columns["old_logprobs"] = torch.from_numpy(flat.old_logprobs)
        is_fresh = flat.policy_versions == flat.policy_versions.max()
        if not is_fresh.all():
            columns["is_fresh"] = torch.from_numpy(is_fresh)
    return TrainBatch(trajectories, group_ids, flat, columns)


def check_columns(columns: Columns, batch: TrainBatch, learner: str) -> Columns:
    """Return what a learner's ``compute_advantages`` returned.

    Raises:
        ConfigError: it is something else than a value for every MODEL token.
    """
    method, num_tokens = f"{learner}.compute_advantages", len(batch.flat.model_positions)
    if not isinstance(columns, dict):
        raise ConfigError(f"{method} returned {type(columns).__name__}, expected a dict of names to tensors")
    for name, column in columns.items():
        _check_shape(f"{method}: {name}", column, num_tokens)
    return columns


def check_loss(token_loss: TokenLoss, outputs: TokenOutputs, learner: str) -> TokenLoss:
    """Return what a learner's ``compute_loss`` returned.

    Raises:
        ConfigError: it is something else than a value for every MODEL token.
    """
    method = f"{learner}.compute_loss"
    if not isinstance(token_loss, TokenLoss):
        raise ConfigError(f"{method} returned {type(token_loss).__name__}, expected a learners.meter.TokenLoss")
    for name, values in {"loss": token_loss.loss, **token_loss.metrics}.items():
        _check_shape(f"{method}: {name}", values, len(outputs.logprobs))
    return token_loss


def _check_shape(where: str, values: torch.Tensor, num_tokens: int) -> None:
    found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    if found != [num_tokens]:
        raise ConfigError(f"{where} is {found}, expected a tensor of [{num_tokens}], one value a MODEL token")
