"""``python -m benchmarks.learner.spinning``: what a torch thread that waits in a loop costs beside a busy process.

Each side is a process with two threads that runs linear layers of SmolLM2-135M's size over 8 and over 512 rows, with
OpenMP's default and with ``ragr1``'s, once alone and once beside a process that keeps two threads busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from ragr1_actors.__main__ import SPIN_COUNT

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 576, 1536, 30
NUM_THREADS = 2
NUM_ROWS = {"decoding": 8, "learning": 512}


def measure(num_rows: int, seconds: float) -> float:
    """Return the mean milliseconds of a pass of ``num_rows`` rows, measured for at least ``seconds``."""
    torch.set_num_threads(NUM_THREADS)
    layers = [torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE) for _ in range(NUM_LAYERS)]
    rows = torch.randn(num_rows, HIDDEN_SIZE)
    count, started = 0, time.perf_counter()
    while not count or time.perf_counter() - started < seconds:
        for layer in layers:
            rows = torch.nn.functional.layer_norm(torch.nn.functional.silu(rows @ layer.T) @ layer, (HIDDEN_SIZE,))
        count += 1
    return 1000 * (time.perf_counter() - started) / count


def measured(side: str, spin_count: str | None) -> float:
    """Return what ``measure`` does in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if spin_count is None else {"GOMP_SPINCOUNT": spin_count}
    command = [sys.executable, "-m", "benchmarks.learner.spinning", str(NUM_ROWS[side])]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the table."""
    for place in ("alone", "beside a busy process"):
        busy = None
        if place != "alone":
            busy = subprocess.Popen([sys.executable, "-m", "benchmarks.learner.spinning", "512", "1e9"])
        try:
            for side in NUM_ROWS:
                default, ours = measured(side, None), measured(side, SPIN_COUNT)
                print(f"{place}, {side}: {default:,.1f} ms by default, {ours:,.1f} ms with {SPIN_COUNT}", flush=True)
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measure(int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 5.0))
    else:
        main()
