"""vLLM's side of a weight update, imported in its worker processes: the parts that its weight transfer engines lack.

Every engine here loads weights, or adapters, from a safetensors file in shared memory (``FileUpdates``). Registered in
vLLM's ``WeightTransferEngineFactory``::

    ragr1_twin   CPUs: weights are packed into a second model between two passes, and the two are swapped
    ragr1_nccl   GPUs: vLLM's NCCL engine with a deadline; files are loaded in place
    ragr1_ipc    GPUs: vLLM's CUDA IPC engine; files are loaded in place
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from ragr1_actors.core.errors import TransferError
from ragr1_actors.core.weight_transport import TIMEOUT_S, AdapterBase, as_weight
from ragr1_actors.rollout.engines.adapters import merged_weights

DEADLINE_S = TIMEOUT_S / 2  # for a broadcast; the sender waits for longer, and then ends the runner
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")  # the second: with images
_HEAD = "lm_head.weight"


class WeightUpdateExtension:
    """Mixin of vLLM's worker by ``worker_extension_cls``, through which this module is imported there."""

    def abandon_weight_update(self) -> None:
        """Drop an unfinished update; vLLM would refuse to start another one."""
        self._weight_update_active = False


class FileUpdates:
    """Loads files in place; vLLM's engine, into which it is mixed, does everything else."""

    device: torch.device
    model: torch.nn.Module
    model_config: Any
    _expected: frozenset[str] = frozenset()
    """Names, in vLLM, that an update must have: the names in the previous update."""

    def start_weight_update(self) -> None:
        """Prepare the model. An abandoned update is finished first: vLLM would count on from it."""
        self._loaded: set[str] = set()
        self._adapters: dict[str, torch.Tensor] = {}
        super().finish_weight_update()  # type: ignore[misc]
        super().start_weight_update()  # type: ignore[misc]

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a part: vLLM's, the arguments of ``load``, or nothing, which says that all files were loaded."""
        if "path" in update_info:
            self.load(**update_info)
        elif update_info:
            super().update_weights(update_info)  # type: ignore[misc]
        else:
            self.complete()

    def load(self, path: str, names: list[str], base: str) -> None:
        """Load weights of the file, or of ``base``, an ``AdapterBase`` as JSON; without names keep its adapters."""
        if not names:
            self._adapters |= {name: as_weight(adapter) for name, adapter in load_file(path).items()}
            return
        weights: Iterator[tuple[str, torch.Tensor]]
        if base:
            found = AdapterBase.model_validate_json(base)
            weights = merged_weights(self._adapters, found, self.model_config.dtype, self.device, names)
        else:
            file: Any = safe_open(path, "pt")
            weights = ((name, as_weight(file.get_tensor(name))) for name in names)
        self._loaded |= self.model.load_weights(self._with_tied_head(weights))  # type: ignore[operator]
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _with_tied_head(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tied embedding as the head too: a CPU packs the head separately, and would keep the old one."""
        is_tied = self.model_config.hf_config.tie_word_embeddings
        for name, weight in weights:
            if not (is_tied and name == _HEAD):
                yield name, weight
            if is_tied and name in _EMBEDDINGS:
                yield _HEAD, weight

    def complete(self) -> None:
        """Raise ``TransferError`` if a parameter is missing. On a CPU, requests are still running."""
        if missing := self._expected - self._loaded:
            raise TransferError(f"weight update lacks {len(missing)} parameters, {min(missing)} among them")
        self._expected = frozenset(self._loaded)


class NcclEngine(FileUpdates, NCCLWeightTransferEngine):  # type: ignore[misc]
    """NCCL engine of vLLM with a deadline: its communicator would wait without end for a dead sender."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join a new group, and leave the previous one."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        """Receive a broadcast; ``TransferError`` if it does not end in time, with some of the weights overwritten.

        If it fails, the group is closed at once. vLLM's engine would leave it open: its buffers would stay in the GPU's
        memory, and another broadcast in it would wait for ranks that have left.
        """
        group = self.model_update_group
        watchdog = threading.Timer(DEADLINE_S, group.destroy)  # aborts the communicator, which frees this thread
        with ExitStack() as after_failure:
            after_failure.callback(self.shutdown)
            watchdog.start()
            try:
                super().receive_weights(update_info)
                torch.accelerator.synchronize()
            finally:
                watchdog.cancel()
            if group.disabled:
                raise TransferError(f"the broadcast did not end in {DEADLINE_S:g} s")
            after_failure.pop_all()


class IpcEngine(FileUpdates, IPCWeightTransferEngine):  # type: ignore[misc]
    """CUDA IPC engine of vLLM, which also loads files."""


class TwinEngine(FileUpdates, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Loads files into a second model, which no request sees, as packing the weights takes long on a CPU."""

    _twin: Any = None

    def start_weight_update(self) -> None:
        """Let the twin, which is made the first time, be updated instead of the model."""
        if self._twin is None:
            layers = self.vllm_config.compilation_config.static_forward_context
            known = set(layers)
            _ROPE_DICT.clear()  # else the models share rotary embeddings, which a reload empties under the requests
            with set_default_torch_dtype(self.model_config.dtype), self.device:
                self._twin = initialize_model(self.vllm_config, prefix="twin")
                self._expected = frozenset(name for name, _ in self._twin.named_parameters())
                process_weights_after_loading(self._twin, self.model_config, self.device)
            for name in set(layers) - known:  # its attention has no cache
                del layers[name]
        self.set_weight_update_target(self._twin, self.model_config)
        super().start_weight_update()

    def complete(self) -> None:
        """Also pack what was not packed layer by layer."""
        super().complete()
        super().finish_weight_update()

    def finish_weight_update(self) -> None:
        """Swap the parameters of model and twin, packed ones too; no generation may run."""
        for ours, theirs in zip(self._default_model.modules(), self.model.modules(), strict=True):
            ours._parameters, theirs._parameters = theirs._parameters, ours._parameters
            if "cpu_linear" in vars(ours):  # the packed weight is inside this function
                ours.cpu_linear, theirs.cpu_linear = theirs.cpu_linear, ours.cpu_linear


for _name, _engine in (("twin", TwinEngine), ("nccl", NcclEngine), ("ipc", IpcEngine)):
    WeightTransferEngineFactory.register_engine(f"ragr1_{_name}", _engine)
