"""``ragr1 bench trl``: whole iterations of GRPO, sampling and learning, against TRL's trainer on the same two cores.

========================= ======================================================================= ======
metric                    ratio                                                                   goal
========================= ======================================================================= ======
vs_trl_single_tiny        trajectories/s ÷ TRL's: one turn, the model of ``quickstart``           >= 2.5
vs_trl_search_tiny        the same with three turns, of which two search                          >= 3.5
vs_trl_single_smollm2     the same two with SmolLM2-135M-Instruct                                 >= 2.5
vs_trl_search_smollm2                                                                             >= 3.5
vs_trl_memory_single_tiny peak memory of all processes ÷ TRL's in that run; so for the others     <= 1
========================= ======================================================================= ======

Each side is a process with two threads: ``ragr1 train`` with env runner, learner and index in the driver, and
``trl_grpo.py`` in ``.venv-trl`` (``make .venv-trl/.installed``). The first iteration does not count.

Both sides compute the same tokens; else it is an error. No token ends a turn, so turns have a fixed length, and their
number is fixed (``fixed.py``). Our side runs first, and searches. TRL gets our prompts, and what our searches found, in
a file: it has nothing to search, and never waits for the longest turn of a batch. Both are in its favour. Its weights
have the number format of ours, without a copy in float32, and it keeps its activations. Two minibatches are the value
of the recipes; TRL computes the log-probs of a batch once more for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from benchmarks.measurement import Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import TokenKind, Trajectory
from ragr1_actors.runs.report import tree_memory_bytes
from ragr1_actors.runs.telemetry.metrics import read_metrics

PYTHON = Path(".venv-trl/bin/python")
PEER = Path(__file__).with_name("trl_grpo.py")
SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
NUM_THREADS, NUM_MINIBATCHES, MEMORY_INTERVAL_S = 2, 2, 0.5
OUR_PARTS = ("sample", "learn", "publish", "write")

Batch = Sequence[Sequence[Trajectory]]
"""Trajectories of an iteration, by group."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of both sides, and what each takes to do it."""

    recipe: str
    num_turns: int
    turn_tokens: int
    lr: float
    num_iterations: int
    """Iterations that count, after one that does not."""
    micro_batch: int = 16
    """Trajectories in a forward and backward pass of TRL."""
    num_tasks: int = 8
    group_size: int = 8

    @property
    def batch_size(self) -> int:
        return self.num_tasks * self.group_size

    @property
    def is_real(self) -> bool:
        """Whether the model is SmolLM2."""
        return self.recipe == "smollm2_world"

    @property
    def dtype(self) -> str:
        """bfloat16 for a real model where the CPU multiplies it in hardware, as in ``make real``."""
        info = Path("/proc/cpuinfo").read_text() if self.is_real and Path("/proc/cpuinfo").exists() else ""
        return "bfloat16" if "avx512_bf16" in info or "amx_bf16" in info else "float32"


WORKLOADS = {
    "single_tiny": Workload("quickstart", num_turns=1, turn_tokens=64, lr=5e-4, num_iterations=8),
    "search_tiny": Workload("quickstart", num_turns=3, turn_tokens=32, lr=5e-4, num_iterations=8),
    "single_smollm2": Workload("smollm2_world", num_turns=1, turn_tokens=64, lr=6e-5, num_iterations=2),
    "search_smollm2": Workload("smollm2_world", num_turns=3, turn_tokens=32, lr=6e-5, num_iterations=2),
}
GOALS = {
    **{f"vs_trl_{name}": Goal(2.5 if one.num_turns == 1 else 3.5, at_least=True) for name, one in WORKLOADS.items()},
    **{f"vs_trl_memory_{name}": Goal(1.0, at_least=False) for name in WORKLOADS},
}
METRICS = tuple(GOALS)


@dataclass(frozen=True, slots=True)
class Side:
    """What a side did in the iterations that count."""

    tokens: list[tuple[int, int]]
    """All tokens and sampled ones, by iteration."""
    iteration_s: float
    parts: dict[str, float]
    """Mean seconds of an iteration, by part."""
    peak_bytes: float


def describe() -> str:
    """The workload, in one line."""
    return "trl: 8 trajectories of each of 8 tasks, sampled and learned; turns of a fixed length"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric, TRL or the model is not there, a side failed, or their tokens differ.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    for name, workload in WORKLOADS.items():
        metrics = {f"vs_trl_{name}": "trajectories/s", f"vs_trl_memory_{name}": "bytes"}
        if quick:
            workload = replace(workload, num_tasks=2, group_size=4, micro_batch=4, num_iterations=1)
        if wanted & metrics.keys():
            samples = zip(*(compare(workload) for _ in times), strict=True)
            for (metric, unit), found in zip(metrics.items(), samples, strict=True):
                if metric in wanted:
                    yield measure(metric, found, unit, GOALS[metric])


def compare(workload: Workload) -> tuple[Sample, Sample]:
    """Return trajectories per second and peak memory of both sides."""
    needed = {PYTHON: "make .venv-trl/.installed"}
    if workload.is_real:
        needed[SMOLLM2] = "make .venv/.installed-real, python -m benchmarks.real.models"
    if missing := [f"{path}: {how}" for path, how in needed.items() if not path.exists()]:
        raise UserError(f"the benchmark trl needs {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        run_dir, work_file = Path(directory) / "run", Path(directory) / "work.json"
        _, peak_bytes = run_process(our_command(workload, run_dir))
        kept = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))
        batches = [[group.trajectories for group in read_trajectories(path)] for path in kept]
        ours = our_side(read_metrics(run_dir), batches, peak_bytes)
        policy = SMOLLM2 if workload.is_real else run_dir / "policy"
        work_file.write_text(json.dumps(work_of(workload, policy, batches)))
        theirs = peer_side(*run_process([str(PYTHON), str(PEER), str(work_file)]))
    for name, side in (("ours", ours), ("TRL", theirs)):
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in side.parts.items())
        log(f"{name}: {side.iteration_s:.2f} s an iteration ({parts}), {side.peak_bytes / 1e9:.2f} GB")
    if ours.tokens != theirs.tokens:
        raise UserError(
            f"got {theirs.tokens} tokens of TRL, expected ours, {ours.tokens}; see benchmarks/peers/fixed.py"
        )
    rates = quotient(workload.batch_size / ours.iteration_s, workload.batch_size / theirs.iteration_s)
    return rates, quotient(ours.peak_bytes, theirs.peak_bytes)


def our_command(workload: Workload, run_dir: Path) -> list[str]:
    """Return the command of our side."""
    settings = (
        "environment.env=benchmarks.peers.fixed:FixedEnv",
        "environment.reward=benchmarks.peers.fixed:token_reward",
        f"environment.max_turns={workload.num_turns}",
        f"policy.dtype={workload.dtype}",
        "env_runners.engine=benchmarks.peers.fixed:FixedEngine",
        "env_runners.num_env_runners=0",
        "env_runners.weight_transport=auto",
        f"env_runners.max_new_tokens_per_turn={workload.turn_tokens}",
        "learners.num_learners=0",
        "retrieval.num_retrievers=0",
        "sft.num_steps=0",
        f"training.num_iterations={1 + workload.num_iterations}",
        f"training.train_batch_size={workload.num_tasks}",
        f"training.group_size={workload.group_size}",
        f"training.num_minibatches={NUM_MINIBATCHES}",
        f"training.lr={workload.lr}",
        "evaluation.num_tasks=1",
        f"debugging.num_threads={NUM_THREADS}",
    )
    return [sys.executable, "-m", "ragr1_actors", "train", workload.recipe, *settings, "--run-dir", str(run_dir)]


def our_side(rows: Sequence[Mapping[str, Any]], batches: Sequence[Batch], peak_bytes: float) -> Side:
    """Return what a run wrote of its iterations."""
    timed = [row for row in rows if "time/iteration_s" in row][1:]
    whole, *parts = (fmean(row.get(f"time/{one}_s", 0.0) for row in timed) for one in ("iteration", *OUR_PARTS))
    played = [[one for group in batch for one in group] for batch in batches[1:]]
    tokens = [(sum(one.num_tokens for one in all_), sum(one.num_model_tokens for one in all_)) for all_ in played]
    return Side(tokens, whole, dict(zip(OUR_PARTS, parts, strict=True)), peak_bytes)


def work_of(workload: Workload, policy: Path, batches: Sequence[Batch]) -> dict[str, Any]:
    """Return TRL's work: for each task the ids of our prompt, and of what stood after each of our searches."""
    tasks = []
    for first, *_ in (group for batch in batches for group in batch):
        ends = np.flatnonzero(np.diff(first.kinds == TokenKind.MODEL)) + 1
        prompt, *parts = (part.tolist() for part in np.split(first.token_ids, ends))
        tasks.append({"prompt_ids": prompt, "observations": parts[1::2]})
    return {
        "policy": str(policy),
        "dtype": workload.dtype,
        "tasks": tasks,
        "turn_tokens": workload.turn_tokens,
        "num_iterations": len(batches),
        "batch_size": workload.batch_size,
        "group_size": workload.group_size,
        "num_minibatches": NUM_MINIBATCHES,
        "micro_batch": workload.micro_batch,
        "lr": workload.lr,
    }


def peer_side(printed: str, peak_bytes: float) -> Side:
    """Return what TRL's process printed of its iterations, a JSON object each among the lines of libraries."""
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{"iteration_s"')][1:]
    if not rows:
        raise UserError(f"got no second iteration from {PEER.name}, which printed {printed[-300:]!r}")
    seconds = {name.removesuffix("_s"): fmean(row[name] for row in rows) for name in rows[0] if name.endswith("_s")}
    tokens = [(row["num_tokens"], row["num_sampled"]) for row in rows]
    return Side(tokens, seconds.pop("iteration"), seconds, peak_bytes)


def run_process(command: Sequence[str]) -> tuple[str, float]:
    """Return what a process prints, and the peak of the memory of its tree in bytes; ``UserError`` if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(NUM_THREADS)}
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ) as process:
            try:
                while process.poll() is None:
                    peak_bytes = max(peak_bytes, tree_memory_bytes(psutil.Process(process.pid)))
                    time.sleep(MEMORY_INTERVAL_S)
            except BaseException:
                process.terminate()
                raise
        output.seek(0)
        printed = output.read()
    if process.returncode:
        raise UserError(f"{' '.join(command)} ended with {process.returncode}: {printed[-2000:]}")
    return printed, float(peak_bytes)
