"""Advantages against plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learners.advantages import generalized_advantages, group_advantages, has_variance, whiten


def test_group_advantages_match_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    rewards = torch.from_numpy(rng.random(12))
    groups = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    advantages, weights = group_advantages(rewards, groups, torch.zeros(12, dtype=torch.bool))
    for group in range(3):
        members = rewards[groups == group].numpy()
        expected = (members - members.mean()) / (members.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(advantages[groups == group], expected, atol=1e-9)
    assert weights.tolist() == [1.0] * 12


def test_a_failure_is_no_part_of_the_baseline() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    failed = torch.tensor([False, False, True, True])
    advantages, weights = group_advantages(rewards, torch.zeros(4, dtype=torch.long), failed)
    alone, _ = group_advantages(rewards[:2], torch.zeros(2, dtype=torch.long), failed[:2])
    assert torch.equal(advantages[:2], alone)
    assert advantages[2:].tolist() == [0.0, 0.0]
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_group_of_one_keeps_its_reward() -> None:
    advantages, _ = group_advantages(torch.tensor([0.7]), torch.tensor([3]), torch.tensor([False]))
    assert advantages.tolist() == pytest.approx([0.7])


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_gae_matches_a_plain_loop(gamma: float, lambda_: float) -> None:
    rng = np.random.default_rng(1)
    lengths = [5, 1, 8, 3]
    rewards, values = rng.normal(size=17), rng.normal(size=17)
    advantages, returns = generalized_advantages(
        torch.from_numpy(rewards), torch.from_numpy(values), lengths, gamma, lambda_
    )
    start = 0
    for length in lengths:
        running, next_value = 0.0, 0.0
        for at in range(start + length - 1, start - 1, -1):
            running = rewards[at] + gamma * next_value - values[at] + gamma * lambda_ * running
            next_value = values[at]
            assert advantages[at].item() == pytest.approx(running, abs=1e-9)
            assert returns[at].item() == pytest.approx(running + values[at], abs=1e-9)
        start += length


def test_gae_with_gamma_and_lambda_one_is_return_minus_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.6, 0.9])
    advantages, _ = generalized_advantages(rewards, values, [3], 1.0, 1.0)
    assert advantages.tolist() == pytest.approx([0.7, 0.4, 0.1])


def test_whiten_sees_only_tokens_with_a_weight() -> None:
    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.normal(3, 2, size=50))
    weights = torch.from_numpy((rng.random(50) < 0.6).astype(np.float64))
    white = whiten(values, weights)
    chosen = values[weights > 0].numpy()
    expected = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(white[weights > 0], expected, atol=1e-9)
    assert not white[weights == 0].any()


def test_has_variance() -> None:
    assert has_variance([1.0])
    assert has_variance([0.0, 1.0])
    assert not has_variance([1.0, 1.0])
    assert not has_variance([])
