"""EnvRunner: one engine and its concurrent trajectories.

It is plain asyncio, runs in any process and needs no Ray; ``runners.env_runner_group`` has the Ray actor around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from envs.base import ENVS, EnvContext, TextEnv
from envs.measures import Reward
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.content import PlacedImage
from ragr1_actors.core.disk.folders import AnyFolder, on_this_node
from ragr1_actors.core.errors import EngineDeadError
from ragr1_actors.core.models.model_files import check_files
from ragr1_actors.core.resolve import load_object, raised_at
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import (
    Completion,
    GenerateFn,
    OnText,
    Sampling,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from ragr1_actors.rollout.chat_format import TagsFormat, Tokenizer, chat_format_of
from ragr1_actors.rollout.engines.base import (
    ENGINES,
    Engine,
    EngineArguments,
    PolicyTokenizer,
    check_takes_part,
    load_tokenizer,
    show_images,
)
from ragr1_actors.rollout.engines.chat_client import Loading, open_models
from ragr1_actors.rollout.engines.endpoint_engine import EndpointTokenizer
from ragr1_actors.rollout.gateway.attempt import AgentAttempts
from ragr1_actors.rollout.groups import GroupRequest, Independent, checked_sample, make_strategy
from ragr1_actors.rollout.recorder import Attempt, EnvAttempt, Fork, Recorder, Watch, run_trajectory
from retrieval.base import AskingRetriever, PacedRetriever, Retriever


class EngineLoad:
    """Load of an engine: the number of its requests, now and over time, and the time that they take."""

    def __init__(self) -> None:
        """Begin without requests."""
        self._num_requests = 0
        self._at_s = self._request_s = self._share_s = 0.0

    async def generate(
        self,
        engine: Engine,
        passed: NDArray[np.float64],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        on_text: OnText | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Call ``Engine.generate``, and add to ``passed`` its seconds: alone, times the requests, and over them.

        Raises ``ConfigError`` for images if the engine is no ``SeeingEngine``.
        """
        if images:
            show_images(engine, request_id, images)
        started = self._change(1)
        try:
            return await engine.generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)
        finally:
            passed += self._change(-1) - started

    def _change(self, num_requests: int) -> NDArray[np.float64]:
        now_s = asyncio.get_running_loop().time()
        self._request_s += self._num_requests * (now_s - self._at_s)
        self._share_s += (now_s - self._at_s) / max(1, self._num_requests)
        self._at_s = now_s
        self._num_requests += num_requests
        return np.array([now_s, self._request_s, self._share_s])


class EnvRunner:
    """Samples trajectories with one engine."""

    def __init__(
        self,
        config: SamplerConfig,
        tokenizer: Tokenizer,
        retriever: Retriever,
        engine: Engine,
        loading: Loading = nullcontext,
    ) -> None:
        """Take a loaded engine, which only this runner uses; engines of ``environment.models`` load in ``loading``."""
        self.engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._env_class: Callable[..., TextEnv] = load_object(config.environment.env, ENVS)
        self._reward = Reward(config.environment)
        self._strategy = make_strategy(config.env_runners)
        models = open_models(config.environment.models, loading)
        if isinstance(retriever, AskingRetriever):
            retriever.use_models(models)
        self._paced = retriever if isinstance(retriever, PacedRetriever) else None
        self._chat = chat_format_of(config, tokenizer)
        parser = None if isinstance(self._chat, TagsFormat) else self._chat.parser
        self._context = EnvContext(retriever, tokenizer.encode, tokenizer.defuse, models, parser=parser)
        agent = config.environment.agent
        self._agents = None if agent is None else AgentAttempts(config, agent, self._chat, retriever)
        self._load = EngineLoad()
        self._room = asyncio.Semaphore(config.env_runners.max_concurrent_trajectories)

    @classmethod
    def load(
        cls,
        config: SamplerConfig,
        policy: AnyFolder,
        retriever: Retriever,
        version: int = 0,
        loading: Loading = nullcontext,
    ) -> Self:
        """Load the engine that ``env_runners.engine`` names; ``version`` is for the weights in ``policy``."""
        engine_class = load_object(config.env_runners.engine, ENGINES)
        policy_dir: str | Path
        tokenizer: PolicyTokenizer | EndpointTokenizer
        if config.env_runners.engine == "endpoint":  # policy and tokenizer are elsewhere
            policy_dir, tokenizer = "", EndpointTokenizer()
        else:
            policy_dir = on_this_node(policy)
            check_files(policy_dir, weights=True)
            tokenizer = load_tokenizer(policy_dir, config.policy)
        engine: Engine = engine_class(policy_dir, tokenizer, EngineArguments.of(config, version))
        check_takes_part(engine, config)  # now, and not when the first version is published
        return cls(config, tokenizer, retriever, engine, loading)

    async def close(self) -> None:
        """End the agents' gateway, and free the engine."""
        if self._agents is not None:
            await self._agents.close()
        await self.engine.close()

    async def sample_group(self, request: GroupRequest) -> TrajectoryGroup:
        """Sample the trajectories of one group; the runner samples up to ``max_concurrent_trajectories`` at once.

        The strategy chooses those that are trained. Its error ends the group as one trajectory with a failure of the
        data.
        """
        strategy = self._strategy if request.context.split == "train" else Independent(Section())
        play = partial(self.sample, request)
        try:
            trajectories = await checked_sample(strategy, request, play)
        except EngineDeadError:
            raise
        except Exception as error:  # a user's strategy may raise anything; only its group ends
            recorder = self._recorder(request, 0, "")
            problem = raised_at(error, strategy.sample)
            trajectories = [recorder.trajectory(request.task, StopReason.ENV_ERROR, error=problem)]
        return TrajectoryGroup(request.task, tuple(trajectories))

    async def sample(
        self,
        request: GroupRequest,
        index: int,
        *,
        variant: str = "",
        fork: Fork | None = None,
        watch: Watch | None = None,
    ) -> Trajectory:
        """Sample the trajectory ``index`` of a group, as a ``Play``; ``watch`` gets its growth."""
        async with self._room:
            if self._paced is not None:
                await self._paced.wait_for_room()
            passed = np.zeros(3)
            generate = partial(self._load.generate, self.engine, passed)
            record = partial(self._recorder, request, index, variant, generate)
            try:
                attempt = self._attempt(record, variant, watch)
            except Exception as error:  # a user's environment may raise anything; only its trajectory ends
                problem = raised_at(error, self._env_class)
                return record().trajectory(request.task, StopReason.ENV_ERROR, error=problem)
            started_s = asyncio.get_running_loop().time()
            try:
                trajectory = await run_trajectory(
                    attempt,
                    request.task,
                    reward=partial(self._reward, context=replace(request.context, models=self._context.models)),
                    fork=fork,
                )
            finally:
                self.engine.release(request.trajectory_id(index))
            names = ("time/generation_s", "time/generation_rows_s", "time/generation_share_s")
            trajectory.metrics.update(zip(names, passed.tolist(), strict=True))
            trajectory.metrics["time/trajectory_s"] = asyncio.get_running_loop().time() - started_s
            return trajectory

    def _attempt(self, record: Callable[..., Recorder], variant: str, watch: Watch | None) -> Attempt:
        if self._agents is not None:
            return self._agents.attempt(record, self.engine.release)
        recorder = record()
        context = replace(self._context, variant=variant, seed=recorder.seed, seen=[])
        return EnvAttempt(self._env_class(self._config.environment, context), recorder, watch)

    def _recorder(
        self, request: GroupRequest, index: int, variant: str, generate: GenerateFn | None = None, part: str = ""
    ) -> Recorder:
        settings = self._config.env_runners
        return Recorder(
            request.trajectory_id(index) + part,
            generate or partial(self._load.generate, self.engine, np.zeros(3)),
            self._tokenizer,
            Sampling(settings.max_new_tokens_per_turn, request.temperature, settings.top_p),
            settings.max_context_tokens,
            self._config.debugging.seed,
            variant,
            self._chat,
        )
