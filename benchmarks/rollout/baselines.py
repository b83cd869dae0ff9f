"""The other sides: the raw engine over the recorded turns, and a lock-step turn loop of the usual shape.

Both use our own engine's ``AsyncLLM.generate``, with the settings that suit them best: nothing is streamed, and the
lock-step loop does not even have the engine decode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from benchmarks.rollout import workload
from benchmarks.rollout.sides import NUM_IN_FLIGHT, SideRun, TurnRecord
from envs.observations import format_observation
from ragr1_actors.core.types import Message
from ragr1_actors.rollout.engines.base import PolicyTokenizer

_request_ids = count()

Generate = Callable[[dict[str, list[int]], Any, str], AsyncIterator[Any]]
"""``AsyncLLM.generate``: of a prompt, vLLM's ``SamplingParams`` and a name."""


async def replay(generate: Generate, turns: Sequence[TurnRecord], num_in_flight: int = NUM_IN_FLIGHT) -> SideRun:
    """Have the engine repeat the turns: recorded prompts, lengths and seeds, a trajectory's turns in order.

    With the seeds it samples the very same tokens, so that its prefix cache is worth as much as ours.
    """
    by_trajectory: dict[str, list[TurnRecord]] = {}
    for turn in sorted(turns, key=lambda turn: (turn.turn, turn.interval)):
        by_trajectory.setdefault(turn.trajectory, []).append(turn)
    room = asyncio.Semaphore(num_in_flight)
    done: list[TurnRecord] = []

    async def one(trajectory: Sequence[TurnRecord]) -> None:
        async with room:
            for turn in trajectory:
                _, record = await _complete(generate, turn, _replay_params(turn))
                done.append(record)

    started = time.perf_counter()
    await asyncio.gather(*map(one, by_trajectory.values()))
    return SideRun(time.perf_counter() - started, done)


def lockstep_params(turn: TurnRecord) -> Any:
    """What the lock-step loop asks vLLM for: as many tokens as were recorded, and nothing else."""
    return _params(max_tokens=turn.num_tokens, temperature=1.0, detokenize=False)


async def lockstep(
    generate: Generate,
    tokenizer: PolicyTokenizer,
    turns: Sequence[TurnRecord],
    *,
    batched_search: bool,
    params: Callable[[TurnRecord], Any] = lockstep_params,
) -> SideRun:
    """Take the same trajectories turn by turn, as RAG-R1's and Search-R1's ``run_llm_loop`` do.

    ::

        whole batch generates ──► decode ──► search, one blocking call after the other ──► encode again ──┐
              ▲ waits for the slowest              (batched_search: one call, as slow as the slowest)         │
              └───────────────────────────────────────────────────────────────────────────────────────────────┘

    Left out, in its favour: HTTP, padding, the copy of the weights before each turn, and the tokens generated after
    the closing tag. Batching, prefix cache and the lengths of the turns are ours.
    """
    planned = {(turn.trajectory, turn.turn): turn for turn in turns}
    names = [turn.trajectory for turn in sorted(turns, key=lambda turn: turn.interval) if turn.turn == 0]
    batch = [_Row(name, workload.plan(name.partition("#")[0])) for name in names]
    done: list[TurnRecord] = []
    searches: list[tuple[float, float]] = []
    started = time.perf_counter()
    for row in batch:
        row.ids = tokenizer.prompt_ids([Message("user", workload.task(row.plan.name).question)])
    for turn in range(workload.MAX_TURNS):
        active = [row for row in batch if turn < len(row.plan.turn_tokens)]
        asked_for = [replace(planned[row.name, turn], prompt_ids=row.ids) for row in active]
        completions = await asyncio.gather(*(_complete(generate, one, params(one)) for one in asked_for))
        done += [record for _, record in completions]
        texts = [tokenizer.decode(token_ids) for token_ids, _ in completions]
        searching = [(row, text) for row, text in zip(active, texts, strict=True) if turn < row.plan.num_searches]
        latencies = [workload.search_latency_s(row.plan.queries(turn)) for row, _ in searching]
        for latency_s in [max(latencies)] if batched_search and latencies else latencies:
            asked = time.perf_counter()
            time.sleep(latency_s)  # theirs blocks, and so must this
            searches.append((asked, time.perf_counter()))
        for row, text in searching:
            observation = _observe(row.plan.queries(turn), tokenizer)
            row.ids = row.ids + tokenizer.encode(text) + tokenizer.encode(observation)
    return SideRun(time.perf_counter() - started, done, searches)


@dataclass(slots=True)
class _Row:
    name: str
    plan: workload.Plan
    ids: list[int] = field(default_factory=list)


def _observe(queries: tuple[str, ...], tokenizer: PolicyTokenizer) -> str:
    found = [workload.passages(query, 1) for query in queries]
    return format_observation(
        queries, found, tokenizer.encode, max_tokens_per_query=512, max_tokens=1536, defuse=tokenizer.defuse
    )


async def _complete(generate: Generate, turn: TurnRecord, params: Any) -> tuple[list[int], TurnRecord]:
    """Sample ``turn`` anew; return its tokens and a record of it."""
    started = time.perf_counter()
    prompt = {"prompt_token_ids": turn.prompt_ids}
    async for output in generate(prompt, params, f"bare-{next(_request_ids)}"):
        last = output
    token_ids = list(last.outputs[0].token_ids)
    return token_ids, replace(turn, num_tokens=len(token_ids), interval=(started, time.perf_counter()))


def _replay_params(turn: TurnRecord) -> Any:
    sampling = turn.sampling
    return _params(
        max_tokens=turn.num_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
    )


def _params(**settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,  # the recorded lengths hold
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **settings,
    )
