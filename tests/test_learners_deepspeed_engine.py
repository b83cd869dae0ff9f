"""An optimizer step: the clip, the warm-up, sums of gradients; and tensors in the host's memory change no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from learners_common import Build, assert_same_arrays, make_config, make_groups, make_policy

from learners.algorithms.grpo import GRPOLearner, PPOLearner
from learners.algorithms.sft import SFTLearner
from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, Schedule, init_distributed, shared_loading
from learners.models.scoring import PolicyModel, pair_cost
from ragr1_actors.core.config import LearnerSettings, RunConfig
from ragr1_actors.core.errors import ConfigError

pytestmark = pytest.mark.engine

SLOW = pytest.mark.slow


def config_for(training: dict[str, object] | None = None, **learners: object) -> RunConfig:
    return make_config(learners=learners, training={"lr": 1e-3, "weight_decay": 0.01} | (training or {}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_moment_after_a_step_is_that_of_the_clipped_gradient(build: Build, stage: int) -> None:
    for clip in (0.25, 1e6):
        learner = build(SFTLearner, make_config(learners={"zero_stage": stage}, training={"grad_clip": clip}))
        norm = learner.update(make_groups(0))["grad_norm"]
        assert 0.25 < norm < 1e6, "the first is clipped, the second is not"
        moments = [value for name, value in learner.get_state().items() if name.startswith("policy/exp_avg/")]
        total = np.sqrt(sum(np.square(moment.astype(np.float64)).sum() for moment in moments))
        assert total == pytest.approx(0.1 * min(norm, clip), rel=1e-3)  # 1 - beta_1 of the gradient


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_learning_rate_warms_up(build: Build, stage: int) -> None:
    learner = build(SFTLearner, make_config(learners={"zero_stage": stage}, sft={"lr": 1e-3, "warmup_steps": 4}))
    before = learner.get_weights()
    assert learner.update(make_groups(0))["lr"] == pytest.approx(0.25e-3)
    after = learner.get_weights()
    # AdamW's first step moves each weight by the rate, for any gradient
    assert max(np.abs(after[name] - before[name]).max() for name in before) == pytest.approx(0.25e-3, rel=1e-2)
    assert [learner.update(make_groups(0))["lr"] for _ in range(4)] == pytest.approx([0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_gradients_in_bf16_add_up(stage: int) -> None:
    torch.manual_seed(0)
    count = 128
    device = init_distributed(0, 1)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    weight_CC = module[0].weight.detach().clone()
    engine = DeepSpeedEngine(module, Schedule(lr=1e-3, grad_clip=1e9), LearnerSettings(zero_stage=stage), device)
    expected_CC = torch.zeros(64, 64)
    for _ in range(count):
        rows_BC = (1 + 0.3 * torch.randn(32, 64)).bfloat16()
        engine.backward(engine(rows_BC).float().square().sum() / count)
        alone_CC = weight_CC.clone().requires_grad_()
        (torch.nn.functional.linear(rows_BC, alone_CC).float().square().sum() / count).backward()
        assert alone_CC.grad is not None
        expected_CC += alone_CC.grad.float()
    assert engine.step(1e-3) == pytest.approx(float(expected_CC.norm()), rel=1e-3)
    found_CC = torch.from_numpy(engine.get_parts()["exp_avg/0.weight"].values).view(64, 64) / 0.1  # 1 - beta_1
    engine.close()
    assert (found_CC - expected_CC).norm() < 2e-3 * expected_CC.norm()


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(1, ["optimizer"]), (2, ["optimizer"]), (3, ["optimizer"]), (3, ["params"]), (3, ["optimizer", "params"])],
)
def test_offload_changes_nothing_and_resumes(
    build: Build, monkeypatch: pytest.MonkeyPatch, stage: int, offload: list[str]
) -> None:
    configs: list[dict[str, Any]] = []

    def initialize(**arguments: Any) -> Any:
        configs.append(arguments["config"]["zero_optimization"])
        return original(**arguments)

    original = deepspeed.initialize
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    plain, offloaded = (build(GRPOLearner, config_for(zero_stage=stage, offload=names)) for names in ([], offload))
    keys = {"optimizer": "offload_optimizer", "params": "offload_param"}
    assert [config["stage"] for config in configs] == [stage, stage]
    assert [set(keys.values()) & set(config) for config in configs] == [set(), {keys[name] for name in offload}]
    for seed in range(3):
        plain.update(make_groups(seed))
        offloaded.update(make_groups(seed))
    assert_same_arrays(plain.get_state(), offloaded.get_state(), atol=1e-6)
    resumed = build(GRPOLearner, config_for(zero_stage=stage, offload=offload))
    resumed.set_state(offloaded.get_state())
    assert offloaded.update(make_groups(3)) == resumed.update(make_groups(3))
    assert_same_arrays(offloaded.get_state(), resumed.get_state())


@pytest.mark.parametrize(
    ("offload", "stage", "message"),
    [
        (["params"], 2, r"got params with learners\.zero_stage=2, expected learners\.zero_stage=3"),
        (
            ["params"],
            None,
            r"got params with learners\.zero_stage=0, its default here, expected learners\.zero_stage=3",
        ),
        (["optimizer"], 0, r"got optimizer with learners\.zero_stage=0, expected .*1 or 2 or 3"),
        (["critic"], 1, r"got critic with training\.algorithm=grpo, which has none"),
        (["reference"], 1, r"got reference with training\.kl_coeff=0, which needs none"),
        (["gradients"], 1, r"learners\.offload\.0: got 'gradients'"),
    ],
)
def test_an_offload_that_would_do_nothing_is_refused(offload: list[str], stage: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(learners={"offload": offload, "zero_stage": stage})


@pytest.mark.parametrize(
    ("stage", "reloads"),
    [
        (0, True),
        (1, True),
        (2, True),
        (0, False),
        pytest.param(3, True, marks=SLOW),
        pytest.param(3, False, marks=SLOW),
    ],
)
def test_an_update_after_offload_and_reload_equals_one_without(build: Build, stage: int, reloads: bool) -> None:
    plain, moved = (build(PPOLearner, config_for(zero_stage=stage)) for _ in range(2))
    for seed in range(3):
        plain.update(make_groups(seed))
        moved.update(make_groups(seed))
        freed = moved.offload_states()
        copies = {"moments": 2, "master weights": int(stage > 0)}  # at stage 0 the weights are a file's that is mapped
        parameters = [p for e in moved.engines().values() for p in e.module.parameters()]
        num_bytes = 4 * sum(np.prod(moved.policy.full_shape(p)) for p in parameters)
        assert freed >= num_bytes * sum(copies.values())
        assert moved.offload_states() == freed, "a second call frees no more"
        if reloads:  # else the next use reloads
            for engine in moved.engines().values():
                engine.reload_states()
    assert_same_arrays(plain.get_state(), moved.get_state())


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_computed_again_changes_no_update(build: Build, stage: int) -> None:
    """Weights would be no measure: AdamW makes whole steps of gradients that are rounding errors."""
    found = []
    for checkpointing in (False, True, "selective"):
        learner = build(PPOLearner, config_for(zero_stage=stage, gradient_checkpointing=checkpointing))
        metrics = [learner.update(make_groups(seed)) for seed in range(2)][-1]
        found.append([metrics[name] for name in ("loss", "grad_norm", "entropy", "value_loss", "critic_grad_norm")])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-2)


def is_empty(engine: DeepSpeedEngine) -> bool:
    """Whether the critic's head has no memory on the device, as a share of it at stage 3."""
    weight = engine.module.get_submodule("head").weight
    return not vars(weight).get("ds_tensor", weight).untyped_storage().nbytes()


@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=SLOW)])
def test_a_critic_rests_between_its_uses(build: Build, stage: int) -> None:
    training: dict[str, object] = {"algorithm": "ppo"}
    plain = build(PPOLearner, config_for(training, zero_stage=stage))
    resting = build(PPOLearner, config_for(training, zero_stage=stage, offload=["critic"]))
    assert isinstance(resting, PPOLearner) and isinstance(plain, PPOLearner)
    for seed in range(2):
        assert plain.update(make_groups(seed)) == resting.update(make_groups(seed))
        assert is_empty(resting.critic)
    assert_same_arrays(plain.get_state(), resting.get_state())
    assert is_empty(resting.critic) and not is_empty(plain.critic)
    resumed = build(PPOLearner, config_for(training, zero_stage=stage, offload=["critic"]))
    resumed.set_state(resting.get_state())
    assert resumed.update(make_groups(2)) == resting.update(make_groups(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_shared_out_as_it_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    policy_dir = make_policy(tmp_path)
    init_distributed(0, 1)
    with shared_loading(2, dtype, on_host=False):
        whole = PolicyModel(policy_dir, dtype, 1.0)
    with shared_loading(3, dtype, on_host=False):
        shared = PolicyModel(policy_dir, dtype, 1.0)
    expected = dict(whole.named_parameters())
    for name, parameter in shared.named_parameters():
        assert parameter.numel() == 0, "nothing of it is whole"
        share = vars(parameter)["ds_tensor"].flatten()[: expected[name].numel()]
        assert torch.equal(share, expected[name].flatten()), name
    for name, buffer in shared.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name
    assert pair_cost(shared.model) == pair_cost(whole.model)
