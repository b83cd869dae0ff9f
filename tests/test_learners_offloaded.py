"""What rests moves through host memory that is kept, once per update; a learner that is closed leaves nothing."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learners_common import Build, make_config, make_groups, make_policy

from learners.algorithms.grpo import PPOLearner
from learners.deepspeed import offloaded as resting
from learners.deepspeed.deepspeed_engine import init_distributed
from learners.deepspeed.offloaded import Offloaded
from learners.ranks.learner_group import LearnerWorker
from ragr1_actors.core.errors import ConfigError

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


def test_views_of_a_storage_are_valid_again() -> None:
    flat = torch.arange(12.0)
    views = [flat[:5], flat[5:].view(7, 1)]
    expected = [view.clone() for view in views]
    rest = Offloaded(CPU)
    rest.offload([flat, *views])
    assert flat.untyped_storage().nbytes() == 0
    assert rest.num_bytes == 48, "each storage once"
    rest.reload()
    assert rest.num_bytes == 0
    for view, value in zip(views, expected, strict=True):
        assert torch.equal(view, value)


def test_what_cannot_be_freed_is_left() -> None:
    mapped = torch.from_numpy(np.ones(5))
    for device, tensor in ((CPU, mapped), (torch.device("meta"), torch.ones(5))):
        rest = Offloaded(device)
        rest.offload([tensor])
        assert rest.num_bytes == 0
    assert mapped.sum() == 5


def count_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> list[int]:
    """Return a list that grows with each block of host memory that is taken."""
    taken: list[int] = []
    allocate = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if size == (block_bytes,) and options.get("dtype") == torch.uint8:
            taken.append(block_bytes)
        return allocate(*size, **options)

    monkeypatch.setattr(resting, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(torch, "empty", empty)
    return taken


def test_host_memory_is_kept_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = count_blocks(monkeypatch, 32)
    rest, counts = Offloaded(CPU), []
    for count in (9, 9, 20):  # moments appear after the first step
        tensors = [torch.randn(count), torch.randn(3), torch.arange(count)]
        expected, scratch = [tensor.clone() for tensor in tensors], torch.ones(4)
        rest.offload(tensors, scratch=[scratch])
        counts.append(len(blocks))
        rest.reload()
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, expected, strict=True))
        assert not scratch.any(), "it is not copied"
    assert counts == [-(-(36 + 12 + 72) // 32)] * 2 + [-(-(80 + 12 + 160) // 32)]


def test_gradients_are_not_copied(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build(PPOLearner, make_config(training={"algorithm": "ppo"}, learners={"zero_stage": 3}))
    learner.update(make_groups(0))
    engine = learner.policy
    num_bytes = sum(4 * np.prod(engine.full_shape(parameter)) for parameter in engine.module.parameters())
    blocks = count_blocks(monkeypatch, 1024)
    assert engine.offload_states() >= 5 * num_bytes, "weights, master weights, two moments and gradients"
    assert 4 * num_bytes <= sum(blocks) < 4.1 * num_bytes
    engine.reload_states()
    learner.update(make_groups(1))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_rests_moves_once_per_update(build: Build, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    training = {"algorithm": "ppo", "num_epochs": 2, "num_minibatches": 2, "kl_coeff": 0.1}
    offload = ["critic", "reference"]
    learner = build(PPOLearner, make_config(training=training, learners={"zero_stage": stage, "offload": offload}))
    learner.update(make_groups(0))
    moves: Counter[tuple[str, int]] = Counter()

    def counted(name: str, original: Any) -> Any:
        def move(self: Offloaded, *arguments: Any, **options: Any) -> None:
            before = self.num_bytes
            original(self, *arguments, **options)
            moves[name, id(self)] += before != self.num_bytes

        return move

    for name in ("offload", "reload"):
        monkeypatch.setattr(Offloaded, name, counted(name, getattr(Offloaded, name)))
    for number in range(1, 4):
        learner.update(make_groups(number))
        often = sorted((name, count) for (name, _), count in moves.items() if count)
        # the critic; the reference is a mapped file, or at stage 3 DeepSpeed's
        assert often == [("offload", number), ("reload", number)]


def tensors() -> list[torch.Tensor]:
    """Return the tensors that Python refers to."""
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_closed_learner_leaves_nothing(tmp_path: Path, stage: int) -> None:
    gc.collect()
    others = {id(tensor) for tensor in tensors()}
    config = make_config(
        training={"algorithm": "ppo", "kl_coeff": 0.1}, learners={"zero_stage": stage, "offload": ["critic"]}
    )
    worker = LearnerWorker(config)
    worker.build("ppo", make_policy(tmp_path))
    worker.learner.update(make_groups(0))
    worker.learner.get_state()
    made = [weakref.ref(tensor) for tensor in tensors() if id(tensor) not in others]
    num_parameters = sum(1 for _ in worker.learner.policy.module.parameters())
    assert len(made) > 3 * 3 * num_parameters, "policy, critic and reference"
    gc.disable()
    try:
        worker.close()
        assert [found.shape for tensor in made if (found := tensor()) is not None] == []
    finally:
        gc.enable()


def test_the_device_is_what_the_rank_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert init_distributed(0, 1) == CPU, "a GPU that the rank did not ask for"
    assert dist.get_backend() == "gloo"


def test_a_gpu_that_torch_cannot_use_is_an_error(build: Build) -> None:
    expected = r"^learners\.num_gpus_per_learner=0\.5, but torch cannot use a GPU in learner rank 0 \(.+\); run"
    with pytest.raises(ConfigError, match=expected):
        build(PPOLearner, make_config(learners={"num_gpus_per_learner": 0.5}))
