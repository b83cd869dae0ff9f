"""The only door to peft: low-rank adapters beside the linear layers of a model, and the weights they amount to.

::

    W, frozen      A, B, trained        published, saved:  W + alpha / rank * B A   by the name of W
       └─ layer(x) = W x + alpha / rank * B A x

The names of a model with adapters are ``...q_proj.base_layer.weight``, ``...q_proj.lora_A.default.weight`` and
``...q_proj.lora_B.default.weight``; outside this file nobody sees them but in a learner's state, which holds adapters
and their moments alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from learners.engine import DeepSpeedEngine
from ragr1_actors.config_checks import nearest
from ragr1_actors.errors import ConfigError
from ragr1_actors.lora_settings import LoraSettings

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(model: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Freeze a model and add adapters to it, in place. B is zero at first, so that nothing it computes changes.

    Raises:
        ConfigError: the model has no linear layer of one of the names.
    """
    known = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    for name in settings.target_modules:
        if name not in known:
            message = f"learners.lora.target_modules: the policy has no linear layer {name!r}"
            raise ConfigError(message + nearest(name, known))
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of A, on every rank alike
        inject_adapter_in_model(config, model, _ADAPTER)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Have the model compute what it did before it had adapters; without gradients."""
    layers = _adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(engine: DeepSpeedEngine, *, adapted_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, adapters merged into the weight beside them, by its name without adapters.

    All ranks iterate to the end together.

    Args:
        engine: of a model with adapters.
        adapted_only: leave out what has no adapter. It never changes, in no stage of a run: an engine that was loaded
            from the run's first policy has it.
    """
    for name, parameter, layer in _merged_parameters(engine, adapted_only):
        if layer is None:
            with engine.gathered([parameter]):
                whole = parameter.detach().clone()
        else:
            a_RI, b_OR = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            with engine.gathered([parameter, a_RI, b_OR]), torch.no_grad():
                delta_OI = layer.scaling[_ADAPTER] * (b_OR.float() @ a_RI.float())
                whole = (parameter.float() + delta_OI).to(parameter.dtype)
        yield name, whole


def merged_shapes(engine: DeepSpeedEngine, *, adapted_only: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of what ``merged_weights`` yields, in its order; nothing is gathered for it."""
    return {name: engine.full_shape(parameter) for name, parameter, _ in _merged_parameters(engine, adapted_only)}


def _merged_parameters(
    engine: DeepSpeedEngine, adapted_only: bool
) -> Iterator[tuple[str, nn.Parameter, Any]]:  # the layer with an adapter that it belongs to, or None
    layers = _adapted_layers(engine.module)
    for name, parameter in engine.module.named_parameters():
        layer = layers.get(name.removesuffix(f"{_BASE}weight"))
        if not _is_adapter(name) and (layer is not None or not adapted_only):
            yield name.replace(_BASE, "."), parameter, layer


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
