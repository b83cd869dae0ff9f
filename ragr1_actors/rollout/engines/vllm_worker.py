"""vLLM's side of a weight update, imported in its worker processes: what its weight transfer engines lack.

Every engine here loads weights, or adapters, from a safetensors file in shared memory (``FileUpdates``). Registered in
vLLM's ``WeightTransferEngineFactory``::

    ragr1_twin   CPUs: weights are packed into a second model between two passes, and the two are swapped
    ragr1_nccl   GPUs: vLLM's NCCL engine with a deadline; files are loaded in place
    ragr1_ipc    GPUs: vLLM's CUDA IPC engine; files are loaded in place
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from cluster.weights.weight_sender import TIMEOUT_S
from ragr1_actors.core.errors import TransferError
from ragr1_actors.core.weight_transport import AdapterBase
from ragr1_actors.rollout.engines.adapters import merged_weights

DEADLINE_S = TIMEOUT_S / 2
"""For a broadcast; the sender waits for longer, and then ends the runner."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class FileUpdate:
    """A part of an update, in the order of the model's layers."""

    path: str
    """A safetensors file of this node; its adapters, where ``base`` is given, are kept until the update is finished."""
    names: list[str] = field(default_factory=list)
    """Weights to load now: of the file, or of the base with the adapters merged."""
    base: str = ""
    """An ``AdapterBase`` as JSON."""
    is_last: bool = False


class WeightUpdateExtension:
    """Methods that vLLM's worker gets: ``worker_extension_cls``, with which this module is imported there."""

    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Forget an update that was not finished; vLLM would refuse to start another one."""
        self._weight_update_active = False


class FileUpdates:
    """Loads files in place, and leaves everything else to vLLM's engine that it is mixed into."""

    device: torch.device
    model: torch.nn.Module
    model_config: Any
    _is_loading = False
    _expected: frozenset[str] = frozenset()
    """vLLM's names of what an update has to hold: what the one before held."""

    def start_weight_update(self) -> None:
        """Prepare the model. An update that was abandoned is finished first: vLLM would count on from it."""
        self._forget_parts()
        if self._is_loading:
            finalize_layerwise_reload(self.model, self.model_config)
        super().start_weight_update()  # type: ignore[misc]
        self._is_loading = True

    def _forget_parts(self) -> None:
        self._loaded: set[str] = set()
        self._adapters: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a part of an update.

        Raises:
            TransferError: it is the last part, and parameters are missing.
        """
        if "path" not in update_info:
            super().update_weights(update_info)  # type: ignore[misc]
            return
        update = FileUpdate(**update_info)
        self._loaded |= self.model.load_weights(self._with_tied_head(self._read(update)))  # type: ignore[operator]
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if update.is_last:
            missing = self._expected - self._loaded
            if missing:
                raise TransferError(f"weight update lacks {len(missing)} parameters, {min(missing)} among them")
            self._expected = frozenset(self._loaded)
            self.pack()

    def _read(self, update: FileUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        if not update.base:
            with safe_open(update.path, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in update.names)
        elif update.names:
            base = AdapterBase.model_validate_json(update.base)
            yield from merged_weights(self._adapters, base, self.model_config.dtype, update.names, self.device)
        else:
            self._adapters |= load_file(update.path)

    def _with_tied_head(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tied embedding as the head too: a CPU packs the head by itself, and would keep the old one."""
        is_tied = self.model_config.hf_text_config.tie_word_embeddings
        for name, weight in weights:
            if not (is_tied and name == _HEAD):
                yield name, weight
            if is_tied and name == _EMBEDDING:
                yield _HEAD, weight

    def pack(self) -> None:
        """Do what has to be done with whole weights while requests are still running; here nothing."""

    def finish_weight_update(self) -> None:
        """Go on with the new weights; nothing may be generating."""
        super().finish_weight_update()  # type: ignore[misc]
        self._is_loading = False


class NcclEngine(FileUpdates, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's, with a deadline: its communicator would wait for ever for a sender that died."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join a new group, and leave the one before."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        """Receive a broadcast.

        Raises:
            TransferError: it did not end in time; some weights are overwritten, and others are not.
        """
        group = self.model_update_group
        watchdog = threading.Timer(DEADLINE_S, group.destroy)  # aborts the communicator, which frees this thread
        watchdog.daemon = True
        watchdog.start()
        try:
            super().receive_weights(update_info)
            torch.accelerator.synchronize()
        finally:
            watchdog.cancel()
        if group.disabled:
            raise TransferError(f"the broadcast did not end in {DEADLINE_S:g} s")


class IpcEngine(FileUpdates, IPCWeightTransferEngine):  # type: ignore[misc]
    """vLLM's, which also loads files."""


class TwinEngine(FileUpdates, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Loads files into a second model, which no request sees; what takes time on a CPU is packing the weights."""

    _twin: torch.nn.Module | None = None
    _is_packed = False

    def start_weight_update(self) -> None:
        """Make the twin the first time, and have it updated in place of the model."""
        if self._twin is None:
            self._twin = self._make_twin()
            self._expected = frozenset(name for name, _ in self._twin.named_parameters())
        self.set_weight_update_target(self._twin, self.model_config)
        if self._is_packed:
            super().start_weight_update()
        else:
            self._forget_parts()

    def _make_twin(self) -> torch.nn.Module:
        layers = self.vllm_config.compilation_config.static_forward_context
        known = set(layers)
        with set_default_torch_dtype(self.model_config.dtype), self.device:
            twin: torch.nn.Module = initialize_model(self.vllm_config, prefix="twin")
        for name in set(layers) - known:  # its attention has no cache
            del layers[name]
        return twin

    def pack(self) -> None:
        """Pack what was not packed layer by layer."""
        if self._is_packed:
            super().finish_weight_update()
            return
        with set_default_torch_dtype(self.model_config.dtype), self.device:
            process_weights_after_loading(self._twin, self.model_config, self.device)
        self._unshare()
        self._is_packed = True

    def _unshare(self) -> None:
        """Give the twin a copy of what vLLM hands out twice, rotary embeddings: a reload empties modules."""
        copies = {m: copy.deepcopy(m) for m in set(self._default_model.modules()) & set(self.model.modules())}
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if child in copies:
                    setattr(parent, name, copies[child])
        for copied in copies.values():
            record_metadata_for_reloading(copied)

    def finish_weight_update(self) -> None:
        """Swap the parameters of model and twin, packed ones too; nothing may be generating."""
        for ours, theirs in zip(self._default_model.modules(), self.model.modules(), strict=True):
            ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
            if "cpu_linear" in vars(ours):  # the packed weight is inside this function
                ours.cpu_linear, theirs.cpu_linear = theirs.cpu_linear, ours.cpu_linear


for _name, _engine in (("twin", TwinEngine), ("nccl", NcclEngine), ("ipc", IpcEngine)):
    WeightTransferEngineFactory.register_engine(f"ragr1_{_name}", _engine)
