"""RolloutFleets: the env runners and retrievers that sample trajectory groups with one policy.

Training samples groups with ``env_runners.sample``. Evaluation and ``ragr1 select`` need nothing else: they
pass a list of tasks to ``sample_tasks``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Self

from cluster.placement import Placement, session_with_room
from cluster.placement_plan import PlacementPlan, actor_demands, retriever_role
from envs.base import search_options
from envs.measures import RewardContext
from envs.tasks.demonstrations import as_message
from envs.tools.base import check_headings
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.disk.folders import AnyFolder, Share, on_this_node
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.process.driver_loop import gather_or_cancel
from ragr1_actors.core.types import Task, TrajectoryGroup
from ragr1_actors.rollout.chat_format import TagsFormat, chat_format_of
from ragr1_actors.rollout.engines.base import ScriptedEngine, load_tokenizer
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from retrieval.base import needs_index
from retrieval.corpora.corpus import Corpus
from retrieval.evaluation import supporting_recall
from retrieval.replicas.retriever_group import RetrieverGroup

logger = logging.getLogger(__name__)

OnGroup = Callable[[FinishedGroup], None]


class RolloutFleets:
    """``EnvRunnerGroup`` that searches with a ``RetrieverGroup``. Both start together and stop together."""

    def __init__(
        self,
        config: SamplerConfig,
        policy: AnyFolder,
        index_dir: Path | None,
        placement: Placement | None = None,
        share: Share = lambda folder: folder,
    ) -> None:
        """Start both fleets, which load while the caller continues. Ray is initialised already if there are actors.

        ``index_dir`` is None if ``retrieval.type`` needs no index. ``placement`` has the nodes of the actors; the
        default is made here. ``share`` returns the form in which actors get the folders of retrieval.

        Raises:
            UserError: the index or a setting cannot be used.
            FleetError: a fleet did not start.
        """
        self._config = config
        self._policy, self._index_dir = policy, index_dir
        if index_dir is not None:
            check_headings(config.environment.tools, lambda: Corpus.open(index_dir).has_headings)
        placement = placement or Placement(config, has_index=index_dir is not None)
        hang_timeout_s = config.debugging.fault_tolerance.hang_timeout_s
        self.retrievers = RetrieverGroup(
            index_dir, config.retrieval, share, placement.retriever_options, placement.encoder_options, hang_timeout_s
        )
        try:
            retriever = self.retrievers.retriever()
            self.env_runners = EnvRunnerGroup(config, policy, retriever, actor_options=placement.runner_options)
            self.loop = self.env_runners.loop
        except BaseException:
            self.retrievers.stop()
            raise

    def __enter__(self) -> Self:
        """Wait until both fleets are ready."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Stop both fleets."""
        self.stop()

    def wait_until_ready(self) -> None:
        """Return once every actor has loaded its index or engine; ``FleetError`` if one did not start."""
        self.retrievers.wait_until_ready()
        self.env_runners.wait_until_ready()

    def sample_tasks(
        self,
        tasks: Sequence[Task],
        num_trajectories: int,
        temperature: float,
        on_group: OnGroup,
    ) -> int:
        """Sample a group of ``num_trajectories`` per task and return how many tasks failed; temperature 0 is greedy.

        A task is sampled again if a trajectory failed, at most ``max_task_retries`` times. ``on_group`` is
        called with every group as it finishes, those with a failed trajectory included.

        Raises:
            FleetError: every task failed.
        """
        return self.loop.run(self.sample_each(tasks, num_trajectories, temperature, on_group))

    async def sample_each(
        self,
        tasks: Sequence[Task],
        num_trajectories: int,
        temperature: float,
        on_group: OnGroup,
        *,
        is_urgent: bool = False,
        progress: float = 1.0,
    ) -> int:
        """Do what ``sample_tasks`` does, within the loop; ``progress`` is that of the run, for rewards.

        With ``is_urgent`` the tasks go before the requests that wait for a runner.
        """
        settings = self._config.env_runners
        most = 4 * max(1, settings.num_env_runners) * settings.max_concurrent_trajectories  # trajectories at a time
        slots = asyncio.Semaphore(max(1, most // num_trajectories))
        num_tries = 1 + self._config.debugging.fault_tolerance.max_task_retries
        context = RewardContext("eval", progress)

        async def sample(task: Task) -> str:
            """Return the error of the last try, if every try failed."""
            request = GroupRequest(task.task_id, task, num_trajectories, temperature, context=context)
            for attempt in range(num_tries):
                async with slots:
                    group = await self.env_runners.sample(replace(request, attempt=attempt), is_urgent=is_urgent)
                on_group(group)
                if not group.summary.num_failed:
                    return ""
            return group.summary.errors[-1]

        errors = [error for error in await gather_or_cancel(map(sample, tasks)) if error]
        if errors:
            message = f"{len(errors)} of {len(tasks)} evaluation tasks failed {num_tries} times"
            message += f"; the last one with: {errors[-1]}"
            if len(errors) == len(tasks):
                raise FleetError(message)
            logger.warning("%s", message)
        return len(errors)

    def play_scripts(self, scripts: Sequence[tuple[Task, Sequence[str]]]) -> list[TrajectoryGroup]:
        """Play scripted turns of tasks, in this process, and return one group per script in order."""
        by = RewardContext("demonstration")  # ids are unique, as a task may be demonstrated twice
        requests = [
            GroupRequest(f"{one.task_id}/demonstration{n}", one, context=by) for n, (one, _) in enumerate(scripts)
        ]
        turns = {r.trajectory_id(0): script for r, (_, script) in zip(requests, scripts, strict=True)}
        tokenizer = load_tokenizer(on_this_node(self._policy), self._config.policy)
        chat = chat_format_of(self._config, tokenizer)
        if not isinstance(chat, TagsFormat):  # demonstrations are written in tags
            query_format = search_options(self._config.environment).query_format
            turns = {
                name: [chat.write(as_message(turn, query_format)) for turn in script] for name, script in turns.items()
            }
        engine = ScriptedEngine(turns, chat.turn_ids, turn_start=tokenizer.turn_start)
        runner = EnvRunner(self._config, tokenizer, self.retrievers.retriever(), engine)

        async def play() -> list[TrajectoryGroup]:
            return await asyncio.gather(*(runner.sample_group(request) for request in requests))

        return self.loop.run(play())

    def measure_recall(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Return ``supporting_recall`` of the retrievers; empty if there is no index or no known evidence.

        Raises:
            RetrievalError: a search failed on every replica.
        """
        if self._index_dir is None or not any(task.supporting_ids for task in tasks):
            return {}
        corpus = Corpus.open(self._index_dir)
        return self.loop.run(supporting_recall(self.retrievers.retriever(), corpus, tasks))

    def metrics(self) -> dict[str, float]:
        """Return health and load of both fleets: ``{"env_runners/load": 8.0, "retrieval/encoder_busy": 0.3}``."""
        runners = {f"env_runners/{name}": value for name, value in self.env_runners.metrics().items()}
        return runners | self.retrievers.metrics()

    def stop(self) -> None:
        """End all actors. Groups in flight are lost."""
        self.env_runners.stop()
        self.retrievers.stop()


def session_for(
    config: SamplerConfig,
    show: Callable[[PlacementPlan], None] = lambda plan: None,
    say: Callable[[str], None] = logger.warning,
) -> AbstractContextManager[None]:
    """Return a Ray session with room for every actor of a run; see ``session_with_room``.

    ``config`` is a ``RunConfig`` if there are also learners.
    """
    has_index = needs_index(config.retrieval.type)
    most = actor_demands(_largest(config), has_index=has_index)
    return session_with_room(actor_demands(config, has_index=has_index), most, show, say)


def describe_loading(config: SamplerConfig) -> str:
    """Return the text of the start: ``loading 2 env runners, 1 retriever and 1 learner rank``.

    Parts without actors load in this process: ``loading the policy and the index``.
    """
    runners, retrieval, has_index = config.env_runners, config.retrieval, needs_index(config.retrieval.type)
    num_retrievers = retrieval.num_retrievers * retrieval.num_shards
    parts = [
        _parts(runners.num_env_runners, "env runners", "the policy"),
        _parts(num_retrievers, retriever_role(retrieval), "the index") if has_index else "",
        _parts(retrieval.encoders.num_encoders, "encoders", "") if has_index and num_retrievers else "",
    ]
    if isinstance(config, RunConfig):
        parts.append(_parts(config.learners.num_learners, "learner ranks", "the learner"))
    *before, last = filter(None, parts)
    return f"loading {', '.join(before)} and {last}" if before else f"loading {last}"


def _parts(count: int, role: str, here: str) -> str:
    return f"{count} {role if count > 1 else role.removesuffix('s')}" if count else here


def _largest(config: SamplerConfig) -> SamplerConfig:
    """Return the configuration with every fleet at its largest; a person may choose larger ones on a live run."""
    runners, retrieval, encoders = config.env_runners, config.retrieval, config.retrieval.encoders
    if runners.autoscaling is not None:
        runners = runners.model_copy(update={"num_env_runners": runners.autoscaling.max_replicas})
    if retrieval.autoscaling is not None:
        retrieval = retrieval.model_copy(update={"num_retrievers": retrieval.autoscaling.max_replicas})
    if encoders.autoscaling is not None:
        encoders = encoders.model_copy(update={"num_encoders": encoders.autoscaling.max_replicas})
    retrieval = retrieval.model_copy(update={"encoders": encoders})
    return config.model_copy(update={"env_runners": runners, "retrieval": retrieval})
