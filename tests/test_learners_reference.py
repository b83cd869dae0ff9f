"""The reference of KL terms: the same scores wherever its weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learners_common import Build, make_batch, make_config, make_groups, make_policy

from learners.algorithms.grpo import GRPOLearner
from learners.deepspeed.deepspeed_engine import FrozenModule
from learners.models.scoring import PolicyModel
from learners.packing import pack
from ragr1_actors.core.config import LearnerSettings

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


@pytest.mark.parametrize("rests", [False, True])
def test_the_reference_is_the_same_wherever_it_is(build: Build, rests: bool) -> None:
    offload = ["reference"] if rests else []
    metrics = []
    for stage in (1, 3):
        learner = build(
            GRPOLearner,
            make_config(training={"kl_coeff": 0.1, "lr": 1e-3}, learners={"zero_stage": stage, "offload": offload}),
        )
        metrics.append([learner.update(make_groups(seed)) for seed in range(2)])
    assert metrics[0][1]["kl"] > 1e-4
    for name in ("kl", "loss", "grad_norm"):
        assert metrics[0][1][name] == pytest.approx(metrics[1][1][name], rel=1e-4), name


def test_a_sharded_reference_is_gathered_layer_by_layer(build: Build, tmp_path: Path) -> None:
    learner = build(GRPOLearner, make_config(learners={"zero_stage": 3}))
    micro_batch = pack(make_batch(learner, make_groups(0)).flat, range(3))
    policy = PolicyModel(tmp_path / "policy", torch.float32, 1.0)
    expected = policy(micro_batch).logprobs
    reference = FrozenModule(policy, CPU, LearnerSettings(zero_stage=3))
    with reference.in_use():
        torch.testing.assert_close(reference(micro_batch).logprobs, expected)
    assert all(hasattr(parameter, "ds_tensor") for parameter in policy.parameters()), "spread over the ranks"
    reference.close()


def test_a_resting_reference_leaves_the_device_and_is_not_copied_back(tmp_path: Path) -> None:
    policy = PolicyModel(make_policy(tmp_path), torch.float32, 1.0)
    for parameter in policy.parameters():  # else they are a file's that is mapped
        parameter.data = parameter.data.clone()
    expected = [parameter.clone() for parameter in policy.parameters()]
    reference = FrozenModule(policy, CPU, LearnerSettings(zero_stage=1, offload=["reference"]))
    for change in (0.0, 1.0):
        assert not any(parameter.untyped_storage().nbytes() for parameter in policy.parameters())
        with reference.in_use(), torch.no_grad():
            for parameter, value in zip(policy.parameters(), expected, strict=True):
                assert torch.equal(parameter, value)
                parameter += change
