"""The only door to DeepSpeed.

A ``DeepSpeedEngine`` holds one module and its AdamW: ``engine(...)``, ``backward(loss)`` as often as there are
micro-batches, ``step(lr)``. Its state is a flat dict of full fp32 tensors by name, the same for every ZeRO stage and
world size. ``ShardedModule`` is one that is not trained.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from learners.deepspeed.offload import OffloadedTensors
from learners.deepspeed.zero import AdamWSettings, deepspeed_config, num_elements, offload_config
from ragr1_actors.core.config import LearnerSettings
from ragr1_actors.core.errors import DataError, LearnerError

State = dict[str, NDArray[Any]]
"""Names to full tensors: what is stored as safetensors and travels zero-copy through the object store."""

MOMENTS = ("exp_avg", "exp_avg_sq")

MAX_SKIPPED_STEPS = 10
"""In a row; by then it is the weights or the loss that are broken, and no further step would be taken either."""


def init_distributed(rank: int, world_size: int) -> torch.device:
    """Join the process group, once in the life of a process, and return this rank's device.

    More than one rank meet at ``MASTER_ADDR`` and ``MASTER_PORT``; a rank alone needs neither port nor network.
    """
    has_cuda = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_cuda else "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it; an actor sees only the GPU it was given
    if not dist.is_initialized():
        backend = "nccl" if has_cuda else "gloo"
        store = dist.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    if dist.get_world_size() != world_size:
        raise RuntimeError(
            f"this process is in a group of {dist.get_world_size()} ranks already, expected {world_size}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


class DeepSpeedEngine:
    """A module, its optimizer and DeepSpeed."""

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        learners: LearnerSettings,
        device: torch.device,
        *,
        rests: bool = False,
    ) -> None:
        """Hand ``module`` to DeepSpeed. ``init_distributed`` comes first; all ranks call this together.

        bf16 needs master weights and sums of gradients in fp32, which stages 0 and 1 lack: they become stage 2.

        Args:
            module: what is trained: those of its parameters that require a gradient.
            settings: of the optimizer.
            learners: the ZeRO stage, and whether ``optimizer`` and ``params`` live in the host's memory.
            device: this rank's.
            rests: whether everything is in the host's memory from now on, but for ``in_use``.
        """
        deepspeed = _import_deepspeed()
        self.dtype = next(module.parameters()).dtype
        self.zero_stage = max(2, learners.zero_stage) if self.dtype == torch.bfloat16 else learners.zero_stage
        self._device = device
        self._rests = rests
        self._offloaded: OffloadedTensors | None = None
        self._grad_clip = settings.grad_clip
        self._grad_norm = 0.0
        self._num_skipped = 0
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        config = deepspeed_config(self.zero_stage, self.dtype, settings.grad_clip, num_elements(parameters))
        config["zero_optimization"] |= offload_config(learners.offload)
        _place(module, device, self.zero_stage, config)
        adamw = torch.optim.AdamW(parameters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay)
        if self.zero_stage == 0:  # DeepSpeed neither reports the norm nor lets us see the reduced gradients
            adamw.register_step_pre_hook(self._clip_at_stage_0)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=config)
        self._adamw = adamw
        if rests:
            self.offload_states()

    @property
    def module(self) -> nn.Module:
        """The module that was handed in."""
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *args: Any) -> Any:
        """Forward."""
        self.reload_states()
        return self._engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss``; gradients are averaged over ranks when the step is taken."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip, update with learning rate ``lr``, and return the gradient's norm before the clip.

        Where the norm is not finite, neither weights nor moments change. DeepSpeed sees to that from ZeRO stage 1 on.

        Raises:
            LearnerError: that was so ``MAX_SKIPPED_STEPS`` times in a row.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self.zero_stage > 0:
            self._grad_norm = float(self._engine.get_global_grad_norm())
        self._num_skipped = 0 if math.isfinite(self._grad_norm) else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED_STEPS:  # the norm is the same on every rank: all of them stop here
            raise LearnerError(
                f"{MAX_SKIPPED_STEPS} optimizer steps in a row had a loss or a gradient that is not finite and were "
                "skipped; lower training.lr or sft.lr, look for NaN in the policy's weights, in rewards and in the "
                "loss, and go on from the last checkpoint"
            )
        return self._grad_norm

    def _clip_at_stage_0(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._grad_clip))
        if not math.isfinite(self._grad_norm):  # the gradients are the same on every rank by now, and so is the norm
            for parameter in parameters:
                parameter.grad = None  # AdamW passes over it

    # Memory

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Do what is done with the engine in here: one that rests is offloaded at the end."""
        yield
        if self._rests:
            self.offload_states()

    def offload_states(self) -> int:
        """Move weights, master weights, moments and buffers to the host's memory; return the bytes this frees.

        Gradients that no step has used yet are dropped. Not DeepSpeed's ``offload_states``: at stage 3 that takes its
        own compiled Adam only, at stages 1 and 2 it leaves a step count on the GPU that torch's AdamW refuses and cuts
        the links that ``get_state`` reads, and at stage 0 there is none.
        """
        if self._offloaded is None:
            self._engine.optimizer.zero_grad()
            self._offloaded = OffloadedTensors(self._tensors(), self._device)
        return self._offloaded.num_bytes

    def reload_states(self) -> None:
        """Undo ``offload_states``, if it was called. Whatever needs the tensors does this for itself."""
        if self._offloaded is not None:
            self._offloaded.reload()
            self._offloaded = None

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held between two updates; a tensor may come twice."""
        if self.zero_stage == 3:
            self._engine.empty_partition_cache()
            yield self._engine.optimizer.grad_partitions_flat_buffer
            for bucket in self._engine.optimizer.ipg_buckets.values():
                if bucket.buffer is not None:
                    yield bucket.buffer
        for parameter in self.module.parameters():
            yield parameter.data
            if self.zero_stage == 3:
                partitioned: Any = parameter
                yield partitioned.ds_tensor
        yield from self._masters()
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in MOMENTS if key in moments)

    # Weights and state

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter whole, in the module's dtype, one at a time. All ranks iterate to the end together."""
        for name, parameter in self.module.named_parameters():
            with self.gathered([parameter]):
                whole = parameter.detach().clone()
            yield name, whole

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``full_weights`` yields, in its order; nothing is gathered for it."""
        return {name: self.full_shape(parameter) for name, parameter in self.module.named_parameters()}

    def full_shape(self, parameter: Any) -> tuple[int, ...]:  # ZeRO-3 adds attributes of its own
        """Shape of a parameter when it is whole."""
        return tuple(parameter.ds_shape if self.zero_stage == 3 else parameter.shape)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.module.named_parameters() if value.requires_grad)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Have parameters whole. All ranks come together; what ``modifier_rank`` writes to them is kept."""
        self.reload_states()
        if self.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank):
            yield

    def get_state(self, *, keep: bool = True) -> State:
        """Return the trained weights and their moments in fp32 and the step count. All ranks call together.

        Args:
            keep: False helps the others to gather, and returns the step count alone.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self.reload_states()
        self._ensure_moments()
        state: State = {"step": np.asarray(self._step_count(), dtype=np.int64)}
        for name, parameter in self._trained():
            if self.zero_stage == 0:
                tensors = {"weight": parameter.detach(), **{key: self._adamw.state[parameter][key] for key in MOMENTS}}
            else:
                tensors = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
                tensors["weight"] = safe_get_full_fp32_param(parameter)
            if keep:
                state |= {f"{key}/{name}": tensor.to("cpu", copy=True).numpy() for key, tensor in tensors.items()}
        return state

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take a state over from any ZeRO stage and world size. All ranks call together with the same state.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        if "step" not in state:
            raise DataError("the learner's state has no step count")
        self.reload_states()
        self._ensure_moments()
        for name, parameter in self._trained():
            shape = self.full_shape(parameter)
            for key in ("weight", *MOMENTS):
                found = state[f"{key}/{name}"].shape if f"{key}/{name}" in state else None
                if found != shape:
                    raise DataError(f"the learner's state has {key}/{name} of shape {found}, expected {shape}")
            tensors = {key: torch.tensor(state[f"{key}/{name}"]) for key in ("weight", *MOMENTS)}
            with self.gathered([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(tensors["weight"])
            self._set_master(parameter, tensors)
        for moments in self._adamw.state.values():
            moments["step"].fill_(int(state["step"]))

    def _set_master(self, parameter: nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        from deepspeed import utils

        if self.zero_stage == 0:
            for key in MOMENTS:
                self._adamw.state[parameter][key].copy_(tensors[key])
        elif self.zero_stage < 3:
            utils.safe_set_full_fp32_param(parameter, tensors["weight"])
            for key in MOMENTS:
                utils.safe_set_full_optimizer_state(parameter, tensors[key], key)
        else:  # the full setters of stage 3 fail where a parameter does not divide by the ranks
            local = {key: self._local_part(parameter, tensor) for key, tensor in tensors.items()}
            utils.safe_set_local_fp32_param(parameter, local["weight"])
            for key in MOMENTS:
                utils.safe_set_local_optimizer_state(parameter, local[key], key)

    @staticmethod
    def _local_part(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a ZeRO-3 parameter, which is padded to a multiple of the ranks."""
        size = parameter.ds_tensor.numel()
        start = size * dist.get_rank()
        part = whole.new_zeros(size)
        found = whole.flatten()[start : start + size]
        part[: len(found)] = found
        return part

    def _ensure_moments(self) -> None:
        """AdamW makes its moments at the first step; a state is read or written before that, too."""
        for master in self._masters():
            if not self._adamw.state[master]:
                moments = {key: torch.zeros_like(master) for key in MOMENTS}
                self._adamw.state[master] = {"step": torch.zeros(()), **moments}
        if self.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _masters(self) -> list[torch.Tensor]:
        """What AdamW steps."""
        if self.zero_stage == 3:  # the parameter groups of stage 3 are filled only while it steps
            masters: list[torch.Tensor] = self._engine.optimizer.fp32_partitioned_groups_flat
            return masters
        return [master for group in self._adamw.param_groups for master in group["params"]]

    def _step_count(self) -> int:
        return int(next(iter(self._adamw.state.values()))["step"])

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module; the engine is of no use afterwards."""
        self._engine.destroy()


class ShardedModule:
    """A module that is not trained, spread over the ranks (ZeRO stage 3).

    Each layer is gathered for its part of the pass.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, on_host: bool) -> None:
        """Spread ``module``; all ranks call this together.

        Args:
            module: in evaluation mode, without gradients.
            device: this rank's.
            on_host: whether a rank's share lives in the host's memory between the passes.
        """
        deepspeed = _import_deepspeed()
        config = deepspeed_config(3, next(module.parameters()).dtype, 0.0, 1)
        config["zero_optimization"] |= offload_config(["params"] if on_host else [])
        _place(module, device, 3, config)
        self._engine, *_ = deepspeed.initialize(model=module, config=config)
        self._engine.eval()

    def __call__(self, *args: Any) -> Any:
        """Forward; all ranks call together."""
        return self._engine(*args)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module."""
        self._engine.destroy()


def _import_deepspeed() -> Any:
    import deepspeed  # 1-2 s, and nobody else needs it

    # On CPUs DeepSpeed would compile a shared-memory all-reduce first: two minutes, and only its inference uses it.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed's collectives; nothing a user could do about them.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
    return deepspeed


@contextmanager
def shared_loading(zero_stage: int, dtype: torch.dtype, *, on_host: bool) -> Iterator[None]:
    """Have transformers load models for ZeRO stage 3 in here: a rank never holds more than its share and one layer.

    Rank 0 reads a layer, and the others get their shares. All ranks load together; at other stages each reads all.

    Args:
        zero_stage: of the engine that gets the model.
        dtype: of the model.
        on_host: whether a rank's share is to live in the host's memory.
    """
    if zero_stage < 3:
        yield
        return
    zero = _import_deepspeed().zero
    from deepspeed.runtime.zero import DeepSpeedTensorOverride
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = deepspeed_config(3, dtype, 0.0, 1)
    config["zero_optimization"] |= offload_config(["params"] if on_host else [])
    held = HfDeepSpeedConfig(config)  # transformers itself holds a weak reference to it
    original = zero.Init
    # It would round what modules compute for themselves to the model's dtype: rotary frequencies, in bf16
    zero.Init = partial(original, tensor_overrides={DeepSpeedTensorOverride.device})
    try:
        yield
    finally:
        zero.Init = original
        unset_hf_deepspeed_config()
        del held


def _place(module: nn.Module, device: torch.device, zero_stage: int, config: dict[str, Any]) -> None:
    """Move a module to the device; at stage 3 by parameters, those that are not spread over the ranks yet."""
    if zero_stage < 3:
        module.to(device)
        return
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
