"""What lives in the host's memory, and when: nothing that is computed depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import make_config, make_groups, make_policy

from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.ppo import PPOLearner
from learners.batches.packing import pack
from learners.deepspeed.deepspeed_engine import init_distributed, shared_loading
from learners.deepspeed.offload import OffloadedTensors
from learners.learner import Learner
from learners.models.reference import make_reference
from learners.models.scoring import PolicyModel, pair_cost
from ragr1_actors.core.config import LearnerSettings
from ragr1_actors.core.errors import ConfigError

Build = Callable[..., Learner]
CPU = torch.device("cpu")
SLOW = pytest.mark.slow


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy")


@pytest.fixture
def build(policy_dir: Path) -> Iterator[Build]:
    """Build learners in this process on one tiny policy, and close them afterwards."""
    made: list[Learner] = []

    def build(learner_class: type[Learner], training: dict[str, object] | None = None, **learners: object) -> Learner:
        config = make_config(learners=learners, training={"lr": 1e-3, "weight_decay": 0.01} | (training or {}))
        made.append(learner_class(config, policy_dir))
        made[-1].build()
        return made[-1]

    yield build
    for learner in made:
        learner.close()


def assert_same_state(one: Learner, other: Learner, atol: float = 0.0) -> None:
    theirs = other.get_state()
    for name, value in one.get_state().items():
        np.testing.assert_allclose(value, theirs[name], atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(1, ["optimizer"]), (2, ["optimizer"]), (3, ["optimizer"]), (3, ["params"]), (3, ["optimizer", "params"])],
)
def test_offload_changes_nothing_and_resumes(build: Build, stage: int, offload: list[str]) -> None:
    plain, offloaded = (build(GRPOLearner, zero_stage=stage, offload=names) for names in ([], offload))
    zero = offloaded.policy._engine.zero_optimization_stage(), offloaded.policy._engine.zero_offload_optimizer()
    assert zero[0] == stage and (zero[1] is not None) == ("optimizer" in offload)
    for seed in range(3):
        plain.update(make_groups(seed))
        offloaded.update(make_groups(seed))
    assert_same_state(plain, offloaded, atol=1e-6)
    resumed = build(GRPOLearner, zero_stage=stage, offload=offload)
    resumed.set_state(offloaded.get_state())
    assert offloaded.update(make_groups(3)) == resumed.update(make_groups(3))
    assert_same_state(offloaded, resumed)


@pytest.mark.parametrize(
    ("offload", "stage", "message"),
    [
        (["params"], 2, r"got params with learners\.zero_stage=2, expected learners\.zero_stage=3"),
        (["optimizer"], 0, r"got optimizer with learners\.zero_stage=0, expected .*1 or 2 or 3"),
        (["critic"], 1, r"got critic with training\.algorithm=grpo, which has none"),
        (["reference"], 1, r"got reference with training\.kl_coeff=0, which needs none"),
        (["gradients"], 1, r"learners\.offload\.0: got 'gradients'"),
    ],
)
def test_an_offload_that_would_do_nothing_is_refused(offload: list[str], stage: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(learners={"offload": offload, "zero_stage": stage})


def test_views_of_a_storage_are_valid_again() -> None:
    flat = torch.arange(12.0)
    views = [flat[:5], flat[5:].view(7, 1)]
    expected = [view.clone() for view in views]
    offloaded = OffloadedTensors([flat, *views], CPU)
    assert flat.untyped_storage().nbytes() == 0
    assert offloaded.num_bytes == 48, "each storage once"
    offloaded.reload()
    for view, value in zip(views, expected, strict=True):
        assert torch.equal(view, value)


def test_what_cannot_be_freed_is_left() -> None:
    mapped = torch.from_numpy(np.ones(5))
    assert OffloadedTensors([mapped], CPU).num_bytes == 0
    assert OffloadedTensors([torch.ones(5)], torch.device("meta")).num_bytes == 0, "of another device"
    assert mapped.sum() == 5


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
    plain, moved = (build(PPOLearner, zero_stage=stage) for _ in range(2))
    for seed in range(3):
        plain.update(make_groups(seed))
        moved.update(make_groups(seed))
        freed = moved.offload_states()
        copies = {"moments": 2, "master weights": int(stage > 0)}  # at stage 0 the weights are a file's that is mapped
        num_bytes = 4 * sum(np.prod(shape) for e in moved.engines().values() for shape in e.full_shapes().values())
        assert freed >= num_bytes * sum(copies.values())
        assert not any(m["exp_avg"].untyped_storage().nbytes() for m in moved.policy._adamw.state.values())
        assert moved.offload_states() == freed, "again is no more"
        if reloads:  # else what needs it does it
            moved.reload_states()
            assert all(m["exp_avg"].untyped_storage().nbytes() for m in moved.policy._adamw.state.values())
    assert_same_state(plain, moved)


@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=SLOW)])
def test_a_critic_rests_between_its_uses(build: Build, stage: int) -> None:
    training: dict[str, object] = {"algorithm": "ppo"}
    plain = build(PPOLearner, training, zero_stage=stage)
    resting = build(PPOLearner, training, zero_stage=stage, offload=["critic"])
    assert isinstance(resting, PPOLearner)
    for seed in range(2):
        assert plain.update(make_groups(seed)) == resting.update(make_groups(seed))
        assert not any(m["exp_avg"].untyped_storage().nbytes() for m in resting.critic._adamw.state.values())
    assert_same_state(plain, resting)
    assert not any(m["exp_avg"].untyped_storage().nbytes() for m in resting.critic._adamw.state.values())
    resumed = build(PPOLearner, training, zero_stage=stage, offload=["critic"])
    resumed.set_state(resting.get_state())
    assert resumed.update(make_groups(2)) == resting.update(make_groups(2))


@pytest.mark.parametrize("rests", [False, True])
def test_the_reference_is_the_same_wherever_it_is(build: Build, rests: bool) -> None:
    offload = ["reference"] if rests else []
    metrics = []
    for stage in (1, 3):
        learner = build(GRPOLearner, {"kl_coeff": 0.1}, zero_stage=stage, offload=offload)
        metrics.append([learner.update(make_groups(seed)) for seed in range(2)])
    assert metrics[0][1]["kl"] > 1e-4
    for name in ("kl", "loss", "grad_norm"):
        assert metrics[0][1][name] == pytest.approx(metrics[1][1][name], rel=1e-4), name


def test_a_sharded_reference_is_gathered_layer_by_layer(build: Build, policy_dir: Path) -> None:
    learner = build(GRPOLearner, zero_stage=3)
    batch = learner._select(make_groups(0))
    assert batch is not None
    micro_batch = pack(batch.flat, range(3))
    policy = PolicyModel(policy_dir, torch.float32, 1.0)
    expected = policy(micro_batch).logprobs
    settings = LearnerSettings(zero_stage=3)
    reference = make_reference(learner.policy, lambda: policy, CPU, settings)
    with reference.in_use():
        torch.testing.assert_close(reference.logprobs(micro_batch), expected)
    assert all(hasattr(parameter, "ds_tensor") for parameter in policy.parameters()), "spread over the ranks"
    reference.close()


def test_a_resting_reference_is_copied_to_the_device_for_a_use(build: Build, policy_dir: Path) -> None:
    policy = PolicyModel(policy_dir, torch.float32, 1.0)
    before = [(parameter.data_ptr(), parameter.clone()) for parameter in policy.parameters()]
    reference = make_reference(build(GRPOLearner).policy, lambda: policy, CPU, LearnerSettings(offload=["reference"]))
    with reference.in_use():
        for parameter, (address, value) in zip(policy.parameters(), before, strict=True):
            assert parameter.data_ptr() != address and torch.equal(parameter, value)
    assert [parameter.data_ptr() for parameter in policy.parameters()] == [address for address, _ in before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_shared_out_as_it_is_loaded(policy_dir: Path, dtype: torch.dtype) -> None:
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
