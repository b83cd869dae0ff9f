"""Which way new weights take from the learners to the env runners, decided from a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError

TransportName = Literal["object_store", "broadcast", "ipc"]
WeightBackend = Literal["host", "nccl", "ipc"]
"""What carries the bytes: Ray's object store (``host``), or vLLM's weight transfer over NCCL or CUDA IPC."""
WakeTag = Literal["weights", "kv_cache"]
"""What an engine that sleeps allocates again, in this order."""
RECEIVING_ENGINES = ("transformers", "vllm")
"""The project's engines that a learner rank can send weights to directly."""
MERGING_ENGINES = RECEIVING_ENGINES
"""Engines that are sent adapters alone and merge them; a custom engine is sent merged weights."""
BASE_KEY = "lora_base"
"""Key of a weight update that holds an ``AdapterBase`` as JSON: the other keys are adapters."""


class AdapterBase(BaseModel):
    """What adapters are merged into: ``AdapterBase(folder="/runs/mine/policy_sft", scaling=2.0)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """The policy at the start of the stage: a Hugging Face folder or hub name."""
    scaling: float
    """A weight W is used as W + scaling * B A."""


def choose_transport(config: SamplerConfig) -> TransportName:
    """Return the transport that the configuration names; ``auto`` is the one that fits where the actors are placed.

    That is ``ipc`` where an env runner and a learner rank share each GPU, ``broadcast`` where both have whole GPUs,
    else ``object_store``; without learners also ``object_store``, which needs no preparation.
    """
    if not isinstance(config, RunConfig):
        return "object_store"
    runners, learners = config.env_runners, config.learners
    if runners.weight_transport != "auto":
        return runners.weight_transport
    if runners.engine not in RECEIVING_ENGINES or not (runners.num_env_runners and learners.num_learners):
        return "object_store"
    if runners.num_gpus_per_env_runner and learners.num_gpus_per_learner and not _against_ipc(config):
        return "ipc"
    have_gpus = runners.num_gpus_per_env_runner >= 1 and learners.num_gpus_per_learner >= 1
    return "broadcast" if have_gpus else "object_store"


def choose_backend(config: SamplerConfig) -> WeightBackend:
    """Return what carries the bytes: vLLM's own transfer between GPUs, else the object store.

    Adapters are sent alone and merged by the engine, which vLLM's transfer cannot do; they are small, and ``host``
    carries them.
    """
    transport = choose_transport(config)
    if not isinstance(config, RunConfig) or transport == "object_store":
        return "host"
    runners, learners = config.env_runners, config.learners
    on_gpus = runners.num_gpus_per_env_runner > 0 and learners.num_gpus_per_learner > 0
    if runners.engine != "vllm" or learners.lora or not on_gpus:
        return "host"
    return "ipc" if transport == "ipc" else "nccl"


def check_transport(config: RunConfig) -> None:
    """Refuse, with a ``ConfigError``, a transport that this configuration cannot have."""
    transport = config.env_runners.weight_transport
    if transport == "broadcast" and not config.env_runners.num_env_runners:
        raise ConfigError(
            "got env_runners.weight_transport broadcast and num_env_runners 0; weights stay within the driver: set "
            "weight_transport to auto"
        )
    reason = _against_ipc(config)
    if transport == "ipc" and reason:
        raise ConfigError(f"env_runners.weight_transport: got ipc with {reason}; change that, or set it to auto")


def _against_ipc(config: RunConfig) -> str:
    """Return why env runner i and learner rank i cannot share a device: the first reason, or an empty string."""
    runners, learners = config.env_runners, config.learners
    gpus = (runners.num_gpus_per_env_runner, learners.num_gpus_per_learner)
    lag = config.training.max_policy_lag
    options = {name: runners.engine_options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    found_actors = f"num_env_runners={runners.num_env_runners} and learners.num_learners={learners.num_learners}"
    found_gpus = f"num_gpus_per_env_runner={gpus[0]:g} and learners.num_gpus_per_learner={gpus[1]:g}"
    reasons = {
        f"{found_actors}, expected actors on both sides": not (runners.num_env_runners and learners.num_learners),
        f"{found_actors}, expected as many of each: runner and learner rank share a device": (
            runners.num_env_runners != learners.num_learners
        ),
        f"training.max_policy_lag={lag}, expected 0: runners sleep while learners work": lag > 0,
        f"{found_gpus}, expected a part of a GPU on both sides, or 0 on both": (gpus[0] > 0) != (gpus[1] > 0),
        f"{found_gpus}, expected at most 1 together: they share a GPU": sum(gpus) > 1 + 1e-9,
        **{f"engine_options.{k}={v}, expected 1: the engine has one GPU": v != 1 for k, v in options.items()},
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
