"""A profile of the learner in this process: a timeline for Perfetto or Chrome, and operators by the time in them.

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
    """What a rank did while it was profiled."""

    timeline: bytes
    """JSON of Chrome's trace format, compressed with gzip."""
    operators_s: dict[str, float]
    """Seconds in each operator, without those that it called: of the GPU where it has one, else of the CPU."""


_running: list[profile] = []
"""The profile of this process, if one is under way."""


def start_profile(learner: Learner) -> None:
    """Begin to profile all threads of this process; a profile that was under way is dropped."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _running.clear()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if learner.device.type == "cuda" else [])
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    found = profile(activities=activities, experimental_config=options)
    found.start()
    _running.append(found)


def stop_profile(learner: Learner) -> RankProfile | None:
    """End the profile and return it; None if this process has begun none, as after a restart."""
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
    """Return the seconds in each operator, without those that it called: ``{"aten::mm": 4.2, ...}``.

    A kernel's time is in that of the operator that started it. The profiler also returns kernels as events of the
    device, which are left out: else every cost would be named twice.
    """
    from torch._C._autograd import DeviceType

    return {
        str(event.key): (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        for event in events
        if event.device_type == DeviceType.CPU
    }
