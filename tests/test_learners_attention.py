"""A packed row computes, sequence by sequence, what transformers computes without packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learners_common import make_groups, make_policy
from transformers import AutoModelForCausalLM

from learners.attention import packed_layout
from learners.batching import flatten, pack
from learners.models import PolicyModel, packed_hidden_states


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_packed_equals_unpacked(tmp_path: Path, kv_heads: int) -> None:
    make_policy(tmp_path, kv_heads=kv_heads, tied=kv_heads != 4)
    policy = PolicyModel(tmp_path, torch.float32, 0.7, gradient_checkpointing=False)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    trajectories = [t for group in make_groups(1) for t in group.trajectories]
    flat = flatten(trajectories)
    order = [3, 1, 8, 0, 12, 5]
    micro_batch = pack(flat, order)
    outputs = policy(micro_batch)
    outputs.logprobs.sum().backward()

    expected, entropy = [], []
    for index in order:
        ids = torch.from_numpy(trajectories[index].token_ids).long()
        logprobs = (eager(ids[None]).logits[0] / 0.7).log_softmax(-1)
        at = torch.from_numpy(trajectories[index].kinds == 1).nonzero()[:, 0]
        expected.append(logprobs[at - 1, ids[at]])
        entropy.append(-(logprobs[at - 1].exp() * logprobs[at - 1]).sum(-1))
    torch.cat(expected).sum().backward()
    torch.testing.assert_close(outputs.logprobs, torch.cat(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.entropy, torch.cat(entropy), atol=1e-5, rtol=0)
    for (name, ours), theirs in zip(policy.model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        scale = theirs.grad.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, atol=1e-5, rtol=0, msg=name)


def test_no_sequence_sees_another(tmp_path: Path) -> None:
    backbone = PolicyModel(make_policy(tmp_path), torch.float32, 1.0, False).model.get_decoder()
    flat = flatten([t for group in make_groups(2) for t in group.trajectories])
    micro_batch = pack(flat, [0, 1, 2])
    before = packed_hidden_states(backbone, micro_batch)
    first = micro_batch.lengths[0]
    micro_batch.token_ids[:first] = (micro_batch.token_ids[:first] + 1) % 64
    after = packed_hidden_states(backbone, micro_batch)
    assert torch.equal(before[first:], after[first:])
    assert not torch.equal(before[:first], after[:first])


def test_checkpointing_and_head_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy(tmp_path)
    micro_batch = pack(flatten([t for group in make_groups(3) for t in group.trajectories]), range(8))
    results = []
    for checkpointing, chunk in ((False, 2**26), (True, 2**26), (False, 64 * 7)):
        monkeypatch.setattr("learners.head.HEAD_CHUNK", chunk)
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
    assert all(block.num_seqs * block.max_len * 0.875 <= block.stop - block.start for block in layout.blocks)
    assert packed_layout([5, 5, 5]).blocks[0].slots is None, "equal lengths need no scatter"
