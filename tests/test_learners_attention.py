"""A packed row computes, sequence by sequence, what transformers computes without packing."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from learners_common import VOCAB, make_branches, make_groups, make_policy
from tensor_bytes import TensorBytes
from transformers import AutoModelForCausalLM

from learners.deepspeed.deepspeed_engine import init_distributed
from learners.losses import TokenLoss
from learners.models import scoring
from learners.models.scoring import (
    PolicyModel,
    TokenOutputs,
    block_attention,
    flash_attention,
    packed_hidden_states,
    takes_rows,
)
from learners.packing import PackedLayout, flatten, pack, packed_layout
from learners.train_batch import Meter
from ragr1_actors.core.section import Checkpointing

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("begins_alike", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_packed_equals_unpacked(tmp_path: Path, kv_heads: int, begins_alike: bool, checkpointing: bool) -> None:
    make_policy(tmp_path, kv_heads=kv_heads, tied=kv_heads != 4)
    assert_scored_as_alone(tmp_path, begins_alike, checkpointing)


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "Gemma3": BOTH | {"query_pre_attn_scalar": 8},
    "Cohere2": BOTH | {"logit_scale": 0.25},
    "GptOss": BOTH | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # and sinks
}


@pytest.mark.parametrize("window", [1, 8, 40])
@pytest.mark.parametrize("begins_alike", [False, True])
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_and_sinks_are_those_of_transformers(
    tmp_path: Path, family: str, begins_alike: bool, window: int
) -> None:
    """Sequences are up to 120 tokens long; where they begin alike, a window reaches from a row into another's."""
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**(SIZES | WINDOWS[family]), sliding_window=window)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(tmp_path)
    checkpointing: dict[int, Checkpointing] = {8: True, 40: "selective"}
    assert_scored_as_alone(tmp_path, begins_alike, checkpointing.get(window, False), max_run=30)


def assert_scored_as_alone(
    policy_dir: Path, begins_alike: bool, checkpointing: Checkpointing, max_run: int = 9
) -> None:
    """A packed row has the log-probs, entropies and gradients of transformers' eager attention on each sequence."""
    policy = PolicyModel(policy_dir, torch.float32, 0.7, gradient_checkpointing=checkpointing)
    eager = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32, attn_implementation="eager")
    trajectories = [t for group in make_groups(1, max_run=max_run) for t in group.trajectories]
    if begins_alike:
        trajectories[5:9] = make_branches(1, max_run=max_run)[:4]
    flat = flatten(trajectories)
    order = [3, 6, 8, 0, 12, 5, 7]
    micro_batch = pack(flat, order)
    assert (micro_batch.layout.shared is not None) == begins_alike
    outputs = policy(micro_batch)
    outputs.logprobs.sum().backward()

    expected, entropy = (torch.full((len(flat.model_positions),), torch.nan) for _ in range(2))
    for index in order:
        ids = torch.from_numpy(trajectories[index].token_ids).long()
        logprobs = (eager(ids[None]).logits[0] / 0.7).log_softmax(-1)
        at = torch.from_numpy(trajectories[index].kinds == 1).nonzero()[:, 0]
        columns = slice(*flat.model_offsets[index : index + 2].tolist())
        expected[columns] = logprobs[at - 1, ids[at]]
        entropy[columns] = -(logprobs[at - 1].exp() * logprobs[at - 1]).sum(-1)
    expected[micro_batch.column_index].sum().backward()
    # on a CPU with AVX2 alone they differ by 1.2e-5
    torch.testing.assert_close(outputs.logprobs, expected[micro_batch.column_index], atol=3e-5, rtol=0)
    torch.testing.assert_close(outputs.entropy, entropy[micro_batch.column_index], atol=3e-5, rtol=0)
    for (name, ours), theirs in zip(policy.model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        scale = theirs.grad.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, atol=1e-5, rtol=0, msg=name)


def test_no_sequence_sees_another(tmp_path: Path) -> None:
    backbone = PolicyModel(make_policy(tmp_path), torch.float32, 1.0, False).model.get_decoder()
    flat = flatten([t for group in make_groups(2) for t in group.trajectories])
    micro_batch = pack(flat, [0, 1, 2])
    before = packed_hidden_states(backbone, micro_batch)
    first = int(micro_batch.layout.boundaries[1])
    micro_batch.token_ids[:first] = (micro_batch.token_ids[:first] + 1) % 64
    after = packed_hidden_states(backbone, micro_batch)
    assert torch.equal(before[first:], after[first:])
    assert not torch.equal(before[:first], after[:first])


def test_checkpointing_and_head_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy(tmp_path)
    micro_batch = pack(flatten([t for group in make_groups(3) for t in group.trajectories]), range(8))
    results = []
    variants: list[tuple[Checkpointing, int]] = [(False, 2**26), (True, 2**26), ("selective", 2**26), (False, 64 * 7)]
    for checkpointing, chunk in variants:
        monkeypatch.setattr("learners.models.scoring_head.HEAD_CHUNK", chunk)
        policy = PolicyModel(tmp_path, torch.float32, 1.0, checkpointing)
        outputs = policy(micro_batch)
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        results.append([outputs.logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_blocks_cover_the_row_and_waste_little() -> None:
    lengths = sorted(range(30, 150), reverse=True)
    layout = packed_layout(lengths)
    edges = [block.start for block in layout.blocks] + [sum(lengths)]
    assert [block.stop for block in layout.blocks] == edges[1:]
    assert sum(block.num_seqs for block in layout.blocks) == len(lengths)
    assert all(block.num_seqs * block.num_queries * 0.875 <= block.stop - block.start for block in layout.blocks)
    assert packed_layout([5, 5, 5]).blocks[0].slots is None, "equal lengths need no scatter"


def test_blocks_of_what_trajectories_share_waste_little() -> None:
    """Sequences of a block have about as many queries, and about as many keys."""
    layout = pack(flatten([*make_branches(2, 15, max_run=60), *make_branches(3, 15, max_run=90)]), range(30)).layout
    assert layout.shared is not None
    ends = layout.boundaries[1:]
    owners = torch.bucketize(layout.shared.origin, ends, right=True)
    own, lengths = owners.bincount(minlength=30).tolist(), layout.boundaries.diff().tolist()
    edges = [block.start for block in layout.blocks] + [len(layout.shared.origin)]
    assert [block.stop for block in layout.blocks] == edges[1:]
    first = padded = 0
    for block in layout.blocks:
        chosen = slice(first, first := first + block.num_seqs)
        assert (block.num_queries, block.num_keys) == (max(own[chosen]), max(lengths[chosen]))
        assert block.num_queries * block.num_seqs * 0.875 <= sum(own[chosen]) == block.stop - block.start
        assert block.num_keys * block.num_seqs * 0.875 <= sum(lengths[chosen])
        padded += block.num_seqs * block.num_queries * block.num_keys
    assert layout.useful_cells == sum(count * length for count, length in zip(own, lengths, strict=True))
    assert layout.padded_cells == padded >= layout.useful_cells


def test_boundaries_say_where_sequences_begin_and_end() -> None:
    layout = packed_layout([5, 4, 2, 2])
    assert layout.boundaries.tolist() == [0, 5, 9, 11, 13]
    assert (layout.boundaries.dtype, layout.max_len) == (torch.int32, 5)
    assert layout.to(torch.device("meta")).boundaries.is_meta


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What ``varlen_attn`` documents, sequence by sequence, for a machine without its kernel."""
    assert torch.equal(cu_seq_q, cu_seq_k) and window_size[1] == 0
    edges = cu_seq_q.tolist()
    lengths = [end - start for start, end in pairwise(edges)]
    assert (max_q, max_k, edges[-1]) == (max(lengths), max(lengths), len(query))
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        if window_size[0] >= 0:  # keys before a query's own
            hidden |= torch.ones_like(hidden).tril(-1 - window_size[0])
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "layout",
    [packed_layout([9, 8, 5, 2, 7]), pack(flatten(make_branches(2)), range(6)).layout],
    ids=["whole", "shared"],
)
def test_flash_attention_asks_for_what_the_blocks_compute(
    monkeypatch: pytest.MonkeyPatch, layout: PackedLayout, kv_heads: int
) -> None:
    torch.manual_seed(0)
    num_tokens = layout.num_tokens if layout.shared is None else len(layout.shared.origin)
    query, key, value = (torch.randn(num_tokens, heads, 8) for heads in (4, kv_heads, kv_heads))
    monkeypatch.setattr(scoring, "varlen_attn", plain_varlen)
    for scaling, window in ((None, None), (0.5, None), (None, 1), (None, 3), (0.5, 50)):
        flash = flash_attention(query, key, value, layout, scaling, window)
        torch.testing.assert_close(flash, block_attention(query, key, value, layout, scaling, window))


def test_torchs_kernel_takes_what_flash_attention_gives_it() -> None:
    """Its operator is called with tensors without data: names, types and shapes are checked, forward and backward."""
    layout = packed_layout([5, 4, 2]).to(torch.device("meta"))
    make = partial(torch.empty, device="meta", dtype=torch.bfloat16, requires_grad=True)
    query, key, value = make(11, 4, 8), make(11, 2, 8), make(11, 2, 8)
    output = flash_attention(query, key, value, layout)
    output.sum().backward()
    assert output.shape == query.shape
    assert key.grad is not None and key.grad.shape == key.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_never_asks_for_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "varlen_attn", None)
    row = torch.randn(1, 4, 11, 8, dtype=dtype)
    module = torch.nn.Identity()
    output, _ = scoring.packed_attention(module, row, row, row, None, packing=packed_layout([5, 4, 2]))
    assert output.shape == (1, 11, 4, 8)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_flash_attention_is_for_gpus_in_half_precision(device: str, dtype: torch.dtype, expected: bool) -> None:
    assert takes_rows(torch.device(device), dtype) is expected


@pytest.mark.parametrize(("in_blocks", "expected"), [(True, 1 - 41 / 75), (False, 0.0)])
def test_padding_is_counted_where_there_are_blocks(in_blocks: bool, expected: float) -> None:
    micro_batch = pack(flatten([t for group in make_groups(1) for t in group.trajectories]), range(3))
    meter = Meter()
    layout = replace(micro_batch.layout, useful_cells=41, padded_cells=75)
    meter.add_layout([replace(micro_batch, layout=layout)], in_blocks=in_blocks)
    zeros = torch.zeros(len(micro_batch.target_ids))
    meter.add_tokens(micro_batch, TokenOutputs(zeros, zeros), None, TokenLoss(zeros))
    meter.num_steps = 1
    init_distributed(0, 1)
    assert meter.reduce(torch.device("cpu"))["attention_padding"] == pytest.approx(expected)


def test_keys_and_values_are_kept_once_for_the_heads_of_a_group_bit_for_bit() -> None:
    layout, found = packed_layout([40, 37, 9]), []
    for keeps_small in (True, False):
        torch.manual_seed(0)
        query, key, value = (torch.randn(86, heads, 8, requires_grad=True) for heads in (12, 2, 2))
        with TensorBytes(known=(query, key, value)) as made:
            output = block_attention(query, key, value, layout, keeps_small=keeps_small)
            kept = made.now
        output.square().sum().backward()
        found.append((kept, output, query.grad, key.grad, value.grad))
    (small, *ours), (large, *plain) = found
    assert large - small > 4 * 86 * 8 * 2 * (12 - 2) - 1  # float32
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("count", [3, 6])
def test_what_the_backward_pass_copies_again_is_what_the_forward_pass_had(
    kv_heads: int, value_dim: int, count: int
) -> None:
    """Values of another width than keys, as in DeepSeek-V3, take torch's plain kernel, which keeps views of them."""
    layout, found = pack(flatten(make_branches(4, count)), range(count)).layout, []
    for keeps_small in (True, False):
        torch.manual_seed(0)
        assert layout.shared is not None
        shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
        query, key, value = (torch.randn(len(layout.shared.origin), *x, requires_grad=True) for x in shapes)
        output = block_attention(query, key, value, layout, keeps_small=keeps_small)
        output.square().sum().backward()
        found.append((output, query.grad, key.grad, value.grad))
    for ours, plain in zip(*found, strict=True):
        assert ours is not None and plain is not None and torch.equal(ours, plain)


def test_layers_keep_neither_copies_nor_masks_of_what_trajectories_share() -> None:
    layout = pack(flatten(make_branches(4, 8, max_run=60)), range(8)).layout
    assert layout.shared is not None
    row = len(layout.shared.origin)
    query, key, value = (torch.randn(row, heads, 8, requires_grad=True) for heads in (2, 2, 2))
    kept = []
    with TensorBytes(known=(query, key, value)) as made:
        for _ in range(3):
            kept.append((made.now, block_attention(query, key, value, layout)))
        kept.append((made.now, query))
    first, second, third = (after - before for (before, _), (after, _) in pairwise(kept))
    num_pairs = sum(one.num_seqs * one.num_queries * one.num_keys for one in layout.blocks if one.keys is not None)
    assert second == third <= first - 4 * num_pairs, "one mask for all layers"
    num_queries = sum(block.num_seqs * block.num_queries for block in layout.blocks)
    assert second <= 4 * 2 * (row * 8 + num_queries * (8 + 8 + 1)), "outputs, padded queries and outputs, and sums"


def test_a_pass_leaves_nothing_behind(tmp_path: Path) -> None:
    """Micro-batches of a step are alive until it ends; a mask grows with the square of the length."""
    make_policy(tmp_path)
    flat = flatten(make_branches(1))
    for checkpointing in (False, True):
        policy = PolicyModel(tmp_path, torch.float32, 1.0, checkpointing)
        policy(pack(flat, range(6))).logprobs.sum().backward()  # makes the gradients
        trained = [tensor for one in policy.parameters() for tensor in (one, one.grad) if tensor is not None]
        micro_batch = pack(flat, range(6))
        assert micro_batch.layout.shared is not None
        parts = (micro_batch, micro_batch.layout.shared, *micro_batch.layout.blocks)
        packed = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
        with TensorBytes(known=[*packed, *trained, *policy.buffers()]) as made:
            policy(micro_batch).logprobs.sum().backward()
            gc.collect()
        assert made.peak > made.now == 0
