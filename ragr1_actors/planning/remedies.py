"""Nearest settings with which a run fits its machine, for ``plan.py``: candidates, tried in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ragr1_actors.core.config import LearnerSettings, RunConfig

Change = tuple[str, Any]
"""A key and its value: ``("retrieval.num_shards", 2)``."""
_FASTER_TYPES = {"flat": "pq", "fp16": "pq", "sq8": "pq", "ivf": "ivf_pq"}
"""Index type that finds almost the same and that a CPU scans faster, by index type."""


def find_remedy(config: RunConfig, changes: Iterable[Change], fits: Callable[[RunConfig], bool]) -> str:
    """Return the settings that make the run fit: one change if one suffices, else several; empty if none helps.

    ``find_remedy(config, [("retrieval.num_shards", 2)], fits) == "it fits with retrieval.num_shards=2"``
    """
    changes = list(changes)
    for key, value in changes:
        if fits(_changed(config, key, value)):
            return _advice({key: value})
    names: dict[str, Any] = {}
    for key, value in changes:
        config = _changed(config, key, value)
        names[key] = value
        if fits(config):
            return _advice(names)
    return ""


def _advice(settings: dict[str, Any]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in settings.values())
    return f"it fits with {' '.join(f'{key}={value}' for key, value in zip(settings, shown, strict=True))}"


def place_changes(place: str, config: RunConfig) -> Iterator[Change]:
    """Yield settings that need less of a place; those that cost least time come first."""
    runners, retrieval = config.env_runners, config.retrieval
    if place == "learner GPU" or (place == "host memory" and not config.learners.num_gpus_per_learner):
        yield from _learner_changes(config.learners, runners.max_context_tokens)
    if place == "env runner GPU" and runners.engine == "vllm":
        for size in (2, 4, 8):
            yield "env_runners.engine_options", {**runners.engine_options, "tensor_parallel_size": size}
    if place == "retriever GPU":
        for shards in (2, 4, 8):
            yield "retrieval.num_shards", shards * retrieval.num_shards
    if place in ("host memory", "disk") and retrieval.type in ("flat", "fp16", "hnsw", "ivf"):
        yield "retrieval.type", "ivf_pq" if retrieval.type in ("ivf", "hnsw") else "pq"
    if place == "/dev/shm":
        yield "env_runners.weight_transport", "auto"
    if place == "disk":
        yield "checkpointing.num_to_keep", 1
        yield "checkpointing.keep_trajectories", False


def search_changes(config: RunConfig, num_cpus: int) -> Iterator[Change]:
    """Yield settings that make searches faster, cheapest first; an actor gets at most ``num_cpus``."""
    retrieval = config.retrieval
    if not retrieval.num_gpus_per_retriever:
        if retrieval.type in _FASTER_TYPES and not retrieval.options:  # the options belong to the type
            yield "retrieval.type", _FASTER_TYPES[retrieval.type]
        for factor in (2, 4, 8, 16):
            cpus = factor * retrieval.num_cpus_per_retriever
            if 0 < cpus <= num_cpus:
                yield "retrieval.num_cpus_per_retriever", cpus
    for factor in (2, 4, 8):
        yield "retrieval.num_retrievers", factor * max(1, retrieval.num_retrievers)
    for factor in (2, 4, 8):
        yield "retrieval.num_shards", factor * retrieval.num_shards


def _learner_changes(learners: LearnerSettings, max_context_tokens: int) -> Iterator[Change]:
    tokens = learners.row_tokens
    while tokens > max_context_tokens:
        tokens = max(tokens // 2, max_context_tokens)
        yield "learners.micro_batch_tokens", tokens
    if not learners.gradient_checkpointing:
        yield "learners.gradient_checkpointing", True
    if not learners.num_gpus_per_learner:
        return  # the rest moves bytes from a GPU to the host, or to another machine
    resting = [part for part in ("reference", "critic") if part not in learners.offload]
    if resting:
        yield "learners.offload", [*learners.offload, *resting]
    if learners.zero_stage < 3:
        yield "learners.zero_stage", 3
    yield "learners.num_learners", 2 * learners.num_learners
    if "optimizer" not in learners.offload:
        yield "learners.offload", ["optimizer", "reference", "critic"]


def _changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    section, name = key.split(".")
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})
