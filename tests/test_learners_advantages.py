"""Advantages of every algorithm against their papers' formulas, written plainly in loops of float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from references_common import BASELINES, LIMIT, expected_advantages, make_batch, make_learner, plain_kl, rows

from learners import advantages
from learners.advantages import generalized_advantages, overlong_penalty, whiten
from learners.algorithms.grpo import (
    DAPOLearner,
    DrGRPOLearner,
    GRPOLearner,
    PPOLearner,
    ReinforcePPLearner,
    RLOOLearner,
)
from learners.learner import Learner
from learners.options import has_variance
from ragr1_actors.core.types import TokenKind


@pytest.mark.parametrize("learner_class", BASELINES)
@pytest.mark.parametrize("seed", range(3))
def test_advantages(learner_class: type[Learner], seed: int) -> None:
    learner = make_learner(learner_class, {"overlong_share": 0.0})
    batch, *_ = make_batch(learner, seed)
    for ours, theirs in zip(
        rows(batch.columns.advantages, batch), expected_advantages(learner_class, batch), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    if learner_class is not ReinforcePPLearner:
        rewards = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64)
        exact = learner.trajectory_advantages(rewards, torch.tensor(batch.group_ids))
        np.testing.assert_allclose(exact, expected_advantages(learner_class, batch), atol=1e-12)


@pytest.mark.parametrize("learner_class", [DrGRPOLearner, RLOOLearner, GRPOLearner])
def test_a_group_of_one_keeps_its_reward(learner_class: type[Learner]) -> None:
    learner = make_learner(learner_class)
    rewards = torch.tensor([0.7, 1.0, 0.0], dtype=torch.float64)
    assert learner.trajectory_advantages(rewards, torch.tensor([3, 1, 1]))[0].item() == pytest.approx(0.7)


def test_each_group_is_compared_once_and_without_the_others() -> None:
    seen: list[int] = []
    ids = torch.tensor([7, 1, 7, 3, 1, 7] * 50)
    rewards = torch.arange(300, dtype=torch.float64)

    def centred(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part - part.mean()

    found = advantages._within_groups(rewards, ids, centred)
    assert sorted(seen) == [50, 100, 150]
    for group in (1, 3, 7):
        members = ids == group
        assert torch.equal(found[members], rewards[members] - rewards[members].mean())
    assert advantages._within_groups(rewards[:0], ids[:0], centred).shape == (0,)


def test_overlong_shaping() -> None:
    """DAPO, equation 13, with L_max = 20 and L_cache = 4."""
    expected = {1: 0.0, 16: 0.0, 17: 0.25, 19: 0.75, 20: 1.0, 25: 1.0}
    found = overlong_penalty(torch.tensor(list(expected), dtype=torch.float64), 20, 0.2)
    assert found.tolist() == pytest.approx(list(expected.values()))


def test_dapo_shapes_the_reward_before_the_baseline() -> None:
    learner = make_learner(DAPOLearner, {"max_model_tokens": LIMIT, "overlong_share": 0.5})
    batch, *_ = make_batch(learner, 0)
    lengths = batch.flat.model_lengths
    assert any(length > LIMIT / 2 for length in lengths)
    shaped = [
        replace(t, reward=t.reward - min(1.0, max(0.0, (length - LIMIT / 2) / (LIMIT / 2))))
        for t, length in zip(batch.trajectories, lengths, strict=True)
    ]
    expected = expected_advantages(DAPOLearner, replace(batch, trajectories=shaped))
    for ours, theirs in zip(rows(batch.columns.advantages, batch), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_of_a_trajectory(estimator: str) -> None:
    learner = make_learner(RLOOLearner, {"kl_estimator": estimator}, kl_coeff=0.1)
    batch, *_ = make_batch(learner, 1)
    pairs = zip(rows(batch.columns.old_logprobs, batch), rows(learner.reference, batch), strict=True)
    penalties = [sum(plain_kl(estimator, a, b) for a, b in zip(old, ref, strict=True)) for old, ref in pairs]
    shaped = [replace(t, reward=t.reward - 0.1 * p.item()) for t, p in zip(batch.trajectories, penalties, strict=True)]
    expected = expected_advantages(RLOOLearner, replace(batch, trajectories=shaped))
    for ours, theirs in zip(rows(batch.columns.advantages, batch), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("gamma", "lambda_", "kl_coeff"), [(1.0, 1.0, 0.0), (0.9, 0.8, 0.1), (0.5, 0.0, 0.0)])
def test_ppo_steps_over_what_it_did_not_write(gamma: float, lambda_: float, kl_coeff: float) -> None:
    """GAE over the trajectory, whose steps are its MODEL tokens alone; then whitening."""
    learner = make_learner(PPOLearner, {"gamma": gamma, "lambda_": lambda_}, kl_coeff=kl_coeff)
    batch, *_ = make_batch(learner, 2)
    values, old, reference = (rows(x, batch) for x in (learner.given, batch.columns.old_logprobs, learner.reference))
    advantages: list[float] = []
    returns: list[float] = []
    for number, trajectory in enumerate(batch.trajectories):
        at, running, next_value = len(values[number]), 0.0, 0.0
        found: list[float] = []
        for kind in reversed(trajectory.kinds):
            if kind != TokenKind.MODEL:
                continue
            is_last = at == len(values[number])
            at -= 1
            reward = (trajectory.reward if is_last else 0.0) - kl_coeff * (old[number][at] - reference[number][at])
            value = values[number][at]
            running = reward + gamma * next_value - value + gamma * lambda_ * running
            next_value = value
            found.insert(0, float(running))
        advantages += found
        returns += [a + float(v) for a, v in zip(found, values[number], strict=True)]
    mean = sum(advantages) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1) + 1e-8)
    np.testing.assert_allclose(batch.columns.returns, returns, atol=1e-6)
    np.testing.assert_allclose(batch.columns.advantages, [(a - mean) / std for a in advantages], atol=1e-6)


def test_ppo_gives_each_turn_its_reward_at_its_last_token() -> None:
    """The rest of the trajectory's reward is at the last token; without a discount the return is what is still due."""
    rng, learner = np.random.default_rng(0), make_learner(PPOLearner, {"gamma": 1.0, "lambda_": 1.0})
    batch, *_ = make_batch(learner, 1)
    for number, trajectory in enumerate(batch.trajectories):
        turns = tuple(replace(turn, reward=float(rng.random())) for turn in trajectory.turns)
        batch.trajectories[number] = replace(trajectory, turns=turns, reward=float(rng.random()) + 1.0)
    returns = learner.compute_advantages(batch)["returns"]
    for trajectory, found in zip(batch.trajectories, rows(returns, batch), strict=True):
        at, due = 0, trajectory.reward
        for turn in trajectory.turns:
            for _ in range(turn.num_model_tokens):
                assert found[at].item() == pytest.approx(due, abs=1e-5)
                at += 1
            due -= turn.reward


def test_gae_with_gamma_and_lambda_one_is_return_minus_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.6, 0.9])
    advantages, _ = generalized_advantages(rewards, values, [3], 1.0, 1.0)
    assert advantages.tolist() == pytest.approx([0.7, 0.4, 0.1])


def test_whitened_values_have_mean_0_and_variance_1() -> None:
    values = np.random.default_rng(2).normal(3, 2, size=50)
    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(torch.from_numpy(values)), expected, atol=1e-9)


def test_has_variance() -> None:
    assert has_variance([1.0])
    assert has_variance([0.0, 1.0])
    assert not has_variance([1.0, 1.0])
    assert not has_variance([])
