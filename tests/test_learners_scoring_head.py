"""The head in chunks: equal to autograd over whole logits, and never as large as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learners.models.scoring_head import HEAD_CHUNK, ScoringHead

pytestmark = pytest.mark.engine

Results = list[torch.Tensor]


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation returned in one tensor."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def make_head(num_tokens: int, vocabulary: int, bias: bool = False) -> tuple[ScoringHead, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = ScoringHead(torch.nn.Linear(16, vocabulary, bias=bias))
    return head, 3 * torch.randn(num_tokens, 16), torch.randint(0, vocabulary, (num_tokens,))


def whole_logits(
    head: ScoringHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).double() / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("rows", [1, 7, 30, 31])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_chunks_match_autograd_over_whole_logits(monkeypatch: pytest.MonkeyPatch, rows: int, uses: str) -> None:
    monkeypatch.setattr("learners.models.scoring_head.HEAD_CHUNK", rows * 50)
    head, hidden, targets = make_head(30, 50, bias=True)
    weights = torch.randn(2, 30)

    def run(score: Any) -> Results:
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = score(leaf)
        terms = {"logprobs": weights[0] * logprobs, "entropy": weights[1] * entropy}
        sum(terms[name].sum() for name in terms if uses in (name, "both")).backward()  # type: ignore[union-attr]
        gradients = [leaf.grad, head.weight.grad, head.bias.grad]
        return [logprobs.detach().float(), entropy.detach().float(), *(g for g in gradients if g is not None)]

    ours = run(lambda leaf: head(leaf, targets, 0.7))
    theirs = run(lambda leaf: whole_logits(head, leaf, targets, 0.7))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_chunks", [1, 512])
def test_half_precision_adds_up_the_weights_gradient_in_fp32(monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> None:
    """A token of every chunk pushes the same weight: in bf16 the sum stops growing after some hundred chunks."""
    monkeypatch.setattr("learners.models.scoring_head.HEAD_CHUNK", 8 * 1024 // num_chunks)
    torch.manual_seed(0)
    exact = ScoringHead(torch.nn.Linear(16, 8)).bfloat16().float()
    half = ScoringHead(torch.nn.Linear(16, 8)).bfloat16()
    half.load_state_dict(exact.state_dict())
    hidden, targets = (1 + torch.rand(1024, 16)).bfloat16(), torch.zeros(1024, dtype=torch.long)
    for head, inputs in ((exact, hidden.float()), (half, hidden)):
        head(inputs, targets, 1.0)[0].sum().backward()
    for ours, theirs in ((half.weight.grad, exact.weight.grad), (half.bias.grad, exact.bias.grad)):
        assert (ours.float() - theirs).norm() / theirs.norm() < 0.005


def test_two_backward_passes_over_one_graph_agree() -> None:
    head, hidden, targets = make_head(30, 50)
    logprobs, entropy = head(hidden, targets, 1.0)
    loss = logprobs.sum() + entropy.sum()
    first, second = (torch.autograd.grad(loss, head.weight, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second)


def test_an_impossible_token_has_no_gradient_that_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (HEAD_CHUNK, 3):
        monkeypatch.setattr("learners.models.scoring_head.HEAD_CHUNK", chunk)
        head = ScoringHead(torch.nn.Linear(1, 3))
        head.bias = torch.nn.Parameter(torch.tensor([0.0, float("-inf"), 1.0]))
        logprobs, entropy = head(torch.zeros(2, 1), torch.tensor([0, 2]), 1.0)
        (logprobs + entropy).sum().backward()
        assert torch.isfinite(entropy).all()
        assert torch.isfinite(head.bias.grad).all()


def test_whole_logits_are_never_held_at_a_real_vocabulary() -> None:
    """Of 151,936 tokens, Qwen2.5's vocabulary; forward, backward, and the entropy's gradient."""
    num_tokens, vocabulary = 600, 151_936
    head, hidden, targets = make_head(num_tokens, vocabulary)
    with LargestTensor() as largest:
        logprobs, entropy = head(hidden.requires_grad_(), targets, 1.0)
        (logprobs.sum() + entropy.sum()).backward()
    assert HEAD_CHUNK - vocabulary < largest.num_elements <= HEAD_CHUNK < num_tokens * vocabulary
