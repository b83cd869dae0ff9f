"""EnvRunner: one engine and its concurrent trajectories.

It is plain asyncio, runs in any process and needs no Ray; ``rollout.env_runner_actor`` has the Ray actor around it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from envs.base import ENVS, EnvContext, TextEnv, exact_match, token_f1
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.folders import AnyFolder, on_this_node
from ragr1_actors.core.models.model_files import check_files
from ragr1_actors.core.resolve import load_object
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
    load_tokenizer,
)
from ragr1_actors.rollout.engines.endpoint_engine import EndpointTokenizer
from ragr1_actors.rollout.task_sampler import Issue
from ragr1_actors.rollout.trajectory_loop import Tokenizer, Watch, run_trajectory
from retrieval.base import PacedRetriever, Retriever


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
    num_sampled_tokens: int = 0
    """Sum over all trajectories, failed ones included."""


class EnvRunner:
    """Samples trajectories with one engine."""

    def __init__(self, config: SamplerConfig, tokenizer: Tokenizer, retriever: Retriever, engine: Engine) -> None:
        """Sample with a loaded engine, which only this runner uses."""
        self.engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._env_class: Callable[..., TextEnv] = load_object(config.environment.env, ENVS)
        self._context = EnvContext(retriever, tokenizer.encode, tokenizer.defuse)
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
            tokenizer = load_tokenizer(policy_dir, config.policy)
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
        num_sampled_tokens=sum(t.num_model_tokens for t in group.trajectories),
    )
