"""One runner against eight: real actors of the real ``EnvRunnerGroup``, with an engine that only keeps time.

The engine returns a scripted turn at ``TOKEN_LATENCY_S`` per token and needs almost no CPU, so that the fleet and its
driver are measured and not the number of cores: eight runners with 32 trajectories each wake up 4,300 times per second,
which takes all their processes together about half of one of two cores. Faster tokens would make those the limit. Turns
are a quarter as long as in the rest of the benchmark, so that groups come and go at the rate of a larger fleet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import Sample
from benchmarks.rollout import workload
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Completion, EncodeFn, OnText, Sampling
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm_config import AlgorithmConfig

TOKEN_LATENCY_S = 0.06
TURN_TOKENS_MEDIAN = workload.TURN_TOKENS_MEDIAN / 4
NUM_RUNNERS = 8
TRAJECTORIES_PER_RUNNER = 32
GROUP_SIZE = 4
SLOTS = TRAJECTORIES_PER_RUNNER // GROUP_SIZE
"""Groups that a runner works on at once."""


class Scripts(Mapping[str, list[str]]):
    """The script of any trajectory, drawn when it is asked for. Copies of a group (``name@copy``) say the same."""

    def __init__(self, turn_tokens_median: float) -> None:
        self._turn_tokens_median = turn_tokens_median

    def __getitem__(self, trajectory_id: str) -> list[str]:
        name, _, rest = trajectory_id.partition("@")
        plan = workload.plan(f"{name}/{rest.rpartition('/')[2]}", self._turn_tokens_median)
        return [self._turn(plan, turn) for turn in range(len(plan.turn_tokens))]

    def _turn(self, plan: workload.Plan, turn: int) -> str:
        if turn == plan.num_searches:
            head, tail = "<answer>", " none</answer>"
        else:
            head, tail = "<search>", f" {plan.queries(turn)[0]}</search>"
        filler = max(0, plan.turn_tokens[turn] - len(tail.split()) - 2)
        return "".join(f" {word}" for word in workload.words()[:filler]) + head + tail

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class PacedScripts(ScriptedEngine):
    """A scripted engine that takes ``token_latency_s`` for each token and reports the text as it grows."""

    def __init__(
        self, scripts: Mapping[str, Sequence[str]], encode: EncodeFn, version: int = 0, *, token_latency_s: float
    ) -> None:
        super().__init__(scripts, encode, version)
        self._token_latency_s = token_latency_s

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        completion = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        text, num_new = completion.text, len(completion.token_ids)
        for num_played in range(1, num_new + 1):
            await asyncio.sleep(self._token_latency_s)
            if on_text is not None:
                on_text(text[: len(text) * num_played // num_new])
        return completion


class PacedEngine(PacedScripts):
    """The engine of the fleet as a recipe names it: ``env_runners.engine: benchmarks.rollout.fleet:PacedEngine``."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        super().__init__(
            Scripts(TURN_TOKENS_MEDIAN), tokenizer.encode, settings.version, token_latency_s=TOKEN_LATENCY_S
        )


def make_config(num_env_runners: int) -> RunConfig:
    """A fleet of runners that need almost no core."""
    config = AlgorithmConfig().environment(prompt="{question}", options={"top_k": 1}).training(group_size=GROUP_SIZE)
    config.env_runners(
        num_env_runners=num_env_runners,
        num_cpus_per_env_runner=0.01,
        engine="benchmarks.rollout.fleet:PacedEngine",
        max_concurrent_trajectories=TRAJECTORIES_PER_RUNNER,
    )
    return config.freeze()


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One measured load."""

    groups_per_s: float
    wall_s: float
    cpu_s: float
    """Of the driver's process, all its threads."""


class Fleets:
    """A fleet of one runner and one of eight, started once for all repeats."""

    def __init__(self, policy_dir: Path) -> None:
        from cluster.session.ray_session import ray_session

        os.environ.pop("RAY_ADDRESS", None)  # a private cluster, also where another one runs
        self._session = ray_session(num_cpus=NUM_RUNNERS)
        self._session.__enter__()
        self._fleets = [EnvRunnerGroup(make_config(n), policy_dir, workload.SlowRetriever()) for n in (1, NUM_RUNNERS)]
        for fleet in self._fleets:
            fleet.wait_until_ready()

    def measure(self, groups_per_runner: int) -> tuple[Sample, Sample]:
        """Return (groups/s of eight ÷ eight times that of one, the driver's CPU seconds ÷ wall seconds with eight)."""
        one = run_fleet(self._fleets[0], 1, groups_per_runner)
        eight = run_fleet(self._fleets[1], NUM_RUNNERS, groups_per_runner)
        expected = NUM_RUNNERS * one.groups_per_s
        scaling = Sample(eight.groups_per_s / expected, eight.groups_per_s, expected)
        return scaling, Sample(eight.cpu_s / eight.wall_s, eight.cpu_s, eight.wall_s)

    def close(self) -> None:
        """End the actors and the cluster."""
        for fleet in self._fleets:
            fleet.stop()
        self._session.__exit__(None, None, None)


def run_fleet(fleet: EnvRunnerGroup, num_runners: int, groups_per_runner: int) -> FleetRun:
    """Give every runner the same groups, and measure as long as all have as much to do as they can take.

    The load is ``num_runners`` copies of the same list. The clock stops when all but the last ``SLOTS`` groups per
    runner are there: what is left then is the end of a run, which no longer run would have.
    """
    names = [f"fleet/{index}@{copy}" for index in range(groups_per_runner) for copy in range(num_runners)]
    requests = [GroupRequest(f"{name}#0", workload.task(name), GROUP_SIZE, 1.0) for name in names]
    wanted = num_runners * (groups_per_runner - SLOTS)

    async def sample() -> FleetRun:
        started, cpu_started = time.perf_counter(), time.process_time()
        ends = asyncio.as_completed([fleet.sample(request) for request in requests])
        for _ in range(wanted):
            await next(ends)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        for end in ends:
            await end
        return FleetRun(wanted / wall_s, wall_s, cpu_s)

    return fleet.loop.run(sample())
