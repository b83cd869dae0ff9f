"""Every recipe that two cores can train, for five iterations, from one start policy per grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.resolve import TINY, method_recipes, recipe_files, recipe_methods
from ragr1_actors.planning.preflight import check_names
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.run_directory import create_run_directory, with_newest_policy
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.training_run import TrainingRun

pytestmark = [pytest.mark.engine, pytest.mark.slow]

IN_DRIVER = (
    "env_runners.num_env_runners=0",
    "learners.num_learners=0",
    "retrieval.num_retrievers=0",
    "training.train_batch_size=2",
    "training.num_minibatches=1",
    "evaluation.num_tasks=1",
)
SHORT = "env_runners.max_new_tokens_per_turn=8"
"""A policy after ten steps of SFT writes on until the limit. Demonstrations have longer turns."""
START = ("sft.num_steps=10", "sft.num_demonstrations=32", "sft.batch_size=8", "training.num_iterations=0")
Starts = Callable[[str], Path]


def small(*, is_trained: bool) -> Iterator[str]:
    """Recipes with a tiny policy: those that train, or those that only evaluate."""
    for name in (name for names in method_recipes().values() for name in names):
        config = AlgorithmConfig.from_recipe(name).freeze()
        if config.policy.model in TINY and is_trained == bool(config.sft.num_steps or config.training.num_iterations):
            yield name


def train(name: str, run_dir: Path, *keys: str) -> RunConfig:
    config = with_newest_policy(AlgorithmConfig.from_recipe(name).override([*IN_DRIVER, *keys]).freeze())
    check_names(config)
    create_run_directory(config, run_dir)
    TrainingRun(config, run_dir, Console(quiet=True)).execute()
    return config


@pytest.fixture(scope="module")
def start_of(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    made: dict[str, Path] = {}

    def start(name: str) -> Path:
        first = f"{recipe_methods()[name]}_start"  # of a method with several stages
        name = first if first in recipe_files() else name
        config = AlgorithmConfig.from_recipe(name).freeze()
        environment = config.environment.model_dump(include={"env", "tasks", "options", "prompt"})
        grammar = json.dumps([environment, config.policy.options, config.env_runners.max_context_tokens], default=str)
        if grammar not in made:
            made[grammar] = tmp_path_factory.mktemp("start") / name
            train(name, made[grammar], *START)
        return made[grammar]

    return start


@pytest.mark.parametrize("name", list(small(is_trained=True)))
def test_a_recipe_trains(name: str, start_of: Starts, tmp_path: Path) -> None:
    train(name, tmp_path, f"policy.model={start_of(name)}", "sft.num_steps=0", "training.num_iterations=5", SHORT)
    rows = [row for row in read_metrics(tmp_path) if row["stage"] == "rl" and "time/iteration_s" in row]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", list(small(is_trained=False)))
def test_a_recipe_without_training_evaluates(name: str, tmp_path: Path) -> None:
    train(name, tmp_path)
    assert [stage.stage for stage in read_report(tmp_path).stages] == ["start", "rl"]
