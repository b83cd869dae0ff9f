"""``ragr1 evaluate``: tasks answered with a policy, the scores of its answers, and their means.

A ``RolloutFleets`` answers, in this process, with what ``evaluated_policy.py`` opens.

``ragr1 rescore`` scores the trajectories that a run has kept with another reward. Nothing is sampled: the answers are
from a policy trained with the run's reward.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cluster.session.leftovers import scratch_folder
from envs.base import ENVS, TextEnv
from envs.checker import stand_in_context
from envs.measures import MEASURES, RATIOS, Reward, RewardContext, Split, rewarded
from envs.sources import TaskSources
from envs.tasks.files import overlap
from envs.tasks.paths import NamedTasks, shown
from envs.tasks.published_sets import load_sets
from ragr1_actors.core.config import EnvironmentSettings, RunConfig, SamplerConfig
from ragr1_actors.core.disk.files import WRITING, write_folder
from ragr1_actors.core.errors import DataError, FleetError, ServiceError
from ragr1_actors.core.process.progress_bar import Shown, unseen
from ragr1_actors.core.resolve import load_object, raised_at
from ragr1_actors.core.schema import (
    TRAJECTORIES,
    groups_from_record_batch,
    groups_to_record_batch,
    read_trajectories,
    write_trajectories,
)
from ragr1_actors.core.types import Task, Trajectory, TrajectoryGroup
from ragr1_actors.evaluation.evaluated_policy import EvalRequest, EvaluatedPolicy, open_policy
from ragr1_actors.planning.fit import changed, check_gpus
from ragr1_actors.planning.preflight import check_sampler, check_services
from ragr1_actors.planning.prepare import in_turn, prepare_index, split_tasks
from ragr1_actors.rollout.chat_format import EndpointFormat, chat_format_of
from ragr1_actors.rollout.engines.base import EngineArguments
from ragr1_actors.rollout.engines.chat_client import open_models
from ragr1_actors.rollout.engines.endpoint_engine import EndpointEngine, EndpointTokenizer
from ragr1_actors.rollout.groups import FinishedGroup, GroupSummary
from ragr1_actors.rollout.runners.rollout_fleets import RolloutFleets, describe_loading
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.scores import (
    EvalArguments,
    Latency,
    TaskScore,
    append_score,
    check_shared,
    latency,
    only_writer,
    open_scores,
    score,
    tasks_digest,
)
from ragr1_actors.runs.telemetry.metrics import mean_over, ratio
from retrieval.base import needs_index

logger = logging.getLogger(__name__)
_IN_RESULT = ("em", "f1", "rounds", "queries", "tokens")


@dataclass(frozen=True)
class Evaluation:
    """Result of ``ragr1 evaluate``."""

    policy: str
    method: str
    """Method: ``search``, or the baseline."""
    decoding: str
    """Decoding: ``greedy``, or temperature, top_p and seed."""
    result: EvalResult
    scores: tuple[TaskScore, ...]
    latency: tuple[Latency, ...]
    """Latency of one question at a time, then of all at load; empty unless it was asked for."""
    num_trained_on: int | None
    """Number of these questions that are in the training file of run or recipe; None if this is not known."""


def evaluate(
    path: str | Path,
    *,
    tasks: NamedTasks | None = None,
    data: Path | None = None,
    index: Path | None = None,
    num_tasks: int | None = None,
    out: Path | None = None,
) -> EvalResult:
    """Answer tasks greedily with a checkpoint, as its run does at the end of a stage; see ``evaluate_policy``.

    ``path`` is a run directory, whose newest checkpoint is taken, or one of its checkpoints, such as
    ``runs/mine/checkpoints/best``, or the URI of either. None takes the tasks that the run held out, the run's own
    index, and all tasks of the files, or as many held-out tasks as the run evaluates.
    """
    request = EvalRequest(str(path), index=index, tasks=tasks, data=data, num_tasks=num_tasks)
    return evaluate_policy(request, out).result


def evaluate_policy(
    request: EvalRequest,
    out: Path | None = None,
    on_task: Callable[[int, int], None] = lambda done, total: None,
    show: Shown = unseen,
) -> Evaluation:
    """Answer tasks with a run's policy, a model folder or an endpoint, by searching or by a baseline.

    The answers are greedy, unless ``request.overrides`` set ``env_runners.temperature``.

    Only ``out`` is written, with the score of every task as it is answered, and with ``request.num_alone`` a second
    file with ``.alone`` before its ending. If a file exists, the evaluation continues with the tasks that it lacks, and
    the result covers all. ``show`` is called with what loads, then ``on_task`` with the numbers of finished tasks and
    of all tasks.

    Raises:
        UserError: there is no such run, folder or endpoint, or a file cannot be used.
        FleetError: every task failed.
    """
    subject = open_policy(request)
    if request.num_alone:  # a question that is asked again must search again
        requests = subject.config.retrieval.requests.model_copy(update={"cache_size": 0})
        subject = replace(subject, config=changed(subject.config, "retrieval", {"requests": requests}))
    _check_subject(subject, request)
    found = evaluation_tasks(subject.run, request.tasks, request.num_tasks, request.data)
    if request.against is not None:
        check_shared(request.against, found)
    num_trained_on = None if request.tasks is None else _num_trained_on(subject, found)
    load = subject.config.env_runners.max_concurrent_trajectories
    with only_writer(out):
        passes = [_Pass(subject, shown(request.tasks or "held out"), found, load, out)]
        if request.num_alone:
            beside = None if out is None else out.with_name(f"{out.stem}.alone{out.suffix}")
            passes.insert(0, _Pass(subject, passes[0].settings.tasks, found[: request.num_alone], 1, beside))
        total = sum(len(one.tasks) for one in passes)

        def report() -> None:
            on_task(sum(len(one.scores) for one in passes), total)

        if any(one.left for one in passes):
            with _fleets_of(subject, show) as fleets:
                report()
                for one in passes:
                    one.answer(fleets, report)
    whole = passes[-1]
    if whole.errors:
        logger.warning("%d of %d agents failed; the last: %s", len(whole.errors), len(whole.scores), whole.errors[-1])
    return Evaluation(
        policy=subject.name,
        method=subject.method,
        decoding=subject.decoding,
        result=_result(whole),
        scores=tuple(whole.scores),
        latency=tuple(latency(one.scores, one.concurrency) for one in passes) if request.num_alone else (),
        num_trained_on=num_trained_on,
    )


class _Pass:
    """Tasks that are answered with one number of trajectories at the same time, with their scores so far."""

    def __init__(
        self, subject: EvaluatedPolicy, source: str, tasks: Sequence[Task], concurrency: int, out: Path | None
    ) -> None:
        self.tasks, self.concurrency, self._out = tasks, concurrency, out
        self.settings = EvalArguments(
            subject.name,
            source,
            len(tasks),
            tasks_digest(tasks),
            subject.method,
            subject.index,
            subject.digest(),
            concurrency,
            subject.decoding,
        )
        self._temperature = subject.temperature
        self._own = own_measures(subject.config.environment)
        self.scores: list[TaskScore] = [] if out is None else open_scores(out, self.settings)
        self.num_failed = 0
        self.errors: list[str] = []

    @property
    def left(self) -> list[Task]:
        """Tasks without a score."""
        done = {one.task_id for one in self.scores}
        return [task for task in self.tasks if task.task_id not in done]

    def answer(self, fleets: RolloutFleets, on_task: Callable[[], None]) -> None:
        """Answer the remaining tasks; raises ``FleetError`` if every task failed."""

        def on_group(group: FinishedGroup) -> None:
            if not group.summary.num_failed:
                (sampled,) = groups_from_record_batch(group.batch)
                self.errors += [one.error for one in sampled.trajectories if one.error]
                self.scores.append(score(sampled.trajectories[0], self._own))
                if self._out is not None:
                    append_score(self._out, self.scores[-1])
                on_task()

        parts = [self.left] if self.concurrency > 1 else [[task] for task in self.left]
        for number, part in enumerate(filter(None, parts), start=1):
            try:
                self.num_failed += fleets.sample_tasks(part, 1, self._temperature, on_group)
            except FleetError:  # of all tasks of this part; it is raised if no other has an answer
                self.num_failed += len(part)
                if number == len(parts) and not self.scores:
                    raise


def _check_subject(subject: EvaluatedPolicy, request: EvalRequest) -> None:
    """Check the policy and its configuration; ``UserError`` if they cannot be used or do not fit the tasks."""
    config = subject.config
    check_gpus(config)
    check_sampler(config, has_index=subject.store is not None, has_policy=not subject.folder)  # an endpoint has its own
    retrieval = config.retrieval
    has_no_index = needs_index(retrieval.type) and not retrieval.index and not retrieval.corpus
    if request.tasks is not None and subject.store is None and has_no_index:
        raise DataError(
            "no index is named, and the recipe's own passages are not about these tasks; name one with --index, or a "
            "server with retrieval.type=http"
        )


@contextmanager
def _fleets_of(subject: EvaluatedPolicy, show: Shown) -> Iterator[RolloutFleets]:
    """Load policy and index, once the services that the tasks need have answered a short request each."""
    config = check_services(subject.config, subject.store)
    if config.env_runners.engine == "endpoint":
        asyncio.run(_probe_endpoint(config))
    with scratch_folder() as scratch, ExitStack() as stack:
        made_in = subject.store.path if subject.store is not None else scratch
        index_dir = prepare_index(config, made_in)
        with show(describe_loading(config)):
            fleets = stack.enter_context(RolloutFleets(config, subject.folder, index_dir))
        yield fleets


async def _probe_endpoint(config: SamplerConfig) -> None:
    """Ask the endpoint like the environment, with its tools; ``ConfigError`` if it does not answer."""
    tokenizer, settings = EndpointTokenizer(), config.environment
    engine, chat = EndpointEngine("", tokenizer, EngineArguments.of(config, 0)), chat_format_of(config, tokenizer)
    if isinstance(chat, EndpointFormat) and chat.is_native:
        env_class: Callable[..., TextEnv] = load_object(settings.env, ENVS)
        env = env_class(settings, stand_in_context(settings))
        env.close()
        await engine.probe(env.tools)
    else:
        await engine.probe()


def _result(whole: _Pass) -> EvalResult:
    mean = mean_over([{name: float(getattr(one, name)) for name in _IN_RESULT} for one in whole.scores])
    own = mean_over([one.measures for one in whole.scores])
    return _from_means(mean, len(whole.scores), whole.num_failed, own)


def _from_means(mean: Mapping[str, float], num_tasks: int, num_failed: int, own: dict[str, float]) -> EvalResult:
    return EvalResult(
        **{name: mean[name] for name in _IN_RESULT},
        queries_per_round=ratio(mean, *RATIOS["queries_per_round"]),
        num_tasks=num_tasks,
        num_failed=num_failed,
        measures=own,
    )


def _num_trained_on(subject: EvaluatedPolicy, tasks: Sequence[Task]) -> int | None:
    """Return how many of the questions are in the training file; None if it is unknown or broken.

    A run trained on the questions of its training file that are neither in ``environment.eval_tasks`` nor, without such
    a file, held out.
    """
    environment = subject.run.environment
    if not subject.folder:
        return None
    sources = TaskSources.open(environment.tasks, environment)
    if len(sources.files) < len(sources.named) or not _are_here(sources):
        return None
    held_out = TaskSources.open(environment.eval_tasks, environment, whole=True)
    try:
        if environment.eval_tasks and not _are_here(held_out):
            trained = sources.tasks("train", subject.run.debugging.seed)
        else:
            trained, _, _ = split_tasks(subject.run, subject.run.evaluation.num_tasks)
    except DataError as error:  # the evaluation does not need the file
        logger.warning("how many of these questions were trained on is not known: %s", error)
        return None
    return len(overlap(trained, tasks))


def _are_here(sources: TaskSources) -> bool:
    """Return whether the task files of a run are also on this machine."""
    try:
        for files in sources.files:
            files.check_files()
    except DataError:
        return False
    return True


def evaluation_tasks(
    run: RunConfig, tasks: NamedTasks | None, num_tasks: int | None, data: Path | None = None
) -> tuple[Task, ...]:
    """Return the first ``num_tasks`` tasks of files, published sets or the held-out tasks of the run; None: all.

    Raises:
        DataError: the file cannot be used, or more tasks are asked for than the run held out.
    """
    num_held_out, environment = run.evaluation.num_tasks, run.environment
    count = num_tasks or num_held_out
    if tasks is not None:
        loaded = load_sets(tasks, data)
        logger.warning("%s", loaded.report)  # it also says how the files were read
        return loaded.tasks[:num_tasks]
    is_split = not TaskSources.open(environment.tasks, environment).tasks("eval", 0) and not environment.eval_tasks
    if count > num_held_out and is_split:
        raise DataError(
            f"the run held {num_held_out:,} tasks out, got --num-tasks {count}: the rest it was trained on; ask for "
            "fewer, or name a file with --tasks"
        )
    _, held_out, _ = split_tasks(run, max(count, num_held_out))
    return in_turn(held_out)[:count]


def own_measures(settings: EnvironmentSettings) -> tuple[str, ...]:
    """Return the names of an environment's measures, ``TextEnv.measures``; none where an agent acts in its place."""
    if settings.agent is not None:
        return ()
    environment: type[TextEnv] = load_object(settings.env, ENVS)
    return tuple(name for name in environment.measures if name not in MEASURES)


def eval_result(summaries: Sequence[GroupSummary], num_failed: int, measures: Iterable[str] = ()) -> EvalResult:
    """Average the groups without a failed trajectory, and their ``measures``; ``num_failed`` tasks have none."""
    answered = [summary for summary in summaries if not summary.num_failed]
    mean = mean_over([summary.means for summary in answered])
    own = {name: mean[name] for name in measures}
    return _from_means(mean, len(answered), num_failed, own)


MAX_AT_ONCE = 256
"""Number of rewards awaited at once; ``environment.models`` have limits in addition."""
_ITERATION = re.compile(r"(eval_)?iteration_(\d+)")


@dataclass(frozen=True, slots=True)
class Rescored:
    """File of trajectories under both rewards."""

    file: str
    num_trajectories: int
    """Number of trajectories that did not fail."""
    before: float
    after: float
    """Means of the rewards."""
    changed: float
    """Share of the trajectories whose reward differs."""
    correlation: float | None
    """Pearson correlation of both rewards over the trajectories; None if one of them is constant."""


def rescore(
    config: RunConfig,
    folder: Path,
    out: Path | None = None,
    on_file: Callable[[Rescored], None] = lambda rescored: None,
) -> list[Rescored]:
    """Compute ``config.environment.reward`` for every trajectory in a run's folder that did not fail.

    With ``out`` the trajectories are written there with the new rewards, as ``out/trajectories/*.arrow``: all, or none
    if it fails. The new reward replaces the whole old one, including the environment's rewards.

    Raises:
        UserError: there are no trajectories, a file is damaged, ``out`` has other files, or the reward cannot be used.
        DataError: the reward fails for a trajectory; the message has its id.
        ServiceError: a service that the reward needs did not answer; the message has the trajectory's id.
    """
    files = sorted(path for path in (folder / TRAJECTORIES).glob("*.arrow") if not path.name.startswith(WRITING))
    if not files:
        raise DataError(f"{folder} has no trajectories; rescore a run with checkpointing.keep_trajectories")
    found: list[Rescored] = []

    async def compute(into: Path | None) -> None:
        reward, models = Reward(config.environment), open_models(config.environment.models)
        for path in files:
            groups = read_trajectories(path)
            new = await _rescored(groups, reward, replace(_context(path.stem, config), models=models))
            if into is not None:
                write_trajectories(into / path.name, [groups_to_record_batch(new)] if new else [])
            found.append(_compared(path.name, groups, new))
            on_file(found[-1])

    # one loop for all files: a reward's client or lock belongs to the loop that first used it
    if out is None:
        asyncio.run(compute(None))
    else:
        if out.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"--out: got {out}, which is in the run's own folder; name a folder outside of {folder}")
        if (out / TRAJECTORIES).exists():
            raise DataError(f"{out / TRAJECTORIES} is there already; name another --out, or delete it")
        write_folder(out / TRAJECTORIES, lambda into: asyncio.run(compute(into)), [path.name for path in files])
    return found


def _context(name: str, config: RunConfig) -> RewardContext:
    """Return the context of the reward at the time when the file was written."""
    split: Split = "eval" if name.startswith("eval_") else "demonstration" if name == "demonstrations" else "train"
    iteration, num_iterations = _ITERATION.fullmatch(name), config.training.num_iterations
    done = int(iteration[2]) - (split == "train") if iteration else num_iterations if name == "eval_rl" else 0
    return RewardContext(split, min(1.0, done / max(1, num_iterations)))


async def _rescored(groups: Sequence[TrajectoryGroup], reward: Reward, context: RewardContext) -> list[TrajectoryGroup]:
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def of(trajectory: Trajectory) -> Trajectory:
        if trajectory.stop_reason.is_failure:
            return trajectory
        turns = tuple(replace(turn, reward=0.0) for turn in trajectory.turns)
        others = {name: value for name, value in trajectory.metrics.items() if not name.startswith("reward_")}
        plain = replace(trajectory, reward=0.0, turns=turns, metrics=others)
        async with room:
            try:
                result = await reward(plain, context)
            except ServiceError as error:
                raise ServiceError(f"{trajectory.trajectory_id}: {error}") from error
            except Exception as error:  # a user's reward may raise anything
                raise DataError(
                    f"{trajectory.trajectory_id}: the reward {reward.name} failed: {raised_at(error)}; mend it"
                ) from error
        return rewarded(plain, result)

    async def of_group(group: TrajectoryGroup) -> TrajectoryGroup:
        return replace(group, trajectories=tuple(await asyncio.gather(*map(of, group.trajectories))))

    return list(await asyncio.gather(*map(of_group, groups)))


def _compared(name: str, before: Sequence[TrajectoryGroup], after: Sequence[TrajectoryGroup]) -> Rescored:
    old, new = (
        np.array([t.reward for group in groups for t in group.trajectories if not t.stop_reason.is_failure])
        for groups in (before, after)
    )
    if not len(old):
        return Rescored(name, 0, 0.0, 0.0, 0.0, None)
    varies = all(len(np.unique(values)) > 1 for values in (old, new))  # std is above 0 for three times 0.1
    correlation = float(np.corrcoef(old, new)[0, 1]) if varies else None
    return Rescored(name, len(old), float(old.mean()), float(new.mean()), float((old != new).mean()), correlation)
