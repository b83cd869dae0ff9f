"""``python -m benchmarks.learner.kernels``: memory that compiled matrix products keep, by oneDNN's limit and ours.

Each side is a process that multiplies bfloat16 matrices of ``NUM_SHAPES`` numbers of rows with the weights of an MLP of
SmolLM2-135M. It prints by how much its memory grew, and the time of the products.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import psutil
import torch

from ragr1_actors.core.models.process_memory import KERNEL_LIMITS, limit_kernel_caches, trim_heap

NUM_SHAPES = 400
HIDDEN_SIZE, INTERMEDIATE_SIZE = 576, 1536


def measure(num_shapes: int, *, is_limited: bool) -> tuple[float, float]:
    """Multiply in this process, which has multiplied nothing before; return the growth in MiB, and seconds."""
    if is_limited:
        limit_kernel_caches()
    torch.set_num_threads(1)
    up = torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16)
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    for num_rows in range(10, 10 + num_shapes):
        hidden = torch.nn.functional.linear(torch.ones(num_rows, HIDDEN_SIZE, dtype=torch.bfloat16), up)
        torch.nn.functional.linear(hidden, up.T)
    seconds = time.perf_counter() - started
    del hidden
    gc.collect()
    trim_heap()
    return (process.memory_info().rss - before) / 2**20, seconds


def measured(num_shapes: int, *, is_limited: bool) -> tuple[float, float]:
    """Return what ``measure`` does in a new process."""
    side = "limited" if is_limited else "default"
    command = [sys.executable, "-m", "benchmarks.learner.kernels", side, str(num_shapes)]
    environment = {name: value for name, value in os.environ.items() if name not in KERNEL_LIMITS}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    grown_mib, seconds = map(float, ended.stdout.split())
    return grown_mib, seconds


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*measure(int(sys.argv[2]), is_limited=sys.argv[1] == "limited"))
    else:
        for is_limited in (False, True):
            grown_mib, seconds = measured(NUM_SHAPES, is_limited=is_limited)
            print(f"{'limited' if is_limited else 'default'}: {grown_mib:,.0f} MiB more, {seconds:.1f} s")
