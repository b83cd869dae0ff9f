"""Algorithm: the driver's loop over the fleets.

One ``train()``::

    TaskSampler ──issue──► EnvRunnerGroup ──finished groups──► GroupBuffer ──batch──► LearnerGroup.update
         ▲                      ▲    ▲ queries                     │ stale, failed          │
         │                      │    ▼                             │                        │ weights
         └── again ─────────────│──RetrieverGroup ◄────────────────┘                        │
                                └──────────────── weight_sync.publish(version + 1) ◄────────┘

=================  =============================  ==============================  ================================
part               consumes                       produces                        waits for
=================  =============================  ==============================  ================================
EnvRunnerGroup     issues                         groups, in completion order     its engines and its documents
GroupBuffer        groups                         batches of train_batch_size     enough groups no older than the lag
LearnerGroup       references of record batches   weights, metrics                the batch
publish            weights                        policy version + 1              every runner's swap
=================  =============================  ==============================  ================================

With ``max_policy_lag = 0`` exactly one batch is out at a time: synchronous training is the same path. With a lag of n,
n more batches are being sampled while the learner works.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.weight_sync import publish
from learners.learner_group import LearnerGroup
from learners.sft import segment as segment_trajectory
from ragr1_actors.buffer import GroupBuffer
from ragr1_actors.checkpoint import CheckpointStore, read_json, read_tensors, write_json, write_tensors
from ragr1_actors.config import RunConfig
from ragr1_actors.env_runner import EnvRunner, GroupRequest
from ragr1_actors.env_runner_group import EnvRunnerGroup, FinishedGroup
from ragr1_actors.errors import FleetError
from ragr1_actors.interrupt import InterruptGuard
from ragr1_actors.metrics import TIME_PREFIX, mean_over
from ragr1_actors.report import EvalResult
from ragr1_actors.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.task_sampler import Issue, TaskSampler
from ragr1_actors.types import TrajectoryGroup
from ragr1_actors.workspace import Workspace, demonstrations, prepare
from retrieval.group import RetrieverGroup

OnProgress = Callable[[int, dict[str, float]], None]
"""Called with the number of steps done and the newest metrics."""


class Algorithm:
    """Trains a policy to search: ``pretrain()`` once, then ``train()`` an iteration at a time."""

    def __init__(self, config: RunConfig, run_dir: Path, guard: InterruptGuard | None = None) -> None:
        """Prepare the data and start the fleets. Where any of them has actors, Ray is initialised already.

        Args:
            config: of the run.
            run_dir: what the run writes goes here.
            guard: holds interrupts back while the learner and the books are between two states.

        Raises:
            UserError: a file or setting that cannot be used.
            FleetError: a fleet did not start.
        """
        self.config = config
        self.run_dir = run_dir = run_dir.absolute()  # actors may have another working directory
        self._guard = guard or InterruptGuard()
        self.sft_step = 0
        self.num_decisions: Counter[str] = Counter()
        self.iteration = 0
        self.policy_version = 0
        if config.learners.num_learners and not config.learners.num_gpus_per_learner:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which transformers imports, warns
        self.workspace: Workspace = prepare(config, run_dir)
        self._learner_name = ""
        self._stage_dir = self.workspace.policy_dir
        self._store = CheckpointStore(run_dir / "checkpoints", config.checkpointing.num_to_keep)
        self._sampler = TaskSampler(self.workspace.train_tasks, config.debugging.seed)
        self._buffer = GroupBuffer(config.training.max_policy_lag)
        self._retrievers = RetrieverGroup.create(self.workspace.index_dir, config.retrieval)
        self._learners = LearnerGroup(config)
        self._env_runners = EnvRunnerGroup(config, self.workspace.policy_dir, self._retrievers.retriever())
        # all fleets load at once: only now wait for them
        if self._store.latest() is None:
            self._build_learner("sft" if config.sft.num_steps else config.training.algorithm, self._stage_dir)
        self._retrievers.wait_until_ready()
        self._env_runners.wait_until_ready()

    # -- stage 1 ---------------------------------------------------------------------------------------------------

    def pretrain(self, on_progress: OnProgress) -> None:
        """Stage 1: learn the format from scripted demonstrations, played against the real retriever."""
        groups = self.collect_demonstrations()
        segments = [segment for group in groups for t in group.trajectories for segment in segment_trajectory(t)]
        self.num_decisions = Counter(segment.category.value for segment in segments)
        self._build_learner("sft", self.workspace.policy_dir)
        for step, batch in enumerate(self._demonstration_batches(groups)):
            if step == self.config.sft.num_steps:
                break
            if step < self.sft_step:  # a resumed run draws the same batches
                continue
            with self._guard.held():
                metrics = self._learners.update([groups_to_record_batch(batch)])
                self.sft_step += 1
            on_progress(self.sft_step, metrics)
        self._stage_dir = str(self.run_dir / "policy_sft")
        self._learners.save_policy(self._stage_dir)
        self._publish()

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

    def train(self) -> dict[str, float]:
        """One iteration of stage 2: sample a batch of groups, learn from it, publish the new policy."""
        started = time.perf_counter()
        training = self.config.training
        self._build_learner(training.algorithm, self._stage_dir)
        batch, num_stale = self._next_batch()
        sampled = time.perf_counter()
        if training.max_policy_lag:
            self._keep_busy()
        lag = self.policy_version - np.mean([group.summary.oldest_version for group in batch])
        with self._guard.held():  # the learner and the books move together, or a resumed run would train a task twice
            learner_metrics = self._learners.update([group.batch for group in batch])
            learned = time.perf_counter()
            for group in batch:
                self._sampler.trained(group.request.issue)
            self.iteration += 1
            self._publish()
        published = time.perf_counter()
        if self.config.checkpointing.keep_trajectories:
            self._write_trajectories(batch)
        return {
            **_rollout_metrics(batch),
            **{f"learner/{name}": value for name, value in learner_metrics.items()},
            "loop/policy_lag": float(lag),
            "loop/stale_groups": float(num_stale),
            "loop/policy_version": float(self.policy_version),
            **{f"tasks/{name}": float(count) for name, count in self._sampler.counts().items()},
            "time/sample_s": sampled - started,
            "time/learn_s": learned - sampled,
            "time/publish_s": published - learned,
            "time/iteration_s": time.perf_counter() - started,
        }

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
            if self._sampler.num_failed >= len(self.workspace.train_tasks):
                raise FleetError(f"every task failed; the last one with: {summary.errors[-1]}")

    def _build_learner(self, name: str, policy_dir: str) -> None:
        if self._learner_name != name:
            self._learners.build(name, policy_dir)
            self._learner_name = name

    def _publish(self) -> None:
        self.policy_version += 1
        publish(self._learners, self._env_runners, self.policy_version)

    def _write_trajectories(self, batch: list[FinishedGroup]) -> None:
        directory = self.run_dir / "trajectories"
        directory.mkdir(exist_ok=True)
        write_trajectories(directory / f"iteration_{self.iteration:05d}.arrow", [_fetch(g.batch) for g in batch])

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self) -> EvalResult:
        """Answer the held-out tasks greedily. Nothing of stage 2 may be in flight: call it between iterations."""
        requests = [GroupRequest(Issue(task.task_id, task, 0), 1, 0.0) for task in self.workspace.eval_tasks]
        means = [group.summary.means for group in self._sample(requests) if group.summary.means]
        if not means:
            raise FleetError("every evaluation task failed; see the run's metrics for why")
        mean = mean_over(means)
        rounds = mean.get("rounds", 0.0)
        return EvalResult(
            em=mean["em"],
            f1=mean["f1"],
            rounds=rounds,
            queries_per_round=mean["queries"] / rounds if rounds else 0.0,
            queries=mean["queries"],
            tokens=mean["tokens"],
            num_tasks=len(means),
        )

    def _sample(self, requests: list[GroupRequest]) -> list[FinishedGroup]:
        """Sample some groups of their own, beside those of stage 2, which are put aside as they come."""
        for request in requests:
            self._env_runners.submit(request)
        wanted = {request.issue.issue_id for request in requests}
        finished: list[FinishedGroup] = []
        while len(finished) < len(wanted):
            for group in self._env_runners.collect():
                if group.request.issue.issue_id in wanted:
                    finished.append(group)
                else:
                    self._sort(group)
        return finished

    # -- state -----------------------------------------------------------------------------------------------------

    def save(self, extra: dict[str, Any] | None = None) -> Path:
        """Write the checkpoint ``step_<iteration>``: the policy as a Hugging Face folder, and what ``restore`` needs.

        Args:
            extra: JSON of the caller's own, given back by ``restore``.
        """
        state = {
            "sft_step": self.sft_step,
            "iteration": self.iteration,
            "policy_version": self.policy_version,
            "learner": self._learner_name,
            "sampler": self._sampler.get_state(),
            "extra": extra or {},
        }

        def write(directory: Path) -> None:
            self._learners.save_policy(directory / "policy")
            write_tensors(directory / "learner.safetensors", self._learners.get_state())
            write_json(directory / "state.json", state)

        with self._guard.held():
            return self._store.save(self.iteration, write)

    def restore(self) -> dict[str, Any] | None:
        """Go on from the newest checkpoint of the run directory; return its ``extra``, or None where there is none."""
        directory = self._store.latest()
        if directory is None:
            return None
        state = read_json(directory / "state.json")
        self.sft_step, self.iteration = state["sft_step"], state["iteration"]
        self._sampler.set_state(state["sampler"])
        in_sft = self.sft_step < self.config.sft.num_steps
        if self.config.sft.num_steps and not in_sft:
            self._stage_dir = str(self.run_dir / "policy_sft")
        learner = "sft" if in_sft else self.config.training.algorithm
        self._build_learner(learner, self._stage_dir)
        if state["learner"] == learner:  # else it was saved between the stages: the folder is all there is to it
            self._learners.set_state(read_tensors(directory / "learner.safetensors"))
        self.policy_version = state["policy_version"] - 1
        self._publish()
        extra: dict[str, Any] = state["extra"]
        return extra

    def task_counts(self) -> dict[str, int]:
        """Issued, trained, failed, lost and doubled tasks of stage 2."""
        return self._sampler.counts()

    def stop(self) -> None:
        """End all fleets."""
        self._env_runners.stop()
        self._learners.stop()
        self._retrievers.stop()


def _fetch(batch: Any) -> Any:
    """A record batch is itself in the driver, and a reference where actors sample."""
    import ray

    return ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch


def _rollout_metrics(batch: list[FinishedGroup]) -> dict[str, float]:
    summaries = [group.summary for group in batch]
    rewards = [np.array(s.rewards) for s in summaries if s.rewards]
    means = mean_over([s.means for s in summaries if s.means])
    return {
        **{name if name.startswith(TIME_PREFIX) else f"rollout/{name}": value for name, value in means.items()},
        "rollout/reward": float(np.mean([r.mean() for r in rewards])),
        "rollout/reward_std": float(np.mean([r.std() for r in rewards])),
        "rollout/groups_with_variance": float(np.mean([r.std() > 0 for r in rewards])),
        "rollout/queries_per_round": means["queries"] / means["rounds"] if means.get("rounds") else 0.0,
        "rollout/failed_trajectories": float(sum(s.num_failed for s in summaries)),
    }
