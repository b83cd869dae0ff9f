"""OREO's two losses, against the equations of its paper in plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from learners_common import fill_columns, make_batch, make_config, make_groups, make_policy

from learners.models.scoring import TokenOutputs
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.recipes.oreo.oreo import OreoLearner, OreoOptions, RightOnlyLearner, kl_of_stored

pytestmark = pytest.mark.engine
BETA, KL_COEFF = 0.5, 0.1


@pytest.fixture
def learner(tmp_path: Path) -> OreoLearner:
    training = {
        "algorithm": "ragr1_actors.recipes.oreo.oreo:OreoLearner",
        "lr": 1e-2,
        "kl_coeff": KL_COEFF,
        "options": {"beta": BETA},
    }
    found = OreoLearner(make_config(training=training), make_policy(tmp_path / "policy"))
    found.build()
    return found


def test_losses_are_those_of_the_soft_bellman_equation(learner: OreoLearner) -> None:
    groups = make_groups(seed=0)
    learner.update(groups)  # so that policy and reference differ, and values are not 0
    batch = fill_columns(learner, make_batch(learner, groups))
    logprobs = learner.score(learner.policy_logprobs, batch.flat)
    columns = batch.columns
    loss = learner.compute_loss(TokenOutputs(logprobs, torch.zeros_like(logprobs)), columns).loss
    log_ratios = (logprobs - columns["ref_logprobs"]).tolist()
    assert max(map(abs, log_ratios)) > 0.01
    values, start = columns["values"].tolist(), 0
    for trajectory, length in zip(batch.trajectories, batch.flat.model_lengths, strict=True):
        for at in range(start, start + length):
            later = BETA * sum(log_ratios[at + 1 : start + length])
            residual = values[at] - trajectory.reward + later + BETA * log_ratios[at]
            ratio = math.exp(log_ratios[at])
            expected = residual**2 + KL_COEFF * (ratio * log_ratios[at] - ratio + 1)
            assert loss[at].item() == pytest.approx(expected, abs=1e-4)
            target = trajectory.reward - later - BETA * log_ratios[at]
            assert columns["returns"][at].item() == pytest.approx(target, abs=1e-4)
        start += length


def test_options_of_ppo_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="gamma, tis_clip: OREO has no ratio"):
        OreoOptions.read({"beta": 0.1, "vf_lr": 1e-3, "gamma": 0.5, "tis_clip": 2.0}, "training.options")


def test_the_estimate_of_the_divergence_is_right_in_the_mean() -> None:
    mu, pi = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    estimate = kl_of_stored((pi / mu).log())
    assert (estimate >= 0).all()
    assert (mu * estimate).sum().item() == pytest.approx((pi * (pi / mu).log()).sum().item(), abs=1e-6)


def test_the_baseline_learns_from_what_was_right_alone(tmp_path: Path) -> None:
    training = {"algorithm": "ragr1_actors.recipes.oreo.oreo:RightOnlyLearner"}
    learner = RightOnlyLearner(make_config(training=training), make_policy(tmp_path / "policy"))
    batch = make_batch(learner, make_groups(seed=0))
    assert [trajectory.reward for trajectory in batch.trajectories] == [1.0] * 8
