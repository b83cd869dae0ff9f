"""What the loop of one runner process costs: tokens/s that it can carry, and its CPU time ÷ that of its engine alone.

The engine plays scripts, a token of every running row per step, as vLLM's does, and is never waited for. What is left
is what the loop does: it looks for queries in the growing text (early search), searches, parses turns, lays out
observations, and makes the record batches of the groups. Searches find their passages at once. The tokens/s depend on
the machine. The ratio to the engine alone, which plays the same turns, does not, and ``ragr1 bench fast`` checks it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import Sample
from benchmarks.rollout import workload
from benchmarks.rollout.fleet import GROUP_SIZE, Scripts
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import Completion, EncodeFn, OnText, Sampling
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest, summarize
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

NUM_ROWS = 256
"""Rows that the engine runs at once: vLLM's default."""


@dataclass(slots=True, eq=False)
class _Row:
    text: str
    num_tokens: int
    on_text: OnText | None
    done: asyncio.Future[None]
    num_played: int = 0


class SteppedScripts(ScriptedEngine):
    """Plays one token of every row per step, without time between two steps."""

    def __init__(self, encode: EncodeFn) -> None:
        super().__init__(Scripts(workload.TURN_TOKENS_MEDIAN), encode)
        self._rows: list[_Row] = []
        self._steps: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        completion = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows.append(_Row(completion.text, len(completion.token_ids), on_text, done))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        await done
        return completion

    async def _run(self) -> None:
        while self._rows:
            for row in self._rows:
                row.num_played += 1
                if row.on_text is not None:
                    row.on_text(row.text[: len(row.text) * row.num_played // row.num_tokens])
                if row.num_played == row.num_tokens:
                    row.done.set_result(None)
            self._rows = [row for row in self._rows if not row.done.done()]
            await asyncio.sleep(0)


class InstantRetriever:
    """Finds the same passages for every query."""

    def __init__(self) -> None:
        self._passages = workload.passages("the same", 1)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [self._passages[:k] for _ in queries]


def make_config() -> RunConfig:
    """A run whose policy writes tags, so that searches begin early."""
    config = AlgorithmConfig().environment(prompt="{question}", options={"top_k": 1})
    return config.env_runners(max_concurrent_trajectories=NUM_ROWS).freeze()


class _Recorder(SteppedScripts):
    """Keeps what each trajectory asked for, so that the engine can be asked for it again without the loop."""

    def __init__(self, encode: EncodeFn) -> None:
        super().__init__(encode)
        self.turns: dict[str, list[tuple[Sequence[int], Sampling]]] = {}

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        self.turns.setdefault(request_id, []).append((prompt_token_ids, sampling))
        return await super().generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)


def loop_samples(policy_dir: Path, num_groups: int) -> dict[str, Sample]:
    """Return ``loop_ceiling`` and ``loop_cost`` of ``num_groups`` groups of ``GROUP_SIZE`` trajectories.

    ``loop_ceiling`` is tokens ÷ CPU seconds of this process; ``loop_cost`` is these seconds ÷ the engine's alone.
    """
    tokenizer = PolicyTokenizer(policy_dir)
    engine = _Recorder(tokenizer.encode)
    runner = EnvRunner(make_config(), tokenizer, InstantRetriever(), engine)
    names = [f"ceiling/{index}" for index in range(num_groups)]
    requests = [GroupRequest(f"{name}#0", workload.task(name), GROUP_SIZE, 1.0) for name in names]

    async def sample(request: GroupRequest) -> int:
        group = await runner.sample_group(request)
        assert not summarize(group).num_failed, group.trajectories[0].error
        groups_to_record_batch([group])
        return sum(trajectory.num_model_tokens for trajectory in group.trajectories)

    num_tokens, cpu_s = _cpu_s([sample(request) for request in requests])
    bare = SteppedScripts(tokenizer.encode)
    slots = asyncio.Semaphore(NUM_ROWS)

    async def play(trajectory_id: str) -> int:
        async with slots:
            turns = [
                await bare.generate(prompt, sampling, request_id=trajectory_id, on_text=lambda text: None)
                for prompt, sampling in engine.turns[trajectory_id]
            ]
        return sum(len(turn.token_ids) for turn in turns)

    num_bare, bare_cpu_s = _cpu_s([play(trajectory_id) for trajectory_id in engine.turns])
    assert num_bare == num_tokens, f"the engine alone played {num_bare} tokens, the loop {num_tokens}"
    return {
        "loop_ceiling": Sample(num_tokens / cpu_s, num_tokens, cpu_s),
        "loop_cost": Sample(cpu_s / bare_cpu_s, cpu_s, bare_cpu_s),
    }


def _cpu_s(counts: Sequence[Coroutine[None, None, int]]) -> tuple[int, float]:
    """Run all at once; return the sum of what they return and the CPU seconds of this process."""

    async def run() -> int:
        return sum(await asyncio.gather(*counts))

    gc.collect()
    started = time.process_time()
    total = asyncio.run(run())
    return total, time.process_time() - started
