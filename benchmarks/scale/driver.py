"""What the traffic of a large fleet costs the driver.

The driver sees requests, references and summaries; what it costs depends on how many groups are in flight and how many
end per second, and not on how many processes sample them. So the traffic of 512 runners with 8 trajectories each goes
through as many actors as a small machine holds. Each has many trajectories, of an engine that sleeps and then answers.
``EnvRunnerGroup`` and ``BatchCollector`` are those of a run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from benchmarks.measurement import log
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.lab.simulation.fleet import VirtualLoop
from ragr1_actors.lab.simulation.run import Simulator, Size
from ragr1_actors.lab.simulation.workload import DrawnWorkload, made_up_task
from ragr1_actors.planning.machine import GPUS, Machine
from ragr1_actors.planning.plan import make_pace
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.batches import BatchCollector
from retrieval.base import Passage

NUM_RUNNERS, NUM_RETRIEVERS, PER_RUNNER = 512, 64, 8
GROUP_SIZE = 8
NUM_GROUPS = NUM_RUNNERS * PER_RUNNER // GROUP_SIZE
"""In flight."""
NUM_ACTORS = 8
NUM_TASKS = 100_000
NUM_PASSAGES = 21_015_324


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a driver carried."""

    groups_per_s: float
    cpu_s_per_group: float
    """Of the driver's process, all its threads."""


class Sleeper:
    """An engine that answers after ``seconds``, one of its options."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        self._ids = tokenizer.encode("<answer> none</answer>")
        self._seconds, self._version = float(settings.options["seconds"]), settings.version

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        await asyncio.sleep(self._seconds)
        count = len(self._ids)
        return Completion(
            self._ids, [0.0] * count, [self._version] * count, "<answer> none</answer>", FinishReason.STOP
        )

    def release(self, request_id: str) -> None:
        pass

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        self._version = version

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


class NoPassages:
    """A retriever that is never asked."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def simulated_rate(num_iterations: int) -> float:
    """Simulate the whole fleet, Search-R1's 7B run on H200s, and return its groups per second."""
    config = (
        AlgorithmConfig.from_recipe("search_r1_grpo_7b")
        .env_runners(max_concurrent_trajectories=PER_RUNNER)
        .training(group_size=GROUP_SIZE, train_batch_size=NUM_GROUPS // 2, max_policy_lag=1)
        .freeze()
    )
    pace = make_pace(config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
    with closing(VirtualLoop()) as loop:
        workload, size = DrawnWorkload(config), Size(NUM_RUNNERS, NUM_RETRIEVERS)
        simulator = Simulator(loop, config, pace, workload, size, lambda time_s: 1.0)
        collector = simulator.collector
        try:
            for _ in range(2):
                collector.trained(loop.run_until_complete(collector.next_batch(0)))
            started_s, num_groups = loop.time(), 0
            for _ in range(num_iterations):  # a learner that takes no time: the fleet is as fast as it can be
                batch = loop.run_until_complete(collector.next_batch(0))
                collector.trained(batch)
                num_groups += len(batch)
            return num_groups / (loop.time() - started_s)
        finally:
            simulator.stop()


class RealTraffic:
    """The same number of groups in flight at ``NUM_ACTORS`` actors, at a rate of the caller's choice."""

    def __init__(self, policy_dir: Path, groups_per_s: float) -> None:
        from cluster.session.ray_session import ray_session

        os.environ.pop("RAY_ADDRESS", None)  # a private cluster, also where another one runs
        self._session = ray_session(num_cpus=NUM_ACTORS)
        self._session.__enter__()
        num_trajectories = NUM_RUNNERS * PER_RUNNER // NUM_ACTORS
        config = sleeping_runners(NUM_ACTORS, num_trajectories=num_trajectories, seconds=NUM_GROUPS / groups_per_s)
        self._fleet = EnvRunnerGroup(config, policy_dir, NoPassages())
        self._fleet.wait_until_ready()
        tasks = [made_up_task(number) for number in range(NUM_TASKS)]
        self._collector = BatchCollector(config, tasks, self._fleet.sample)

    def measure(self, num_batches: int) -> Traffic:
        """Collect batches while all groups are in flight."""
        started, cpu_s, num_groups = time.perf_counter(), time.process_time(), 0
        for _ in range(num_batches):
            batch = self._fleet.loop.run(self._collector.next_batch(0))
            self._fleet.loop.run(self._collector.feed())
            self._collector.trained(batch)
            num_groups += len(batch)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        log(f"{NUM_ACTORS} actors, {num_groups / wall_s:.0f} groups/s: the driver takes {cpu_s / wall_s:.2f} cores")
        return Traffic(num_groups / wall_s, cpu_s / num_groups)

    def close(self) -> None:
        """End the actors and the cluster."""
        self._fleet.stop()
        self._session.__exit__(None, None, None)


def sleeping_runners(
    num_env_runners: int,
    *,
    num_trajectories: int,
    seconds: float,
    engine: str = "benchmarks.scale.driver:Sleeper",
) -> RunConfig:
    """Env runners that need almost no core: their engine sleeps for each turn."""
    return (
        AlgorithmConfig()
        .environment(prompt="{question}", options={"top_k": 1})
        .env_runners(
            num_env_runners=num_env_runners,
            num_cpus_per_env_runner=0.01,
            engine=engine,
            engine_options={"seconds": seconds},
            max_concurrent_trajectories=num_trajectories,
        )
        .training(group_size=GROUP_SIZE, train_batch_size=NUM_GROUPS // 2, max_policy_lag=1)
        .freeze()
    )
