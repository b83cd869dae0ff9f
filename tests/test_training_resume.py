"""A run that dies at step k and is resumed ends with the same parameters, bit by bit, as an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from small_world import SHORT, deterministic, make_config, make_files

from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.learner_state import LEARNER_FILE, read_learner
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.training_run import TrainingRun

pytestmark = pytest.mark.engine

NUM_ITERATIONS = 5
DIES_IN = 4
"""The iteration that no checkpoint follows; the newest is of iteration 2."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def run_config(files: Path, algorithm: str, num_learners: int) -> RunConfig:
    config = make_config(
        files,
        SHORT,
        algorithm=algorithm,
        num_iterations=NUM_ITERATIONS,
        num_minibatches=2,
        lr_schedule="cosine",
        warmup_steps=3,
        kl_coeff=0.01,
        options={} if algorithm == "ppo" else {"drop_zero_variance": False},
    )
    learners = {"num_learners": num_learners, "num_cpus_per_learner": 0.5, "zero_stage": 2 if num_learners else 0}
    return config.model_copy(
        update={
            "environment": config.environment.model_copy(update={"eval_tasks": ""}),
            "checkpointing": config.checkpointing.model_copy(update={"interval": 2, "num_to_keep": 3}),
            "learners": config.learners.model_copy(update=learners),
        }
    )


def newest_state(run_dir: Path) -> tuple[str, dict[str, np.ndarray]]:
    newest = Checkpoints(RunStore(run_dir)).latest()
    assert newest is not None
    return newest.name, dict(read_learner(newest / LEARNER_FILE))


def check_resume(config: RunConfig, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "cut"):
        create_run_directory(config, directory / name)
    TrainingRun(config, directory / "whole", Console(quiet=True)).execute()

    update = LearnerGroup.update
    calls_left = SHORT["num_steps"] + DIES_IN

    def dies(self: LearnerGroup, batches: list[Any]) -> dict[str, float]:
        nonlocal calls_left
        calls_left -= 1
        if not calls_left:
            raise RuntimeError("the power fails")
        return update(self, batches)

    monkeypatch.setattr(LearnerGroup, "update", dies)
    with pytest.raises(RuntimeError, match="the power fails"):
        TrainingRun(config, directory / "cut", Console(quiet=True)).execute()
    name, before = newest_state(directory / "cut")
    assert name == "step_2"
    TrainingRun(config, directory / "cut", Console(quiet=True)).execute()

    name, found = newest_state(directory / "cut")
    _, expected = newest_state(directory / "whole")
    assert name == f"step_{NUM_ITERATIONS}"
    assert found.keys() == expected.keys()
    for tensor, value in found.items():
        np.testing.assert_array_equal(value, expected[tensor], err_msg=tensor)
    weight = "policy/weight/model.model.norm.weight"
    assert not np.array_equal(before[weight], found[weight])  # what is compared was learned after the resume
    ours, theirs = ([deterministic(row) for row in read_metrics(directory / run)] for run in ("cut", "whole"))
    assert ours == theirs


@pytest.mark.slow
def test_in_the_driver(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_resume(run_config(files, "grpo", 0), tmp_path, monkeypatch)


@pytest.mark.ray
@pytest.mark.slow
def test_on_two_ranks(ray_local: ModuleType, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PPO, which has all that GRPO has, and a critic."""
    check_resume(run_config(files, "ppo", 2), tmp_path, monkeypatch)
