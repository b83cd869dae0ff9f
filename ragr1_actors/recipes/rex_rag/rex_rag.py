"""REX-RAG (arXiv:2508.08149): where an attempt went wrong, a probe goes on from there with a hint, and is learned from.

Rollouts
    An attempt with a wrong answer has a probe with probability ``fork_rate``: its turns before the answer, then a hint.
Filter
    Of a batch with N plain attempts the ``round(N * r)`` probes are kept whose hints have the highest mean log-prob
    under the policy. r follows the share of probes that are right: ``r = 0.9 r + 0.1 share``.
Correction
    The denominator of the policy ratio is a mixture of the policy that sampled and of the probes' distribution mu, with
    the share a of probes in the batch: ``(1 - a) pi_old + a mu``. mu of a token is

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from learners.algorithms.grpo import GRPOLearner
from learners.losses import clipped_policy_loss
from learners.options import GroupOptions, LearnerOptions
from learners.packing import flatten
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors import RolloutStrategy, StopReason, TokenKind, Trajectory
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import TrajectoryGroup
from ragr1_actors.rollout.engines.base import load_tokenizer
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.strategy import Play

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
        probes = (play(count + number, fork=fork) for number, fork in enumerate(forks))
        return plain + list(await asyncio.gather(*probes))


class RexOptions(GroupOptions):
    """``training.options``: those of GRPO, and REX-RAG's."""

    keep_rate: float = Field(0.08, ge=0, le=1)
    """r at the start; ``keep_ratio`` of the published script. A run that is resumed starts again with it."""
    correct: bool = True
    """Whether the denominator is the mixture; false takes pi_old."""


class RexLearner(GRPOLearner):
    """GRPO that learns from probes, hints included."""

    options_class: ClassVar[type[LearnerOptions]] = RexOptions
    options: RexOptions
    trained_kinds = frozenset((TokenKind.MODEL, TokenKind.INJECTED))

    def build(self) -> None:
        """Read the hints with the policy's tokenizer."""
        super().build()
        explore = ExploreOptions.read(self.config.env_runners.strategy_options, "env_runners.strategy_options")
        self.hints = list(map(load_tokenizer(self.policy_dir, self.config.policy).encode, explore.hints))
        self.keep_rate = self.options.keep_rate

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Filter the probes, and move r."""
        members = [one for group in groups for one in group.trajectories if not one.stop_reason.is_failure]
        probes = [one for one in members if one.parent]
        if not probes:
            return groups
        flat = flatten(probes, frozenset((TokenKind.INJECTED,)))
        sums = np.add.reduceat(self.score(self.policy_logprobs, flat).numpy(), flat.trajectory_offsets[:-1])
        best = np.argsort(-sums / np.diff(flat.trajectory_offsets), kind="stable")
        kept = {probes[index].trajectory_id for index in best[: round(self.keep_rate * (len(members) - len(probes)))]}
        share = sum(one.reward >= 1 for one in probes) / len(probes)
        self.keep_rate += MOMENTUM * (share - self.keep_rate)
        return [
            replace(group, trajectories=tuple(t for t in group.trajectories if not t.parent or t.trajectory_id in kept))
            for group in groups
        ]

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return ``mixture_logprobs`` as well, the denominator."""
        columns, old_M, members = super().prepare(batch), batch.columns["old_logprobs"], batch.trajectories
        if not self.options.correct:
            return {**columns, "mixture_logprobs": old_M}
        share = sum(bool(one.parent) for one in members) / len(members)
        plain = [(group, one.reward < 1) for group, one in zip(batch.group_ids, members, strict=True) if not one.parent]
        num_plain, num_wrong = Counter(group for group, _ in plain), Counter(group for group, wrong in plain if wrong)
        mixture = []
        for group, one, old in zip(batch.group_ids, members, old_M.split(batch.flat.model_lengths), strict=True):
            mixture.append(old + math.log1p(-share))
            if one.parent:
                mu = self.probe_logprobs(one, old, num_wrong[group] / num_plain[group])
                mixture[-1] = torch.logaddexp(mixture[-1], mu + math.log(share))
        return {**columns, "mixture_logprobs": torch.cat(mixture)}

    def probe_logprobs(self, probe: Trajectory, old: torch.Tensor, error_rate: float) -> torch.Tensor:
        """Return log mu of a probe's tokens, from their log-probs under the policy that sampled; ``[num_trained]``."""
        mu, is_hint = old.clone(), probe.kinds == TokenKind.INJECTED
        mu[: probe.num_copied_tokens] -= math.log(error_rate) / max(1, probe.num_copied_tokens)
        in_hint = torch.from_numpy(is_hint[np.isin(probe.kinds, sorted(self.trained_kinds))])
        mu[in_hint] = torch.tensor(frequencies(probe.token_ids[is_hint].tolist(), self.hints)).log()
        return mu

    def policy_loss(self, logprobs_M: torch.Tensor, columns: TokenColumns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipped surrogate over the mixture."""
        return clipped_policy_loss(logprobs_M, columns["mixture_logprobs"], columns["advantages"], *self.clip)


def frequencies(hint: Sequence[int], hints: Sequence[Sequence[int]]) -> list[float]:
    """Return the share of each token behind those before it: ``frequencies([5, 6], [[5, 6], [5, 7]]) == [1, 0.5]``."""
    counts = [sum(one[:length] == hint[:length] for one in hints) for length in range(len(hint) + 1)]
    return [now / before for before, now in pairwise(counts)]
