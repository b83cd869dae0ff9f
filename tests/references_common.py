"""Shared by the tests against papers: learners with given log-probs, and the papers' formulas for advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners_common import fill_columns, make_config, make_groups, with_rows
from learners_common import make_batch as select_batch

from learners.algorithms.grpo import (
    CISPOLearner,
    DAPOLearner,
    DrGRPOLearner,
    GRPOLearner,
    GSPOLearner,
    ReinforcePPLearner,
    RLOOLearner,
)
from learners.learner import Learner
from learners.models.scoring import TokenOutputs
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import TokenKind, TrajectoryGroup

LIMIT = 24
"""``max_model_tokens`` in these tests."""
Rows = list[torch.Tensor]
"""One tensor per trajectory, one value per MODEL token: ``[N][num_model_tokens]``."""


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """Groups of four with rewards of three values, unequal within each; some trajectories have several rows."""
    rng, cuts = np.random.default_rng(seed), np.random.default_rng(seed + 7)
    groups = []
    for group in make_groups(seed):
        rewards = [1.0, 0.0, *rng.choice([0.0, 0.5, 1.0], 2).tolist()]
        several = [with_rows(trajectory, cuts) for trajectory in group.trajectories]
        members = (replace(t, reward=reward) for t, reward in zip(several, rewards, strict=True))
        groups.append(TrajectoryGroup(group.task, tuple(members)))
    return groups


class Scored:
    """Mixed into a learner's class: scores are given, so no model is loaded."""

    given: torch.Tensor
    critic = policy = SimpleNamespace(in_use=nullcontext)

    def score(self, *_: object) -> torch.Tensor:
        return self.given

    def reference_logprobs(self, _: object) -> torch.Tensor:
        return self.reference


def make_learner(learner_class: type[Learner], options: dict[str, object] | None = None, **training: object) -> Learner:
    scored = type(learner_class.__name__, (Scored, learner_class), {})
    return scored(make_config(training={"options": options or {}, **training}), Path("none"))


def make_batch(learner: Learner, seed: int) -> tuple[TrainBatch, torch.Tensor, torch.Tensor]:
    """A batch with its columns in float64, the policy's log-probs (a leaf) and its entropies."""
    rng = np.random.default_rng(seed + 100)
    batch = select_batch(learner, random_groups(seed))
    count = len(batch.flat.model_positions)
    old = torch.from_numpy(rng.normal(-2, 0.5, count))
    batch = replace(batch, columns=replace(batch.columns, rollout_logprobs=old, old_logprobs=old))
    learner.given = old + torch.from_numpy(rng.normal(0, 0.3, count))
    learner.reference = old + torch.from_numpy(rng.normal(0, 0.3, count))
    batch = fill_columns(learner, batch)
    return batch, learner.given.clone().requires_grad_(), torch.from_numpy(rng.random(count))


def rows(values_M: torch.Tensor, batch: TrainBatch) -> Rows:
    return list(values_M.split(batch.flat.model_lengths))


def sequence_lengths(batch: TrainBatch) -> list[list[int]]:
    """MODEL tokens of each row of each trajectory; some may have none."""
    return [[int((t.kinds[row] == TokenKind.MODEL).sum()) for row in t.rows] for t in batch.trajectories]


def loss_of(learner: Learner, batch: TrainBatch, new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """The loss of one optimizer step on the whole batch, with columns in float64."""
    columns = batch.columns.with_columns(learner.step_columns(batch, list(range(len(batch.trajectories)))), "step")
    doubled = {name: c.double() if c.is_floating_point() else c for name, c in columns.present.items()}
    empty = TokenColumns(columns.trajectory_ids, columns.sequence_ids)
    del doubled["trajectory_ids"], doubled["sequence_ids"]
    return learner.compute_loss(TokenOutputs(new, entropy), empty.with_columns(doubled, "doubled")).loss.mean()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor) -> None:
    """Value and gradient."""
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(ours, leaf)
    (expected,) = torch.autograd.grad(theirs, leaf)
    assert expected.abs().max() > 1e-4
    np.testing.assert_allclose(gradient, expected, atol=1e-6, rtol=0)


def group_rewards(batch: TrainBatch) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for trajectory, group_id in zip(batch.trajectories, batch.group_ids, strict=True):
        found.setdefault(group_id, []).append(trajectory.reward)
    return found


def of_group(reward: float, rewards: list[float]) -> float:
    """GRPO: (r - mean) / (std + eps), with the unbiased standard deviation of the published code."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return (reward - mean) / (std + 1e-6)


def centered(reward: float, rewards: list[float]) -> float:
    """Dr.GRPO: r - mean."""
    return reward - sum(rewards) / len(rewards)


def of_others(reward: float, rewards: list[float]) -> float:
    """RLOO: r_i - 1/(k-1) sum of r_j over j != i."""
    return reward - (sum(rewards) - reward) / (len(rewards) - 1)


BASELINES: dict[type[Learner], Callable[[float, list[float]], float]] = {
    GRPOLearner: of_group,
    DAPOLearner: of_group,
    GSPOLearner: of_group,
    CISPOLearner: of_group,
    DrGRPOLearner: centered,
    RLOOLearner: of_others,
    ReinforcePPLearner: centered,
}


def expected_advantages(learner_class: type[Learner], batch: TrainBatch) -> list[float]:
    """Per trajectory; REINFORCE++ divides by the standard deviation over all tokens of the batch."""
    found = group_rewards(batch)
    plain = [
        BASELINES[learner_class](t.reward, found[g]) for t, g in zip(batch.trajectories, batch.group_ids, strict=True)
    ]
    if learner_class is ReinforcePPLearner:
        tokens = [a for a, length in zip(plain, batch.flat.model_lengths, strict=True) for _ in range(length)]
        mean = sum(tokens) / len(tokens)
        std = math.sqrt(sum((a - mean) ** 2 for a in tokens) / (len(tokens) - 1) + 1e-8)
        plain = [(a - mean) / std for a in plain]
    return plain


def plain_kl(estimator: str, new: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Schulman (2020), with r = ref / new: -log r; (log r)^2 / 2; (r - 1) - log r."""
    log_r = ref - new
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": (log_r.exp() - 1) - log_r}[estimator]
