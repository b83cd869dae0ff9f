from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.runs.metrics import MetricsLogger, deterministic, mean_over, read_metrics


def scalars(run_dir: Path, stage: str, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard" / stage))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_one_line_per_iteration_and_the_same_in_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run")
    logger.log("rl", 0, {"rollout/reward": 0.25, "learner/loss": -1})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"iteration": 0, "learner/loss": -1.0, "rollout/reward": 0.25, "stage": "rl"}']
    logger.close()
    logger.close()
    assert scalars(tmp_path / "run", "rl", "rollout/reward") == [(0, 0.25)]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    for iteration in range(3):
        logger.log("sft", iteration, {"learner/loss": 9.0})
    for iteration in range(4):
        logger.log("rl", iteration, {"rollout/reward": float(iteration)})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rollo')  # the crash
    logger = MetricsLogger(tmp_path)
    logger.log("rl", 2, {"rollout/reward": 20.0})
    logger.close()
    rows = read_metrics(tmp_path)
    assert [(row["stage"], row["iteration"]) for row in rows] == [
        *(("sft", iteration) for iteration in range(3)),
        *(("rl", iteration) for iteration in range(3)),
    ]
    assert [row["rollout/reward"] for row in rows[3:]] == [0.0, 1.0, 20.0]
    assert scalars(tmp_path, "rl", "rollout/reward") == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_values_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log("rl", 0, {"learner/loss": math.nan, "learner/norm": math.inf})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["learner/norm"] == "inf"
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["learner/loss"])
    assert row["learner/norm"] == math.inf


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no"):
        read_metrics(tmp_path / "absent")
    (tmp_path / "metrics.jsonl").write_text("{broken\n{}\n")
    with pytest.raises(RunDirectoryError, match="line 1"):
        read_metrics(tmp_path)


def test_helpers() -> None:
    assert mean_over([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}
    assert mean_over([]) == {}
    timed = {"time/iteration_s": 1.0, "env_runners/load": 3.0, "retrieval/waiting": 4.0}
    assert deterministic({**timed, "rollout/reward": 2.0}) == {"rollout/reward": 2.0}
