"""What runs inside vLLM's own worker processes: taking over a policy's weights. Imported there by name.

Two steps, so that generation stands still for the second only::

    stage_policy (a file's) or      a layer, or a bucket, at a time, between two passes of the model; on a CPU the
    stage_broadcast, stage_some ... weights are packed into a twin of the model, as packing is what takes time there
    take_policy                     GPU: the weights are loaded in place.  CPU: model and twin exchange tensors

    receive_policy                  GPU, broadcast or ipc: both in one, as its memory would not hold them twice
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

from cluster.weights.weight_stream import NO_GROUP, Invitation, Weights, WeightStream, join
from ragr1_actors.core.errors import EngineError, TransferError
from ragr1_actors.core.weight_transport import AdapterBase
from ragr1_actors.rollout.engines.adapters import MergedSource, Source, merged_weights

_LAYER = re.compile(r"^.*?\.\d+\.")


class PolicyLoader:
    """vLLM's worker class gets these methods (``worker_extension_cls``); ``self`` is the worker."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _source: Source | None = None
    """What is being staged."""
    _names: set[str] | None = None
    _host_weights: dict[str, torch.Tensor] | None = None
    """What ``take_policy`` loads, where there is no twin."""
    _twin: _Twin | None = None
    _weight_group: WeightStream | None = None

    def stage_policy(self, path: str, base: str) -> None:
        """Begin with what is in the safetensors file ``path``: weights, or the adapters of ``base``, if that is any."""
        weights = load_file(path)  # a map of the file: nothing is read yet
        self._names = self._names or set(weights)
        if set(weights) != self._names:  # what is not in it would stay as it was two updates ago
            raise ValueError(f"update of {len(weights)} parameters, expected the {len(self._names)} of the first one")
        self._source = self._merging(_File(weights), base)
        self._begin()

    def stage_broadcast(self) -> str:
        """Begin with the weights that come next from the weight group; return what went wrong."""
        if self._weight_group is None:
            return NO_GROUP
        try:
            self._weight_group.begin()
        except TransferError as error:
            return str(error)
        self._source = self._merging(self._weight_group, self._weight_group.invitation.base)
        self._begin()
        return ""

    def _merging(self, source: Source, base: str) -> Source:
        if not base:
            return source
        return MergedSource(source, AdapterBase.model_validate_json(base), **self._policy_form)

    @property
    def _policy_form(self) -> dict[str, Any]:
        config = self.vllm_config.model_config
        return {"dtype": config.dtype, "is_tied": config.hf_text_config.tie_word_embeddings}

    def _begin(self) -> None:
        self._host_weights = None
        if self.model_runner.device.type != "cpu":
            self._host_weights = {}
            return
        if self._twin is None:
            self._twin = _Twin(self.vllm_config, self.model_runner.get_model())
        self._twin.begin()

    @torch.no_grad()
    def stage_some(self) -> tuple[bool, str]:
        """Stage what there is; return whether that was the last of it, or else what went wrong with the transfer."""
        assert self._source is not None, "stage_some() before stage_policy()"
        try:
            arrived = self._source.take()
        except (TransferError, EngineError) as error:
            self._source = None
            return False, str(error)
        if self._host_weights is not None:
            self._host_weights |= {name: tensor.clone() for name, tensor in arrived}
        elif self._twin is not None:
            self._twin.load(arrived)
            if self._source.is_complete:
                self._twin.finish()
        return self._source.is_complete, ""

    def take_policy(self) -> None:
        """Replace the weights by those that were staged; nothing may be generating."""
        assert self._source is not None and self._source.is_complete, "take_policy() before everything is staged"
        weights, self._source, self._host_weights = self._host_weights, None, None
        if weights is not None:
            # A bare load_weights would overwrite what the kernels have packed
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        elif self._twin is not None:
            self._twin.swap()

    def join_weight_group(self, invitation: str, first_rank: int) -> str:
        """Join, ``invitation`` in JSON, and leave the group before; return what went wrong. Waits for the others."""
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None
        try:
            self._weight_group = join(Invitation.from_json(invitation), first_rank + self.rank, self.device)
        except TransferError as error:
            return str(error)
        return ""

    def receive_policy(self) -> str:
        """Load what comes next from the weight group in place; nothing may be generating. Return what went wrong.

        In that case the model is whole in shape only, so that nothing may be generated before the next update.
        """
        if self._weight_group is None:
            return NO_GROUP
        try:
            weights, base = self._weight_group.receive(), self._weight_group.invitation.base
            if base:
                weights = merged_weights(dict(weights), AdapterBase.model_validate_json(base), **self._policy_form)
            self.model_runner.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
        except (TransferError, EngineError) as error:
            # vLLM counts what a layer has been given: without this, the next update would begin at what this one left
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
            return str(error)
        return ""


class _File:
    """Weights of a file, a decoder layer at a time."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._layers = _by_layer(weights)[::-1]

    @property
    def is_complete(self) -> bool:
        return not self._layers

    def take(self) -> Weights:
        return list(self._layers.pop().items()) if self._layers else []


class _Twin:
    """A second model of the same shape, which no request ever sees."""

    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self._config = vllm_config
        self._model = model
        layers = vllm_config.compilation_config.static_forward_context
        known = set(layers)
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("cpu"):
            self._twin = initialize_model(vllm_config, prefix="twin")
        for name in set(layers) - known:  # its attention has no cache
            del layers[name]
        self._loaded: set[str] = set()
        self._is_packed = False
        self._is_loading = False

    def begin(self) -> None:
        """Begin to load; what an update before has left unfinished is forgotten."""
        self._loaded.clear()
        if not self._is_packed:
            return
        if self._is_loading:
            # vLLM counts what a layer has been given, and would count on
            finalize_layerwise_reload(self._twin, self._config.model_config)
        initialize_layerwise_reload(self._twin)
        self._is_loading = True

    def load(self, weights: Weights) -> None:
        """Load some."""
        self._loaded |= self._twin.load_weights(iter(weights))

    def finish(self) -> None:
        """Pack what is loaded, where that has not been done layer by layer."""
        if self._is_packed:
            finalize_layerwise_reload(self._twin, self._config.model_config)
            self._is_loading = False
            return
        missing = {name for name, _ in self._twin.named_parameters()} - self._loaded
        if missing:
            raise ValueError(f"update lacks {len(missing)} parameters, {min(missing)} among them")
        device = torch.device("cpu")
        with set_default_torch_dtype(self._config.model_config.dtype), device:
            process_weights_after_loading(self._twin, self._config.model_config, device)
        _unshare(self._twin, self._model)
        self._is_packed = True

    def swap(self) -> None:
        """Exchange the parameters of model and twin, packed ones too."""
        for ours, theirs in zip(self._model.modules(), self._twin.modules(), strict=True):
            ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
            if "cpu_linear" in vars(ours):  # the packed weight is inside this function
                ours.cpu_linear, theirs.cpu_linear = theirs.cpu_linear, ours.cpu_linear


def _unshare(twin: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give the twin its own copy of what vLLM hands out twice, rotary embeddings: a reload empties modules."""
    copies = {module: copy.deepcopy(module) for module in set(model.modules()) & set(twin.modules())}
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if child in copies:
                setattr(parent, name, copies[child])
    for copied in copies.values():
        record_metadata_for_reloading(copied)


def _by_layer(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Group weights by decoder layer: ``model.layers.7.``; what stands in none is the last group."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found.group() if found else "~"

    return [{name: weights[name] for name in names} for _, names in groupby(sorted(weights, key=layer), layer)]
