"""What DeepSpeed wraps: a policy that returns log-probs, a critic that returns values, both of a packed row.

Only the hidden states that predict a MODEL token go through the language-model head, and not more of them at a time
than ``HEAD_CHUNK`` logits, so that no tensor of all the tokens by the whole vocabulary exists.

Notation: T tokens of the row, M MODEL tokens, V vocabulary, C hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from learners.attention import PACKED_ATTENTION
from learners.batching import MicroBatch

HEAD_CHUNK = 2**26
"""Logits computed at once: 256 MiB in fp32."""


class TokenOutputs(NamedTuple):
    """What a policy says about every MODEL token."""

    logprobs: torch.Tensor  # [M], of the token that was sampled
    entropy: torch.Tensor  # [M], of the distribution it was sampled from


class _SelectedLogprobs(torch.autograd.Function):
    """Log-prob of the target and entropy of the distribution, from logits.

    By hand because autograd would keep three tensors of the size of the logits where one does.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: torch.Tensor, target_ids_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_MV = logits_MV.float().log_softmax(-1)
        probs_MV = logprobs_MV.exp()
        logprobs_M = logprobs_MV.gather(-1, target_ids_M.unsqueeze(-1)).squeeze(-1)
        # A token of probability 0 adds nothing, not the NaN that 0 times -inf would be.
        entropy_M = -torch.linalg.vecdot(probs_MV, logprobs_MV.clamp_(min=torch.finfo(torch.float32).min))
        ctx.save_for_backward(probs_MV, target_ids_M, entropy_M)
        ctx.dtype = logits_MV.dtype
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_M: torch.Tensor | None, grad_entropy_M: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        probs_MV, target_ids_M, entropy_M = ctx.saved_tensors
        grad_MV = torch.zeros_like(probs_MV) if grad_logprobs_M is None else probs_MV * -grad_logprobs_M.unsqueeze(-1)
        if grad_logprobs_M is not None:
            grad_MV.scatter_add_(-1, target_ids_M.unsqueeze(-1), grad_logprobs_M.unsqueeze(-1))
        if grad_entropy_M is not None:
            tiny = torch.finfo(torch.float32).tiny
            surprise_MV = probs_MV.clamp(min=tiny).log() + entropy_M.unsqueeze(-1)
            grad_MV -= grad_entropy_M.unsqueeze(-1) * probs_MV * surprise_MV
        return grad_MV.to(ctx.dtype), None


class PolicyModel(nn.Module):
    """A causal language model that scores the MODEL tokens of a packed row."""

    def __init__(self, policy_dir: Path, dtype: torch.dtype, temperature: float, gradient_checkpointing: bool) -> None:
        """Load a Hugging Face folder; logits are divided by ``temperature``, as they were when tokens were sampled."""
        super().__init__()
        self.model = load_causal_lm(policy_dir, dtype, gradient_checkpointing)
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> TokenOutputs:
        """Score the MODEL tokens."""
        hidden_TC = packed_hidden_states(self.model.get_decoder(), batch)
        hidden_MC = hidden_TC.index_select(0, batch.predict_positions)
        rows = max(1, HEAD_CHUNK // self.model.config.vocab_size)
        if len(hidden_MC) <= rows:
            return self._score(hidden_MC, batch.target_ids)
        chunks = [
            checkpoint(self._score, hidden, target_ids, use_reentrant=False)
            for hidden, target_ids in zip(hidden_MC.split(rows), batch.target_ids.split(rows), strict=True)
        ]
        return TokenOutputs(torch.cat([c.logprobs for c in chunks]), torch.cat([c.entropy for c in chunks]))

    def _score(self, hidden_MC: torch.Tensor, target_ids_M: torch.Tensor) -> TokenOutputs:
        logits_MV = self.model.get_output_embeddings()(hidden_MC)
        if self.temperature != 1.0:
            logits_MV = logits_MV / self.temperature
        score: Any = _SelectedLogprobs.apply  # untyped in torch
        logprobs_M, entropy_M = score(logits_MV, target_ids_M)
        return TokenOutputs(logprobs_M, entropy_M)


class ValueModel(nn.Module):
    """The backbone of the policy with a scalar head: the return expected before every MODEL token."""

    def __init__(self, policy_dir: Path, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
        """Load the backbone of a Hugging Face folder; the head starts at zero, so that every value does."""
        super().__init__()
        self.backbone = load_causal_lm(policy_dir, dtype, gradient_checkpointing).get_decoder()
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the values ``[M]``."""
        hidden_TC = packed_hidden_states(self.backbone, batch)
        values: torch.Tensor = self.head(hidden_TC.index_select(0, batch.predict_positions)).squeeze(-1).float()
        return values


def load_causal_lm(policy_dir: Path, dtype: torch.dtype, gradient_checkpointing: bool = False) -> Any:
    """Load a Hugging Face folder with packed attention and without dropout.

    The tokens were sampled without dropout, so a ratio against them with dropout would be noise.
    """
    show_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar a rank, for a file that is on this disk
    try:
        model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    finally:
        if show_progress:
            logging.enable_progress_bar()
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def packed_hidden_states(backbone: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Run the backbone over a packed row and return ``[T, C]``."""
    output = backbone(
        input_ids=batch.token_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        use_cache=False,
        packing=batch.layout,
    )
    hidden_TC: torch.Tensor = output.last_hidden_state[0]
    return hidden_TC


def pair_cost(model: Any) -> float:
    """What a query-key pair costs in a Hugging Face model, in tokens: L tokens cost ``L + pair_cost * L**2``.

    By FLOPs (Chowdhery et al., arXiv:2204.02311, appendix B, but causal attention looks at half the pairs): 2 a
    parameter and token in the linear layers, 2 * num_layers * hidden_size a pair of L**2 in attention. For
    Qwen2.5-1.5B it is 1 / 30,500: at 8,000 tokens attention is a quarter of the linear layers. The head is left out, as
    it sees MODEL tokens only. Call it before ZeRO-3 takes the parameters apart.
    """
    decoder = model.get_decoder()
    num_parameters = sum(p.numel() for p in decoder.parameters()) - model.get_input_embeddings().weight.numel()
    return float(model.config.num_hidden_layers * model.config.hidden_size / num_parameters)
