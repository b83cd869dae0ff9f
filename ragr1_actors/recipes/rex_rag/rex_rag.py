"""REX-RAG (arXiv:2508.08149): where an attempt went wrong, a probe goes on from there with a hint, and is learned from.

Rollouts
    An attempt with a wrong answer has a probe with probability ``fork_rate``: its turns before the answer, then a hint.
Filter
    Of a batch with N plain attempts the ``round(N * r)`` probes are kept whose hints have the highest mean log-prob
    under the policy. r follows the share of these that are right: ``r = 0.9 r + 0.1 share``.
Correction
    The denominator of the policy ratio is a mixture of the policy that sampled and of the probes' distribution mu, with
    the share a of kept probes in all attempts of the batch: ``(1 - a) pi_old + a mu``. mu of a token is

    =========================================  ===========================================================
    token                                      mu
    =========================================  ===========================================================
    of a plain attempt                         0
    of a probe, the j tokens before the hint   pi_old / z^(1/j); z is the share of wrong plain attempts
    of a probe, in the hint                    its frequency after the same beginning among the hints
    of a probe, behind the hint                pi_old
    =========================================  ===========================================================
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from pydantic import Field

from learners.algorithms.grpo import GRPOLearner
from learners.losses import clipped_policy_loss
from learners.options import GroupOptions
from learners.packing import flatten
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors import RolloutStrategy, StopReason, TokenKind, Trajectory
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Failure, TrajectoryGroup
from ragr1_actors.rollout.engines.base import load_tokenizer
from ragr1_actors.rollout.groups import GroupRequest, Play

MOMENTUM = 0.1  # weight of a batch in r, alpha of the published code


class ExploreOptions(Section):
    """``env_runners.strategy_options``."""

    hints: list[str] = Field(min_length=1)
    """What a probe's turn may begin with."""
    fork_rate: float = Field(0.2, ge=0, le=1)
    """Probability that a wrong attempt has a probe; ``data.revision_prob=20`` of the published script."""


class Explore(RolloutStrategy):
    """Plain attempts, then a probe of some that answered wrong."""

    options_class = ExploreOptions
    options: ExploreOptions

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        """Return the plain attempts, and behind them the probes."""
        rng, count = random.Random(request.trajectory_id(0)), request.num_trajectories
        plain = list(await asyncio.gather(*(play(index) for index in range(count))))
        wrong = [one for one in plain if one.stop_reason is StopReason.ANSWERED and one.reward < 1]
        chosen = [one for one in wrong if rng.random() < self.options.fork_rate]
        forks = [(one, len(one.turns) - 1, rng.choice(self.options.hints)) for one in chosen]
        probes = await asyncio.gather(*(play(count + number, fork=fork) for number, fork in enumerate(forks)))
        return plain + [one for one in probes if one.stop_reason.failure is not Failure.DATA]  # a hint without room


class RexOptions(GroupOptions):
    """``training.options``: those of GRPO, and REX-RAG's."""

    keep_rate: float = Field(0.08, ge=0, le=1)
    """r at the start; ``keep_ratio`` of the published script. A run that is resumed starts again with it."""
    correct: bool = True
    """Whether the denominator is the mixture; false takes pi_old."""


class RexLearner(GRPOLearner):
    """GRPO that learns from probes, hints included."""

    options_class = RexOptions
    options: RexOptions
    trained_kinds = frozenset((TokenKind.MODEL, TokenKind.INJECTED))

    def build(self) -> None:
        """Read the hints with the policy's tokenizer."""
        super().build()
        explore = ExploreOptions.read(self.config.env_runners.strategy_options, "env_runners.strategy_options")
        self.hints = list(map(load_tokenizer(self.policy_dir, self.config.policy).encode, explore.hints))
        self.keep_rate, self.probe_share, self.error_rate = self.options.keep_rate, 0.0, 0.0

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Filter the probes, move r, and count what the mixture needs: its shares are those of the whole batch."""
        members = [one for group in groups for one in group.trajectories if not one.stop_reason.is_failure]
        probes, plain = ([one for one in members if bool(one.parent) is of_probe] for of_probe in (True, False))
        kept = self.likeliest(probes, round(self.keep_rate * len(plain)))
        self.keep_rate += MOMENTUM * (float(np.mean([one.reward >= 1 for one in kept] or [False])) - self.keep_rate)
        self.probe_share = len(kept) / max(1, len(kept) + len(plain))
        self.error_rate = float(np.mean([one.reward < 1 for one in plain] or [False]))
        dropped = {one.trajectory_id for one in probes} - {one.trajectory_id for one in kept}
        return [
            replace(group, trajectories=tuple(one for one in group.trajectories if one.trajectory_id not in dropped))
            for group in groups
        ]

    def likeliest(self, probes: Sequence[Trajectory], count: int) -> list[Trajectory]:
        """Return the probes whose hints have the highest mean log-prob under the policy."""
        if not probes:
            return []
        flat = flatten(probes, frozenset((TokenKind.INJECTED,)))
        sums = np.add.reduceat(self.score(self.policy_logprobs, flat).numpy(), flat.trajectory_offsets[:-1])
        best = np.argsort(-sums / np.diff(flat.trajectory_offsets), kind="stable")
        return [probes[index] for index in best[:count]]

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return ``mixture_logprobs`` as well, the denominator."""
        columns, mixture_M = super().prepare(batch), batch.columns["old_logprobs"]
        if self.options.correct and self.probe_share:
            parts = zip(batch.trajectories, mixture_M.split(batch.flat.model_lengths), strict=True)
            mixture_M = torch.cat([self.mixture_logprobs(*part) for part in parts])
        return {**columns, "mixture_logprobs": mixture_M}

    def mixture_logprobs(self, one: Trajectory, old: torch.Tensor) -> torch.Tensor:
        """Return log ``(1 - a) pi_old + a mu`` of a trajectory's tokens, from log pi_old; ``[num_trained]`` each."""
        mixture = old + math.log1p(-self.probe_share)
        if not one.parent:
            return mixture
        mu, is_hint = old.clone(), one.kinds == TokenKind.INJECTED
        mu[: one.num_copied_tokens] -= math.log(self.error_rate) / max(1, one.num_copied_tokens)
        in_hint = torch.from_numpy(is_hint[np.isin(one.kinds, sorted(self.trained_kinds))])
        mu[in_hint] = torch.tensor(frequencies(one.token_ids[is_hint].tolist(), self.hints)).log()
        return torch.logaddexp(mixture, mu + math.log(self.probe_share))

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipped surrogate over the mixture."""
        denominator, clips = columns["mixture_logprobs"], (*self.clip, self.options.dual_clip)
        return clipped_policy_loss(logprobs_M, denominator, columns["advantages"], *clips)


def frequencies(hint: Sequence[int], hints: Sequence[Sequence[int]]) -> list[float]:
    """Return the share of each token behind those before it: ``frequencies([5, 6], [[5, 6], [5, 7]]) == [1, 0.5]``."""
    counts = [sum(one[:length] == hint[:length] for one in hints) for length in range(len(hint) + 1)]
    return [now / before for before, now in pairwise(counts)]
