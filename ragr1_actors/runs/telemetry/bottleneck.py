"""Bottleneck of a run's throughput: a pure function of its loads, for simulations and the metrics of real runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragr1_actors.core.config import RunConfig
from ragr1_actors.runs.telemetry.metrics import is_iteration

Limit = Literal["learner", "retrieval", "batch", "rollout"]

BUSY_LEARNER, BUSY_LEARNER_IN_TURNS = 0.9, 0.5
"""Share of time that the learner works from which it is the bottleneck: with a lag, and in turns with sampling."""
LONG_SEARCHES = 0.2
"""Share of a trajectory's time that it waits for searches, above which retrieval matters."""
BUSY_RETRIEVERS = 0.7
"""Share of their time that retrievers work, above which queries wait longer than their search takes."""
EMPTY_RUNNERS = 0.25
"""Share of their trajectories that runners have in flight, below which more runners have nothing to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """Means over some iterations of a run."""

    learner_wait: float
    """Share of the time that the learner waited for a batch: ``time/sample_s`` of ``time/iteration_s``."""
    search_wait: float
    """Share of a trajectory's time that it waited for searches: ``time/retrieval_waited_s`` of its sum with
    ``time/generation_s``."""
    retriever_busy: float
    """Share of their time that the retrievers worked: ``retrieval/retriever_busy``."""
    runner_load: float
    """Trajectories in flight per runner, ``env_runners/load``, over ``env_runners.max_concurrent_trajectories``."""
    num_runners: int
    num_retrievers: int
    max_policy_lag: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Bottleneck of the throughput, and advice: ``Verdict("retrieval", "... add 3 retrievers")``."""

    limit: Limit
    advice: str


def load_of_rows(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Load | None:
    """Return the means of lines of ``metrics.jsonl``; None without an iteration of RL, or if no runner sampled.

    Without runners the policy samples in the driver, between two updates.
    """
    found = [row for row in rows if is_iteration(row)]
    if not found or not config.env_runners.num_env_runners:
        return None

    def mean(name: str) -> float:
        return math.fsum(float(row.get(name, 0.0)) for row in found) / len(found)

    waited_s, generated_s = mean("time/retrieval_waited_s"), mean("time/generation_s")
    return Load(
        learner_wait=mean("time/sample_s") / mean("time/iteration_s"),
        search_wait=waited_s / (waited_s + generated_s) if waited_s else 0.0,
        retriever_busy=mean("retrieval/retriever_busy"),
        runner_load=mean("env_runners/load") / config.env_runners.max_concurrent_trajectories,
        num_runners=round(mean("env_runners/running")),
        num_retrievers=round(mean("retrieval/retriever_running")),
        max_policy_lag=config.training.max_policy_lag,
    )


def find_bottleneck(load: Load) -> Verdict:
    """Return the bottleneck; of several, the first of learner, retrieval, batch and rollout."""
    waits, runners, retrievers = load.learner_wait, load.num_runners, load.num_retrievers
    enough = BUSY_LEARNER if load.max_policy_lag else BUSY_LEARNER_IN_TURNS
    in_turns = "" if load.max_policy_lag else "; with training.max_policy_lag=1 it would not wait while they sample"
    if waits <= 1 - enough:
        return Verdict("learner", f"the learner works {1 - waits:.0%} of the time: add learner ranks{in_turns}")
    if load.search_wait >= LONG_SEARCHES and load.retriever_busy >= BUSY_RETRIEVERS:
        missing = max(1, math.ceil(retrievers * load.retriever_busy / BUSY_RETRIEVERS) - retrievers)
        return Verdict(
            "retrieval",
            f"trajectories wait for searches {load.search_wait:.0%} of their time, and the retrievers work "
            f"{load.retriever_busy:.0%} of theirs: add at least {missing} to the {retrievers}",
        )
    if load.search_wait >= LONG_SEARCHES:
        return Verdict(
            "retrieval",
            f"trajectories wait for searches {load.search_wait:.0%} of their time, though the retrievers work only "
            f"{load.retriever_busy:.0%} of theirs: make a search faster by a compressed index, more shards or GPUs",
        )
    if load.runner_load < EMPTY_RUNNERS:
        return Verdict(
            "batch",
            f"the runners have {load.runner_load:.0%} of the trajectories that they can have in flight: raise "
            f"training.train_batch_size or training.max_policy_lag, or take fewer than {runners} runners{in_turns}",
        )
    # in turns, sampling takes wait / (1 - wait) times as long as learning, and should become as long
    wanted = runners * enough * (1 if load.max_policy_lag else 2 * waits) / max(0.01, 1 - waits)
    missing = max(1, math.ceil(wanted) - runners)
    return Verdict(
        "rollout",
        f"the learner waits {waits:.0%} of the time for samples: add {missing} to the {runners} runners, where GPUs or "
        f"CPUs are free{in_turns}",
    )
