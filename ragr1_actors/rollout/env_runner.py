"""EnvRunner: one engine and its concurrent trajectories.

``EnvRunner`` is plain asyncio and runs in any process. ``EnvRunnerActor`` is the Ray actor around it: it turns groups
into record batches, which stay in the object store while only their references travel.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.metrics import count, observe
from cluster.watchdog import beating
from envs.base import ENVS, EnvContext, TextEnv, exact_match, token_f1
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, EngineDeadError
from ragr1_actors.core.folders import AnyFolder, on_this_node
from ragr1_actors.core.models.model_files import check_files
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import (
    Completion,
    Failure,
    OnText,
    Sampling,
    StopReason,
    TokenKind,
    Trajectory,
    TrajectoryGroup,
)
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.rollout.engines.base import (
    ENGINES,
    ColocatedEngine,
    Engine,
    EngineSettings,
    PolicyTokenizer,
    ReceivingEngine,
)
from ragr1_actors.rollout.engines.endpoint_engine import EndpointTokenizer
from ragr1_actors.rollout.task_sampler import Issue
from ragr1_actors.rollout.trajectory_loop import Tokenizer, Watch, run_trajectory
from retrieval.base import PacedRetriever, Retriever

T = TypeVar("T")

_FIRST_BEAT_S = 2.0
"""A call of an engine that takes longer may keep the runner from answering; a shorter one writes no beat."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to sample."""

    issue: Issue
    num_trajectories: int
    temperature: float
    """0 is greedy."""
    policy_version: int = 0
    """The newest version when the group was asked for; no token of it is sampled with an older one."""

    def trajectory_id(self, index: int) -> str:
        """Return the id of the group's trajectory ``index``: ``world/train/17#2/0``."""
        return f"{self.issue.group_id}/{index}"


@dataclass(frozen=True, slots=True)
class Process:
    """The process that an actor is in: another one after a restart."""

    node_id: str
    """Ray's id of its node."""
    pid: int

    @classmethod
    def current(cls) -> Self:
        """Return that of the actor that calls."""
        import ray

        return cls(ray.get_runtime_context().get_node_id(), os.getpid())


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the driver knows of a group; it never reads the group's tokens."""

    rewards: tuple[float, ...]  # [num_trajectories that did not fail]
    num_failed: int
    errors: tuple[str, ...]
    oldest_version: int
    """The lowest policy version of any token; -1 if none was sampled."""
    means: dict[str, float]
    """Over the trajectories that did not fail: em, rounds, queries, tokens, stop reasons, the environment's metrics."""
    data_errors: tuple[str, ...] = ()
    """Those of ``errors`` that are ``Failure.DATA``."""
    stop_reasons: tuple[StopReason, ...] = ()
    """Reasons of the trajectories that failed."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Values whose histograms are drawn: per trajectory that did not fail, and per turn that searched."""


class EnvRunner:
    """Samples trajectories with one engine."""

    def __init__(self, config: SamplerConfig, tokenizer: Tokenizer, retriever: Retriever, engine: Engine) -> None:
        """Sample with a loaded engine, which only this runner uses."""
        self.engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._env_class: Callable[..., TextEnv] = load_object(config.environment.env, ENVS)
        self._context = EnvContext(retriever, self._tokenizer.encode)
        self._load = _EngineLoad()
        self._room = asyncio.Semaphore(config.env_runners.max_concurrent_trajectories)

    @classmethod
    def load(cls, config: SamplerConfig, policy: AnyFolder, retriever: Retriever, version: int = 0) -> Self:
        """Load the engine that ``env_runners.engine`` names; ``version`` is that of the weights in ``policy``."""
        engine_class = load_object(config.env_runners.engine, ENGINES)
        policy_dir: str | Path
        tokenizer: PolicyTokenizer | EndpointTokenizer
        if config.env_runners.engine == "endpoint":  # the policy is elsewhere, and so is its tokenizer
            policy_dir, tokenizer = "", EndpointTokenizer()
        else:
            policy_dir = on_this_node(policy)
            check_files(policy_dir, weights=True)
            tokenizer = PolicyTokenizer(policy_dir, trust_remote_code=config.policy.trust_remote_code)
        engine: Engine = engine_class(policy_dir, tokenizer, engine_settings(config, version))
        transport = choose_transport(config)  # checked now, and not when the first version is published
        takes_part: dict[str, type] = {"broadcast": ReceivingEngine, "ipc": ColocatedEngine}
        if not isinstance(engine, takes_part.get(transport, object)):
            raise ConfigError(
                f"got env_runners.weight_transport {transport}, in which the engine {config.env_runners.engine} cannot "
                "take part; set it to object_store"
            )
        return cls(config, tokenizer, retriever, engine)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what an interrupt left on ``loop``, free the engine and close ``loop``."""
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:  # awaited, else asyncio prints a message for each
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(self.engine.close())
        loop.close()

    async def sample_group(self, request: GroupRequest) -> TrajectoryGroup:
        """Sample the trajectories of one group concurrently, up to ``max_concurrent_trajectories`` of the runner."""
        indices = range(request.num_trajectories)
        trajectories = await asyncio.gather(*(self._sample(request, index) for index in indices))
        return TrajectoryGroup(request.issue.task, tuple(trajectories))

    async def sample_watched(self, request: GroupRequest, watch: Watch) -> Trajectory:
        """Sample the first trajectory of a group; ``watch`` sees it grow."""
        return await self._sample(request, 0, watch)

    async def _sample(self, request: GroupRequest, index: int, watch: Watch | None = None) -> Trajectory:
        settings = self._config.env_runners
        trajectory_id = request.trajectory_id(index)
        async with self._room:
            if isinstance(self._context.retriever, PacedRetriever):
                await self._context.retriever.wait_for_room()
            meter = _Meter(self.engine, self._load)
            started_s = asyncio.get_running_loop().time()
            try:
                trajectory = await run_trajectory(
                    self._env_class(self._config.environment, self._context),
                    request.issue.task,
                    meter.generate,
                    self._tokenizer,
                    Sampling(settings.max_new_tokens_per_turn, request.temperature, settings.top_p),
                    settings.max_context_tokens,
                    trajectory_id=trajectory_id,
                    seed=self._config.debugging.seed,
                    watch=watch,
                )
            finally:
                self.engine.release(trajectory_id)
            trajectory.metrics.update(meter.metrics())
            trajectory.metrics["time/trajectory_s"] = asyncio.get_running_loop().time() - started_s
            return trajectory


class _EngineLoad:
    """How many requests an engine has, and how many it had over time."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._at_s = self._request_s = self._share_s = 0.0

    def change(self, num_requests: int) -> NDArray[np.float64]:
        """Count requests that begin or end; return seconds: until now, times the requests, divided by them."""
        now_s = asyncio.get_running_loop().time()
        self._request_s += self.num_requests * (now_s - self._at_s)
        self._share_s += (now_s - self._at_s) / max(1, self.num_requests)
        self._at_s = now_s
        self.num_requests += num_requests
        return np.array([now_s, self._request_s, self._share_s])


class _Meter:
    """``Engine.generate`` for one trajectory, with the time that it takes."""

    def __init__(self, engine: Engine, load: _EngineLoad) -> None:
        self._engine, self._load = engine, load
        self._passed = np.zeros(3)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """See ``Engine.generate``."""
        started = self._load.change(1)
        try:
            return await self._engine.generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)
        finally:
            self._passed += self._load.change(-1) - started

    def metrics(self) -> dict[str, float]:
        """Seconds at the engine; the same, each moment times the requests that the engine had; and divided by them."""
        names = ("time/generation_s", "time/generation_rows_s", "time/generation_share_s")
        return dict(zip(names, self._passed.tolist(), strict=True))


class EnvRunnerActor:
    """``EnvRunner`` as a Ray actor. Its process exits if the engine dies, and Ray starts both again."""

    def __init__(self, config: SamplerConfig, policy: AnyFolder, retriever: Retriever, version: int) -> None:
        """Build the runner in the actor's process, with the actor's share of the cores.

        If the actor was restarted and shares its device with a learner, which may be using it, ``catch_up`` builds the
        runner.
        """
        import ray
        import torch

        torch.set_num_threads(
            config.debugging.num_threads or max(1, math.floor(config.env_runners.num_cpus_per_env_runner))
        )
        self._load = partial(EnvRunner.load, config, policy, retriever, version)
        waits = choose_transport(config) == "ipc" and ray.get_runtime_context().was_current_actor_reconstructed
        with beating():
            self._loaded: EnvRunner | None = None if waits else self._load()

    @property
    def _runner(self) -> EnvRunner:
        if self._loaded is None:  # it was restarted, and the driver does not know yet
            _exit("it has no engine yet")
        return self._loaded

    async def ping(self) -> Process:
        """Return the actor's process if the engine is loaded and alive; else raise ``EngineDeadError``."""
        await self._runner.engine.check()
        return Process.current()

    async def pulse(self) -> Process:
        """Return the actor's process, with or without an engine; raise ``EngineDeadError`` if it has one that died."""
        if self._loaded is not None:
            await self._loaded.engine.check()
        return Process.current()

    async def sample_group(self, request: GroupRequest) -> tuple[tuple[Process, GroupSummary], pa.RecordBatch]:
        """Sample a group; Ray stores the two results under two references."""
        started = time.monotonic()
        group = await _or_exit(self._runner.sample_group(request))
        observe("group_seconds", time.monotonic() - started)
        summary = summarize(group)
        count("trajectories", len(summary.rewards), failed="false")
        count("trajectories", summary.num_failed, failed="true")
        count("tokens", sum(trajectory.num_model_tokens for trajectory in group.trajectories))
        return (Process.current(), summary), groups_to_record_batch([group])

    async def catch_up(self, weights: Mapping[str, NDArray[Any]], version: int) -> Process:
        """Give the engine the newest weights, after loading it if need be; return the actor's process."""
        if self._loaded is None:
            with beating():
                self._loaded = self._load()
        await self.call_engine("update_weights", weights, version)
        return Process.current()

    async def call_engine(self, method: str, *arguments: Any) -> None:
        """Call one of the engine's methods for weights and memory: see ``ReceivingEngine`` and ``ColocatedEngine``."""
        with beating(_FIRST_BEAT_S):  # an engine may copy all weights at once
            await _or_exit(getattr(self._runner.engine, method)(*arguments))

    async def apply(self, func: Callable[[EnvRunner], Any]) -> Any:
        """Return ``func(runner)``; see ``EnvRunnerGroup.foreach_env_runner``."""
        return func(self._runner)


async def _or_exit(work: Awaitable[T]) -> T:
    """Await ``work``. If the engine is dead the process exits; Ray restarts it, and the group repeats its requests."""
    try:
        return await work
    except EngineDeadError as error:
        _exit(str(error))


def _exit(reason: str) -> NoReturn:
    print(f"env runner {os.getpid()} exits: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def engine_settings(config: SamplerConfig, version: int) -> EngineSettings:
    """Return the engine settings of a configuration."""
    settings = config.env_runners
    return EngineSettings(
        max_rows=settings.max_concurrent_trajectories,
        max_context_tokens=settings.max_context_tokens,
        dtype=config.policy.dtype,
        device="cuda" if settings.num_gpus_per_env_runner else "cpu",
        version=version,
        sleeps=choose_transport(config) == "ipc",
        trust_remote_code=config.policy.trust_remote_code,
        options=settings.engine_options,
    )


def summarize(group: TrajectoryGroup) -> GroupSummary:
    """Return what the driver needs of a group, for its task sampler and metrics."""
    kept = [t for t in group.trajectories if not t.stop_reason.is_failure]
    totals: Counter[str] = Counter()
    for trajectory in kept:
        values: dict[str, float] = {
            "em": exact_match(trajectory.answer, trajectory.task.golden_answers),
            "f1": token_f1(trajectory.answer, trajectory.task.golden_answers),
            "rounds": float(trajectory.num_search_rounds),
            "queries": float(trajectory.num_queries),
            "turns": float(len(trajectory.turns)),
            "tokens": float(trajectory.num_model_tokens),
            "observation_tokens": float((trajectory.kinds == TokenKind.OBSERVATION).sum()),
            "context_tokens": float(trajectory.num_tokens),
            "well_formed": float(trajectory.is_well_formed),
            "repeated_queries": float(trajectory.num_repeated_queries),
            f"stop_{trajectory.stop_reason.value}": 1.0,
            **trajectory.metrics,
        }
        totals.update(values)
    versions = [int(v) for t in kept for v in t.policy_versions[t.kinds == TokenKind.MODEL][:1]]
    return GroupSummary(
        rewards=tuple(t.reward for t in kept),
        num_failed=len(group.trajectories) - len(kept),
        errors=tuple(t.error for t in group.trajectories if t.error),
        oldest_version=min(versions, default=-1),
        means={name: total / len(kept) for name, total in totals.items()},
        data_errors=tuple(t.error for t in group.trajectories if t.stop_reason.failure is Failure.DATA),
        stop_reasons=tuple(t.stop_reason for t in group.trajectories if t.stop_reason.is_failure),
        samples={
            "turns": tuple(float(len(t.turns)) for t in kept),
            "queries_per_turn": tuple(float(len(turn.queries)) for t in kept for turn in t.turns if turn.queries),
            "tokens": tuple(float(t.num_model_tokens) for t in kept),
            "context_tokens": tuple(float(t.num_tokens) for t in kept),
        },
    )
