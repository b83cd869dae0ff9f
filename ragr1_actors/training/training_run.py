"""TrainingRun: the stages of a run in its directory, with progress bars, checkpoints and report.

``ragr1 train`` runs it. ``Algorithm`` trains; a ``TrainingRun`` chooses its next step and logs.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError

from cluster.metrics import GaugeExport
from cluster.placement_plan import PlacementPlan
from learners.profiling import largest_costs, write_timelines
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import INDEX, POLICY, is_no_room
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import DataError, RunDirectoryError, UserError, command_name, one_line
from ragr1_actors.core.process.interrupts import InterruptGuard
from ragr1_actors.core.process.progress_bar import counted_bar, describe_iteration, elapsed_time, show_progress
from ragr1_actors.pages.report.page import write_page
from ragr1_actors.planning.prepare import PreparedRun, prepare
from ragr1_actors.rollout.runners.rollout_fleets import describe_loading, session_for
from ragr1_actors.runs.checkpoint import STATE_FILE, Checkpoints, TrainingRunState, checkpoint_name
from ragr1_actors.runs.report import (
    REPORT_HTML,
    EvalResult,
    PeakMemory,
    RunReport,
    StageName,
    StageReport,
    TaskCounts,
    render_table,
    write_report,
)
from ragr1_actors.runs.run_directory import append_start, this_start
from ragr1_actors.runs.storage.store import RunStore, find_store
from ragr1_actors.runs.telemetry.events import IncidentLog, ScalingDecision
from ragr1_actors.runs.telemetry.metrics import METRICS_FILE, Gap, MetricsLogger, find_gaps, read_events, read_metrics
from ragr1_actors.runs.telemetry.trackers import trackers
from ragr1_actors.training.algorithm import Algorithm, Examples, HeldBlock
from ragr1_actors.training.batches import Histograms, Samples
from ragr1_actors.training.guard import Guard

SFT_CHECKPOINT_STEPS = 100
"""Optimizer steps of SFT between two checkpoints; they take some minutes."""

logger = logging.getLogger(__name__)


class TrainingRun:
    """Training run. ``execute()`` continues it from its newest checkpoint, or from the start, to its end."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path | RunStore,
        console: Console,
        *,
        num_profiled: int = 0,
        words: Sequence[str] = (),
    ) -> None:
        """Open a run directory made by ``run_directory.create_run_directory``.

        ``num_profiled`` iterations of RL are profiled, after the first one of this process. ``words`` are the recipe
        and the overrides that begin the run, for ``run_directory.check_recipe``.
        """
        self._num_profiled, self._words = num_profiled, words
        self._profiled: list[dict[str, float]] | None = None  # metrics; None before a profile and after it
        self._config = config
        self._store = find_store(run_dir)
        self._store.retry_for(config.debugging.fault_tolerance.storage_retry_s)
        self._run_dir = self._store.path
        self._console = console
        self._incidents = IncidentLog(lambda line: console.print(line, highlight=False, markup=False))
        self._stages: list[StageReport] = []
        self._guard = Guard(config.training.guard)
        self._held: HeldBlock = nullcontext
        self._evaluated: tuple[int, dict[str, float], Examples] | None = None  # of an iteration, not logged yet
        self._told_share = 0.05  # of agents that failed
        self._wall_before_s = 0.0
        self._started = self._saved = time.monotonic()

    def execute(self) -> RunReport:
        """Run the stages that are not done yet.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint is written and all actors have ended.
            UserError: a setting or file cannot be used, the disk is full, or an alarm stopped the run; all actors have
                ended.
        """
        try:
            with self._store.held(), self._store:
                return self._execute()
        except (OSError, SafetensorError) as error:
            if not is_no_room(error):
                if isinstance(error, OSError) and str(self._run_dir) in str(error.filename):
                    raise RunDirectoryError(
                        f"{error.filename}: {error.strerror}; make the run directory readable and writable, and go on "
                        "with --resume if it still holds a checkpoint"
                    ) from error
                raise
            raise UserError(
                f"no room left to write to {self._run_dir} ({error}); free some space and go on with --resume: the "
                "checkpoints written before are whole"
            ) from error

    def _execute(self) -> RunReport:
        with (
            PeakMemory() as memory,
            InterruptGuard() as interrupts,
            self._incidents,
            session_for(self._config, self._show_placement, self._console.print),
            ExitStack() as stack,
        ):
            with self._console.status("fetching what was made"):
                for made in (INDEX, POLICY):
                    self._store.bring(made)
            prepared = prepare(self._config, self._run_dir)  # the build of an index shows its bars
            append_start(self._run_dir, this_start(self._words))
            export = stack.enter_context(closing(GaugeExport(self._run_dir.name)))
            changes = self._config.changes()
            track = stack.enter_context(trackers(self._config.debugging.trackers, self._run_dir, changes))
            logger = stack.enter_context(closing(MetricsLogger(self._run_dir, export, changes, track)))
            before_start = time.monotonic()
            with elapsed_time(self._console, describe_loading(self._config), in_logs=True):
                self._held = interrupts.held
                algorithm = Algorithm.start(self._config, self._store, prepared, self._held)
            self._console.print(f"actors loaded in {time.monotonic() - before_start:.1f} s", highlight=False)
            with self._page_of_early_end(lambda: self._report(algorithm, memory.peak_bytes)):
                try:
                    # An interrupt saves nothing here: the newest checkpoint is newer than the state
                    with elapsed_time(self._console, "loading the newest checkpoint"):
                        self._restore(algorithm)
                    recall = algorithm.measure_recall()
                    try:
                        self._describe(prepared, recall)
                        self._run_stages(algorithm, logger)
                    except KeyboardInterrupt:
                        interrupts.acknowledge()
                        if not interrupts.is_torn:  # else learner and ledger differ; the one before is valid
                            self._save(algorithm)
                        raise
                finally:
                    algorithm.stop()
        decisions, incidents = read_events(self._run_dir)
        report = self._report(algorithm, memory.peak_bytes)
        report = replace(report, ratios=recall, decisions=decisions, incidents=incidents)
        self._write_page(report)
        write_report(self._run_dir, report)
        return report

    def _report(self, algorithm: Algorithm, peak_rss_bytes: int) -> RunReport:
        """Return the report so far, without the contents of the run's files."""
        return RunReport(
            stages=tuple(self._stages),
            wall_s=self._wall_s(),
            peak_rss_bytes=peak_rss_bytes,
            tasks=TaskCounts(**algorithm.task_counts()),
            failed_tasks=algorithm.failed_tasks(),
            alarms=tuple(self._guard.state.alarms),
            gaps=self._gaps(algorithm),
        )

    def _write_page(self, report: RunReport, *, is_finished: bool = True) -> None:
        page = self._run_dir / REPORT_HTML
        write_page(page, self._run_dir.name, self._config, self._run_dir, report, is_finished=is_finished)

    @contextmanager
    def _page_of_early_end(self, report: Callable[[], RunReport]) -> Iterator[None]:
        """Write ``report.html`` if the block raises, even an interrupt; an error of this is only printed."""
        try:
            yield
        except BaseException:
            try:
                if (self._run_dir / METRICS_FILE).stat().st_size:  # else nothing was measured
                    self._write_page(report(), is_finished=False)
            except Exception as error:  # a process boundary: the reason why the run ended must not be lost
                if not is_no_room(error):
                    self._print(f"{REPORT_HTML} was not written: {one_line(error)}")
            raise

    def _show_placement(self, plan: PlacementPlan) -> None:
        table = Table("actors", "number", "each", "nodes", box=None, pad_edge=False)
        for row in plan.rows:
            table.add_row(row.demand.role, str(row.demand.count), row.demand.each, row.where)
        self._console.print(table, highlight=False)

    def _restore(self, algorithm: Algorithm) -> None:
        checkpoints = Checkpoints(self._store)
        checkpoint = checkpoints.latest()
        if checkpoint is None:
            return
        try:
            standing = validated(TrainingRunState, algorithm.restore() or {}, f"extra in {STATE_FILE}")
        except DataError as error:
            raise RunDirectoryError(f"{error}; {checkpoints.recovery_hint(checkpoint)}") from error
        self._wall_before_s, self._stages = standing.wall_s, list(standing.stages)
        self._guard = Guard(self._guard.settings, standing.guard)
        self._console.print(f"resumed at SFT step {algorithm.sft_step}, RL iteration {algorithm.iteration}")
        for gap in self._gaps(algorithm):
            self._print(f"{self._run_dir / METRICS_FILE} lacks the lines of {gap}; the report says so, too")

    def _gaps(self, algorithm: Algorithm) -> tuple[Gap, ...]:
        done = {"sft": algorithm.sft_step, "rl": algorithm.iteration}
        return find_gaps(read_metrics(self._run_dir), done)

    def _save(self, algorithm: Algorithm, score: float | None = None, *, wait: bool = True) -> None:
        extra = {
            "wall_s": self._wall_s(),
            "stages": [asdict(stage) for stage in self._stages],
            "guard": asdict(self._guard.state),
        }
        algorithm.save(extra, score=score, wait=wait)
        self._saved = time.monotonic()

    def _is_due(self, step: int, interval: int) -> bool:
        """Return whether a checkpoint is due after ``step``: ``interval`` steps, or minutes, after the previous one."""
        interval_s = 60 * self._config.checkpointing.interval_minutes
        return step % interval == 0 or 0 < interval_s <= time.monotonic() - self._saved

    def _score(self, result: EvalResult) -> float | None:
        metric = self._config.checkpointing.best_metric
        return result.by_name()[metric] if metric else None

    def _wall_s(self) -> float:
        return self._wall_before_s + time.monotonic() - self._started

    def _describe(self, prepared: PreparedRun, recall: dict[str, float]) -> None:
        for note in prepared.notes:
            self._console.print(note, markup=False)  # a shape such as "text": [paragraph, ...] is not markup
        shares = ", ".join(f"{name} {value:.2f}" for name, value in recall.items())
        self._console.print(
            f"{len(prepared.train_tasks):,} training tasks, {len(prepared.eval_tasks):,} held out"
            + (f"; the question as query finds the evidence with {shares}" if shares else "")
        )

    def _run_stages(self, algorithm: Algorithm, logger: MetricsLogger) -> None:
        config = self._config
        if not self._has_stage("start"):
            self._evaluate(algorithm, logger, "start")
        if config.sft.num_steps and not (self._has_stage("sft") and algorithm.is_pretrained):
            with show_progress(self._console, "SFT", config.sft.num_steps, algorithm.sft_step) as report:

                def on_step(step: int, metrics: dict[str, float]) -> None:
                    values = {f"learner/{name}": value for name, value in metrics.items()}
                    logger.log("sft", step, values, self._decisions(algorithm), self._incidents.take())
                    report(step, f"loss {metrics['loss']:.3f}")
                    if self._is_due(step, SFT_CHECKPOINT_STEPS) and step < config.sft.num_steps:
                        self._save(algorithm, wait=False)

                num_decisions = algorithm.pretrain(on_step)
            decisions = ", ".join(f"{name} {count:,}" for name, count in sorted(num_decisions.items()))
            if decisions:  # nothing is demonstrated if the run was resumed after stage 1
                self._console.print(f"decisions demonstrated: {decisions}")
            score = self._evaluate(algorithm, logger, "sft")
            self._save(algorithm, score, wait=False)
        if algorithm.iteration < config.training.num_iterations or self._guard.state.unanswered:
            self._reinforce(algorithm, logger)
        score = self._evaluate(algorithm, logger, "rl")
        self._save(algorithm, score)

    def _reinforce(self, algorithm: Algorithm, logger: MetricsLogger) -> None:
        was_idle = False
        total = self._config.training.num_iterations
        with show_progress(self._console, "RL", total, algorithm.iteration, line_interval_s=0) as report:

            def on_iteration(n: int, metrics: dict[str, float], samples: Samples, histograms: Histograms) -> None:
                nonlocal was_idle
                self._warn_of_agents(n, metrics)
                for alarm in self._guard.observe(n, metrics):
                    self._say(alarm)
                found = metrics | self._guard.metrics()
                decisions, incidents = self._decisions(algorithm), self._incidents.take()
                logger.log("rl", n, found, decisions, incidents, samples, histograms)
                is_idle = not metrics["learner/num_steps"]
                if is_idle and not was_idle:  # the first of several in a row is reported
                    self._console.print(
                        f"no group with different rewards: nothing learned in iteration {n}", highlight=False
                    )
                was_idle = is_idle
                if self._evaluated is not None:  # after the line before which it took place, see ``MetricsLogger.log``
                    evaluated, values, examples = self._evaluated
                    logger.log("rl", evaluated, values)
                    logger.log_examples("rl", evaluated, examples)
                    self._evaluated = None
                report(n, describe_iteration(metrics))

            if self._lacks_evaluation(algorithm.iteration):  # it was interrupted
                self._evaluate_beside(algorithm)
            while algorithm.iteration < total or self._guard.state.unanswered:
                if self._guard.state.unanswered:
                    self._answer_alarms(algorithm, logger)
                    continue
                metrics = algorithm.train(on_iteration)
                self._profile(algorithm, metrics, is_last=algorithm.iteration >= total)
                if algorithm.iteration < total and not self._guard.state.unanswered:
                    self._evaluate_and_save(algorithm, metrics)

    def _warn_of_agents(self, iteration: int, metrics: dict[str, float]) -> None:
        """Warn if more agents fail than before: at 10 %, and then whenever the share has doubled."""
        if (share := metrics.get("rollout/stop_agent_failed", 0.0)) >= self._told_share * 2:
            self._told_share = share
            logger.warning(
                "%.0f %% of the agents failed in iteration %d; ragr1 view %s shows their errors",
                100 * share,
                iteration,
                self._store,
            )

    def _profile(self, algorithm: Algorithm, metrics: dict[str, float], *, is_last: bool) -> None:
        """Begin the profile after the first iteration, and end it after the last requested one."""
        if not self._num_profiled:
            return
        if self._profiled is None:
            if is_last:
                self._print("no iteration is left to profile: the first one of a process is not")
                return
            self._profiled = []
            algorithm.start_profile()
            return
        self._profiled.append(metrics)
        if len(self._profiled) < self._num_profiled and not is_last:
            return
        ranks = algorithm.stop_profile()
        folder = write_timelines(self._run_dir, ranks)
        wall_s = sum(row["time/iteration_s"] for row in self._profiled)
        self._print(
            f"profile of {len(self._profiled)} iterations, {wall_s:.1f} s: timelines in {folder}; largest costs:"
        )
        for cost in largest_costs(self._profiled, ranks):
            self._print(f"  {cost.seconds:8.2f} s  {cost.share:4.0%}  {cost.name}")
        self._num_profiled = 0

    def _evaluate_and_save(self, algorithm: Algorithm, metrics: dict[str, float]) -> None:
        """Begin an evaluation and write a checkpoint after an iteration with these metrics, if they are due."""
        iteration, interval = algorithm.iteration, self._config.evaluation.interval
        is_due = self._is_due(iteration, self._config.checkpointing.interval)
        # After skipped steps only, the state is not saved: the previous checkpoint is the one to continue from
        is_stuck = metrics.get("learner/skipped_steps", 0.0) >= metrics["learner/num_steps"] > 0
        is_sound = not is_stuck and not self._guard.is_suspicious
        if interval and iteration % interval == 0:
            self._evaluate_beside(algorithm, is_sound=is_sound, is_due=is_due)
        elif is_due and is_sound:
            self._save(algorithm, wait=False)

    def _lacks_evaluation(self, iteration: int) -> bool:
        """Return whether a run that was resumed after ``iteration`` has no evaluation of it, and should."""
        interval = self._config.evaluation.interval
        if not (interval and 0 < iteration < self._config.training.num_iterations and iteration % interval == 0):
            return False
        return not any(
            (row["stage"], row["iteration"]) == ("rl", iteration) and "eval/em" in row
            for row in read_metrics(self._run_dir)
        )

    def _evaluate_beside(self, algorithm: Algorithm, *, is_sound: bool = True, is_due: bool = False) -> None:
        """Evaluate while the next batch is sampled, and then write the checkpoint that is due or the best."""
        iteration = algorithm.iteration

        def on_result(result: EvalResult, examples: Examples) -> None:
            values = {f"eval/{name}": float(value) for name, value in result.by_name().items()}
            version = {"eval/policy_version": float(algorithm.policy_version)}
            self._evaluated = iteration, values | version, examples
            score = self._score(result)
            if is_sound and (is_due or (score is not None and algorithm.is_best(score))):
                self._save(algorithm, score, wait=False)

        algorithm.evaluate_beside(f"iteration_{iteration:05d}", on_result)

    def _answer_alarms(self, algorithm: Algorithm, logger: MetricsLogger) -> None:
        """Roll back, or stop the run with a ``UserError``; in both cases a checkpoint is written."""
        guard = self._guard
        with self._held():
            alarms, extra = guard.answer(), None
            if not (why_stop := guard.why_stop(alarms)):
                extra = algorithm.roll_back(guard.last_good(alarms), guard.next_lr_factor)
            if extra is not None:
                then = validated(TrainingRunState, extra, f"extra in {STATE_FILE}").guard
                guard.rolled_back(alarms, algorithm.iteration, then)
                logger.rewind("rl")
            self._save(algorithm)
        if extra is None:
            newest = algorithm.store.at(checkpoint_name(algorithm.iteration))
            raise UserError(
                f"the guard stopped the run{why_stop or ', for want of an earlier checkpoint'}, at {alarms[0]}; go on "
                f"in spite of it with --resume, from {newest}, or begin a new run with a smaller "
                "training.lr or with training.guard.action=roll_back"
            )
        self._say(
            f"rolled back to iteration {algorithm.iteration}, the learning rate is multiplied by "
            f"{guard.settings.lr_factor:g} (roll-back {guard.state.num_roll_backs} of at most "
            f"{guard.settings.max_roll_backs})"
        )

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _say(self, text: object) -> None:
        self._console.print(f"guard: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    def _decisions(self, algorithm: Algorithm) -> list[ScalingDecision]:
        """Return and print the sizes that the fleets got since the last call."""
        taken = algorithm.controller.take_decisions()
        for decision in taken:
            self._console.print(str(decision), highlight=False, markup=False)
        return taken

    def _has_stage(self, name: StageName) -> bool:
        return any(stage.stage == name for stage in self._stages)

    def _evaluate(self, algorithm: Algorithm, logger: MetricsLogger, name: StageName) -> float | None:
        """Evaluate at the end of a stage and return the score; None if that was done before a resume."""
        if self._has_stage(name):
            return None
        examples: Examples = {}
        with counted_bar(self._console, "evaluating") as on_task:
            result = algorithm.evaluate(name, on_task, examples.update)
        values = {f"eval/{key}": value for key, value in result.by_name().items()}
        logger.log(f"eval_{name}", algorithm.iteration, values, self._decisions(algorithm), self._incidents.take())
        logger.log_examples(f"eval_{name}", algorithm.iteration, examples)
        before_s = sum(stage.wall_s for stage in self._stages)
        self._stages.append(StageReport(name, result, self._wall_s() - before_s))
        return self._score(result)

    def describe_end(self, report: RunReport) -> None:
        """Print the table of results, and the paths of the written files."""
        run_dir = str(self._store).partition("?")[0]
        self._console.print(render_table(report))
        if failed := report.failed_tasks:
            told = f"training tasks given up: {len(failed):,}, listed in the report; the last was {failed[-1].task_id}"
            self._console.print(f"{told}: {failed[-1].error}", highlight=False, markup=False)
        board = shlex.join([str(Path(command_name()).with_name("tensorboard")), "--logdir", f"{run_dir}/tensorboard"])
        self._console.print(
            f"TensorBoard   {board}\n"
            f"trajectories  {run_dir}/trajectories\n"
            f"checkpoint    {Checkpoints(self._store).latest()}\n"
            f"report        {run_dir}/report.html\n"
            f"wall time {report.wall_s:.0f} s, peak memory {report.peak_rss_bytes / 2**30:.1f} GiB",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
