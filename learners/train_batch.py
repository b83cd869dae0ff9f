"""Batch of one update: the trajectories with a gradient, typed columns per MODEL token, and the metrics of its steps.

Tensors named ``_M`` have shape ``[M]``, one value per MODEL token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from learners.advantages import SequenceWeights
from learners.losses import MAX_LOG_RATIO, TokenLoss, k3_kl, ratios
from learners.models.scoring import TokenOutputs
from learners.packing import MODEL_ONLY, FlatTrajectories, MicroBatch, flatten
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.schema import LEARNED_SCHEMA
from ragr1_actors.core.types import HISTOGRAM_PREFIX, TokenKind, Trajectory, TrajectoryGroup


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
    start_logprobs: torch.Tensor | None = None
    """Log-prob under the policy at the start of the update: the learner's if it scored the batch, else the engine's. It
    is set where ``old_logprobs`` may be another policy's: if a trajectory has ``behaviour_logprobs``."""
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
        start_M = None if acted_M is None else old_M
        if acted_M is not None:
            old_M = torch.where(acted_M.isnan(), old_M, acted_M)
            rollout_M = torch.where(acted_M.isnan(), rollout_M, acted_M) if corrects else rollout_M
        return replace(self, rollout_logprobs=rollout_M, old_logprobs=old_M, start_logprobs=start_M)

    @property
    def policy_logprobs(self) -> torch.Tensor:
        """Log-prob under the policy at the start of the update, whichever policy acted."""
        columns = (self.start_logprobs, self.old_logprobs, self["rollout_logprobs"])
        return next(column for column in columns if column is not None)

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


EDGES = {
    "ratio": (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0),
    "advantage": tuple(edge / 2 for edge in range(-8, 9)),
}
"""Edges of each histogram's buckets. A value outside the edges is counted in the first or last bucket."""
OUTLIER_RATIO = 0.1
"""Distance of a ratio from 1 before the first step beyond which engine and learner disagree."""

_INVERSE_RATIO = "_inverse_sequence_ratio"
"""Metric whose maximum is kept, instead of the minimum of the ratio, because a rank with dummies only counts as 0."""
_COUNTS = {
    "logprob_gap_mean": "_gap_tokens",
    "engine_kl": "_gap_tokens",
    "ratio_outliers": "_gap_tokens",
    "logprob_gap_mean_fresh": "_fresh_tokens",
    "ratio_outliers_fresh": "_fresh_tokens",
    "good_logprob": "_good_tokens",
    "sequence_ratio_mean": "_sequences",
    "sequences_outside": "_sequences",
}
"""Count that divides a sum, by metric, if it is not the number of all tokens."""


class Meter:
    """Metrics of one update: sums, counts and maxima on this rank, and their reduction over all ranks."""

    def __init__(self, num_ratios: int = 0, device: torch.device | None = None) -> None:
        """Start with all sums at zero; the ratios of a batch of ``num_ratios`` MODEL tokens are kept on ``device``."""
        self.num_steps = 0
        self._ratios_M = torch.zeros(num_ratios, device=device)  # in the last pass over each token
        self._passes_M = torch.zeros(num_ratios, dtype=torch.int32, device=device)  # number of its step, from 1
        self._sums: defaultdict[str, torch.Tensor | float] = defaultdict(float)
        self._histograms: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor | float] = {}
        self._norms: defaultdict[str, list[float]] = defaultdict(list)

    def add_layout(self, micro_batches: Iterable[MicroBatch], *, in_blocks: bool) -> None:
        """Count the tokens of linear layers and the query-key pairs of attention, and how many are dummies or padding.

        Tokens that the trajectories of a row share pass through linear layers once, and are counted once.

        With ``in_blocks``, attention computes the padded pairs of blocks; else only the pairs of the sequences.
        """
        for micro_batch in micro_batches:
            layout = micro_batch.layout
            self._sums["_computed"] += micro_batch.num_tokens
            self._sums["_whole"] += layout.num_tokens
            self._sums["_padding"] += micro_batch.num_tokens * (1.0 - micro_batch.weight)
            self._sums["_useful_cells"] += layout.useful_cells * micro_batch.weight
            self._sums["_padded_cells"] += layout.padded_cells if in_blocks else layout.useful_cells

    def add_tokens(
        self, micro_batch: MicroBatch, outputs: TokenOutputs, old_logprobs_M: torch.Tensor | None, token_loss: TokenLoss
    ) -> None:
        """Add the values per token of a micro-batch; ``old_logprobs_M`` is the denominator of the ratio."""
        if not micro_batch.weight:
            return
        with torch.no_grad():
            self._sums["_tokens"] += len(outputs.logprobs)
            self.add_values(micro_batch, loss=token_loss.loss, entropy=outputs.entropy, **token_loss.metrics)
            if token_loss.sequences is not None:
                self._add_sequences(token_loss.sequences)
            if old_logprobs_M is not None:
                ratios_M = ratios(outputs.logprobs, old_logprobs_M)
                self.add_values(micro_batch, ratio_mean=ratios_M)
                self._count("ratio", ratios_M)
                if len(self._ratios_M):
                    self._ratios_M[micro_batch.column_index] = ratios_M.float()
                    self._passes_M[micro_batch.column_index] = self.num_steps + 1
                # NaN has no order, so a maximum over ranks differs between backends.
                self._max("ratio_max_deviation", (ratios_M - 1).abs().nan_to_num(nan=math.inf))

    def add_gap(
        self, learner_logprobs_M: torch.Tensor, rollout_logprobs_M: torch.Tensor, is_fresh_M: torch.Tensor | None
    ) -> None:
        """Add tokens that engine and learner have both scored, the learner before the first step of the update.

        They are reported as ``logprob_gap_mean`` and ``logprob_gap_max`` (absolute, in nats), ``ratio_outliers`` (share
        of tokens whose ratio is further than ``OUTLIER_RATIO`` from 1) and ``engine_kl`` (k3 estimate of KL(engine,
        learner), in nats per token). With a policy lag they include the change of the policy since it sampled;
        ``logprob_gap_mean_fresh`` and ``ratio_outliers_fresh`` cover only the tokens ``is_fresh_M``, which the newest
        version of the batch sampled. A gap counts as at most ``MAX_LOG_RATIO``; NaN counts as that maximum.
        """
        limit = MAX_LOG_RATIO
        log_ratios_M = (learner_logprobs_M - rollout_logprobs_M).detach().float()
        log_ratios_M = log_ratios_M.nan_to_num(nan=-limit).clamp(-limit, limit)
        gaps_M = log_ratios_M.abs()
        is_outlier_M = (log_ratios_M.exp() - 1).abs() > OUTLIER_RATIO
        self._sums["_gap_tokens"] += len(gaps_M)
        self._sums["logprob_gap_mean"] += gaps_M.sum()
        self._sums["ratio_outliers"] += is_outlier_M.sum()
        self._sums["engine_kl"] += k3_kl(torch.zeros_like(log_ratios_M), log_ratios_M).sum()
        self._max("logprob_gap_max", gaps_M)
        if is_fresh_M is not None:
            self._sums["_fresh_tokens"] += is_fresh_M.sum()
            self._sums["logprob_gap_mean_fresh"] += (gaps_M * is_fresh_M).sum()
            self._sums["ratio_outliers_fresh"] += (is_outlier_M & is_fresh_M).sum()

    def _add_sequences(self, sequences: SequenceWeights) -> None:
        """Add the sequences of a micro-batch: mean and extremes of their ratios, and the share outside the bounds."""
        ratios_S = sequences.ratios_S
        self._sums["_sequences"] += len(ratios_S)
        self._sums["sequence_ratio_mean"] += ratios_S.sum()
        self._sums["sequences_outside"] += sequences.is_outside_S.sum()
        self._max("sequence_ratio_max", ratios_S.nan_to_num(nan=math.inf))
        self._max(_INVERSE_RATIO, ratios_S.reciprocal().nan_to_num(nan=math.inf))

    def add_advantages(self, logprobs_M: torch.Tensor, advantages_M: torch.Tensor) -> None:
        """Add a histogram of the advantages, and the mean log-prob of the tokens whose advantage is positive.

        The mean is reported as ``good_logprob``, in nats. It falls when training makes good actions less likely, too:
        lazy likelihood displacement (arXiv:2512.04220).
        """
        is_good_M = advantages_M > 0
        self._sums["_good_tokens"] += is_good_M.sum()
        # an index with a mask would wait for the GPU
        self._sums["good_logprob"] += torch.where(is_good_M, logprobs_M.detach().float(), 0.0).sum()
        self._count("advantage", advantages_M)

    def add_values(self, micro_batch: MicroBatch, **values_M: torch.Tensor) -> None:
        """Add values per MODEL token; their means are reported."""
        for name, values in values_M.items():
            self._sums[name] += micro_batch.weight * values.detach().float().sum()

    def add_step(self, **norms: float) -> None:
        """Add gradient norms; their means over steps are reported. A norm that is not finite means a skipped step."""
        for name, norm in norms.items():
            self._norms[name].append(norm)

    def _count(self, name: str, values_M: torch.Tensor) -> None:
        """Add values to a histogram, without ``bincount``, which would wait for the GPU."""
        inner = torch.tensor(EDGES[name][1:-1], device=values_M.device)
        counts = self._histograms.setdefault(
            name, torch.zeros(len(inner) + 1, dtype=torch.int64, device=values_M.device)
        )
        buckets_M = torch.bucketize(values_M.detach().float(), inner, right=True)
        counts.index_add_(0, buckets_M, torch.ones_like(values_M, dtype=counts.dtype))

    def _max(self, name: str, values: torch.Tensor) -> None:
        if len(values):  # another system's row may be a prompt only, and alone in its micro-batch
            so_far = torch.as_tensor(self._maxima.get(name, 0.0), device=values.device)
            self._maxima[name] = torch.maximum(so_far, values.max())

    def gather_ratios(self) -> torch.Tensor:
        """Return the kept ratios, ``[M]`` on the CPU, NaN for tokens without a pass. All ranks call together.

        No two ranks have passed the same token in one step.
        """
        if dist.get_world_size() > 1:
            newest_M = self._passes_M.clone()
            dist.all_reduce(newest_M, op=dist.ReduceOp.MAX)
            self._ratios_M[self._passes_M < newest_M] = 0.0
            dist.all_reduce(self._ratios_M)
            self._passes_M = newest_M
        return torch.where(self._passes_M > 0, self._ratios_M, math.nan).cpu()

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Return the metrics over all ranks; zeros if no step was taken. All ranks call together."""
        if self.num_steps == 0:
            return {"tokens": 0.0, "computed_tokens": 0.0, "padding_waste": 0.0}
        sums, maxima = _reduce(self._sums, device, dist.ReduceOp.SUM), _reduce(self._maxima, device, dist.ReduceOp.MAX)
        inverse = maxima.pop(_INVERSE_RATIO, 0.0)
        found = {
            f"{HISTOGRAM_PREFIX}{name}/{left:g}/{right:g}": count
            for name, counts in self._histograms.items()
            for (left, right), count in zip(pairwise(EDGES[name]), counts.tolist(), strict=True)
        }
        buckets = _reduce(found, device, dist.ReduceOp.SUM)
        counts = {name: sums.pop(name, 0.0) for name in list(sums) if name.startswith("_")}
        denominators = {name: counts[_COUNTS.get(name, "_tokens")] for name in sums}
        finite = {name: [norm for norm in norms if math.isfinite(norm)] for name, norms in self._norms.items()}
        num_skipped = sum(len(norms) - len(finite[name]) for name, norms in self._norms.items())
        return {
            **{name: value / denominators[name] for name, value in sums.items() if denominators[name]},
            **maxima,
            **({"sequence_ratio_min": 1 / inverse} if inverse else {}),
            **buckets,
            **{name: sum(norms) / len(norms) for name, norms in finite.items() if norms},
            "skipped_steps": float(num_skipped),
            "tokens": counts["_tokens"],
            "computed_tokens": counts["_computed"],
            "padding_waste": counts["_padding"] / counts["_computed"],
            "shared_tokens": 1 - counts["_computed"] / counts["_whole"],
            "attention_padding": 1 - counts["_useful_cells"] / counts["_padded_cells"],
        }


def _reduce(values: Mapping[str, torch.Tensor | float], device: torch.device, op: Any) -> dict[str, float]:
    """Reduce named numbers over all ranks. A rank with dummies only has fewer names than the others."""
    keys = sorted(values)
    if dist.get_world_size() > 1:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, keys)
        keys = sorted(set().union(*names))
    vector = torch.tensor([float(values.get(key, 0.0)) for key in keys], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(vector, op=op)
    return dict(zip(keys, vector.tolist(), strict=True))
