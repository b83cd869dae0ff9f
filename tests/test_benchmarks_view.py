"""The two sides of ``ragr1 bench view --only writing``: the same calls, with files and without."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.view import writing
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, read_metrics


@pytest.mark.parametrize(("clock", "num_rows"), [(writing.Clock, 3), (writing.SilentClock, 0)])
def test_both_sides_note_when_an_iteration_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: type[writing.Clock], num_rows: int
) -> None:
    monkeypatch.setattr(clock, "ended_at", {})
    with closing(clock(tmp_path)) as logger:
        assert isinstance(logger, MetricsLogger)
        logger.log("sft", 1, {"eval/em": 0.5})
        logger.log("rl", 1, {"rollout/reward": 0.5})
        logger.log("rl", 2, {"rollout/reward": 0.5}, (), (), {"turns": [1.0]}, {})
        logger.log_examples("rl", 2, {"wrong": "text"})
    assert list(clock.ended_at) == [1, 2]
    assert clock.ended_at[1] <= clock.ended_at[2]
    assert len(read_metrics(tmp_path)) == num_rows
