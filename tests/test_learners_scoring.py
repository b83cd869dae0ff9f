"""Policy and critic: which models they refuse, and what checkpointing of layers keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from learners_common import VOCAB, make_branches, make_groups, make_policy, make_trajectory
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from learners.models.scoring import PolicyModel, ValueModel
from learners.packing import flatten, pack
from ragr1_actors.core.errors import ConfigError
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


LOGITS = {
    "Cohere": {"logit_scale": 0.0625},
    "Granite": {"logits_scaling": 8.0},
    "HyperCLOVAX": {"logits_scaling": 0.125},
    "FalconH1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "MiniCPM3": {
        "dim_model_base": 16,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize("family", LOGITS)
def test_a_factor_of_logits_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | LOGITS[family]), initializer_range=0.2)
    folder = save(getattr(transformers, f"{family}ForCausalLM")(config), tmp_path)
    trajectory = make_groups(0)[0].trajectories[0]
    ids = torch.from_numpy(trajectory.token_ids).long()
    at = torch.from_numpy(np.flatnonzero(trajectory.kinds == TokenKind.MODEL))
    with torch.no_grad():
        found = PolicyModel(folder, torch.float32, 0.7)(pack(flatten([trajectory]), [0]))
        logits = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(ids[None]).logits[0]
    torch.testing.assert_close(found.logprobs, (logits / 0.7).log_softmax(-1)[at - 1, ids[at]], atol=1e-4, rtol=0)
    assert found.logprobs.std() > 0.05


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Gemma2", {"head_dim": 8}, "changes its logits by final_logit_softcapping=30"),
        ("RecurrentGemma", {"lru_width": 32}, "changes its logits by logits_soft_cap=30"),
        ("Llama4", {"head_dim": 8, "num_local_experts": 2}, "has chunked_attention"),
    ],
)
def test_what_the_learner_lacks_is_refused(tmp_path: Path, family: str, settings: dict[str, Any], message: str) -> None:
    text = "Text" if family == "Llama4" else ""
    config = getattr(transformers, f"{family}{text}Config")(**SIZES, **settings)
    folder = save(getattr(transformers, f"{family}ForCausalLM")(config), tmp_path)
    with pytest.raises(ConfigError, match=message):
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
