"""Our side: the real loop on one engine, and what is written down of it for the other sides to repeat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from benchmarks.measurement import Sample, quotient
from benchmarks.rollout import workload
from benchmarks.rollout.intervals import Interval, uncovered_s
from envs.base import EnvContext
from envs.grammars.tags import Action, Answer, Search
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings, RunConfig
from ragr1_actors.core.types import Completion, Message, OnText, Sampling, Task
from ragr1_actors.rollout.engines.base import Engine, PolicyTokenizer
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.training.algorithm_config import AlgorithmConfig

NUM_IN_FLIGHT = 64
NUM_SEQUENCES = 32
"""Half as many run in the engine, so that a trajectory that waits for its search leaves no hole in the batch."""
MAX_CONTEXT_TOKENS = 1536
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model in the engine's own process, as vLLM has it on one GPU. Its CPU build would put it into another one and
wait for it in a loop of ``sched_yield``, which takes the second of two cores from whatever is measured."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as it was sampled."""

    trajectory: str
    turn: int
    prompt_ids: list[int]
    sampling: Sampling
    num_tokens: int
    interval: Interval
    """``time.perf_counter()`` when it was asked for and when it was there."""


@dataclass(frozen=True, slots=True)
class SideRun:
    """What one side did."""

    wall_s: float
    turns: list[TurnRecord] = field(repr=False)
    searches: list[Interval] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> int:
        """Sampled by the policy."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def tokens_per_s(self) -> float:
        """Over all of it, its end with ever fewer trajectories included."""
        return self.num_tokens / self.wall_s

    @property
    def search_s(self) -> float:
        """Of all searches, one by one."""
        return sum(end - start for start, end in self.searches)

    @property
    def waiting(self) -> Sample:
        """Share of the time of all trajectories, over the whole run, in which they neither generate nor search."""
        total_s = self.wall_s * len({turn.trajectory for turn in self.turns})
        waiting_s = total_s - self.search_s - sum(end - start for start, end in (t.interval for t in self.turns))
        return quotient(waiting_s, total_s)

    @property
    def hidden(self) -> Sample:
        """1 - seconds in which searches alone were under way ÷ seconds of all searches."""
        idle_s = uncovered_s(self.searches, (turn.interval for turn in self.turns))
        return Sample(1 - idle_s / self.search_s, idle_s, self.search_s)


class PlannedEnv(SearchEnv):
    """``SearchEnv`` for a policy that writes no tags: the number of the turn says whether it searches or answers.

    Everything else is the real thing: the tags as stop strings, ``peek`` over the growing text, cleaning, layout. No
    search begins before its turn has ended, as the text holds no queries: what early searches would gain is left out.
    """

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self._plan = workload.Plan("", ())
        self._turn = 0

    async def reset(self, task: Task) -> list[Message]:
        self._plan = workload.plan(task.task_id)
        return await super().reset(task)

    def parse(self, completion: str) -> Action:
        turn, self._turn = self._turn, self._turn + 1
        if turn == self._plan.num_searches:
            return Answer("done")
        return Search(self._plan.queries(turn))


class PlannedEngine:
    """An engine whose turns are as long as was drawn; it keeps a record of each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next_turn: dict[str, int] = {}
        self.turns: list[TurnRecord] = []

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        turn = self._next_turn.get(request_id, 0)
        self._next_turn[request_id] = turn + 1
        prompt_ids = list(prompt_token_ids)
        length = workload.plan(request_id.partition("#")[0]).turn_tokens[turn]
        sampling = replace(sampling, max_new_tokens=min(length, sampling.max_new_tokens))
        started = time.perf_counter()
        completion = await self._engine.generate(prompt_ids, sampling, request_id=request_id, on_text=on_text)
        interval = (started, time.perf_counter())
        self.turns.append(TurnRecord(request_id, turn, prompt_ids, sampling, len(completion.token_ids), interval))
        return completion

    def release(self, request_id: str) -> None:
        self._engine.release(request_id)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        await self._engine.update_weights(weights, version)

    async def check(self) -> None:
        await self._engine.check()

    async def close(self) -> None:
        """Leave the engine open: the other sides use it too."""


def make_config(num_in_flight: int = NUM_IN_FLIGHT) -> RunConfig:
    """The run that is measured."""
    config = AlgorithmConfig().environment(
        env="benchmarks.rollout.sides:PlannedEnv", prompt="{question}", options={"top_k": 1}
    )
    config.env_runners(
        engine="vllm",
        engine_options={"max_num_seqs": NUM_SEQUENCES, "distributed_executor_backend": EXECUTOR},
        max_concurrent_trajectories=num_in_flight,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_new_tokens_per_turn=workload.MAX_TURN_TOKENS,
    )
    return config.freeze()


async def run_loop(config: RunConfig, policy_dir: str, engine: Engine, names: Sequence[str]) -> SideRun:
    """Sample the trajectories ``names`` with the real ``EnvRunner``."""
    retriever, planned = workload.SlowRetriever(), PlannedEngine(engine)
    runner = EnvRunner(config, PolicyTokenizer(policy_dir), retriever, planned)
    requests = [GroupRequest(f"{name}#0", workload.task(name), 1, 1.0) for name in names]
    started = time.perf_counter()
    groups = await asyncio.gather(*(runner.sample_group(request) for request in requests))
    wall_s = time.perf_counter() - started
    for trajectory in (t for group in groups for t in group.trajectories):
        assert not trajectory.stop_reason.is_failure, trajectory.error
    return SideRun(wall_s, planned.turns, retriever.searches)
