"""What runs inside vLLM's own worker processes: taking over a policy's weights. Imported there by name.

Two steps, so that generation stands still for the second only::

    stage_policy, stage_some ...    a layer at a time, between two passes of the model; on a CPU the weights are packed
                                    into a twin of the model, as packing is what takes time there
    take_policy                     GPU: the weights are loaded in place.  CPU: model and twin exchange tensors
"""

from __future__ import annotations

import copy
import re
from itertools import groupby
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

Weights = dict[str, torch.Tensor]
_LAYER = re.compile(r"^.*?\.\d+\.")


class PolicyLoader:
    """vLLM's worker class gets these methods (``worker_extension_cls``); ``self`` is the worker."""

    model_runner: Any
    vllm_config: Any
    _groups: list[Weights] | None = None
    """Still to be staged, the last one first."""
    _names: set[str] | None = None
    _host_weights: Weights | None = None
    """What ``take_policy`` loads, where there is no twin."""
    _twin: Any = None

    def stage_policy(self, path: str) -> None:
        """Begin with the weights in the safetensors file ``path``."""
        weights = load_file(path)  # a map of the file: nothing is read yet
        self._names = self._names or set(weights)
        if set(weights) != self._names:  # what is not in it would stay as it was two updates ago
            raise ValueError(f"update of {len(weights)} parameters, expected the {len(self._names)} of the first one")
        self._groups = _by_layer(weights)[::-1]
        if self.model_runner.device.type != "cpu":
            return
        if self._twin is None:
            self._twin = self._make_twin(weights)
            self._groups = []
        else:
            initialize_layerwise_reload(self._twin)

    @torch.no_grad()
    def stage_some(self) -> bool:
        """Stage the next layer; return whether all are."""
        assert self._groups is not None, "stage_some() before stage_policy()"
        if self._groups:
            group = self._groups.pop()
            if self._twin is None:
                self._host_weights = (self._host_weights or {}) | {name: group[name].clone() for name in group}
            else:
                self._twin.load_weights(iter(group.items()))
                if not self._groups:
                    finalize_layerwise_reload(self._twin, self.vllm_config.model_config)
        return not self._groups

    def take_policy(self) -> None:
        """Replace the weights by those that were staged; nothing may be generating."""
        assert self._groups == [], "take_policy() before everything is staged"
        weights, self._groups, self._host_weights = self._host_weights, None, None
        if weights is not None:
            # A bare load_weights would overwrite what the kernels have packed
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        else:
            _swap(self.model_runner.get_model(), self._twin)

    @torch.no_grad()
    def _make_twin(self, weights: Weights) -> Any:
        """Return a second model of the same shape with these weights, which no request will ever see."""
        layers = self.vllm_config.compilation_config.static_forward_context
        known = set(layers)
        device = torch.device("cpu")
        with set_default_torch_dtype(self.vllm_config.model_config.dtype), device:
            twin = initialize_model(self.vllm_config, prefix="twin")
            missing = {name for name, _ in twin.named_parameters()} - twin.load_weights(iter(weights.items()))
            if missing:
                raise ValueError(f"update lacks {len(missing)} parameters, {min(missing)} among them")
            process_weights_after_loading(twin, self.vllm_config.model_config, device)
        for name in set(layers) - known:  # its attention has no cache
            del layers[name]
        _unshare(twin, self.model_runner.get_model())
        return twin


def _unshare(twin: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give the twin its own copy of what vLLM hands out twice, rotary embeddings: a reload empties modules."""
    copies = {module: copy.deepcopy(module) for module in set(model.modules()) & set(twin.modules())}
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if child in copies:
                setattr(parent, name, copies[child])
    for copied in copies.values():
        record_metadata_for_reloading(copied)


def _by_layer(weights: Weights) -> list[Weights]:
    """Group weights by decoder layer: ``model.layers.7.``; what stands in none is the last group."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found.group() if found else "~"

    return [{name: weights[name] for name in names} for _, names in groupby(sorted(weights, key=layer), layer)]


def _swap(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Exchange the parameters of two models of one shape, packed ones too."""
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
        if "cpu_linear" in vars(ours):  # the packed weight is inside this function
            ours.cpu_linear, theirs.cpu_linear = theirs.cpu_linear, ours.cpu_linear
