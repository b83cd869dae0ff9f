"""Sizes of a machine: this one's, or those of its data sheet."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ragr1_actors.planning.fit import num_gpus_here

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Kind of GPU: usable memory, bandwidth and dense bf16 peak of its data sheet."""

    name: str
    num_bytes: int
    bytes_per_s: float
    flops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", int(39.4 * GIB), 1.56e12, 312e12),
        Gpu("a100-80gb", int(79.2 * GIB), 2.04e12, 312e12),
        Gpu("h100-80gb", int(79.2 * GIB), 3.35e12, 989e12),
        Gpu("h200-141gb", int(139.8 * GIB), 4.8e12, 989e12),
    )
}


@dataclass(frozen=True)
class Machine:
    """Sizes of each of the equal machines of a cluster."""

    gpu: Gpu | None
    num_gpus: int
    num_cpus: int
    host_bytes: int
    shm_bytes: int
    disk_bytes: int
    num_machines: int = 1


def this_machine(directory: Path) -> Machine:
    """Read the sizes of this machine, with the disk of ``directory``. All its GPUs count like the first one."""
    num_gpus, gpu = num_gpus_here(), None
    if num_gpus:
        import torch

        found = torch.cuda.get_device_properties(0)
        known = next((k for k in GPUS.values() if k.name.split("-")[0] in found.name.lower()), GPUS["a100-80gb"])
        gpu = replace(known, name=found.name, num_bytes=found.total_memory)
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    disk = shutil.disk_usage(directory).free
    return Machine(gpu, num_gpus, psutil.cpu_count() or 1, host_bytes(), shm, disk)


def host_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or of the container if it may have fewer."""
    limits: list[int] = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of version 2, where it may be "max", and of version 1
        with suppress(OSError, ValueError):
            limits.append(int((groups / name).read_text()))
    return min(limits)
