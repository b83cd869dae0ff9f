"""A run of many iterations holds no more at its end than near its beginning.

``RAGR1_ITERATIONS=1000 python -m pytest -m slow tests/test_training_endurance.py -s`` runs longer, and prints figures.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from rich.console import Console
from small_world import make_config, make_files

from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.telemetry.metrics import MetricsLogger
from ragr1_actors.training.training_run import TrainingRun

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]
ACTORS = ("ray::EnvRunner", "ray::Learner", "ray::retriever", "ray::Retriever")
NUM_ITERATIONS = int(os.environ.get("RAGR1_ITERATIONS", "30"))


def holds() -> dict[str, int]:
    """Return what the driver has open, and the memory of the object store: that of the raylet."""
    this = psutil.Process()
    processes = this.children(recursive=True)
    names = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            names[process] = process.name()
    return {
        "driver's bytes": this.memory_info().rss,
        "object store's bytes": sum(p.memory_info().rss for p, name in names.items() if name == "raylet"),
        "file descriptors": this.num_fds(),
        "threads": this.num_threads(),
        "actors": sum(name.startswith(ACTORS) for name in names.values()),
    }


def test_nothing_grows_with_the_iterations(
    ray_local: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        make_files(tmp_path), {"num_steps": 0}, num_iterations=NUM_ITERATIONS, max_policy_lag=1, train_batch_size=4
    )
    parts: dict[str, dict[str, Any]] = {
        "env_runners": {"num_env_runners": 2, "num_cpus_per_env_runner": 0.5},
        "learners": {"num_learners": 1, "num_cpus_per_learner": 0.5},
        "retrieval": {"num_retrievers": 1, "num_cpus_per_retriever": 0},
        "evaluation": {"interval": 5},
        "checkpointing": {"interval": 5},
        "training": {"options": {"drop_zero_variance": False}},
    }
    changed = {name: getattr(config, name).model_copy(update=part) for name, part in parts.items()}
    original, found = MetricsLogger.log, dict[int, dict[str, int]]()

    def log(self: MetricsLogger, stage: str, iteration: int, *arguments: Any) -> None:
        original(self, stage, iteration, *arguments)
        if stage == "rl":
            found[iteration] = holds()

    monkeypatch.setattr(MetricsLogger, "log", log)
    create_run_directory(config.model_copy(update=changed), tmp_path / "run")
    TrainingRun(config.model_copy(update=changed), tmp_path / "run", Console(quiet=True)).execute()
    early = {name: max(found[n][name] for n in range(NUM_ITERATIONS // 5, NUM_ITERATIONS // 3)) for name in found[1]}
    late = {name: max(found[n][name] for n in range(NUM_ITERATIONS * 4 // 5, NUM_ITERATIONS)) for name in found[1]}
    print(f"\niterations {NUM_ITERATIONS}: {early} -> {late}")
    assert early["actors"] == 4
    for name in ("file descriptors", "threads", "actors"):
        assert late[name] <= early[name] + 2, name  # a file may be open in the moment
    for name in ("driver's bytes", "object store's bytes"):
        assert late[name] < 1.05 * early[name], name
