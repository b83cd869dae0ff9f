"""The quickstart on a cluster whose nodes come and go: autoscaled fleets against fleets of the largest size.

Every runner and every retriever has a node of one CPU, which Ray's autoscaler starts and ends on this machine. The
learner stays on the head.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import log
from benchmarks.scale.clusters import autoscaled_cluster
from ragr1_actors.core.errors import UserError
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.telemetry.metrics import read_metrics

NUM_RUNNERS, NUM_RETRIEVERS = 3, 2
"""Size of the fixed fleets, and largest size of the others; all begin with it."""
PLACES = [
    f"env_runners.num_env_runners={NUM_RUNNERS}",
    f"retrieval.num_retrievers={NUM_RETRIEVERS}",
    "env_runners.label_selector={role: runner}",
    "retrieval.label_selector={role: retriever}",
    "learners.label_selector={role: '!in(runner, retriever)'}",
    "retrieval.num_cpus_per_retriever=1",
]
_DELAYS = "look_back_period_s: 10, upscale_delay_s: 10, downscale_delay_s: 10, cooldown_s: 10"
AUTOSCALING = [
    f"env_runners.autoscaling={{max_replicas: {NUM_RUNNERS}, {_DELAYS}}}",
    f"retrieval.autoscaling={{max_replicas: {NUM_RETRIEVERS}, {_DELAYS}}}",
]
"""Delays for a run of minutes; all else by default."""
QUICK = ["sft.num_demonstrations=8", "sft.num_steps=1", "training.num_iterations=2", "evaluation.num_tasks=2"]
QUICK += ["training.train_batch_size=4", "env_runners.num_env_runners=1", "learners.num_learners=1"]
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run reached, and what its fleets cost."""

    em: float
    """Exact match on the held-out tasks after RL."""
    actor_s: float
    """Seconds of RL times runners and retrievers, those that start included."""
    wall_s: float
    """Seconds that the whole run took, SFT included."""
    num_decisions: int
    """Changes of the fleets' sizes."""


def compare(*, quick: bool) -> tuple[Trained, Trained]:
    """Train with autoscaled and then with fixed fleets, each on a new cluster; return both."""
    overrides = [*PLACES, *(QUICK if quick else ())]
    found = train([*overrides, *AUTOSCALING]), train(overrides)
    for name, one in zip(("autoscaled", "fixed"), found, strict=True):
        log(
            f"{name}: EM {one.em:.3f}, {one.actor_s:.0f} s of runners and retrievers, {one.wall_s:.0f} s in all, "
            f"{one.num_decisions} changes of size"
        )
    return found


def train(overrides: list[str]) -> Trained:
    """Run the quickstart on a new cluster.

    Raises:
        UserError: it failed; the text has its last lines.
    """
    types = {"runner": _node("runner", NUM_RUNNERS), "retriever": _node("retriever", NUM_RETRIEVERS)}
    with (
        tempfile.TemporaryDirectory(prefix="ragr1-bench-") as folder,
        autoscaled_cluster(types, num_cpus=2, idle_timeout_s=5) as environment,
    ):
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "ragr1_actors", "train", "quickstart", *overrides, "--run-dir", str(run_dir)]
        variables = os.environ | environment | {"PYTHONPATH": str(Path.cwd())}
        done = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            raise UserError("the run failed: " + "\n".join(done.stdout.splitlines()[-_LAST_LINES:]))
        report = read_report(run_dir)
        last = [row for row in read_metrics(run_dir) if "env_runners/replica_s" in row][-1]
        actor_s = last["env_runners/replica_s"] + last["retrieval/retriever_replica_s"]
        return Trained(report.stages[-1].eval.em, actor_s, report.wall_s, len(report.decisions))


def _node(role: str, max_workers: int) -> Mapping[str, object]:
    return {
        "resources": {"CPU": 1, "object_store_memory": 100_000_000},
        "labels": {"role": role},
        "max_workers": max_workers,
    }
