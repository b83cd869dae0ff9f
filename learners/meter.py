"""Metrics of an update: means over tokens and steps, and maxima, reduced over all learner ranks.

Tensors named ``_M`` have shape ``[M]``, one value per MODEL token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from learners.importance import SequenceWeights
from learners.losses import MAX_LOG_RATIO, TokenLoss, k3_kl, ratios
from learners.models.scoring import TokenOutputs
from learners.packing import MicroBatch
from ragr1_actors.core.types import HISTOGRAM_PREFIX

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
                self._max("ratio_max_deviation", (ratios_M - 1).abs().nan_to_num(nan=math.inf).max())

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
        self._max("logprob_gap_max", gaps_M.max())
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
        self._max("sequence_ratio_max", ratios_S.nan_to_num(nan=math.inf).max())
        self._max(_INVERSE_RATIO, ratios_S.reciprocal().nan_to_num(nan=math.inf).max())

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

    def _max(self, name: str, value: torch.Tensor) -> None:
        self._maxima[name] = torch.maximum(torch.as_tensor(self._maxima.get(name, 0.0), device=value.device), value)

    def _buckets(self) -> Iterator[tuple[str, float]]:
        for name, counts in self._histograms.items():
            for (left, right), count in zip(pairwise(EDGES[name]), counts.tolist(), strict=True):
                yield f"{HISTOGRAM_PREFIX}{name}/{left:g}/{right:g}", count

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
        buckets = _reduce(dict(self._buckets()), device, dist.ReduceOp.SUM)
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
