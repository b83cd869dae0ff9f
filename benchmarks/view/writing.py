"""What it costs to write metrics, TensorBoard and trajectories: the quickstart's RL, with and without.

Both sides train the same policy with the same seed, so that they sample the same trajectories; the only differences are
``checkpointing.keep_trajectories`` and a logger that writes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from benchmarks.measurement import Sample, log
from ragr1_actors.core.errors import UserError
from ragr1_actors.runs.telemetry.metrics import MetricsLogger

NUM_ITERATIONS, NUM_ITERATIONS_QUICK = 60, 4
WARM_UP = 3
"""First iterations that are not counted: caches fill and files are made."""
SFT = ["sft.num_steps=200", "sft.num_demonstrations=2000", "training.num_iterations=1", "evaluation.num_tasks=1"]
SFT_QUICK = ["sft.num_steps=1", "sft.num_demonstrations=8", "training.num_iterations=1", "evaluation.num_tasks=1"]
WITHOUT = ["checkpointing.keep_trajectories=false"]
_SCRIPT = "import sys; from benchmarks.view.writing import train; train(*sys.argv[1:])"


class Clock(MetricsLogger):
    """Notes when each iteration has been logged."""

    ended_at: ClassVar[dict[int, float]] = {}

    def log(self, stage: str, iteration: int, *values: Any, **more: Any) -> None:
        super().log(stage, iteration, *values, **more)
        self.note(stage, iteration)

    def note(self, stage: str, iteration: int) -> None:
        if stage == "rl":
            self.ended_at.setdefault(iteration, time.perf_counter())


class SilentClock(Clock):
    """The same, and writes nothing."""

    def log(self, stage: str, iteration: int, *values: Any, **more: Any) -> None:
        self.note(stage, iteration)

    def log_examples(self, *values: Any) -> None:
        """Nothing is written."""


def train(run_dir: str, writes: str, *overrides: str) -> None:
    """Train in this process, and print the end of each iteration in seconds as JSON."""
    from ragr1_actors.cli import main
    from ragr1_actors.training import stages

    clock = Clock if writes == "with" else SilentClock
    stages.MetricsLogger = clock  # type: ignore[misc]
    sys.argv = ["ragr1", "train", "quickstart", *overrides, "--run-dir", run_dir]
    try:
        main.main()
    finally:
        print("ENDED", json.dumps(list(clock.ended_at.values())), flush=True)


def cost(folder: Path, repeats: int, *, quick: bool) -> list[Sample]:
    """Return seconds per iteration with writing and without; the ratio is the share that writing adds.

    The sides take turns, so that a machine that gets slower does not favour one of them.
    """
    _train(folder / "sft", "with", SFT_QUICK if quick else SFT)
    policy = f"policy.model={folder / 'sft' / 'policy_sft'}"
    num_iterations = NUM_ITERATIONS_QUICK if quick else NUM_ITERATIONS
    overrides = [policy, "sft.num_steps=0", f"training.num_iterations={num_iterations}", "evaluation.num_tasks=1"]
    overrides += [f"checkpointing.interval={num_iterations + 1}"]
    found = []
    for repeat in range(repeats):
        seconds = {}
        for writes in ("with", "without") if repeat % 2 == 0 else ("without", "with"):
            more = WITHOUT if writes == "without" else []
            seconds[writes] = _train(folder / f"{writes}_{repeat}", writes, [*overrides, *more])
        ours, theirs = mean(seconds["with"]), mean(seconds["without"])
        log(f"{ours:.3f} s per iteration with writing, {theirs:.3f} s without: {ours / theirs - 1:.2%} more")
        found.append(Sample(ours / theirs - 1, ours, theirs))
    return found


def _train(run_dir: Path, writes: str, overrides: list[str]) -> list[float]:
    """Return the seconds of each iteration after the first ones."""
    command = [sys.executable, "-c", _SCRIPT, str(run_dir), writes, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"the run failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    ended_at = json.loads(line.removeprefix("ENDED "))[WARM_UP - 1 :]
    return [after - before for before, after in pairwise(ended_at)]
