"""What the reference tests share: learners whose model is given as numbers, and advantages by the papers' formulas."""

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
from learners_common import make_config, make_groups

from learners.algorithms.cispo import CISPOLearner
from learners.algorithms.dapo import DAPOLearner
from learners.algorithms.dr_grpo import DrGRPOLearner
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.gspo import GSPOLearner
from learners.algorithms.reinforce_pp import ReinforcePPLearner
from learners.algorithms.rloo import RLOOLearner
from learners.batches.train_batch import TrainBatch
from learners.learner import Learner
from learners.models.scoring import TokenOutputs
from ragr1_actors.core.types import TrajectoryGroup

LIMIT = 24
"""``max_model_tokens`` of these tests."""
Rows = list[torch.Tensor]
"""One tensor a trajectory, a number a MODEL token: ``[N][num_model_tokens]``."""


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """Groups of four with rewards of three values, unequal within each."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in make_groups(seed):
        rewards = [1.0, 0.0, *rng.choice([0.0, 0.5, 1.0], 2).tolist()]
        members = (replace(t, reward=reward) for t, reward in zip(group.trajectories, rewards, strict=True))
        groups.append(TrajectoryGroup(group.task, tuple(members)))
    return groups


class Scored:
    """Stands before a learner's class: what a model would say is given, so that none is loaded."""

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
    batch = learner._select(random_groups(seed))
    assert batch is not None
    count = len(batch.flat.model_positions)
    old = torch.from_numpy(rng.normal(-2, 0.5, count))
    batch.columns["old_logprobs"] = old
    learner.given = old + torch.from_numpy(rng.normal(0, 0.3, count))
    learner.reference = old + torch.from_numpy(rng.normal(0, 0.3, count))
    batch.columns.update(learner.prepare(batch))
    batch.columns.update(learner.compute_advantages(batch))
    return batch, learner.given.clone().requires_grad_(), torch.from_numpy(rng.random(count))


def rows(values_M: torch.Tensor, batch: TrainBatch) -> Rows:
    return list(values_M.split(batch.flat.model_lengths))


def loss_of(learner: Learner, batch: TrainBatch, new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """What one optimizer step on the whole batch takes the gradient of, as the base of all learners averages it."""
    columns = batch.columns | learner.step_columns(batch, list(range(len(batch.trajectories))))
    columns = {name: c.double() if c.is_floating_point() else c for name, c in columns.items()}
    return learner.compute_loss(TokenOutputs(new, entropy), columns).loss.mean()


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
    """Of every trajectory; REINFORCE++ divides by the standard deviation over all the tokens of the batch."""
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
