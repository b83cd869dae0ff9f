"""Profile of a run: the timelines of the learner ranks for Perfetto or Chrome, and the largest costs.

::

    iteration 1 (not measured)   2 ... N + 1                                    profile/learner_0.json.gz, ray.json
                                 torch's profiler in every rank, Ray's own ──►  the five largest costs

The driver imports this module too, and needs no torch.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import profile

    from learners.learner import Learner

FOLDER = "profile"
NUM_COSTS = 5
_PHASES = {
    "time/sample_s": "the learner waits for samples",
    "time/publish_s": "weights are published",
    "time/write_s": "trajectories and metrics are written",
}


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Timeline and operator times of a profiled rank."""

    timeline: bytes
    """Timeline as JSON in Chrome's trace format, compressed with gzip."""
    operators_s: dict[str, float]
    """Seconds in each operator, without the operators that it called: on the GPU if there is one, else on the CPU."""


_running: list[profile] = []
"""Profile of this process, if one is running."""


def start_profile(learner: Learner) -> None:
    """Begin to profile all threads of this process; a running profile is dropped."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _running.clear()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if learner.device.type == "cuda" else [])
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    found = profile(activities=activities, experimental_config=options)
    found.start()
    _running.append(found)


def stop_profile(learner: Learner) -> RankProfile | None:
    """End the profile and return it; None if this process has begun none, such as after a restart."""
    if not _running:
        return None
    found = _running.pop()
    found.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json.gz"
        found.export_chrome_trace(str(path))
        timeline = path.read_bytes()
    return RankProfile(timeline, operators_s(found.key_averages(), on_gpu=learner.device.type == "cuda"))


def operators_s(events: Iterable[FunctionEventAvg], *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds in each operator, without the operators that it called: ``{"aten::mm": 4.2, ...}``.

    The time of a kernel counts for the operator that started it. The profiler also returns kernels as events of the
    device, which are left out: else every cost would be counted twice.
    """
    from torch._C._autograd import DeviceType

    return {
        str(event.key): (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        for event in events
        if event.device_type == DeviceType.CPU
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds over the profiled iterations: ``Cost("learner: aten::addmm", 12.5, 0.31)``."""

    name: str
    seconds: float
    share: float
    """Share of the wall time of the iterations."""


def largest_costs(rows: Sequence[Mapping[str, float]], ranks: Sequence[RankProfile]) -> list[Cost]:
    """Return the largest costs of the iterations with these metrics: phases of the driver, operators of the learner.

    Learning is divided into its operators, by the mean over the ranks.
    """
    wall_s = math.fsum(row["time/iteration_s"] for row in rows)
    found = {what: math.fsum(row[name] for row in rows) for name, what in _PHASES.items()}
    phases = math.fsum(found.values()) + math.fsum(row["time/learn_s"] for row in rows)
    found["the driver's other work"] = max(0.0, wall_s - phases)
    for name in dict.fromkeys(name for rank in ranks for name in rank.operators_s):
        found[f"learner: {name}"] = math.fsum(rank.operators_s.get(name, 0.0) for rank in ranks) / len(ranks)
    largest = sorted(found.items(), key=lambda item: item[1], reverse=True)[:NUM_COSTS]
    return [Cost(name, seconds, seconds / wall_s) for name, seconds in largest]


def write_timelines(run_dir: Path, ranks: Sequence[RankProfile]) -> Path:
    """Write the timelines of all ranks and of Ray's tasks; return their folder."""
    import ray

    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for number, rank in enumerate(ranks):
        (folder / f"learner_{number}.json.gz").write_bytes(rank.timeline)
    if ray.is_initialized():
        ray.timeline(str(folder / "ray.json"))
    return folder
