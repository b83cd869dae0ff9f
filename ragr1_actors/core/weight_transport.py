"""Transport of new weights from the learners to the env runners: its choice, and the parts in which they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from pydantic import BaseModel

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

PART_BYTES = 64 * 2**20
"""Bytes of a part of a transfer: a runner holds this much beside its engine, not another copy of the policy."""
TIMEOUT_S = 60.0  # for one step of a transfer; a runner that needs longer hangs
RECEIVING_ENGINES = ("transformers", "vllm")  # learner ranks can send to them directly, also adapters, which they merge
BASE_KEY = "lora_base"
"""Key of a weight update that holds an ``AdapterBase`` as JSON: the other keys are adapters."""


class AdapterBase(BaseModel):
    """Base of adapters, into which they are merged: ``AdapterBase(folder="/runs/mine/policy_sft", scaling=2.0)``."""

    folder: str
    """Policy at the start of the stage: a Hugging Face folder or hub name."""
    reference: str = ""
    """Reference of the folder; see ``Folder.reference``."""
    scaling: float  # a weight W is used as W + scaling * B A


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=_Sized)


def as_weight(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight that came as an array: uint16 holds the bits of bfloat16, which NumPy lacks."""
    import torch

    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def in_parts(weights: Iterable[tuple[str, W]], max_bytes: int) -> Iterator[dict[str, W]]:
    """Yield weights in parts of up to ``max_bytes``; a larger weight is a part by itself."""
    part: dict[str, W] = {}
    for name, weight in weights:
        if part and sum(value.nbytes for value in part.values()) + weight.nbytes > max_bytes:
            yield part
            part = {}
        part[name] = weight
    yield part


def choose_transport(config: SamplerConfig) -> Literal["object_store", "broadcast", "ipc"]:
    """Return the transport that the configuration names, or ``object_store`` without learners.

    ``auto`` is ``ipc`` if an env runner and a learner rank share each GPU, ``broadcast`` if both have whole GPUs, else
    ``object_store``.
    """
    if not isinstance(config, RunConfig):
        return "object_store"
    runners, learners = config.env_runners, config.learners
    if runners.weight_transport != "auto":
        return runners.weight_transport
    gpus = min(runners.num_gpus_per_env_runner, learners.num_gpus_per_learner)
    if runners.engine not in RECEIVING_ENGINES or not (runners.num_env_runners and learners.num_learners and gpus):
        return "object_store"
    if not _against_ipc(config):
        return "ipc"
    return "broadcast" if gpus >= 1 else "object_store"


def check_transport(config: RunConfig) -> None:
    """Refuse, with a ``ConfigError``, a transport that this configuration cannot have."""
    transport, reason = config.env_runners.weight_transport, _against_ipc(config)
    if transport == "broadcast" and not config.env_runners.num_env_runners:
        raise ConfigError(
            "got env_runners.weight_transport broadcast and num_env_runners 0; weights stay within the driver: set "
            "weight_transport to auto"
        )
    gpus = (config.env_runners.num_gpus_per_env_runner, config.learners.num_gpus_per_learner)
    if transport == "broadcast" and any(0 < share < 1 for share in gpus):
        raise ConfigError(
            f"env_runners.weight_transport: got broadcast with {gpus[0]:g} GPUs per env runner and {gpus[1]:g} per "
            "learner, expected whole GPUs or none; set it to auto"
        )
    if transport == "ipc" and reason:
        raise ConfigError(f"env_runners.weight_transport: got ipc with {reason}; change that, or set it to auto")


def _against_ipc(config: RunConfig) -> str:
    """Return the first reason why env runner i and learner rank i cannot share a device, or an empty string."""
    runners, learners = config.env_runners, config.learners
    gpus = (runners.num_gpus_per_env_runner, learners.num_gpus_per_learner)
    actors = f"num_env_runners={runners.num_env_runners} and learners.num_learners={learners.num_learners}"
    parts = f"num_gpus_per_env_runner={gpus[0]:g} and learners.num_gpus_per_learner={gpus[1]:g}"
    if not runners.num_env_runners == learners.num_learners > 0:
        return f"{actors}, expected actors on both sides, as many of each: runner and learner rank share a device"
    if runners.autoscaling:
        return "env_runners.autoscaling, expected none: each runner shares its device with a learner rank for good"
    if lag := config.training.max_policy_lag:
        return f"training.max_policy_lag={lag}, expected 0: runners sleep while learners work"
    if (gpus[0] > 0) != (gpus[1] > 0):
        return f"{parts}, expected a part of a GPU on both sides, or 0 on both"
    if sum(gpus) > 1 + 1e-9:
        return f"{parts}, expected at most 1 together: they share a GPU"
    if runners.label_selector != learners.label_selector:
        return "other nodes in env_runners.label_selector than in learners.label_selector, expected the same"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := runners.engine_options.get(name, 1)) != 1:
            return f"engine_options.{name}={size}, expected 1: the engine has one GPU"
    return ""
