"""Profile of the learner in this process: a timeline for Perfetto or Chrome, and the seconds in each operator.

The driver imports this module too, and needs no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import profile

    from learners.learner import Learner


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
