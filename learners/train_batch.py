"""Batch of one update: the trajectories with a gradient, and typed columns of numbers per MODEL token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import torch

from learners.packing import MODEL_ONLY, FlatTrajectories, flatten
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.schema import LEARNED_SCHEMA
from ragr1_actors.core.types import TokenKind, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class TokenColumns:
    """Inputs of a loss per MODEL token: tensors of shape ``[M]`` in the order of the batch, float32 unless noted.

    A column is set once and never changes its meaning. ``columns.advantages`` is the tensor, or None if the recipe does
    not need the column. ``columns["advantages"]`` is the tensor, and raises ``ConfigError`` if it is missing; columns
    of a custom learner (``own``) are read in this way only.
    """

    trajectory_ids: torch.Tensor
    """Index into ``TrainBatch.trajectories``, int64."""
    sequence_ids: torch.Tensor
    """Number of the sequence, int64: the trajectory, or a row of it if its conversation was rewritten. All tokens of a
    sequence are in one micro-batch."""
    rollout_logprobs: torch.Tensor | None = None
    """Log-prob, in nats, under the engine and the sampling temperature; None for demonstrations (not sampled)."""
    old_logprobs: torch.Tensor | None = None
    """Denominator of the policy ratio: ``Trajectory.behaviour_logprobs`` if a trajectory has them (else NaN until
    ``Learner.fill_columns``). Otherwise it is the learner's log-prob at the start of the update if ``tis_clip`` or
    ``sequence_correction`` is set or ``env_runners.top_p < 1``, else ``rollout_logprobs``. If the update has only one
    optimizer step and nothing else needs the learner's log-probs before, a correction leaves it None until
    ``compute_loss``: the pass of the step gives it."""
    ref_logprobs: torch.Tensor | None = None
    """Log-prob under the reference, the policy at the start of the stage; set if a KL term is in the loss."""
    rollout_kl: torch.Tensor | None = None
    """Estimate of KL(policy, reference) before the first step; set if a KL term is in the reward."""
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """Value of the critic before the token, before the first step of the update (PPO)."""
    returns: torch.Tensor | None = None
    """Target of the critic: advantage plus ``values``, before whitening (PPO)."""
    is_sampled: torch.Tensor | None = None
    """Whether an engine sampled the token, bool; None if it sampled all. The other tokens are trained by
    ``Learner.trained_kinds``; their ``rollout_logprobs`` are the learner's at the start of the update."""
    is_fresh: torch.Tensor | None = None
    """Whether the newest policy version of the batch sampled the token, bool; None if there is only one version."""
    segment_ids: torch.Tensor | None = None
    """Number of the turn or sequence, by ``llds_gate``, int64; set with ``llds_coeff``."""
    loss_weights: torch.Tensor | None = None
    """Factor of the token's loss; set if the step does not average over all its tokens."""
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns of an algorithm or a custom learner besides those above."""

    @property
    def present(self) -> dict[str, torch.Tensor]:
        """Columns that are set, by name."""
        typed = {name: column for name, column in vars(self).items() if name != "own" and column is not None}
        return typed | dict(self.own)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a column.

        Raises:
            ConfigError: the column is not set.
        """
        if name not in self.present:
            raise ConfigError(
                f"the loss reads the column {name!r}, which is not set; got {', '.join(self.present)}; return it from "
                "compute_advantages"
            )
        return self.present[name]

    def with_columns(self, new: Mapping[str, torch.Tensor], source: str) -> TokenColumns:
        """Return these columns and ``new`` ones; ``source`` names their method: ``MyLearner.compute_advantages``.

        Raises:
            ConfigError: ``new`` is not a dict, a value is not a tensor of ``[M]``, or a column is set already.
        """
        if not isinstance(new, Mapping):
            raise ConfigError(f"{source} returned {type(new).__name__}, expected a dict of names to tensors")
        for name, column in new.items():
            check_shape(f"{source}: {name}", column, len(self.trajectory_ids))
            if name in self.present:
                raise ConfigError(f"{source}: {name} is set already, and a column is set once; take another name")
        return _columns(self.present | dict(new))

    def lacks_logprobs(self, corrects: bool) -> bool:
        """Return whether the learner's log-probs are needed before the first step; see ``with_denominator``."""
        return self.is_sampled is not None or (corrects and self.old_logprobs is not None)

    def with_denominator(self, own_M: torch.Tensor | None, *, is_denominator: bool, corrects: bool) -> TokenColumns:
        """Return the columns with ``old_logprobs`` for every token.

        ``own_M`` are the learner's log-probs at the start of the update. They replace an engine's for tokens that no
        engine sampled, and are the denominator of the ratio with ``is_denominator``. If the policy that acted is known,
        it is the denominator, and a correction (``corrects``) has no effect.
        """
        rollout_M, acted_M = self["rollout_logprobs"], self.old_logprobs
        if own_M is not None and self.is_sampled is not None:
            rollout_M = torch.where(self.is_sampled, rollout_M, own_M)
        old_M = own_M if own_M is not None and is_denominator else rollout_M
        if acted_M is not None:
            old_M = torch.where(acted_M.isnan(), old_M, acted_M)
            rollout_M = torch.where(acted_M.isnan(), rollout_M, acted_M) if corrects else rollout_M
        return replace(self, rollout_logprobs=rollout_M, old_logprobs=old_M)

    def select(self, index: torch.Tensor, device: torch.device) -> TokenColumns:
        """Return the entries ``index`` of every column, on ``device``."""
        return _columns({name: column[index].to(device) for name, column in self.present.items()})


def _columns(named: dict[str, torch.Tensor]) -> TokenColumns:
    known = {name: named[name] for name in TokenColumns.__dataclass_fields__ if name in named}
    return TokenColumns(**known, own={name: column for name, column in named.items() if name not in known})


def check_shape(where: str, values: torch.Tensor, num_tokens: int) -> None:
    """Check that ``values`` is a tensor of one value per MODEL token.

    Raises:
        ConfigError: it is not.
    """
    found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    if found != [num_tokens]:
        raise ConfigError(f"{where} is {found}, expected a tensor of [{num_tokens}], one value per MODEL token")


@dataclass(frozen=True)
class TrainBatch:
    """Trajectories of one update, with the columns of their MODEL tokens."""

    trajectories: list[Trajectory]  # [N], without failures
    group_ids: list[int]  # [N], number of the trajectory group
    flat: FlatTrajectories
    columns: TokenColumns

    @property
    def rewards(self) -> torch.Tensor:
        """Reward per trajectory, ``[N]`` of float64."""
        return torch.tensor([trajectory.reward for trajectory in self.trajectories], dtype=torch.float64)

    @property
    def model_lengths(self) -> torch.Tensor:
        """Number of MODEL tokens per trajectory, ``[N]`` of int64."""
        return torch.tensor(self.flat.model_lengths)

    def per_token(self, values_N: torch.Tensor) -> torch.Tensor:
        """Repeat one value per trajectory for each of its MODEL tokens: ``[N]`` to ``[M]`` of float32."""
        return values_N.float()[self.columns.trajectory_ids]

    def per_trajectory(self, values_M: torch.Tensor) -> torch.Tensor:
        """Sum the values of every trajectory's MODEL tokens: ``[M]`` to ``[N]`` of float64."""
        sums_N = torch.zeros(len(self.trajectories), dtype=torch.float64)
        return sums_N.index_add_(0, self.columns.trajectory_ids, values_M.double())

    def with_columns(self, new: Mapping[str, torch.Tensor], source: str) -> TrainBatch:
        """Return the batch with more columns; see ``TokenColumns.with_columns``."""
        return replace(self, columns=self.columns.with_columns(new, source))


def make_batch(
    groups: Sequence[TrajectoryGroup],
    select_members: Callable[[list[Trajectory]], list[Trajectory]],
    has_rollout_logprobs: bool,
    trained_kinds: frozenset[TokenKind] = MODEL_ONLY,
) -> TrainBatch | None:
    """Return the batch of the trajectories with a gradient, or None if there are none.

    ``select_members`` gets the trajectories of a group that did not fail and have MODEL tokens, and returns those to
    train on. ``has_rollout_logprobs`` tells whether an engine sampled the tokens; ``trained_kinds`` are trained.
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
    flat = flatten(trajectories, trained_kinds)
    columns = TokenColumns(
        trajectory_ids=torch.from_numpy(np.repeat(np.arange(len(trajectories)), flat.model_lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(flat.lengths)), np.diff(flat.model_offsets))),
    )
    if has_rollout_logprobs:
        is_sampled = flat.policy_versions >= 0
        is_fresh = (flat.policy_versions == flat.policy_versions.max()) | ~is_sampled
        columns = replace(
            columns,
            rollout_logprobs=torch.from_numpy(flat.rollout_logprobs),
            is_sampled=None if is_sampled.all() else torch.from_numpy(is_sampled),
            is_fresh=None if is_fresh.all() else torch.from_numpy(is_fresh),
        )
        if any(one.behaviour_logprobs is not None for one in trajectories):
            unknown = np.float32(np.nan)
            acted = [
                np.full(one.num_tokens, unknown) if one.behaviour_logprobs is None else one.behaviour_logprobs
                for one in trajectories
            ]
            old_logprobs = np.concatenate(acted).astype(np.float32)[flat.response_mask]
            columns = replace(columns, old_logprobs=torch.from_numpy(old_logprobs))
    return TrainBatch(trajectories, group_ids, flat, columns)


def learned_columns(batch: TrainBatch, ratios_M: torch.Tensor) -> pa.RecordBatch:
    """Return advantages and ratios by trajectory, in ``LEARNED_SCHEMA``; advantages are null if there are none."""
    columns, offsets = batch.columns, batch.flat.trajectory_offsets
    kept: slice | torch.Tensor = slice(None)
    if columns.is_sampled is not None:  # a file has values for MODEL tokens only
        kept = columns.is_sampled
        offsets = np.concatenate([[0], np.cumsum(columns.is_sampled.numpy())])[offsets]
    ratios = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ratios_M[kept].numpy()))
    advantages: pa.Array = pa.nulls(len(ratios), ratios.type)
    if columns.advantages is not None:
        values = pa.array(columns.advantages.float()[kept].numpy())
        advantages = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    ids = pa.array([trajectory.trajectory_id for trajectory in batch.trajectories])
    return pa.RecordBatch.from_arrays([ids, advantages, ratios], schema=LEARNED_SCHEMA)
