"""Check that the sequences of a packed row do not affect each other in a model, made when the policy is built.

Packing is exact for causal attention. Recurrent layers and convolutions carry a state from one sequence to the next,
and some rotary embeddings depend on the longest sequence of the row. No list of models is complete, so two short
sequences are scored::

    alone        [ a a a ]   [ b b b ]
    packed       [ a a a   b b b ]      b differs: a layer mixes sequences; they need a row each
    followed     [ a a a   c c c ]      a differs, with c at the last positions: no row gives the right scores
    shared       [ a a a   d ]          a a d differs: a layer takes the row in order; every sequence is whole in it

Notation: T tokens of a row, H tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from learners.packing import FlatTrajectories, MicroBatch, pack
from ragr1_actors.core.errors import ConfigError

_LENGTH = 24
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Gap between two log-probs of one token, in nats, up to which it counts as rounding."""
_ROUNDING_FACTOR = 4.0
"""Factor by which the gap may exceed the first sequence's, which is only rounding, as nothing precedes it."""

Score = Callable[[MicroBatch], torch.Tensor]
"""Function that returns the log-probs of the MODEL tokens of a row, ``[M]``."""


def check_rows(
    score: Score, backbone: Any, vocab_size: int, dtype: torch.dtype, device: torch.device, max_length: int
) -> tuple[str, bool]:
    """Return the first layer through which sequences of a packed row reach each other, and whether a row may share.

    The layer is empty if there is none. A row that shares holds the common beginning of sequences once.
    ``max_length`` is the longest trajectory's. All ranks call together: five to seven passes of at most 48 tokens.

    Raises:
        ConfigError: the scores of a sequence depend on what follows it; the message names the layer.
    """
    rng = np.random.default_rng(0)
    first, second, other = (rng.integers(vocab_size, size=_LENGTH) for _ in range(3))
    head, tail = slice(0, _LENGTH), slice(_LENGTH, None)

    def run(*sequences: NDArray[np.int64], shift: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        row = _row(sequences)
        positions = torch.cat((row.position_ids[head], row.position_ids[tail] + shift))
        try:
            with torch.no_grad(), _recorded(backbone, row.num_tokens) as outputs:
                return score(replace(row, position_ids=positions).to(device)), outputs
        except (AttributeError, TypeError) as error:  # the model asks for a mask or takes no other arguments
            raise ConfigError(
                f"policy.model: {type(backbone).__name__} cannot run on a packed row ({error}); expected causal "
                "attention by transformers' attention interface; take another model"
            ) from error

    def gap(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().max())

    limit, count = _ROUNDING[dtype], _LENGTH - 1  # the first token of a sequence is not predicted
    packed, outputs = run(first, second)
    has_rope = bool(backbone.config.to_dict().get("rope_parameters"))  # other positions may be rows of a table
    followed, followed_outputs = run(first, other, shift=max(0, max_length - _LENGTH) if has_rope else 0)
    if gap(packed[:count], followed[:count]) > limit:
        raise ConfigError(
            f"policy.model: the scores of a sequence depend on what follows it in a row, by "
            f"{gap(packed[:count], followed[:count]):.2g} nats, through {_first_gap(outputs, followed_outputs, head)}; "
            "expected causal attention by transformers' attention interface, and rotary frequencies that do not change "
            "with the length; take another model, or with dynamic or long RoPE lower env_runners.max_context_tokens to "
            "the length before scaling"
        )
    rounding = gap(packed[:count], run(first)[0])
    limit = max(limit, _ROUNDING_FACTOR * rounding)
    if gap(packed[count:], run(second)[0]) > limit:
        _, other_outputs = run(other, second)
        return _first_gap(outputs, other_outputs, tail), False
    branch = np.concatenate([first[: _LENGTH // 2], other[_LENGTH // 2 :]])
    row = _row((first, branch))
    assert row.layout.shared is not None
    scores = torch.empty(2 * count)
    scores[row.column_index] = run(first, branch)[0].cpu()
    return "", gap(scores[count:], run(branch)[0].cpu()) <= limit


def _row(sequences: Sequence[NDArray[np.int64]]) -> MicroBatch:
    offsets = np.arange(len(sequences) + 1) * _LENGTH
    is_model = np.arange(len(sequences) * _LENGTH) % _LENGTH > 0
    num_model = int(is_model.sum())
    flat = FlatTrajectories(
        token_ids=np.concatenate(sequences),
        offsets=offsets,
        response_mask=is_model,
        model_offsets=np.arange(len(sequences) + 1) * (_LENGTH - 1),
        first_sequences=np.arange(len(sequences) + 1),
        rollout_logprobs=np.zeros(num_model, np.float32),
        policy_versions=np.zeros(num_model, np.int32),
    )
    return pack(flat, range(len(sequences)))


@contextmanager
def _recorded(backbone: Any, num_tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs of the backbone's parts, ``[1, T, ...]`` each, in the order in which they end."""
    parts = dict(backbone.named_children())
    for name, layers in backbone.named_children():
        if isinstance(layers, nn.ModuleList):
            parts |= {f"{name}.{i}.{part}": module for i, x in enumerate(layers) for part, module in x.named_children()}
    outputs: dict[str, torch.Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, object, object], None]:
        def record(module: nn.Module, args: object, output: object) -> None:
            found = output[0] if isinstance(output, tuple) else output
            if isinstance(found, torch.Tensor) and found.shape[:2] == (1, num_tokens):
                outputs[f"{name} ({type(module).__name__})"] = found

        return record

    hooks = [module.register_forward_hook(recorder(name)) for name, module in parts.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _first_gap(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tokens: slice) -> str:
    """Return the first part whose outputs differ at ``tokens``; rows of one shape have no rounding between them."""
    for name, output in one.items():
        if name in two and not torch.equal(output[0, tokens], two[name][0, tokens]):
            return name
    return "its layers"
