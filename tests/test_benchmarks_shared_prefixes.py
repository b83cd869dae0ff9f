"""What ``benchmarks.real.shared_prefixes`` counts in the trajectories of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from learners_common import make_branches

from benchmarks.real import shared_prefixes
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import StopReason, Trajectory, TrajectoryGroup


def write(run: Path, number: int, *groups: list[Trajectory]) -> None:
    """A file of an iteration."""
    (run / "trajectories").mkdir(parents=True, exist_ok=True)
    batches = [groups_to_record_batch([TrajectoryGroup(group[0].task, tuple(group)) for group in groups])]
    write_trajectories(run / "trajectories" / f"iteration_{number:05d}.arrow", batches)


def test_groups_that_are_learned_from_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither equal rewards nor a failure teach anything."""
    first, twin, other, *_ = make_branches(0)  # the first two are equal
    flat = [replace(one, reward=1.0) for one in (first, other)]
    failed = replace(first, stop_reason=StopReason.ENGINE_ERROR, reward=0.0)
    pair = [replace(first, reward=1.0), replace(twin, reward=0.0), failed]
    write(tmp_path, 1, flat, [replace(first, reward=1.0), failed])
    write(tmp_path, 2, pair)
    shared_prefixes.main([tmp_path])
    length = first.num_tokens
    assert capsys.readouterr().out == f"{tmp_path}: {length} of {2 * length} tokens, 0.50\n"


def test_a_run_without_trajectories_is_named(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    for run in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=rf"no trajectories/iteration_\*\.arrow in {run}; name the folder"):
            shared_prefixes.main([run])
    write(tmp_path, 1, make_branches(0))
    path = tmp_path / "trajectories" / "iteration_00001.arrow"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"iteration_00001\.arrow cannot be read"):
        shared_prefixes.main([tmp_path])
