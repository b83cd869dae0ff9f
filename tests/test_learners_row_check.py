"""Models whose layers are not plain causal attention: a row for each sequence, or refused with the layer's name."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from learners_common import VOCAB, make_branches, make_config, make_groups, own_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from learners.algorithms.grpo import GRPOLearner
from learners.learner import Learner
from learners.models.scoring import PolicyModel, check_rows
from learners.packing import MicroBatch
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import TokenKind, TrajectoryGroup

pytestmark = pytest.mark.engine

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = COMMON | {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
DELTA = {f"linear_{name}": size for name, size in (("key_head_dim", 8), ("value_head_dim", 8), ("conv_kernel_dim", 4))}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_d_head": 8}
GRANITE = {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 64}
GRANITE |= {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8}
ALIBI = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

SHARING = {"Qwen3": {"head_dim": 8}, "Qwen3Moe": EXPERTS | {"head_dim": 8}}
MIXING = {
    "Qwen3_5": (DELTA, r"layers\.0\.linear_attn \(Qwen3_5GatedDeltaNet\)"),
    "Qwen3Next": (DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}, r"layers\.0\.linear_attn"),
    "Lfm2": ({"block_ff_dim": 64, "layer_types": ["conv", "full_attention"] * 2}, r"layers\.0\.conv"),
    "FalconH1": (MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4}, r"layers\.0\.mamba"),
    "GraniteMoeHybrid": (MAMBA | GRANITE, r"layers\.0\.mamba"),
    "Mamba2": ({"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}, r"layers\.0\.mixer"),
}


def save(folder: Path, family: str, **settings: object) -> Path:
    """Save a small model of a family with random weights."""
    torch.manual_seed(0)
    text = "Text" if family == "Qwen3_5" else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    return folder


def built(folder: Path, **env_runners: object) -> Learner:
    learner = GRPOLearner(make_config(env_runners=env_runners), folder)
    learner.build()
    return learner


def alone(folder: Path, groups: Sequence[TrajectoryGroup]) -> list[torch.Tensor]:
    """Log-probs of the MODEL tokens by transformers, each trajectory without others."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    found = []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = torch.from_numpy(trajectory.token_ids).long()
        at = torch.from_numpy(np.flatnonzero(trajectory.kinds == TokenKind.MODEL))
        with torch.no_grad():
            found.append(model(ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]])
    return found


@pytest.mark.parametrize("family", [*SHARING, *MIXING])
def test_every_family_is_scored_and_trained_as_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    settings, layer = MIXING.get(family, (SHARING.get(family), ""))
    folder = save(tmp_path, family, **((COMMON if family == "Mamba2" else SIZES) | settings))
    with caplog.at_level(logging.WARNING, logger="learners.learner"):
        learner = built(folder)
    groups = make_groups(0, num_groups=2)
    before = own_logprobs(learner, groups)
    torch.testing.assert_close(before, torch.cat(alone(folder, groups)), atol=2e-4, rtol=0)
    assert learner.update(groups)["grad_norm"] > 0
    assert (own_logprobs(learner, groups) - before).abs().max() > 1e-3
    warnings = [record.getMessage() for record in caplog.records if record.name == "learners.learner"]
    assert len(warnings) == bool(layer)
    for warning in warnings:
        assert re.match(f"policy.model: {layer}.* mixes the sequences of a packed row", warning)


@pytest.mark.parametrize("family", ["Qwen3_5", "Lfm2"])
def test_a_kernel_that_takes_the_ends_of_sequences_gets_them_and_whole_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The kernels need a GPU. What they document is done by transformers' own functions, sequence by sequence."""
    folder = save(tmp_path, family, **(SIZES | MIXING[family][0]))
    branches = make_branches(0)
    groups = [*make_groups(0, num_groups=2), TrajectoryGroup(branches[0].task, tuple(branches))]
    expected = torch.cat(alone(folder, groups))
    module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    conv = module.causal_conv1d_fn

    def causal_conv1d(row: torch.Tensor, *args: Any, seq_idx: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        parts = [row] if seq_idx is None else row.split(seq_idx[0].bincount().tolist(), dim=-1)
        return torch.cat([conv(part, *args, **kwargs) for part in parts], dim=-1)

    monkeypatch.setattr(module, "causal_conv1d_fn", causal_conv1d)
    if family == "Qwen3_5":
        rule = module.torch_chunk_gated_delta_rule

        def delta_rule(
            *row: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor,
            cu_seqlens: torch.Tensor | None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            lengths = [g.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
            parts = zip(*(x.split(lengths, dim=1) for x in (*row, g, beta)), strict=True)
            found = [rule(q, k, v, g=decay, beta=rate, **kwargs)[0] for q, k, v, decay, rate in parts]
            return torch.cat(found, dim=1), None

        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", delta_rule)
    learner = built(folder)
    assert (learner.row_tokens > 1, learner.shares_tokens) == (True, False)
    torch.testing.assert_close(own_logprobs(learner, groups), expected, atol=2e-4, rtol=0)
    assert learner.update(groups)["grad_norm"] > 0


@pytest.mark.parametrize(("family", "mixes"), [("Qwen3", False), ("Qwen3_5", True), ("Lfm2", True)])
def test_in_half_precision_rounding_is_told_from_mixing(tmp_path: Path, family: str, mixes: bool) -> None:
    settings = SHARING[family] if family in SHARING else MIXING[family][0]
    policy = PolicyModel(save(tmp_path, family, **(SIZES | settings)), torch.bfloat16, 1.0)

    def score(row: MicroBatch) -> torch.Tensor:
        rounding = 0.03 * torch.randn(len(row.column_index), generator=torch.Generator().manual_seed(row.num_tokens))
        return policy(row).logprobs + rounding  # a GPU takes another kernel for another length

    backbone = policy.model.get_decoder()
    layer, shares = check_rows(score, backbone, VOCAB, torch.bfloat16, torch.device("cpu"), 256)
    assert (bool(layer), shares) == (mixes, not mixes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_rope_that_depends_on_the_longest_sequence_is_refused_beyond_its_length(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    folder = save(tmp_path, "Qwen2", **SIZES, rope_parameters=rope)
    assert built(folder, max_context_tokens=256).row_tokens > 1
    with pytest.raises(ConfigError, match=r"depend on what follows.* through rotary_emb \(Qwen2RotaryEmbedding\)"):
        built(folder, max_context_tokens=512)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, r"through h\.0\.self_attention"),
        ("Mpt", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}, "MptModel cannot run on a packed"),
        ("Falcon", ALIBI | {"alibi": True}, "does not use transformers' attention interface"),
    ],
)
def test_attention_that_takes_no_other_function_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(save(tmp_path, family, **settings, initializer_range=0.2))
