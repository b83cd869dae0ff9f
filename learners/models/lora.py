"""The only module that imports peft: low-rank adapters of a model's linear layers, and the merged weights.

::

    W, frozen      A, B, trained        saved:      W + alpha / rank * B A   by the name of W;  A and B in a folder
       └─ layer(x) = W x + alpha / rank * B A x
                                        published:  A, B;  the engines merge them (``engines/adapters.py``)

The names of a model with adapters are ``...q_proj.base_layer.weight``, ``...q_proj.lora_A.default.weight`` and
``...q_proj.lora_B.default.weight``. Only this file and a learner's state use them; the state holds adapters and their
moments only. The published names are ``...q_proj.lora_A.weight`` and ``...q_proj.lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn

from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, WholeTensor
from ragr1_actors.core.config import LoraSettings
from ragr1_actors.core.disk.digests import write_list
from ragr1_actors.core.errors import ConfigError, nearest

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(model: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Freeze a model and add adapters in place. B starts at zero, so the outputs of the model do not change.

    Raises:
        ConfigError: no linear layer has one of the names.
    """
    known = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    for name in settings.target_modules:
        if name not in known:
            message = f"learners.lora.target_modules: the policy has no linear layer {name!r}"
            raise ConfigError(message + nearest(name, known))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same A on every rank
        inject_adapter_in_model(_peft_config(settings), model, _ADAPTER)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters in this context; call without gradients."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_tensors(engine: DeepSpeedEngine) -> Iterator[WholeTensor]:
    """Yield every parameter by its name without adapters; to gather it merges its adapter."""
    layers = {name: module for name, module in engine.module.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in engine.module.named_parameters():
        if _is_adapter(name):
            continue
        tensor = engine.whole(name.replace(_BASE, "."), parameter)
        layer = layers.get(name.removesuffix(f"{_BASE}weight"))
        yield tensor if layer is None else tensor._replace(gather=partial(_merge, engine, parameter, layer))


def _merge(engine: DeepSpeedEngine, parameter: nn.Parameter, layer: Any) -> torch.Tensor:
    a_RI, b_OR = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    with engine.gathered([parameter, a_RI, b_OR]), torch.no_grad():
        delta_OI = layer.scaling[_ADAPTER] * (b_OR.float() @ a_RI.float())
        merged_OI: torch.Tensor = (parameter.float() + delta_OI).to(parameter.dtype)
    return merged_OI


def adapter_tensors(engine: DeepSpeedEngine) -> Iterator[WholeTensor]:
    """Yield A and B of every adapter by their published names."""
    for name, parameter in engine.module.named_parameters():
        if _is_adapter(name):
            yield engine.whole(name.replace(f".{_ADAPTER}.", "."), parameter)


@dataclass(frozen=True)
class AdapterCopy:
    """Copy of a policy's adapters in the host's memory."""

    settings: LoraSettings
    base: str
    """Policy to which the adapters belong: a folder or a name on a model hub."""
    tensors: dict[str, torch.Tensor]
    """Tensors by published name."""

    def write(self, directory: Path) -> None:
        """Write the folder that ``peft.PeftModel.from_pretrained`` loads, given the base model.

        Raises:
            OSError: the folder cannot be written; or ``SafetensorError``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        config = _peft_config(self.settings)
        config.base_model_name_or_path, config.task_type, config.inference_mode = self.base, TaskType.CAUSAL_LM, True
        config.save_pretrained(str(directory))
        tensors = {f"base_model.model.{name}": tensor for name, tensor in self.tensors.items()}
        save_file(tensors, directory / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        write_list(directory)


def _peft_config(settings: LoraSettings) -> LoraConfig:
    return LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target_modules)


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
