"""The cost of writing, as ``ragr1 bench view --only writing`` measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measurement import Repeats
from benchmarks.view import writing
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.runs.telemetry.metrics import read_metrics


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_every_second_block_writes_what_a_run_writes(tmp_path: Path) -> None:
    (found,) = writing.cost(tmp_path, Repeats(1), quick=True)
    assert found.ours > 0
    assert found.ratio == pytest.approx(found.ours / found.theirs - 1)
    last = read_metrics(tmp_path / "run")[-2]  # the last row is that of the evaluation
    written = read_metrics(tmp_path / "written")
    assert len(written) == (writing.WARM_UP + writing.NUM_BLOCKS_QUICK) * writing.BLOCK
    assert set(last) - set(written[-1]) == set()
    files = sorted((tmp_path / "written" / "trajectories").iterdir())
    assert len(files) == len(written)
    (run_file,) = (tmp_path / "run" / "trajectories").glob("iteration_00003.arrow")
    assert [group.task for group in read_trajectories(files[-1])] == [g.task for g in read_trajectories(run_file)]
    assert (tmp_path / "written" / "tensorboard").is_dir()
