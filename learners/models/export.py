"""The policy's weights by their Hugging Face names, out of an engine that may train adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, State
from ragr1_actors.core.config import LoraSettings


def policy_weights(
    engine: DeepSpeedEngine, lora: LoraSettings | None, *, adapters_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, where it is and as it is, a tied one once. All ranks iterate to the end together.

    Args:
        engine: of the policy.
        lora: its adapters, which are merged into the weights beside them.
        adapters_only: yield the adapters instead.
    """
    if lora is None:
        weights = engine.full_weights()
    else:
        from learners.models.lora import adapter_weights, merged_weights  # imports peft

        weights = adapter_weights(engine) if adapters_only else merged_weights(engine)
    return ((name.removeprefix("model."), tensor) for name, tensor in weights)


def policy_shapes(
    engine: DeepSpeedEngine, lora: LoraSettings | None, *, adapters_only: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of what ``policy_weights`` yields, in its order; nothing is gathered for it."""
    if lora is None:
        shapes = engine.full_shapes()
    else:
        from learners.models.lora import adapter_shapes, merged_shapes

        shapes = adapter_shapes(engine) if adapters_only else merged_shapes(engine)
    return {name.removeprefix("model."): shape for name, shape in shapes.items()}


def gather(stream: Iterator[tuple[str, torch.Tensor]], rank: int, is_tied: bool) -> State:
    """Return on rank 0 what ``policy_weights`` yields, as arrays; with an embedding, a tied ``lm_head.weight`` too."""
    weights: State = {}
    for name, tensor in stream:
        if rank == 0:
            weights[name] = tensor.float().cpu().numpy()
    if is_tied and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights
