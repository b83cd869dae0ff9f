"""Policy and critic: which models they refuse, and what checkpointing of layers keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import VOCAB, make_branches, make_groups, make_policy, make_trajectory
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from learners.models.scoring import PolicyModel, ValueModel
from learners.packing import flatten, pack
from ragr1_actors.core.errors import ConfigError, LearnerError
from ragr1_actors.core.types import TokenKind

pytestmark = pytest.mark.engine

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_a_sliding_window_shorter_than_a_trajectory_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), range(4))
    for window, is_refused in ((batch.layout.max_len, False), (batch.layout.max_len - 1, True)):
        config = MistralConfig(**SIZES, sliding_window=window)
        folder = save(MistralForCausalLM(config), tmp_path / f"window{window}")
        policy = PolicyModel(folder, torch.float32, 1.0, False)
        if is_refused:
            with pytest.raises(LearnerError, match="sliding window shorter than a trajectory"):
                policy(batch)
        else:
            policy(batch)


def test_logits_that_are_changed_behind_the_head_are_refused(tmp_path: Path) -> None:
    folder = save(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), tmp_path)
    with pytest.raises(ConfigError, match=r"changes its logits by logits_scaling=8\.0"):
        PolicyModel(folder, torch.float32, 1.0, False)


def test_checkpointing_brings_no_dropout_into_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=None, attention_dropout=0.5)
    folder = save(MistralForCausalLM(config), tmp_path)
    batch = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), range(4))
    plain, checkpointed = (PolicyModel(folder, torch.float32, 1.0, on)(batch).logprobs for on in (False, True))
    torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("model", [PolicyModel, ValueModel])
def test_checkpointing_keeps_one_hidden_state_per_layer(tmp_path: Path, model: type[PolicyModel | ValueModel]) -> None:
    folder = make_policy(tmp_path)
    micro_batch = pack(flatten([t for group in make_groups(3) for t in group.trajectories]), range(8))
    kept = {}
    for checkpointing in (False, True):
        arguments = (1.0, checkpointing) if model is PolicyModel else (checkpointing,)
        module = model(folder, torch.float32, *arguments)  # type: ignore[arg-type]
        weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        kept[checkpointing] = _num_bytes_kept(lambda module=module: module(micro_batch), weights)  # type: ignore[misc]
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.parametrize("begin_alike", [False, True])
def test_a_value_is_read_before_its_token(tmp_path: Path, begin_alike: bool) -> None:
    rng = np.random.default_rng(0)
    trajectories = make_branches(0)[:3] if begin_alike else [make_trajectory(rng) for _ in range(3)]
    critic = ValueModel(make_policy(tmp_path), torch.float32, False)
    torch.nn.init.normal_(critic.head.weight)
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").get_decoder()
    expected: list[float] = []
    with torch.no_grad():
        micro_batch = pack(flatten(trajectories), range(3))
        assert (micro_batch.layout.shared is not None) == begin_alike
        values = torch.zeros(len(micro_batch.column_index))
        values[micro_batch.column_index] = critic(micro_batch)
        for trajectory in trajectories:
            hidden = backbone(torch.from_numpy(trajectory.token_ids).long()[None]).last_hidden_state[0]
            before = np.flatnonzero(trajectory.kinds == TokenKind.MODEL) - 1
            expected += critic.head(hidden[before])[:, 0].tolist()
    assert values.tolist() == pytest.approx(expected, abs=1e-5)


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
