"""A profile: which costs are the largest, and the timelines that a run writes."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from small_world import invoke, make_config, make_files
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from learners.profiling import FOLDER, Cost, RankProfile, largest_costs, operators_s
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.training.training_run import TrainingRun

ROW = {
    "time/iteration_s": 10.0,
    "time/sample_s": 4.0,
    "time/learn_s": 5.0,
    "time/publish_s": 0.25,
    "time/write_s": 0.125,
}


def test_costs_are_the_phases_of_the_driver_and_the_operators_of_the_learner() -> None:
    ranks = [
        RankProfile(b"", {"aten::mm": 6.0, "aten::add": 1.0}),
        RankProfile(b"", {"aten::mm": 4.0, "aten::mul": 0.5}),
    ]
    assert largest_costs([ROW, ROW], ranks) == [
        Cost("the learner waits for samples", 8.0, 0.4),
        Cost("learner: aten::mm", 5.0, 0.25),
        Cost("the driver's other work", 1.25, 0.0625),
        Cost("weights are published", 0.5, 0.025),
        Cost("learner: aten::add", 0.5, 0.025),
    ]


def made_up(name: str, device: DeviceType, cpu_us: float, device_us: float) -> FunctionEventAvg:
    event = FunctionEventAvg()
    event.key, event.device_type = name, device
    event.self_cpu_time_total, event.self_device_time_total = cpu_us, device_us
    return event


def test_a_kernel_is_no_cost_beside_the_operator_that_started_it() -> None:
    events = [
        made_up("aten::mm", DeviceType.CPU, 1e5, 6e6),
        made_up("aten::linear", DeviceType.CPU, 2e5, 0.0),
        made_up("ampere_sgemm_128x64_tn", DeviceType.CUDA, 0.0, 6e6),
    ]
    assert operators_s(events, on_gpu=True) == {"aten::mm": 6.0, "aten::linear": 0.0}
    assert operators_s(events[:2], on_gpu=False) == {"aten::mm": 0.1, "aten::linear": 0.2}


@pytest.mark.engine
def test_a_run_writes_timelines_and_names_its_largest_costs(tmp_path: Path) -> None:
    learns = {"options": {"drop_zero_variance": False}, "entropy_coeff": 0.01}  # whatever the rewards are
    config = make_config(make_files(tmp_path), {"num_steps": 2}, num_iterations=4, **learns)
    create_run_directory(config, tmp_path / "run")
    printed = io.StringIO()
    TrainingRun(config, tmp_path / "run", Console(file=printed, width=300), num_profiled=2).execute()
    lines = printed.getvalue().splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("profile of 2 iterations, "))
    costs = [re.fullmatch(r" +(\d+\.\d\d) s +(\d+)%  (.+)", line) for line in lines[first + 1 : first + 6]]
    assert all(costs), lines[first:]
    seconds = [float(cost[1]) for cost in costs if cost]
    assert seconds == sorted(seconds, reverse=True)
    assert any(cost and cost[3].startswith("learner: aten::") for cost in costs)
    timeline = json.loads(gzip.decompress((tmp_path / "run" / FOLDER / "learner_0.json.gz").read_bytes()))
    assert any("backward" in event["name"].lower() for event in timeline["traceEvents"])
    assert len(list((tmp_path / "run" / FOLDER).glob("learner_*"))) == 1


def test_more_iterations_than_the_run_has_are_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = invoke("train", "quickstart", "training.num_iterations=3", "--profile", "3", "--run-dir", str(run_dir))
    assert "got --profile 3, but the run has 3 iterations" in said
    assert not run_dir.exists()
