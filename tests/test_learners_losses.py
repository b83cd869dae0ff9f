"""Losses against plain references in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learners.losses import clipped_policy_loss, clipped_value_loss, k1_kl, k3_kl, negative_log_likelihood, ratios


def test_clipped_policy_loss_matches_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(-2, 0.5, 200), rng.normal(-2, 0.5, 200), rng.normal(size=200)
    loss, clipped = clipped_policy_loss(*(torch.from_numpy(x) for x in (new, old, advantages)), 0.2, 0.28)
    for at in range(200):
        ratio = np.exp(new[at] - old[at])
        bounded = min(max(ratio, 0.8), 1.28)
        assert loss[at].item() == pytest.approx(-min(ratio * advantages[at], bounded * advantages[at]), abs=1e-9)
        assert bool(clipped[at]) == (bounded * advantages[at] < ratio * advantages[at])


def test_a_clipped_token_has_no_gradient() -> None:
    new = torch.tensor([0.0, -5.0, 0.0, -5.0], requires_grad=True)
    old = torch.tensor([-5.0, 0.0, -5.0, 0.0])
    loss, clipped = clipped_policy_loss(new, old, torch.tensor([1.0, -1.0, -1.0, 1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False, False]
    assert new.grad is not None
    assert (new.grad == 0).tolist() == [True, True, False, False]


def test_a_ratio_is_finite_however_far_apart_the_policies_are() -> None:
    assert torch.isfinite(ratios(torch.tensor([0.0, -1e30]), torch.tensor([-1e30, 0.0]))).all()


def test_k3_has_the_mean_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(8, dtype=torch.float64, generator=generator).log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum()
    # Expectation over the policy, exactly: the weighted mean over all tokens.
    assert (policy.exp() * k1_kl(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    assert (policy.exp() * k3_kl(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    assert (k3_kl(policy, reference) >= 0).all()


def test_clipped_value_loss_matches_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    values, old, returns = rng.normal(size=(3, 100))
    loss = clipped_value_loss(*(torch.from_numpy(x) for x in (values, old, returns)), 0.5)
    bounded = np.clip(values, old - 0.5, old + 0.5)
    np.testing.assert_allclose(loss, 0.5 * np.maximum((values - returns) ** 2, (bounded - returns) ** 2), atol=1e-9)


def test_negative_log_likelihood() -> None:
    assert negative_log_likelihood(torch.tensor([-1.0, -0.5])).tolist() == [1.0, 0.5]
