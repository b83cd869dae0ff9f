"""A learner that becomes a hundred times slower than the runners: what waits for it is bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from small_world import make_config, make_files

from learners.algorithms.grpo import GRPOLearner
from ragr1_actors.core.types import TrajectoryGroup
from ragr1_actors.training.algorithm import Algorithm

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]
LAG, BATCH, NUM_FAST, NUM_SLOW = 2, 2, 3, 4


class SlowingLearner(GRPOLearner):
    """Takes a hundred times as long as the fastest of its first three updates from its fourth update on."""

    fastest_s = math.inf

    def update(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        started = time.monotonic()
        metrics = super().update(groups)
        if self.num_updates <= NUM_FAST:
            self.fastest_s = min(self.fastest_s, time.monotonic() - started)
        else:
            time.sleep(99 * self.fastest_s)
        return metrics


def memory() -> dict[str, int]:
    """Resident bytes of the driver, of the runners, and of the raylet, whose memory the object store is."""
    this = psutil.Process()
    found = {"driver": this.memory_info().rss, "runners": 0, "object store": 0}
    for process in this.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if process.name().startswith("ray::EnvRunner"):
                found["runners"] += process.memory_info().rss
            elif process.name() == "raylet":
                found["object store"] += process.memory_info().rss
    return found


def test_a_learner_that_is_a_hundred_times_slower_leaves_memory_flat(ray_local: ModuleType, tmp_path: Path) -> None:
    config = make_config(
        make_files(tmp_path), {"num_steps": 0}, train_batch_size=BATCH, group_size=4, max_policy_lag=LAG
    )
    parts = {
        "training": {"algorithm": f"{__name__}:SlowingLearner", "options": {"drop_zero_variance": False}},
        "env_runners": {"num_env_runners": 2, "num_cpus_per_env_runner": 0.5, "max_concurrent_trajectories": 8},
        "learners": {"num_learners": 1, "num_cpus_per_learner": 0.5},
    }
    changed = {name: getattr(config, name).model_copy(update=part) for name, part in parts.items()}
    algorithm = Algorithm.create(config.model_copy(update=changed), tmp_path / "run")
    measured, learn_s = [], []
    for _ in range(NUM_FAST + NUM_SLOW):
        metrics = algorithm.train()
        assert metrics["tasks/issued"] - metrics["tasks/trained"] <= (LAG + 1) * BATCH
        assert metrics["loop/stale_groups"] == 0
        measured.append(memory())
        learn_s.append(metrics["time/learn_s"])
    algorithm.stop()
    assert min(learn_s[NUM_FAST:]) > 20 * min(learn_s[:NUM_FAST])  # so the runners had the time for many batches
    first, last = measured[NUM_FAST], measured[-1]
    assert min(first.values()) > 0
    assert {name: last[name] / first[name] for name in first} == pytest.approx(dict.fromkeys(first, 1.0), abs=0.05)
