"""What is measured of the sampling: an engine's load and time by trajectory, and what the driver knows of a group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.types import Completion, Failure, OnText, Sampling, StopReason, TokenKind, TrajectoryGroup
from ragr1_actors.rollout.engines.base import Engine


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the driver knows of a group; it never reads the group's tokens."""

    rewards: tuple[float, ...]  # [num_trajectories that did not fail]
    num_failed: int
    errors: tuple[str, ...]
    oldest_version: int
    """The lowest policy version of any token; -1 if none was sampled."""
    means: dict[str, float]
    """Over the trajectories that did not fail: turns, tokens, stop reasons, measures, the environment's metrics."""
    data_errors: tuple[str, ...] = ()
    """Those of ``errors`` that are ``Failure.DATA``."""
    stop_reasons: tuple[StopReason, ...] = ()
    """Reasons of the trajectories that failed."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Values whose histograms are drawn: per trajectory that did not fail, and per turn with calls."""
    num_sampled_tokens: int = 0
    """Sum over all trajectories, failed ones included."""


class EngineLoad:
    """How many requests an engine has, and how many it had over time."""

    def __init__(self) -> None:
        """Begin without requests."""
        self.num_requests = 0
        self._at_s = self._request_s = self._share_s = 0.0

    def change(self, num_requests: int) -> NDArray[np.float64]:
        """Count requests that begin or end; return seconds: until now, times the requests, divided by them."""
        now_s = asyncio.get_running_loop().time()
        self._request_s += self.num_requests * (now_s - self._at_s)
        self._share_s += (now_s - self._at_s) / max(1, self.num_requests)
        self._at_s = now_s
        self.num_requests += num_requests
        return np.array([now_s, self._request_s, self._share_s])


class Meter:
    """``Engine.generate`` for one trajectory, with the time that it takes."""

    def __init__(self, engine: Engine, load: EngineLoad) -> None:
        """Measure what one trajectory asks of an engine, whose requests ``load`` counts."""
        self._engine, self._load = engine, load
        self._passed = np.zeros(3)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """See ``Engine.generate``."""
        started = self._load.change(1)
        try:
            return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)
        finally:
            self._passed += self._load.change(-1) - started

    def metrics(self) -> dict[str, float]:
        """Seconds at the engine; the same, each moment times the requests that the engine had; and divided by them."""
        names = ("time/generation_s", "time/generation_rows_s", "time/generation_share_s")
        return dict(zip(names, self._passed.tolist(), strict=True))


def summarize(group: TrajectoryGroup) -> GroupSummary:
    """Return what the driver needs of a group, for its task ledger and metrics."""
    kept = [t for t in group.trajectories if not t.stop_reason.is_failure]
    totals: Counter[str] = Counter()
    for trajectory in kept:
        values: dict[str, float] = {
            "turns": float(len(trajectory.turns)),
            "tokens": float(trajectory.num_model_tokens),
            "observation_tokens": float((trajectory.kinds == TokenKind.OBSERVATION).sum()),
            "context_tokens": float(trajectory.num_tokens),
            "well_formed": float(trajectory.is_well_formed),
            f"stop_{trajectory.stop_reason.value}": 1.0,
            **trajectory.metrics,
        }
        totals.update(values)
    versions = [int(v) for t in kept for v in t.policy_versions[t.kinds == TokenKind.MODEL][:1]]
    return GroupSummary(
        rewards=tuple(t.reward for t in kept),
        num_failed=len(group.trajectories) - len(kept),
        errors=tuple(t.error for t in group.trajectories if t.error),
        oldest_version=min(versions, default=-1),
        means={name: total / len(kept) for name, total in totals.items()},
        data_errors=tuple(t.error for t in group.trajectories if t.stop_reason.failure is Failure.DATA),
        stop_reasons=tuple(t.stop_reason for t in group.trajectories if t.stop_reason.is_failure),
        samples={
            "turns": tuple(float(len(t.turns)) for t in kept),
            "calls_per_turn": tuple(float(len(turn.calls)) for t in kept for turn in t.turns if turn.calls),
            "tokens": tuple(float(t.num_model_tokens) for t in kept),
            "context_tokens": tuple(float(t.num_tokens) for t in kept),
        },
        num_sampled_tokens=sum(t.num_model_tokens - t.num_copied_tokens for t in group.trajectories),
    )
