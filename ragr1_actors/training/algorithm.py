"""Algorithm: the driver's loop over the fleets.

One ``train()``::

    TaskSampler ──issue──► EnvRunnerGroup ──finished groups──► GroupBuffer ──batch──► make_room, LearnerGroup.update
         ▲                      ▲    ▲ queries                     │ stale, failed               │
         │                      │    ▼                             │                             │ weights
         └── again ─────────────│──RetrieverGroup ◄────────────────┘                             │
                                └──────────────── Transport.publish(version + 1) ◄───────────────┘

=================  =============================  ==============================  ================================
part               consumes                       produces                        waits for
=================  =============================  ==============================  ================================
EnvRunnerGroup     issues                         groups, in completion order     its engines and its documents
GroupBuffer        groups                         batches of train_batch_size     enough groups no older than the lag
make_room          devices that runners share     the same, for the learners      every runner's sleep
LearnerGroup       references of record batches   weights, metrics                the batch
publish            weights                        policy version + 1              every runner's swap
=================  =============================  ==============================  ================================

``make_room`` is of use only where runners and learners sit on one device and take turns there: what it puts to sleep,
``publish`` wakes (``cluster/weights/weight_sync.py``). A checkpoint is such a turn of the learners, too.

With dynamic sampling the buffer sets groups aside whose rewards are all alike, and others are sampled in their place.
With ``max_policy_lag = 0`` exactly one batch is out at a time: synchronous training is the same path. With a lag of n,
n more batches are being sampled while the learner works. A checkpoint is begun between two iterations, and written
while the next ones go on (``saving.py``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from cluster.placement import Placement
from cluster.weights.weight_sync import make_transport
from learners.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError, FleetError
from ragr1_actors.core.files import write_folder
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import Task, TrajectoryGroup
from ragr1_actors.rollout.env_runner import EnvRunner, GroupRequest
from ragr1_actors.rollout.env_runner_group import EnvRunnerGroup, FinishedGroup
from ragr1_actors.rollout.held_out import OnGroup, sample_tasks
from ragr1_actors.rollout.task_sampler import Issue, TaskSampler
from ragr1_actors.runs.checkpoint import CheckpointStore
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.run_state import read_state
from ragr1_actors.runs.trajectory_files import keep_trajectories
from ragr1_actors.training.buffer import GroupBuffer, max_set_aside
from ragr1_actors.training.data import Workspace, demonstrations, prepare
from ragr1_actors.training.demonstrations import learnable
from ragr1_actors.training.interrupt import InterruptGuard
from ragr1_actors.training.preflight import check_names
from ragr1_actors.training.saving import CheckpointSaver
from ragr1_actors.training.summaries import eval_result, rollout_metrics
from retrieval.fleet.group import RetrieverGroup

OnProgress = Callable[[int, dict[str, float]], None]
"""Called with the number of steps done and the newest metrics."""
HOPELESS_TASKS = 64
"""Given up on before any came to its end: what fails is not the tasks."""


class Algorithm:
    """Trains a policy to search: ``pretrain()`` once, then ``train()`` an iteration at a time."""

    def __init__(
        self, config: RunConfig, run_dir: Path, guard: InterruptGuard | None = None, *, learns: bool = True
    ) -> None:
        """Prepare the data and start the fleets. Where any of them has actors, Ray is initialised already.

        Args:
            config: of the run.
            run_dir: what the run writes goes here.
            guard: holds interrupts back while the learner and the books are between two states.
            learns: False loads no learner, for ``evaluate`` alone.

        Raises:
            UserError: a file or setting that cannot be used.
            FleetError: a fleet did not start.
        """
        self.config = config
        self.run_dir = run_dir = run_dir.absolute()  # actors may have another working directory
        self._guard = guard or InterruptGuard()
        self.sft_step = 0
        self.num_decisions: Counter[str] = Counter()
        self.iteration = self.policy_version = 0
        self.workspace: Workspace = prepare(config, run_dir)
        if not self.workspace.eval_tasks:
            raise DataError(
                f"{config.environment.tasks}: {len(self.workspace.train_tasks)} tasks are too few to hold one in five "
                "out; name a file of evaluation tasks in environment.eval_tasks"
            )
        if learns and not self.workspace.train_tasks:
            raise DataError(
                f"{config.environment.tasks}: no training task is left after holding the evaluation tasks out"
            )
        self._learner_name = ""
        self._stage_dir = self.workspace.policy_dir
        checkpointing = config.checkpointing
        self._store = CheckpointStore(run_dir / "checkpoints", checkpointing.num_to_keep, checkpointing.best_metric)
        self._sampler = TaskSampler(self.workspace.train_tasks, config.debugging.seed)
        self._buffer = GroupBuffer(config.training.max_policy_lag, max_set_aside(config) if learns else 0)
        self._retrievers = RetrieverGroup.create(self.workspace.index_dir, config.retrieval)
        self._placement = Placement(config)
        self._learners = LearnerGroup(config, self._placement.options)
        self._saver = CheckpointSaver(self._store, self._learners)
        self._env_runners = EnvRunnerGroup(
            config, self.workspace.policy_dir, self._retrievers.retriever(), actor_options=self._placement.options
        )
        self._transport = make_transport(config, self._learners, self._env_runners)
        if self._transport.shares_devices:  # an engine takes what is free when it starts
            self._env_runners.wait_until_ready()
        # all fleets load at once: only now wait for them
        if learns and self._store.latest() is None:
            self._build_learner("sft" if config.sft.num_steps else config.training.algorithm, self._stage_dir)
        self._retrievers.wait_until_ready()
        self._env_runners.wait_until_ready()

    @classmethod
    def create(cls, config: RunConfig, run_dir: Path) -> Self:
        """Check the names in ``config``, make ``run_dir`` the directory of a new run, and start the algorithm in it."""
        check_names(config)
        create_run_directory(config, run_dir)
        return cls(config, run_dir)

    # -- stage 1 ---------------------------------------------------------------------------------------------------

    def pretrain(self, on_progress: OnProgress) -> None:
        """Stage 1: learn the format from scripted demonstrations, played against the real retriever.

        Does nothing where a run was restored that has it behind it already.
        """
        if self._is_pretrained():
            return
        played = self.collect_demonstrations()
        groups, self.num_decisions = learnable(played)
        if self.config.checkpointing.keep_trajectories:
            keep_trajectories(self.run_dir, "demonstrations", [groups_to_record_batch(played)])
        self._transport.make_room()
        self._build_learner("sft", self.workspace.policy_dir)
        for step, batch in enumerate(self._demonstration_batches(groups)):
            if step == self.config.sft.num_steps:
                break
            if step < self.sft_step:  # a resumed run draws the same batches
                continue
            with self._guard.held():
                self._saver.look()
                metrics = self._learners.update([groups_to_record_batch(batch)])
                self.sft_step += 1
                on_progress(self.sft_step, metrics)
        with self._guard.held():
            write_folder(self._sft_dir, self._learners.save_policy)
            self._stage_dir = str(self._sft_dir)
            self._publish()

    @property
    def _sft_dir(self) -> Path:
        """The policy that stage 1 ends with; there once it has ended."""
        return self.run_dir / "policy_sft"

    def _is_pretrained(self) -> bool:
        return self.sft_step >= self.config.sft.num_steps and self._sft_dir.exists()

    def collect_demonstrations(self) -> list[TrajectoryGroup]:
        """Play ``sft.num_demonstrations`` scripts through the environment and return them in the order drawn."""
        drawn = demonstrations(self.workspace, self.config.sft.num_demonstrations, self.config.debugging.seed)
        requests = [GroupRequest(Issue(task.task_id, task, 0), 1, 0.0) for task, _ in drawn]
        scripts = {r.trajectory_id(0): script for r, (_, script) in zip(requests, drawn, strict=True)}
        return asyncio.run(self._play(requests, scripts))

    async def _play(self, requests: list[GroupRequest], scripts: Mapping[str, Sequence[str]]) -> list[TrajectoryGroup]:
        retriever = self._retrievers.retriever()
        reciter = EnvRunner.recite(self.config, self.workspace.policy_dir, retriever, scripts)
        return await asyncio.gather(*(reciter.sample_group(request) for request in requests))

    def _demonstration_batches(self, groups: list[TrajectoryGroup]) -> Iterator[list[TrajectoryGroup]]:
        rng = random.Random(f"sft {self.config.debugging.seed}")
        size = min(self.config.sft.batch_size, len(groups))
        while True:
            order = rng.sample(groups, len(groups))
            yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))

    # -- stage 2 ---------------------------------------------------------------------------------------------------

    def train(self, on_progress: OnProgress | None = None) -> dict[str, float]:
        """One iteration of stage 2: sample a batch of groups, learn from it, publish the new policy.

        ``on_progress`` is called with what is returned, before an interrupt that was held back meanwhile.
        """
        started = time.perf_counter()
        training = self.config.training
        with self._guard.held():
            self._saver.look()
        self._build_learner(training.algorithm, self._stage_dir)
        batch, num_stale = self._next_batch()
        sampled = time.perf_counter()
        if training.max_policy_lag:
            self._keep_busy()
        versions = [group.summary.oldest_version for group in batch if group.summary.oldest_version >= 0]
        lag = self.policy_version - np.mean(versions) if versions else 0.0
        # learner, books and logs move together: a resumed run would train a task twice, or have an iteration unlogged
        with self._guard.held():
            self._transport.make_room()
            learner_metrics = self._learners.update([group.batch for group in batch])
            learned = time.perf_counter()
            set_aside = self._buffer.drop_set_aside()
            for group in batch + set_aside:  # what was set aside is done with as well: it has nothing to teach
                self._sampler.trained(group.request.issue)
            self.iteration += 1
            self._publish()
            published = time.perf_counter()
            if self.config.checkpointing.keep_trajectories:
                keep_trajectories(self.run_dir, f"iteration_{self.iteration:05d}", [group.batch for group in batch])
            metrics = {
                **rollout_metrics(batch + set_aside),
                **{f"learner/{name}": value for name, value in learner_metrics.items()},
                **self._retrievers.metrics(),
                "loop/policy_lag": float(lag),
                "loop/stale_groups": float(num_stale),
                "loop/set_aside_groups": float(len(set_aside)),
                "loop/policy_version": float(self.policy_version),
                "loop/weight_fallbacks": float(self._transport.num_fallbacks),
                "loop/learner_restarts": float(self._learners.num_restarts),
                **{f"tasks/{name}": float(count) for name, count in self._sampler.counts().items()},
                "time/sample_s": sampled - started,
                "time/learn_s": learned - sampled,
                "time/publish_s": published - learned,
                "time/iteration_s": time.perf_counter() - started,
            }
            if on_progress is not None:
                on_progress(self.iteration, metrics)
        return metrics

    def _keep_busy(self) -> None:
        """Issue tasks until all the batches that the lag allows are out or waiting."""
        training = self.config.training
        wanted = training.train_batch_size * (1 + training.max_policy_lag)
        while self._env_runners.num_unfinished + len(self._buffer) < wanted:
            self._submit(self._sampler.next())

    def _submit(self, issue: Issue) -> None:
        self._env_runners.submit(
            GroupRequest(issue, self.config.training.group_size, self.config.env_runners.temperature)
        )

    def _next_batch(self) -> tuple[list[FinishedGroup], int]:
        """Sample until a batch is together; failed and stale groups are issued again."""
        size = self.config.training.train_batch_size
        num_stale = 0
        while True:
            for group in self._buffer.drop_stale(self.policy_version):
                num_stale += 1
                self._sampler.again(group.request.issue)
            if len(self._buffer) >= size:
                return sorted(self._buffer.take(size), key=lambda g: g.request.issue.issue_id), num_stale
            self._keep_busy()
            for group in self._env_runners.collect():
                self._sort(group)

    def _sort(self, group: FinishedGroup) -> None:
        """Keep a whole group; issue one with a failure in it again, and after too often use what there is of it."""
        summary, issue = group.summary, group.request.issue
        if not summary.num_failed:
            self._buffer.add(group)
        elif issue.attempt < self.config.env_runners.max_task_retries:
            self._sampler.again(issue)
        elif summary.rewards:
            self._buffer.add(group)
        else:
            self._sampler.give_up(issue)
            num_tasks, num_failed = len(self.workspace.train_tasks), self._sampler.num_failed
            is_hopeless = num_failed >= HOPELESS_TASKS and not self._sampler.num_trained and not len(self._buffer)
            if num_failed >= num_tasks or is_hopeless:
                raise FleetError(f"all of {num_failed} tasks failed; the last one with: {summary.errors[-1]}")

    def _build_learner(self, name: str, policy_dir: str) -> None:
        if self._learner_name != name:
            with self._guard.held(), self._transport.room():  # in between there is no learner to save
                self._saver.finish()
                self._learners.build(name, policy_dir)
                self._learner_name = name

    def _publish(self) -> None:
        self.policy_version += 1
        self._transport.publish(self.policy_version)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str = "") -> EvalResult:
        """Answer the held-out tasks greedily. Nothing of stage 2 may be in flight: call it between iterations.

        A task that fails for the machinery's sake is asked again, ``env_runners.max_task_retries`` times at most.

        Args:
            name: keeps the trajectories as ``trajectories/eval_<name>.arrow``, where the run keeps any.

        Raises:
            FleetError: no task came to its end.
        """
        groups: list[FinishedGroup] = []
        num_failed = self.sample(self.workspace.eval_tasks, 1, 0.0, groups.append)
        if name and self.config.checkpointing.keep_trajectories:
            keep_trajectories(self.run_dir, f"eval_{name}", [group.batch for group in groups])
        return eval_result([group.summary for group in groups if not group.summary.num_failed], num_failed)

    def sample(self, tasks: Sequence[Task], num_trajectories: int, temperature: float, on_group: OnGroup) -> int:
        """Sample a group for each of some tasks beside those of stage 2; see ``held_out.sample_tasks``."""
        return sample_tasks(
            self._env_runners, self.config, tasks, num_trajectories, temperature, on_group, aside=self._sort
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def save(self, extra: dict[str, Any] | None = None, *, score: float | None = None, wait: bool = True) -> Path:
        """Write the checkpoint ``step_<iteration>``: the policy as a Hugging Face folder, and what ``restore`` needs.

        Args:
            extra: JSON of the caller's own, given back by ``restore``.
            score: of ``checkpointing.best_metric``, where this policy was evaluated.
            wait: False returns once the state is copied; it is written while training goes on. What goes wrong then
                is raised by the next ``train``, ``save`` or ``stop``.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written.
        """
        state = {
            "sft_step": self.sft_step,
            "iteration": self.iteration,
            "policy_version": self.policy_version,
            "learner": self._learner_name,
            "sampler": self._sampler.get_state(),
            "extra": extra or {},
        }
        with self._guard.held():
            with self._transport.room():
                self._saver.begin(self.iteration, state, score)
            if wait:
                self._saver.finish()
        return self.run_dir / "checkpoints" / f"step_{self.iteration}"

    def is_best(self, score: float) -> bool:
        """Whether ``checkpointing.best_metric`` was never as high; False where there is none."""
        return self._store.is_best(score)

    def restore(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint of the run directory; return its ``extra``, or None where there is none.

        Raises:
            DataError: a file of the checkpoint is damaged.
        """
        directory = self._store.latest()
        if directory is None:
            return None
        state = read_state(directory)
        self.sft_step, self.iteration = state.sft_step, state.iteration
        self._sampler.set_state(state.sampler.model_dump())
        if self._is_pretrained():
            self._stage_dir = str(self._sft_dir)
        self._transport.make_room()
        in_sft = bool(self.config.sft.num_steps) and not self._is_pretrained()
        learner = "sft" if in_sft else self.config.training.algorithm
        self._build_learner(learner, self._stage_dir)
        if state.learner == learner:  # else it was saved between the stages: the folder is all there is to it
            self._saver.restore(directory)
        self.policy_version = state.policy_version - 1
        self._publish()
        return state.extra

    def task_counts(self) -> dict[str, int]:
        """Issued, trained, failed, lost and doubled tasks of stage 2."""
        return self._sampler.counts()

    def stop(self) -> None:
        """End all fleets, once a checkpoint that is being written is whole.

        Raises:
            UserError: it could not be written; the fleets are gone nonetheless.
        """
        try:
            if not self._learners.is_stopped:
                self._saver.finish()
        finally:
            self._env_runners.stop()
            self._learners.stop()
            self._retrievers.stop()
            self._placement.remove()
