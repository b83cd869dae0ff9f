"""What an update reports: means over tokens and steps, and maxima, over all ranks.

Notation: M MODEL tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from learners.batching import MicroBatch
from learners.losses import ratios
from learners.models import TokenOutputs

Columns = dict[str, torch.Tensor]
"""Names to one value a MODEL token, ``[M]``."""

OUTLIER_RATIO = 0.1
"""A ratio further than this from 1 before the first step means that engine and learner disagree."""


@dataclass(frozen=True)
class TokenLoss:
    """What ``compute_loss`` returns."""

    loss: torch.Tensor  # [M]
    metrics: Columns = field(default_factory=dict)
    """Reported as means over the MODEL tokens."""


class Meter:
    """Metrics of one update: sums, counts and maxima on this rank, and their reduction over ranks."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.num_steps = 0
        self._sums: dict[str, torch.Tensor | float] = {}
        self._maxima: dict[str, torch.Tensor | float] = {}
        self._steps: dict[str, float] = {}

    def add_layout(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Count the tokens that go through the linear layers, and those of dummies among them."""
        for micro_batch in micro_batches:
            self._add("_computed", float(micro_batch.num_tokens))
            self._add("_padding", micro_batch.num_tokens * (1.0 - micro_batch.weight))
            self._add("_useful_cells", micro_batch.layout.useful_cells * micro_batch.weight)
            self._add("_padded_cells", float(micro_batch.layout.padded_cells))

    def add_tokens(
        self, micro_batch: MicroBatch, outputs: TokenOutputs, old_logprobs_M: torch.Tensor, token_loss: TokenLoss
    ) -> None:
        """Add a micro-batch's per-token values."""
        if not micro_batch.weight:
            return
        with torch.no_grad():
            ratios_M = ratios(outputs.logprobs, old_logprobs_M)
            per_token = {
                "loss": token_loss.loss,
                "entropy": outputs.entropy,
                "ratio_mean": ratios_M,
                **token_loss.metrics,
            }
            self.add_values(micro_batch, **per_token)
            self._add("_tokens", float(len(ratios_M)))
            self._max("ratio_max_deviation", (ratios_M - 1).abs().max())
            if self.num_steps == 0:  # no step yet: the policy is the one that sampled, or a later one at a lag
                gap_M = (outputs.logprobs - old_logprobs_M).abs()
                self._add("_first_tokens", float(len(gap_M)))
                self._add("logprob_gap_mean", gap_M.sum())
                self._max("logprob_gap_max", gap_M.max())
                self._add("ratio_outliers", ((ratios_M - 1).abs() > OUTLIER_RATIO).float().sum())

    def add_values(self, micro_batch: MicroBatch, **values_M: torch.Tensor) -> None:
        """Add values a MODEL token; reported as means over them."""
        for name, values in values_M.items():
            self._add(name, micro_batch.weight * values.detach().float().sum())

    def add_step(self, **values: float) -> None:
        """Add values that there is one of a step, such as gradient norms; reported as means over steps."""
        for name, value in values.items():
            self._steps[name] = self._steps.get(name, 0.0) + value

    def _add(self, name: str, value: torch.Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def _max(self, name: str, value: torch.Tensor) -> None:
        self._maxima[name] = torch.maximum(torch.as_tensor(self._maxima.get(name, 0.0), device=value.device), value)

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Return the metrics over all ranks; empty sums where no step was taken."""
        if self.num_steps == 0:
            return {"tokens": 0.0, "computed_tokens": 0.0, "padding_waste": 0.0}
        sums, maxima = _reduce(self._sums, device, dist.ReduceOp.SUM), _reduce(self._maxima, device, dist.ReduceOp.MAX)
        counts = {name: sums.pop(name, 0.0) for name in list(sums) if name.startswith("_")}
        first = {"logprob_gap_mean", "ratio_outliers"}
        return {
            **{n: s / counts["_first_tokens" if n in first else "_tokens"] for n, s in sums.items()},
            **maxima,
            **{name: value / self.num_steps for name, value in self._steps.items()},
            "tokens": counts["_tokens"],
            "computed_tokens": counts["_computed"],
            "padding_waste": counts["_padding"] / counts["_computed"],
            "attention_padding": 1 - counts["_useful_cells"] / counts["_padded_cells"],
        }


def _reduce(values: Mapping[str, torch.Tensor | float], device: torch.device, op: Any) -> dict[str, float]:
    """Reduce named numbers over ranks. A rank that had only dummies knows fewer names than the others."""
    if dist.get_world_size() > 1:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, sorted(values))
        keys = sorted(set().union(*names))
    else:
        keys = sorted(values)
    vector = torch.tensor([float(values.get(key, 0.0)) for key in keys], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(vector, op=op)
    return dict(zip(keys, vector.tolist(), strict=True))
