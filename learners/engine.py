"""The only door to DeepSpeed.

A ``DeepSpeedEngine`` holds one module and its AdamW: ``engine(...)``, ``backward(loss)`` as often as there are
micro-batches, ``step(lr)``. Its state is a flat dict of full fp32 tensors by name, the same for every ZeRO stage and
world size.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ragr1_actors.errors import DataError, LearnerError

State = dict[str, NDArray[Any]]
"""Names to full tensors: what is stored as safetensors and travels zero-copy through the object store."""

MOMENTS = ("exp_avg", "exp_avg_sq")


MAX_SKIPPED_STEPS = 10
"""In a row; by then it is the weights or the loss that are broken, and no further step would be taken either."""


@dataclass(frozen=True)
class AdamWSettings:
    """Of ``torch.optim.AdamW``; the learning rate is given with every step."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0


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

    def __init__(self, module: nn.Module, settings: AdamWSettings, *, zero_stage: int) -> None:
        """Hand ``module`` to DeepSpeed. ``init_distributed`` comes first; all ranks call this together.

        bf16 needs fp32 master weights, which only ZeRO's optimizers keep: stage 0 becomes stage 1, the same to the bit.
        """
        import deepspeed  # 1-2 s, and nobody else needs it

        # On CPUs DeepSpeed would compile a shared-memory all-reduce first: two minutes, and only its inference uses it.
        deepspeed.ops.__compatible_ops__ = {}
        # DeepSpeed's collectives; nothing a user could do about them.
        warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
        self._dtype = next(module.parameters()).dtype
        self.zero_stage = max(1, zero_stage) if self._dtype == torch.bfloat16 else zero_stage
        self._grad_clip = settings.grad_clip
        self._grad_norm = 0.0
        self._num_skipped = 0
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(parameters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay)
        if self.zero_stage == 0:  # DeepSpeed neither reports the norm nor lets us see the reduced gradients
            adamw.register_step_pre_hook(self._clip_at_stage_0)
        num_elements = sum(parameter.numel() for parameter in parameters)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=adamw,
            config=_deepspeed_config(self.zero_stage, self._dtype, settings.grad_clip, num_elements),
        )
        self._adamw = adamw

    @property
    def module(self) -> nn.Module:
        """The module that was handed in."""
        module: nn.Module = self._engine.module
        return module

    def __call__(self, *args: Any) -> Any:
        """Forward."""
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

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter whole, in the module's dtype, one at a time. All ranks iterate to the end together."""
        for name, parameter in self.module.named_parameters():
            with self._gathered(parameter):
                whole = parameter.detach().clone()
            yield name, whole

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``full_weights`` yields, in its order; nothing is gathered for it."""
        return {name: self._full_shape(parameter) for name, parameter in self.module.named_parameters()}

    def _full_shape(self, parameter: Any) -> tuple[int, ...]:  # ZeRO-3 adds attributes of its own
        return tuple(parameter.ds_shape if self.zero_stage == 3 else parameter.shape)

    @contextmanager
    def _gathered(self, parameter: nn.Parameter, modifier_rank: int | None = None) -> Iterator[None]:
        if self.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank):
            yield

    def get_state(self) -> State:
        """Return weights and moments in fp32 and the step count. All ranks call together; all get the same."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._ensure_moments()
        state: State = {"step": np.asarray(self._step_count(), dtype=np.int64)}
        for name, parameter in self.module.named_parameters():
            if self.zero_stage == 0:
                tensors = {"weight": parameter.detach(), **{key: self._adamw.state[parameter][key] for key in MOMENTS}}
            else:
                tensors = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
                tensors["weight"] = safe_get_full_fp32_param(parameter)
            state |= {f"{key}/{name}": tensor.cpu().numpy().copy() for key, tensor in tensors.items()}
        return state

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take a state over from any ZeRO stage and world size. All ranks call together with the same state.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        if "step" not in state:
            raise DataError("the learner's state has no step count")
        self._ensure_moments()
        for name, parameter in self.module.named_parameters():
            shape = self._full_shape(parameter)
            for key in ("weight", *MOMENTS):
                found = state[f"{key}/{name}"].shape if f"{key}/{name}" in state else None
                if found != shape:
                    raise DataError(f"the learner's state has {key}/{name} of shape {found}, expected {shape}")
            tensors = {key: torch.tensor(state[f"{key}/{name}"]) for key in ("weight", *MOMENTS)}
            with self._gathered(parameter, modifier_rank=0), torch.no_grad():
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
        if self.zero_stage == 3:  # the parameter groups of stage 3 are filled only while it steps
            masters = self._engine.optimizer.fp32_partitioned_groups_flat
        else:
            masters = [master for group in self._adamw.param_groups for master in group["params"]]
        for master in masters:
            if not self._adamw.state[master]:
                moments = {key: torch.zeros_like(master) for key in MOMENTS}
                self._adamw.state[master] = {"step": torch.zeros(()), **moments}
        if self.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _step_count(self) -> int:
        return int(next(iter(self._adamw.state.values()))["step"])

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module; the engine is of no use afterwards."""
        self._engine.destroy()


def _deepspeed_config(stage: int, dtype: torch.dtype, grad_clip: float, num_elements: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: micro-batches are ours
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # a step is where we call step()
        "gradient_clipping": grad_clip if stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            # Buckets are allocated whole: the default of 5e8 elements is 2 GB for a model of any size.
            "reduce_bucket_size": min(num_elements, 200_000_000),
        },
        "steps_per_print": 2**31,
    }
