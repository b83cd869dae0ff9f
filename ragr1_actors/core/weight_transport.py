"""How new weights come from the learners to the runners: the way that a configuration asks for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError

TransportName = Literal["object_store", "broadcast", "ipc"]
WakeTag = Literal["weights", "kv_cache"]
"""What an engine that sleeps takes room for again, in this order."""
RECEIVING_ENGINES = ("transformers", "vllm")
"""The project's own engines that receive weights from a learner directly."""
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
    """Return what the recipe names; ``auto`` is the way that fits where the parts sit.

    Without learners there are no new weights, and the answer is ``object_store``, which needs no preparation.

    That is ``ipc`` where a runner and a learner rank share each GPU, ``broadcast`` where both sides have whole GPUs,
    else ``object_store``. Neither of the first two has been run on GPUs yet: where they fail, they say so and take the
    object store.
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


def check_transport(config: RunConfig) -> None:
    """Refuse a way that is not there.

    Raises:
        ConfigError: says what is in the way.
    """
    transport = config.env_runners.weight_transport
    if transport == "broadcast" and not config.env_runners.num_env_runners:
        raise ConfigError(
            "got env_runners.weight_transport broadcast and num_env_runners 0; weights are handed over within the "
            "driver: set it to auto"
        )
    reason = _against_ipc(config)
    if transport == "ipc" and reason:
        raise ConfigError(f"env_runners.weight_transport: got ipc with {reason}; change that, or set it to auto")


def _against_ipc(config: RunConfig) -> str:
    """Return the first reason why runner i and learner rank i cannot share a device, what was got and expected."""
    runners, learners = config.env_runners, config.learners
    runner_gpus, learner_gpus = runners.num_gpus_per_env_runner, learners.num_gpus_per_learner
    actors = f"num_env_runners={runners.num_env_runners} and learners.num_learners={learners.num_learners}"
    gpus = f"num_gpus_per_env_runner={runner_gpus:g} and learners.num_gpus_per_learner={learner_gpus:g}"
    if not (runners.num_env_runners and learners.num_learners):
        return f"{actors}, expected actors on both sides"
    if runners.num_env_runners != learners.num_learners:
        return f"{actors}, expected as many of each: runner and learner rank share a device"
    if config.training.max_policy_lag:
        return (
            f"training.max_policy_lag={config.training.max_policy_lag}, expected 0: runners sleep while learners work"
        )
    if (runner_gpus > 0) != (learner_gpus > 0):
        return f"{gpus}, expected a part of a GPU on both sides, or 0 on both"
    if runner_gpus + learner_gpus > 1 + 1e-9:
        return f"{gpus}, expected at most 1 together: they share a GPU"
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        if runners.engine_options.get(option, 1) != 1:
            return f"engine_options.{option}={runners.engine_options[option]}, expected 1: the engine has one GPU"
    return ""
