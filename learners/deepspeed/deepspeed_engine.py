"""The only module that imports DeepSpeed.

A ``DeepSpeedEngine`` holds one module and its AdamW: ``engine(...)`` and ``backward(loss)`` per micro-batch, then
``step(lr)``. Its state is a flat dict of fp32 tensors by name, the same for every ZeRO stage and number of ranks; each
rank has a part. ``FrozenModule`` holds a module that is not trained.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import pad

from learners.deepspeed.memory import BUCKET_ELEMENTS
from learners.deepspeed.offloaded import Offloaded
from ragr1_actors.core.config import LearnerSettings
from ragr1_actors.core.disk.learner_state import TensorPart
from ragr1_actors.core.errors import ConfigError, DataError, LearnerError, one_line
from ragr1_actors.core.process.imports import quick_imports

State = dict[str, NDArray[Any]]
"""Full tensors by name: stored as safetensors, and sent without a copy through the object store."""

MOMENTS = ("exp_avg", "exp_avg_sq")

MAX_SKIPPED_STEPS = 10
"""Limit of skipped steps in a row, after which the run ends: the weights or the loss are broken."""


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps per update, their learning rate, and the settings of AdamW."""

    lr: float
    warmup_steps: int = 0
    num_steps: int = 0
    """Optimizer steps over which the rate falls to zero along a cosine; 0 keeps it constant after the warm-up."""
    num_epochs: int = 1
    num_minibatches: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient of one step."""

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of one update."""
        return self.num_epochs * self.num_minibatches

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if not self.num_steps:
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class WholeTensor(NamedTuple):
    """Tensor of a module, gathered on demand."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, known without a gather."""
    gather: Callable[[], torch.Tensor]
    """Returns the whole tensor on the device; all ranks call together."""


def init_distributed(rank: int, world_size: int, num_gpus: float = 0) -> torch.device:
    """Join the process group, once per process, and return the device of this rank.

    Several ranks connect to ``MASTER_ADDR`` and ``MASTER_PORT``; a single rank needs neither port nor network.
    ``num_gpus`` is ``learners.num_gpus_per_learner``: with 0 the rank uses no GPU even if torch sees one, since Ray
    hides no GPU from an actor that asks for none.

    Raises:
        ConfigError: the rank was given a GPU, and torch cannot use it.
        RuntimeError: this process is in a group of another size already.
    """
    if num_gpus and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "no GPU is visible"
        except (RuntimeError, AssertionError) as error:  # a build for CPUs raises AssertionError
            reason = one_line(error)
        raise ConfigError(
            f"learners.num_gpus_per_learner={num_gpus:g}, but torch cannot use a GPU in learner rank {rank} "
            f"({reason}); run `ragr1 doctor` on its machine, or set learners.num_gpus_per_learner=0 to train on CPUs"
        )
    os.environ["DS_ACCELERATOR"] = "cuda" if num_gpus else "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it; an actor sees only its own GPU
    if not dist.is_initialized():
        store = dist.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if num_gpus else "gloo", store=store, rank=rank, world_size=world_size)
    if dist.get_world_size() != world_size:
        num_ranks = dist.get_world_size()
        raise RuntimeError(f"this process is in a group of {num_ranks} ranks already, expected {world_size}")
    return torch.device("cuda", torch.cuda.current_device()) if num_gpus else torch.device("cpu")


class DeepSpeedEngine:
    """Module with its optimizer, run by DeepSpeed."""

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        learners: LearnerSettings,
        device: torch.device,
        *,
        rests: bool = False,
    ) -> None:
        """Train the parameters of ``module`` that require a gradient. All ranks call, after ``init_distributed``.

        bf16 needs master weights and gradient sums in fp32, so stages 0 and 1, which lack them, become stage 2. With
        ``rests``, all tensors are in the host's memory outside ``in_use``.
        """
        deepspeed = _import_deepspeed()
        self.module = module
        dtype = next(module.parameters()).dtype
        self.zero_stage = max(2, learners.stage) if dtype == torch.bfloat16 else learners.stage
        self._rests = rests
        self._resting = Offloaded(device)
        self._grad_clip = schedule.grad_clip
        self._grad_norm = 0.0
        self._num_skipped = 0
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        num_trained = num_elements(parameters)
        config = _deepspeed_config(self.zero_stage, dtype, learners.offload, schedule.grad_clip, num_trained)
        _place(module, device, self.zero_stage, config)
        # On a CPU torch's default AdamW makes two temporary tensors as large as the master weights, and takes five
        # times as long: docs/decisions/heap.md.
        is_fused = device.type == "cpu"
        adamw = torch.optim.AdamW(
            parameters, lr=0.0, betas=schedule.betas, weight_decay=schedule.weight_decay, fused=is_fused or None
        )
        if self.zero_stage == 0:  # DeepSpeed neither reports the norm nor lets us see the reduced gradients
            adamw.register_step_pre_hook(self._clip_at_stage_0)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=config)
        if self.zero_stage == 0 and dist.get_world_size() == 1:  # nothing to reduce, for which it copies all gradients
            self._engine.enable_backward_allreduce = False
        self._adamw = adamw
        if rests:
            self.offload_states()

    def __call__(self, *args: Any) -> Any:
        """Run the forward pass of the module."""
        self.reload_states()
        return self._engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss``; ``step`` averages gradients over ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip the gradient, update with learning rate ``lr``, and return the norm before the clip.

        If the norm is not finite, neither weights nor moments change (DeepSpeed does this from ZeRO stage 1 on).

        Raises:
            LearnerError: ``MAX_SKIPPED_STEPS`` norms in a row were not finite.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self.zero_stage > 0:
            self._grad_norm = float(self._engine.get_global_grad_norm())
        self._num_skipped = 0 if math.isfinite(self._grad_norm) else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED_STEPS:  # the norm is the same on every rank, so all ranks stop here
            raise LearnerError(
                f"{MAX_SKIPPED_STEPS} optimizer steps in a row had a loss or a gradient that is not finite and were "
                "skipped; lower training.lr or sft.lr, look for NaN in the policy's weights, in rewards and in the "
                "loss, and go on from the last checkpoint"
            )
        return self._grad_norm

    def _clip_at_stage_0(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._grad_clip))
        if not math.isfinite(self._grad_norm):  # gradients and norm are the same on every rank here
            for parameter in parameters:
                parameter.grad = None  # AdamW skips parameters without a gradient

    # Memory

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the engine in this context; an engine with ``rests`` is offloaded at the end."""
        yield
        if self._rests:
            self.offload_states()

    def offload_states(self) -> int:
        """Move weights, master weights, moments and buffers to the host's memory; return the bytes that this frees.

        Gradients that no step has used are dropped. This is not DeepSpeed's ``offload_states``: at stage 3 that needs
        DeepSpeed's compiled Adam, at stages 1 and 2 it leaves a step count on the GPU that torch's AdamW rejects and
        removes the links that ``get_state`` reads, and stage 0 does not have it.
        """
        if not self.is_offloaded:
            self._engine.optimizer.zero_grad()
            self._resting.offload(self._tensors(), scratch=self._gradients())
        return self._resting.num_bytes

    @property
    def is_offloaded(self) -> bool:
        """Whether ``offload_states`` has moved the tensors and no call has reloaded them since."""
        return self._resting.num_bytes > 0

    def reload_states(self) -> None:
        """Undo ``offload_states`` if it was called. Every method that needs the tensors calls this."""
        if self.is_offloaded:
            self._resting.reload()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that an update starts from; a tensor may be yielded twice."""
        if self.zero_stage == 3:
            self._engine.empty_partition_cache()
        for parameter in self.module.parameters():
            yield parameter.data
            if self.zero_stage == 3:
                partitioned: Any = parameter
                yield partitioned.ds_tensor
        yield from self._masters()
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in MOMENTS if key in moments)

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Yield stage 3's gradient buffers between two updates, which the first backward pass overwrites."""
        if self.zero_stage == 3:
            yield self._engine.optimizer.grad_partitions_flat_buffer
            yield from (b.buffer for b in self._engine.optimizer.ipg_buckets.values() if b.buffer is not None)

    # Weights and state

    def whole(self, name: str, parameter: nn.Parameter) -> WholeTensor:
        """Return a parameter of the module as a tensor that is gathered on demand."""

        def gather() -> torch.Tensor:
            with self.gathered([parameter]):
                return parameter.detach().clone()

        return WholeTensor(name, self.full_shape(parameter), gather)

    def full_shape(self, parameter: Any) -> tuple[int, ...]:  # ZeRO-3 adds attributes
        """Return the shape of the whole parameter."""
        return tuple(parameter.ds_shape if self.zero_stage == 3 else parameter.shape)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.module.named_parameters() if value.requires_grad)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Gather whole parameters in this context. All ranks call together; writes by ``modifier_rank`` are kept."""
        self.reload_states()
        if self.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank):
            yield

    def get_parts(self) -> dict[str, TensorPart]:
        """Return this rank's part of the trained weights and their moments in fp32, and on rank 0 the step count."""
        self.reload_states()
        self._ensure_moments()
        parts: dict[str, TensorPart] = {}
        if dist.get_rank() == 0:
            step = int(next(iter(self._adamw.state.values()))["step"])
            parts["step"] = TensorPart(np.asarray([step], dtype=np.int64), 0, ())
        for name, parameter in self._trained():
            start, tensors = self._owned(parameter)
            for key, tensor in tensors.items():
                if tensor.numel():
                    parts[f"{key}/{name}"] = TensorPart(
                        tensor.detach().to("cpu", copy=True).numpy(), start, self.full_shape(parameter)
                    )
        return parts

    def _owned(self, parameter: Any) -> tuple[int, dict[str, torch.Tensor]]:
        """Return weight and moments of the elements that this rank updates, each ``[n]``, and the first one's index.

        DeepSpeed's universal checkpoint finds them in the same way, but needs a conversion before a resume on another
        number of ranks, and its files are pickled.
        """
        from deepspeed import utils

        if self.zero_stage == 0:  # every rank updates all parameters: each stores an equal share
            size, rank, num_ranks = parameter.numel(), dist.get_rank(), dist.get_world_size()
            start, stop = size * rank // num_ranks, size * (rank + 1) // num_ranks
            whole = {"weight": parameter.detach(), **{key: self._adamw.state[parameter][key] for key in MOMENTS}}
            return start, {key: tensor.flatten()[start:stop] for key, tensor in whole.items()}
        if self.zero_stage < 3:
            fragment = parameter._hp_mapping
            if fragment is None:
                return 0, {}
            owned = {key: fragment.get_hp_fragment(key) for key in MOMENTS}
            return fragment.lp_fragment_address.start, {"weight": fragment.get_hp_fragment(), **owned}
        size = parameter.ds_tensor.numel()
        start = size * dist.get_rank()
        owned = {key: utils.safe_get_local_optimizer_state(parameter, key) for key in MOMENTS}
        owned["weight"] = utils.safe_get_local_fp32_param(parameter)
        stop = max(0, min(size, parameter.ds_numel - start))  # the rest is padding
        return start, {key: tensor.flatten()[:stop] for key, tensor in owned.items()}

    def set_state(self, state: Mapping[str, NDArray[Any]], prefix: str) -> None:
        """Load a state of any ZeRO stage and number of ranks: the tensors whose names begin with ``prefix``.

        All ranks call together with the same state, and hold one tensor of it at a time.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        if f"{prefix}step" not in state:
            raise DataError("the learner's state has no step count")
        self.reload_states()
        self._ensure_moments()
        for name, parameter in self._trained():
            shape = self.full_shape(parameter)
            tensors: dict[str, torch.Tensor] = {}
            for key in ("weight", *MOMENTS):
                value = state.get(f"{prefix}{key}/{name}")
                found = None if value is None else value.shape
                if value is None or found != shape:
                    raise DataError(f"the learner's state has {key}/{name} of shape {found}, expected {shape}")
                tensors[key] = torch.tensor(value)
            with self.gathered([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(tensors["weight"])
            self._set_master(parameter, tensors)
        for moments in self._adamw.state.values():
            moments["step"].fill_(int(state[f"{prefix}step"]))

    def _set_master(self, parameter: nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        from deepspeed import utils

        if self.zero_stage == 0:
            for key in MOMENTS:
                self._adamw.state[parameter][key].copy_(tensors[key])
        elif self.zero_stage < 3:
            utils.safe_set_full_fp32_param(parameter, tensors["weight"])
            for key in MOMENTS:
                utils.safe_set_full_optimizer_state(parameter, tensors[key], key)
        else:  # the full setters of stage 3 fail if the ranks do not divide a parameter evenly
            local = {key: self._local_part(parameter, tensor) for key, tensor in tensors.items()}
            utils.safe_set_local_fp32_param(parameter, local["weight"])
            for key in MOMENTS:
                utils.safe_set_local_optimizer_state(parameter, local[key], key)

    @staticmethod
    def _local_part(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a ZeRO-3 parameter, padded to a multiple of the ranks."""
        size = parameter.ds_tensor.numel()
        start = size * dist.get_rank()
        part = whole.flatten()[start : start + size]
        return pad(part, (0, size - len(part)))

    def _ensure_moments(self) -> None:
        """Create AdamW's moments, which it creates at its first step only: a state may be read or set before that."""
        for master in self._masters():
            if not self._adamw.state[master]:
                moments = {key: torch.zeros_like(master) for key in MOMENTS}
                self._adamw.state[master] = {"step": torch.zeros(()), **moments}
        if self.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _masters(self) -> list[torch.Tensor]:
        """Return the tensors that AdamW updates."""
        if self.zero_stage == 3:  # the parameter groups of stage 3 are filled only while it steps
            masters: list[torch.Tensor] = self._engine.optimizer.fp32_partitioned_groups_flat
            return masters
        return [master for group in self._adamw.param_groups for master in group["params"]]

    def close(self) -> None:
        """Release the module, its optimizer and DeepSpeed; the engine cannot be used afterwards.

        They refer to each other, so that their memory is free after the next garbage collection.
        """
        self._engine.destroy()
        _forget(self.module)
        del self._engine, self._adamw, self.module, self._resting


class FrozenModule:
    """Reference of KL terms: a module that is not trained, whole on every rank, or sharded at ZeRO stage 3."""

    def __init__(self, module: nn.Module, device: torch.device, learners: LearnerSettings) -> None:
        """Take over ``module``. All ranks call together.

        At stage 3 each layer is gathered when it runs. With ``reference`` in ``learners.offload`` the parameters are
        in the host's memory between two uses; at stage 3, between two passes.
        """
        rests = "reference" in learners.offload
        self._module: Any = module.eval().requires_grad_(False)
        self._is_sharded = learners.stage == 3
        self._resting: Offloaded | None = None
        if self._is_sharded:
            deepspeed = _import_deepspeed()
            config = _deepspeed_config(3, next(module.parameters()).dtype, ["params"] if rests else [])
            _place(module, device, 3, config)
            self._module, *_ = deepspeed.initialize(model=module, config=config)
            self._module.eval()
        else:
            module.to(device)
            if rests:
                self._resting = Offloaded(device)
                self._resting.offload(module.parameters())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the parameters on the device in this context."""
        if self._resting is not None:
            self._resting.reload()
        yield
        if self._resting is not None:
            self._resting.offload(self._module.parameters(), is_changed=False)

    def __call__(self, *args: Any) -> Any:
        """Run the forward pass. All ranks call together, equally often."""
        return self._module(*args)

    def close(self) -> None:
        """Release the module, as ``DeepSpeedEngine.close``."""
        if self._is_sharded:
            self._module.destroy()
            _forget(self._module.module)
        del self._module, self._resting


def _forget(module: nn.Module) -> None:
    """Remove a module from two objects that DeepSpeed's stage 3 keeps: a list of modules and an unbounded cache."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    parts = set(module.modules())
    FWD_MODULE_STACK[:] = [entry for entry in FWD_MODULE_STACK if entry not in parts]
    # The cached method is inside a decorator; other engines compute its results again.
    decorated = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()


def _import_deepspeed() -> Any:
    with quick_imports():
        import deepspeed  # 1-2 s

    # On CPUs DeepSpeed would first compile a shared-memory all-reduce for two minutes; only its inference uses it.
    deepspeed.ops.__compatible_ops__ = {}
    # Warnings of DeepSpeed's collectives, which a user cannot fix.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
    return deepspeed


@contextmanager
def shared_loading(zero_stage: int, dtype: torch.dtype, *, on_host: bool) -> Iterator[None]:
    """Make transformers load models for ZeRO stage 3 in this context: a rank holds its share and one layer at most.

    Rank 0 reads a layer and sends the shares. All ranks load together. At other stages each rank reads the whole model.
    With ``on_host``, a rank's share is in the host's memory.
    """
    if zero_stage < 3:
        yield
        return
    zero = _import_deepspeed().zero
    from deepspeed.runtime.zero import DeepSpeedTensorOverride
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = _deepspeed_config(3, dtype, ["params"] if on_host else [])
    held = HfDeepSpeedConfig(config)  # transformers holds only a weak reference to it
    original = zero.Init
    # Init would round buffers that modules compute, such as rotary frequencies, to the model's dtype
    zero.Init = partial(original, tensor_overrides={DeepSpeedTensorOverride.device})
    try:
        yield
    finally:
        zero.Init = original
        unset_hf_deepspeed_config()
        del held


def _place(module: nn.Module, device: torch.device, zero_stage: int, config: dict[str, Any]) -> None:
    """Move a module to the device; at stage 3, shard the parameters that are not sharded yet."""
    if zero_stage < 3:
        module.to(device)
        return
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Count the elements of whole parameters, also of those that ZeRO-3 has sharded."""
    return sum(int(vars(parameter).get("ds_numel", parameter.numel())) for parameter in parameters)


def _deepspeed_config(
    stage: int, dtype: torch.dtype, offload: Collection[str], grad_clip: float = 0.0, bucket_elements: int = 1
) -> dict[str, Any]:
    """Return DeepSpeed's settings; ``bucket_elements`` counts the elements that are trained."""
    offload_keys = {"optimizer": "offload_optimizer", "params": "offload_param"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # for its log only: the learner makes the micro-batches
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # a step is where we call step()
        "gradient_clipping": grad_clip if stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},  # in bf16 a sum of many small gradients loses its low bits
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            # Buckets are allocated whole: the default of 5e8 elements is 2 GB for a model of any size.
            "reduce_bucket_size": min(bucket_elements, BUCKET_ELEMENTS),
            **{key: {"device": "cpu"} for name, key in offload_keys.items() if name in offload},
        },
        "steps_per_print": 2**31,
    }
