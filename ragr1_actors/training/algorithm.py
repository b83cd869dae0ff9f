"""Algorithm: the trainer, which drives a ``RolloutFleets`` and a ``LearnerGroup`` over a ``PreparedRun``.

One ``train()``::

    TaskLedger ──request──► EnvRunnerGroup ──finished groups──► BatchCollector ──batch──► make_room, LearnerGroup.update
        ▲                      ▲    ▲ queries                       │ failed, stale, lost            │
        │                      │    ▼                               │                                │ weights
        │                      │  RetrieverGroup                    │                                │
        └────── again ─────────│────────────────────────────────────┘                                │
                               └──────────────────── WeightSync.publish(version + 1) ◄───────────────┘

``make_room`` acts only if runners and learners share devices and take turns on them: it puts the engines to sleep, and
``publish`` wakes them (``rollout/runners/weight_sync.py``). The learners also need the devices to write a checkpoint.

The driver has one event loop, which runs while the driver waits for samples or for the learners (``DriverLoop``). Its
tasks, and what each waits for:

==========================  ===============================  =====================================================
task                        waits for                        goes on when
==========================  ===============================  =====================================================
feed, one task per group    a runner with room, its answer   a runner has room or has answered; fails if none is left
collect, ``next_batch``     the queue of ended groups        any group has ended
learn, ``_update``          the learners, in a thread        the update has ended, or its ranks cannot restart
supervise                   a second                         always; its error ends what the driver waits for
evaluation beside training  its groups, like feed            all held-out tasks were answered
==========================  ===============================  =====================================================

Between two runs of the loop nothing of this changes: the driver publishes, saves and logs then.

With dynamic sampling the buffer sets aside groups whose rewards are all equal, and others are sampled in their place.
With ``max_policy_lag = 0`` exactly one batch is in flight at a time: synchronous training is the same path. With a lag
of n, n more batches are sampled while the learner works. A checkpoint is begun between two iterations, and written
while the next iterations run (``CheckpointSaver``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

from cluster.placement import Placement
from learners.profiling import RankProfile, start_profile, stop_profile
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.digests import LIST_FILE
from ragr1_actors.core.disk.files import INDEX, POLICY_FOLDER, SFT_POLICY
from ragr1_actors.core.disk.folders import AnyFolder, part_of, warn_of_unlisted
from ragr1_actors.core.disk.learner_state import LEARNER_PREFIX
from ragr1_actors.core.errors import DataError, RunDirectoryError
from ragr1_actors.core.models.model_files import ADVICE
from ragr1_actors.core.process.progress_bar import SAMPLED_TOKENS
from ragr1_actors.core.resolve import MIXTURE
from ragr1_actors.core.schema import groups_from_record_batch, groups_to_record_batch
from ragr1_actors.core.types import FailedTask, TrajectoryGroup
from ragr1_actors.evaluation.evaluate import eval_result, own_measures
from ragr1_actors.planning.preflight import check_names, check_services
from ragr1_actors.planning.prepare import PreparedRun, draw_demonstrations, learnable, prepare
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.rollout.runners.rollout_fleets import OnGroup, RolloutFleets
from ragr1_actors.rollout.runners.stored_groups import StoredGroups
from ragr1_actors.rollout.runners.weight_sync import WeightSync
from ragr1_actors.runs.checkpoint import Checkpoints, CheckpointSaver, checkpoint_name, read_state
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import (
    check_shared,
    create_run_directory,
    fetch_batches,
    keep_trajectories,
    removed_if_unused,
    with_newest_policy,
)
from ragr1_actors.runs.storage.store import RunStore, find_store
from ragr1_actors.runs.telemetry.metrics import as_markdown
from ragr1_actors.training.batches import (
    BatchCollector,
    Histograms,
    Samples,
    mean_lag,
    rollout_metrics,
    rollout_samples,
    take_histograms,
)
from ragr1_actors.training.fleet_controller import TICK_S, FleetController

OnStep = Callable[[int, dict[str, float]], None]
"""Callback with the number of finished steps of SFT and the newest metrics."""
OnIteration = Callable[[int, dict[str, float], Samples, Histograms], None]
"""Callback with the number of finished iterations, and what the newest one measured."""
Examples = dict[str, str]
"""A right and a wrong trajectory of an evaluation as Markdown: ``{"right": ..., "wrong": ...}``."""
OnResult = Callable[[EvalResult, Examples], None]
HeldBlock = Callable[[], AbstractContextManager[None]]
"""Function that returns a context in which an interrupt is held back, such as ``InterruptGuard.held``."""


class Algorithm:
    """Trains a policy to search: ``pretrain()`` once, then ``train()`` once per iteration."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        prepared: PreparedRun,
        policy: AnyFolder,
        fleets: RolloutFleets,
        learners: LearnerGroup,
        placement: Placement,
        held: HeldBlock = nullcontext,
    ) -> None:
        """Take fleets that were started; ``start`` starts them.

        ``policy`` is ``prepared.policy_dir`` in the form for actors. ``held`` holds interrupts back while learner and
        task ledger are between two states.
        """
        self.config = config
        self.store = store
        self.prepared = prepared
        self.sft_step = 0
        self.iteration = self.policy_version = 0
        self._log_s = 0.0  # of the previous iteration
        self._keeper = ThreadPoolExecutor(1, "keep trajectories")
        self._keeping: Future[None] | None = None
        self._held = held
        self._learner_name = ""
        self._first_policy = policy
        self._sft_policy: AnyFolder | None = None  # once stage 1 has ended
        checkpointing = config.checkpointing
        self._checkpoints = Checkpoints(store, checkpointing.num_to_keep, checkpointing.best_metric)
        self._fleets = fleets
        self._loop = fleets.loop
        stored = config.training.from_trajectories
        self._sample = StoredGroups(Path(stored)).sample if stored else fleets.env_runners.sample
        self._evaluation: tuple[str, OnResult, asyncio.Task[tuple[list[FinishedGroup], int]]] | None = None
        """Evaluation beside training: its name, the callback of its result, and its task."""
        self._is_learning, self._supervise_at = False, 0.0
        self._collector = BatchCollector(config, prepared.train_tasks, self._sample)
        self._learners = learners
        self._placement = placement
        self._saver = CheckpointSaver(self._checkpoints, learners)
        self._weight_sync = WeightSync(config, learners, fleets.env_runners)
        self.controller = FleetController(
            config, fleets, store, lambda: self._collector.num_finished_batches(), lambda: learners.actors
        )
        self._loop.run_beside(self._supervise)

    @classmethod
    def create(cls, config: RunConfig, run_dir: str | Path) -> Self:
        """Make ``run_dir`` the directory of a new run, once ``config`` is checked; prepare its data and ``start``."""
        config = with_newest_policy(config)
        check_names(config)
        config = check_services(config)
        store = find_store(run_dir)
        create_run_directory(config, store)
        with removed_if_unused(store):
            return cls.start(config, store, prepare(config, store.path))

    @classmethod
    def start(
        cls, config: RunConfig, run_dir: str | Path | RunStore, prepared: PreparedRun, held: HeldBlock = nullcontext
    ) -> Self:
        """Start the fleets over prepared data, and wait until they are ready. Ray is initialised if any has actors.

        Raises:
            UserError: a setting cannot be used.
            FleetError: a fleet did not start.
        """
        store = find_store(run_dir)
        policy = store.share(prepared.policy_dir)
        if prepared.index_dir is not None and config.retrieval.num_retrievers:
            store.share(prepared.index_dir, INDEX)
        with ExitStack() as started:
            placement = Placement(config, has_index=prepared.index_dir is not None)
            started.callback(placement.remove)
            fleets = RolloutFleets(config, policy, prepared.index_dir, placement, store.share)
            started.callback(fleets.stop)
            learners = LearnerGroup(config, placement.learner_options, placement.spare_cpus)
            started.callback(learners.stop)
            algorithm = cls(config, store, prepared, policy, fleets, learners, placement, held)
            started.pop_all()  # ``algorithm.stop`` ends them from now on
        try:
            if algorithm._weight_sync.shares_devices:  # an engine takes the memory that is free when it starts
                fleets.env_runners.wait_until_ready()
            if algorithm._checkpoints.latest() is None:  # else ``restore`` builds the learner
                algorithm._build_learner(algorithm._next_learner(), policy)
            fleets.wait_until_ready()
            if store.remote is None:
                check_shared(store.path.absolute(), learners.answer_probe)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    # -- stage 1 ---------------------------------------------------------------------------------------------------

    def pretrain(self, on_step: OnStep) -> Counter[str]:
        """SFT: learn the format from demonstrations, played against the real retriever.

        It returns how often each decision was demonstrated, ``{"search": 900, "answer": 400}``. If the restored run has
        finished the stage, it does nothing and returns an empty counter.
        """
        if self.is_pretrained:
            return Counter()
        settings = self.config.sft
        scripts = draw_demonstrations(self.prepared, settings.num_demonstrations, self.config.debugging.seed)
        played = self._fleets.play_scripts(scripts)
        groups, num_decisions = learnable(played, only_correct=settings.demonstrations != MIXTURE)
        if self.config.checkpointing.keep_trajectories:
            keep_trajectories(self.store.path, "demonstrations", [groups_to_record_batch(played)])
        self._weight_sync.make_room()
        self._build_learner("sft", self._first_policy)
        for step, batch in enumerate(self._demonstration_batches(groups)):
            if step == settings.num_steps:
                break
            if step < self.sft_step:  # a resumed run draws the same batches
                continue
            with self._held():
                self._saver.commit_if_written()
                metrics = self._loop.run(self._update([groups_to_record_batch(batch)]))
                self.sft_step += 1
                on_step(self.sft_step, metrics)
        with self._held():
            self._sft_policy = self.store.write_policy(SFT_POLICY, self._learners.save_policy)
            self._publish()
        return num_decisions

    @property
    def is_pretrained(self) -> bool:
        """Whether stage 1, if there is one, has ended and its policy exists."""
        return self.sft_step >= self.config.sft.num_steps and self._sft_policy is not None

    @property
    def _stage_policy(self) -> AnyFolder:
        """Policy at the start of the stage."""
        return self._sft_policy if self.is_pretrained and self._sft_policy is not None else self._first_policy

    def _next_learner(self) -> str:
        is_in_sft = self.config.sft.num_steps and not self.is_pretrained
        return "sft" if is_in_sft else self.config.training.algorithm

    def _demonstration_batches(self, groups: list[TrajectoryGroup]) -> Iterator[list[TrajectoryGroup]]:
        rng = random.Random(f"sft {self.config.debugging.seed}")
        size = min(self.config.sft.batch_size, len(groups))
        while True:
            order = rng.sample(groups, len(groups))
            yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))

    # -- stage 2 ---------------------------------------------------------------------------------------------------

    def train(self, on_iteration: OnIteration | None = None) -> dict[str, float]:
        """Run one iteration of RL: sample a batch of groups, learn from it, publish the new policy.

        ``on_iteration`` is called with the returned metrics, before a held interrupt is raised.
        """
        started, num_sampled_before = time.perf_counter(), self._collector.num_sampled_tokens
        training = self.config.training
        with self._held():
            self._saver.commit_if_written()
        self._build_learner(training.algorithm, self._stage_policy)
        self._collector.num_iterations_done = self.iteration
        with self.controller.learner.waits():
            find_lost = self._learners.find_lost
            batch = self._loop.run(self._collector.next_batch(self.policy_version, find_lost))
            self._finish_evaluation()
        self.controller.learner.num_stale += self._collector.num_stale
        sampled = time.perf_counter()
        if training.max_policy_lag and self.config.env_runners.num_env_runners:
            self._loop.run(self._collector.feed(while_learning=True))
        lag = mean_lag(batch, self.policy_version)
        # Learner, task ledger and logs change together: else a resumed run trains a task twice, or logs no metrics
        with self._held(), self.controller.learner.works():
            self._weight_sync.make_room()
            updated = self._loop.run(self._update([group.batch for group in batch]))
            learner_metrics, histograms = take_histograms(updated)
            learned = time.perf_counter()
            set_aside = self._collector.trained(batch)
            self.iteration += 1
            self._publish()
            published = time.perf_counter()
            self._keep_trained(batch)
            written = time.perf_counter()
            metrics = {
                **rollout_metrics(batch + set_aside),
                **{f"learner/{name}": value for name, value in learner_metrics.items()},
                **self._fleets.metrics(),
                **self.controller.metrics(),
                "loop/policy_lag": lag,
                "loop/set_aside_groups": float(len(set_aside)),
                "loop/policy_version": float(self.policy_version),
                "loop/weight_fallbacks": float(self._weight_sync.num_fallbacks),
                "loop/learner_restarts": float(self._learners.num_restarts),
                **self._collector.metrics(),
                SAMPLED_TOKENS: float(self._collector.num_sampled_tokens - num_sampled_before),
                "time/sample_s": sampled - started,
                "time/learn_s": learned - sampled,
                "time/publish_s": published - learned,
                "time/write_s": written - published + self._log_s,
                "time/iteration_s": time.perf_counter() - started,
            }
            logging = time.perf_counter()
            if on_iteration is not None:
                on_iteration(self.iteration, metrics, rollout_samples(batch + set_aside), histograms)
            self._log_s = time.perf_counter() - logging
        return metrics

    def _keep_trained(self, batch: Sequence[FinishedGroup]) -> None:
        """Begin to write the file of this iteration; a thread does it while the next batch is sampled."""
        if self.config.checkpointing.keep_trajectories:
            self._finish_keeping()
            learned, *_ = self._learners.foreach_learner(lambda learner: learner.learned)
            name, batches = f"iteration_{self.iteration:05d}", [group.batch for group in batch]
            self._keeping = self._keeper.submit(keep_trajectories, self.store.path, name, batches, learned)

    def _finish_keeping(self) -> None:
        """Wait until the newest file of trained trajectories is whole; ``OSError`` if it could not be written."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.result()

    async def _update(self, batches: list[Any]) -> dict[str, float]:
        """Learn from batches; the loop samples meanwhile if the learners are actors."""
        if not self._learners.actors:
            return self._learners.update(batches)
        self._is_learning = True
        try:
            return await asyncio.to_thread(self._learners.update, batches)
        finally:
            self._is_learning = False

    async def _supervise(self) -> None:
        """Give returned runners the newest weights, and change the sizes of the fleets, once in ``TICK_S``."""
        while True:
            await asyncio.sleep(self._supervise_at - time.monotonic())
            if not self._is_learning:
                self._weight_sync.catch_up()
            self.controller.tick()
            self._supervise_at = time.monotonic() + TICK_S

    def _build_learner(self, name: str, policy: AnyFolder) -> None:
        if self._learner_name != name:
            with self._held(), self._weight_sync.room():  # in between there is no learner to save
                self._saver.finish()
                self._learners.build(name, policy)
                self._learner_name = name

    def _publish(self) -> None:
        self.policy_version += 1
        if self.config.env_runners.in_flight == "finish" or not self.config.env_runners.num_env_runners:
            self._loop.run(self._fleets.env_runners.finish_in_flight())
        self._weight_sync.publish(self.policy_version)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        name: str = "",
        on_task: Callable[[int, int], None] = lambda done, total: None,
        on_examples: Callable[[Examples], None] = lambda examples: None,
    ) -> EvalResult:
        """Answer the held-out tasks greedily; to be called between iterations.

        A task is asked again if the machinery failed, at most ``max_task_retries`` times; ``FleetError`` if every task
        failed. The trajectories are kept as ``trajectories/eval_<name>.arrow``, if the run keeps any. ``on_task`` is
        called with the numbers of finished tasks and of all tasks.
        """
        num_done, num_tasks = 0, len(self.prepared.eval_tasks)

        def on_group(group: FinishedGroup) -> None:
            nonlocal num_done
            num_done += not group.summary.num_failed
            on_task(num_done, num_tasks)

        with self.controller.learner.waits():
            self._finish_evaluation()
            groups, num_failed = self._loop.run(self._sample_evaluation(on_group))
            result, examples = self._keep_evaluation(name, groups, num_failed)
        on_examples(examples)
        return result

    def evaluate_beside(self, name: str, on_result: OnResult) -> None:
        """Begin an evaluation and return: its tasks are answered while the next ``train`` samples its batch.

        That ``train`` calls ``on_result`` before it learns, so all answers are from the current policy version. Another
        evaluation that begins before that calls it, too.
        """
        self._finish_evaluation()
        sampled = self._loop.begin(self._sample_evaluation(lambda group: None, is_urgent=True))
        self._evaluation = name, on_result, sampled

    async def _sample_evaluation(
        self, on_group: OnGroup, *, is_urgent: bool = False
    ) -> tuple[list[FinishedGroup], int]:
        """Answer the held-out tasks; return the groups in the order of their ends, and the number of failed tasks."""
        groups: list[FinishedGroup] = []

        def note(group: FinishedGroup) -> None:
            groups.append(group)
            self._collector.num_sampled_tokens += group.summary.num_sampled_tokens
            on_group(group)

        progress = min(1.0, self.iteration / max(1, self.config.training.num_iterations))
        tasks = self.prepared.eval_tasks
        num_failed = await self._fleets.sample_each(tasks, 1, 0.0, note, is_urgent=is_urgent, progress=progress)
        return groups, num_failed

    def _finish_evaluation(self) -> None:
        """Wait until the evaluation beside training is done, if there is one, and tell its result."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            name, on_result, sampled = evaluation
            on_result(*self._keep_evaluation(name, *self._loop.run(asyncio.wait_for(sampled, None))))

    def _keep_evaluation(self, name: str, groups: list[FinishedGroup], num_failed: int) -> tuple[EvalResult, Examples]:
        if name and self.config.checkpointing.keep_trajectories:
            keep_trajectories(self.store.path, f"eval_{name}", [group.batch for group in groups])
        result = eval_result([group.summary for group in groups], num_failed, own_measures(self.config.environment))
        return result, _examples(groups)

    def start_profile(self) -> None:
        """Begin to profile every learner rank."""
        self._learners.foreach_learner(start_profile)

    def stop_profile(self) -> list[RankProfile]:
        """End the profiles and return them by rank; a rank that was restarted in between has none."""
        return [found for found in self._learners.foreach_learner(stop_profile, is_blocking=True) if found is not None]

    def measure_recall(self) -> dict[str, float]:
        """Return ``{"recall@3": 0.61, ...}`` for the evaluation questions; empty if their evidence is unknown."""
        return self._fleets.measure_recall(self.prepared.eval_tasks)

    # -- state -----------------------------------------------------------------------------------------------------

    def save(self, extra: dict[str, Any] | None = None, *, score: float | None = None, wait: bool = True) -> str:
        """Write the checkpoint ``step_<iteration>``: the policy as a Hugging Face folder, and ``restore``'s state.

        Returns its path or URI.

        ``extra`` is the caller's JSON, which ``restore`` returns; ``score`` the value of ``checkpointing.best_metric``,
        if this policy was evaluated. With ``wait=False`` the copied state is written while training continues, and an
        error of writing is raised by the next ``train``, ``save`` or ``stop``.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written.
        """
        state = {
            "sft_step": self.sft_step,
            "iteration": self.iteration,
            "policy_version": self.policy_version,
            "learner": self._learner_name,
            "task_ledger": self._collector.tasks.get_state(),
            "extra": extra or {},
        }
        with self._held():
            self._finish_keeping()
            with self._weight_sync.room():
                self._saver.begin(self.iteration, state, score)
            if wait:
                self._saver.finish()
        return self.store.at(checkpoint_name(self.iteration))

    def is_best(self, score: float) -> bool:
        """Return whether ``checkpointing.best_metric`` was never as high; False if the run has no such metric."""
        return self._checkpoints.is_best(score)

    def restore(self) -> dict[str, Any] | None:
        """Continue from the newest checkpoint and return its ``extra``; None without any, ``DataError`` if damaged."""
        checkpoint = self._checkpoints.latest()
        return None if checkpoint is None else self._continue_from(checkpoint, -1)

    def roll_back(self, last_good: int, lr_factor: float) -> dict[str, Any] | None:
        """Continue from an earlier checkpoint, with the learning rate of the configuration times ``lr_factor``.

        It is the best one up to iteration ``last_good``, or the newest if none was evaluated. It returns the ``extra``
        of that; without one it returns None and changes nothing. Call it between iterations, and ``save`` after it, as
        the newest checkpoint is given up. Groups in flight are awaited and dropped; the restored task ledger issues
        their tasks again. The policy version keeps rising.
        """
        with self._held():
            self._finish_keeping()
            self._saver.finish()
            checkpoint = self._checkpoints.best_until(last_good)
            if checkpoint is None:
                return None
            self._loop.run(self._collector.drop_in_flight())
            if self._evaluation is not None:
                self._loop.run(asyncio.wait_for(self._evaluation[-1], None))
                self._evaluation = None
            num_failed = self._collector.num_failed
            self._collector = BatchCollector(self.config, self.prepared.train_tasks, self._sample)
            self._collector.num_failed = num_failed
            self._learner_name = ""  # builds the learner again, which may have begun from another policy
            extra = self._continue_from(checkpoint, self.policy_version)
            self._learners.scale_lr(lr_factor)
        return extra

    def _continue_from(self, checkpoint: AnyFolder, last_version: int) -> dict[str, Any]:
        """Restore a checkpoint's state, and publish its policy as a version above ``last_version``."""
        state = read_state(checkpoint)
        self.sft_step, self.iteration = state.sft_step, state.iteration
        self._collector.tasks.set_state(state.task_ledger.model_dump())
        self._sft_policy = self.store.find(SFT_POLICY)
        warn_of_unlisted(checkpoint, *([self._sft_policy] if self._sft_policy is not None else []))
        self._weight_sync.make_room()
        learner = self._next_learner()
        try:
            if learner == "sft" and state.learner not in ("", "sft"):
                raise DataError(f"{self.store}/{SFT_POLICY} is missing")
            self._build_learner(learner, self._stage_policy)
        except DataError as error:
            raise RunDirectoryError(self._without_policy(str(error), checkpoint, state.learner)) from error
        if state.learner == learner:  # else it was saved between the stages, and the policy is the whole state
            self._learners.load_state(part_of(checkpoint, LEARNER_PREFIX, LIST_FILE))
        self.policy_version = max(last_version, state.policy_version - 1)
        self._publish()
        return state.extra

    def _without_policy(self, problem: str, checkpoint: AnyFolder, learner: str) -> str:
        """Return the message for a damaged policy from which the learner of a checkpoint begins."""
        what = problem.removesuffix(f"; {ADVICE}")
        if self.is_pretrained and learner == "sft":
            return f"{what}; delete {self._sft_policy}: --resume writes it again, from {checkpoint}"
        return (
            f"{what}; put a copy of it back, as every checkpoint needs it, or begin a new run with a copy of "
            f"{checkpoint}/{POLICY_FOLDER} as policy.model and with sft.num_steps=0"
        )

    def task_counts(self) -> dict[str, int]:
        """Return the numbers of issued RL tasks by their end, see ``TaskCounts``."""
        return self._collector.tasks.counts()

    def failed_tasks(self) -> tuple[FailedTask, ...]:
        """Return the tasks of RL that were given up, with the reason."""
        return tuple(self._collector.tasks.failed_tasks)

    def stop(self) -> None:
        """End all fleets, after running writes have ended.

        Raises:
            UserError: a checkpoint could not be written; or ``OSError``: the newest trajectories.
        """
        with ExitStack() as ends:  # the last first, each even if one before it raises
            ends.callback(self._placement.remove)
            ends.callback(self._learners.stop)
            ends.callback(self._fleets.stop)
            if not self._learners.is_stopped:
                ends.callback(self._saver.finish)
            ends.callback(self._keeper.shutdown)
            ends.callback(self._finish_keeping)


def _examples(groups: Sequence[FinishedGroup]) -> Examples:
    """Return the first trajectory with a right answer, and the first with a wrong one, as Markdown."""
    found: Examples = {}
    for group in groups:
        name = "right" if group.summary.means.get("em") else "wrong"
        if name not in found and not group.summary.num_failed:
            for batch in fetch_batches([group.batch]):
                found[name] = as_markdown(groups_from_record_batch(batch)[0].trajectories[0])
    return found
