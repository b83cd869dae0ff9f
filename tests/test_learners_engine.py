"""What an optimizer step is made of: the clip, the warm-up, the checkpoints of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import make_config, make_groups, make_policy

from learners.algorithms.sft import SFTLearner
from learners.batches.packing import flatten, pack
from learners.learner import Learner
from learners.models.scoring import PolicyModel, ValueModel

Build = Callable[..., Learner]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Build SFT learners in this process on one tiny policy, and close them afterwards."""
    policy_dir = make_policy(tmp_path / "policy")
    made: list[Learner] = []

    def build(**sections: dict[str, object]) -> Learner:
        learner = SFTLearner(make_config(**sections), policy_dir)
        learner.build()
        made.append(learner)
        return learner

    yield build
    for learner in made:
        learner.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_moment_after_a_step_is_that_of_the_clipped_gradient(build: Build, stage: int) -> None:
    for clip in (0.25, 1e6):
        learner = build(learners={"zero_stage": stage}, training={"grad_clip": clip})
        norm = learner.update(make_groups(0))["grad_norm"]
        assert 0.25 < norm < 1e6, "the first is clipped, the second is not"
        moments = [value for name, value in learner.get_state().items() if name.startswith("policy/exp_avg/")]
        total = np.sqrt(sum(np.square(moment.astype(np.float64)).sum() for moment in moments))
        assert total == pytest.approx(0.1 * min(norm, clip), rel=1e-3)  # 1 - beta_1 of the gradient


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_learning_rate_warms_up(build: Build, stage: int) -> None:
    learner = build(learners={"zero_stage": stage}, sft={"lr": 1e-3, "warmup_steps": 4})
    before = learner.get_weights()
    assert learner.update(make_groups(0))["lr"] == pytest.approx(0.25e-3)
    after = learner.get_weights()
    # AdamW's first step moves each weight by the rate, whatever the gradient
    assert max(np.abs(after[name] - before[name]).max() for name in before) == pytest.approx(0.25e-3, rel=1e-2)
    assert [learner.update(make_groups(0))["lr"] for _ in range(4)] == pytest.approx([0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("model", [PolicyModel, ValueModel])
def test_checkpointing_keeps_one_hidden_state_a_layer(tmp_path: Path, model: type[PolicyModel | ValueModel]) -> None:
    folder = make_policy(tmp_path)
    micro_batch = pack(flatten([t for group in make_groups(3) for t in group.trajectories]), range(8))
    kept = {}
    for checkpointing in (False, True):
        arguments = (1.0, checkpointing) if model is PolicyModel else (checkpointing,)
        module = model(folder, torch.float32, *arguments)  # type: ignore[arg-type]
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        kept[checkpointing] = _num_bytes_kept(lambda module=module: module(micro_batch), weights)  # type: ignore[misc]
    assert kept[True] < 0.5 * kept[False]


def _num_bytes_kept(forward: Callable[[], object], weights: set[int]) -> int:
    """Bytes of what autograd keeps for the backward pass, each storage once, weights left out."""
    sizes: dict[int, int] = {}
    held: list[torch.Tensor] = []  # or an address would be used twice

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        forward()
    return sum(sizes.values())
