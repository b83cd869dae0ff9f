"""What a policy is used for without a learner: ``ragr1 evaluate`` and ``ragr1 select``.

Both sample with a ``Sampler``. ``evaluate`` takes a checkpoint's policy and its run's index, in this process, or what
``evaluated_policy.py`` lists. ``ragr1 ask`` is in ``asking.py``, which loads less.

``select`` chooses the tasks that a policy can learn from by how often it answers them, after RAG-R1 (arXiv:2507.02962):
the questions that Qwen2.5-72B-Instruct got wrong once were sampled up to ten times more, at temperature 1.2 and with up
to ten searches. Kept were those with a correct answer among these, and a random quarter of the questions that it had
got right. Deviation: whether a question is hard is decided by its pass rate over all samples, not by one attempt, which
is a coin toss for a question that is answered half of the time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.leftovers import scratch_folder
from cluster.storage import share
from envs.tasks.files import load_tasks, overlap, without_overlap
from envs.tasks.published_sets import load_set
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError, DataError, FleetError
from ragr1_actors.core.files import write_file
from ragr1_actors.core.resolve import override, read_recipe, recipe_names, resolve
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.engines.endpoint_engine import EndpointEngine, EndpointTokenizer
from ragr1_actors.rollout.env_runner import GroupSummary, engine_settings
from ragr1_actors.rollout.env_runner_group import FinishedGroup
from ragr1_actors.rollout.sampler import Sampler, session_for
from ragr1_actors.runs.metrics import mean_over
from ragr1_actors.runs.places import INDEX, Place
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory
from ragr1_actors.runs.scores import (
    EvalSettings,
    Latency,
    TaskScore,
    append_score,
    latency,
    open_scores,
    score,
    tasks_digest,
)
from ragr1_actors.training.data import WORLD, prepare_index, prepare_policy, split_tasks
from ragr1_actors.training.evaluated_policy import (
    EvalRequest,
    EvaluatedPolicy,
    index_of,
    open_policy,
    sampler_config,
)
from ragr1_actors.training.preflight import check_sampler
from retrieval.base import needs_index

_IN_RESULT = ("em", "f1", "rounds", "queries", "tokens")
_TAKEN_AS = {
    "environment.tasks": "--tasks",
    "environment.eval_tasks": "--tasks",
    "environment.max_turns": "--max-turns",
    "env_runners.temperature": "--temperature",
}


@dataclass(frozen=True)
class Evaluation:
    """What ``ragr1 evaluate`` found."""

    policy: str
    method: str
    """``search``, or the baseline."""
    result: EvalResult
    scores: tuple[TaskScore, ...]
    latency: tuple[Latency, ...]
    """One question at a time, then all at load; empty unless it was asked for."""
    num_trained_on: int | None
    """Questions that are in the training file of run or recipe; None if it is unknown, or there is no such file."""


@dataclass(frozen=True)
class EvalTasks:
    """Which tasks to answer."""

    tasks: str | Path | None = None
    """A file or the name of a published set; None is what the run held out."""
    data: Path | None = None
    """Folder of the published sets; None is the hub."""
    num_tasks: int | None = None
    """The first ones only; None is all."""
    num_alone: int = 0
    """How many of the first tasks are answered one at a time besides, for their latency."""


def evaluate(
    path: str | Path,
    *,
    tasks: str | Path | None = None,
    data: Path | None = None,
    index: Path | None = None,
    num_tasks: int | None = None,
    out: Path | None = None,
) -> EvalResult:
    """Answer tasks greedily with a checkpoint, as its run does at the end of a stage; see ``evaluate_policy``.

    ``path`` is a run directory, whose newest checkpoint is taken, or one of its checkpoints, such as
    ``runs/mine/checkpoints/best``, or the URI of either. None takes the tasks that the run held out, the run's own
    index, and all tasks of a file, or as many held-out tasks as the run evaluates.
    """
    return evaluate_policy(EvalRequest(str(path), index=index), EvalTasks(tasks, data, num_tasks), out).result


def evaluate_policy(
    request: EvalRequest,
    which: EvalTasks,
    out: Path | None = None,
    on_task: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer tasks greedily with a run's policy, a model folder or an endpoint, by searching or by a baseline.

    ``out`` is the only file that is written: the score of every task, as it is answered; with ``which.num_alone``, also
    ``<out>.alone`` before the ending. If a file is there already, the evaluation goes on with the tasks that it lacks,
    and the result is over all. ``on_task`` is called with the number of tasks done and the number of all tasks.

    Raises:
        UserError: there is no such run, folder or endpoint, or a file cannot be used.
        FleetError: every task failed.
    """
    subject = open_policy(request)
    if which.num_alone:  # a question that is asked again must search again
        retrieval = subject.config.retrieval.model_copy(update={"cache_size": 0})
        subject = replace(subject, config=subject.config.model_copy(update={"retrieval": retrieval}))
    _check_subject(subject, which)
    found = evaluation_tasks(subject.run, which.tasks, which.num_tasks, which.data)
    load = subject.config.env_runners.max_concurrent_trajectories
    passes = [_Pass(subject, str(which.tasks or "held out"), found, load, out)]
    if which.num_alone:
        beside = None if out is None else out.with_name(f"{out.stem}.alone{out.suffix}")
        passes.insert(0, _Pass(subject, passes[0].settings.tasks, found[: which.num_alone], 1, beside))
    total, done = sum(len(one.tasks) for one in passes), sum(len(one.scores) for one in passes)
    on_task(done, total)
    if any(one.left for one in passes):
        with _started(subject) as sampler:
            for one in passes:
                one.answer(sampler, lambda: on_task(sum(len(each.scores) for each in passes), total))
    whole = passes[-1]
    return Evaluation(
        policy=subject.name,
        method=subject.method,
        result=_result(whole),
        scores=tuple(whole.scores),
        latency=tuple(latency(one.scores, one.concurrency) for one in passes) if which.num_alone else (),
        num_trained_on=_num_trained_on(subject, which),
    )


class _Pass:
    """Tasks that are answered with one number of trajectories at the same time, and their scores so far."""

    def __init__(
        self, subject: EvaluatedPolicy, source: str, tasks: Sequence[Task], concurrency: int, out: Path | None
    ) -> None:
        self.tasks, self.concurrency, self._out = tasks, concurrency, out
        self.settings = EvalSettings(
            subject.name,
            source,
            len(tasks),
            tasks_digest(tasks),
            subject.method,
            subject.index,
            subject.digest(),
            concurrency,
        )
        self.scores: list[TaskScore] = [] if out is None else open_scores(out, self.settings)
        self.num_failed = 0

    @property
    def left(self) -> list[Task]:
        """The tasks without a score."""
        done = {one.task_id for one in self.scores}
        return [task for task in self.tasks if task.task_id not in done]

    def answer(self, sampler: Sampler, on_task: Callable[[], None]) -> None:
        """Answer what is left; ``FleetError`` if every task failed."""

        def on_group(group: FinishedGroup) -> None:
            if not group.summary.num_failed:
                (sampled,) = groups_from_record_batch(group.batch)
                self.scores.append(score(sampled.trajectories[0]))
                if self._out is not None:
                    append_score(self._out, self.scores[-1])
                on_task()

        sampler.env_runners.on_finished = on_group  # and not when all that were asked for at once have finished
        left = self.left
        if self.concurrency > 1:
            self.num_failed = sampler.sample_tasks(left, 1, 0.0, lambda group: None) if left else 0
            return
        for number, task in enumerate(left, start=1):
            try:
                sampler.sample_tasks([task], 1, 0.0, lambda group: None)
            except FleetError:  # this task; it is raised below if there is no other
                self.num_failed += 1
                if number == len(left) and not self.scores:
                    raise


def _check_subject(subject: EvaluatedPolicy, which: EvalTasks) -> None:
    """Check what is sampled with; ``UserError`` if it cannot be used, or does not fit the tasks."""
    config = subject.config
    check_sampler(config, has_index=subject.place is not None)
    retrieval = config.retrieval
    searches_world = needs_index(retrieval.type) and not retrieval.index and retrieval.corpus == WORLD
    if which.tasks is not None and subject.place is None and searches_world:
        raise DataError(
            "no index is named, and the generated world has no passages about these tasks; name one with --index, or a "
            "server with retrieval.type=http"
        )


@contextmanager
def _started(subject: EvaluatedPolicy) -> Iterator[Sampler]:
    """Load policy and index; an endpoint is asked once, so that a wrong address or key is said before any task."""
    config = subject.config
    if config.env_runners.engine == "endpoint":
        asyncio.run(EndpointEngine("", EndpointTokenizer(), engine_settings(config, 0)).probe())
    with scratch_folder() as scratch:
        index_dir = prepare_index(config, subject.place.path if subject.place is not None else scratch)
        with Sampler(config, subject.folder, index_dir) as sampler:
            yield sampler


def _result(whole: _Pass) -> EvalResult:
    mean = mean_over([{name: float(getattr(one, name)) for name in _IN_RESULT} for one in whole.scores])
    queries_per_round = mean["queries"] / mean["rounds"] if mean["rounds"] else 0.0
    num_tasks, num_failed = len(whole.scores), whole.num_failed
    return EvalResult(**mean, queries_per_round=queries_per_round, num_tasks=num_tasks, num_failed=num_failed)


def _num_trained_on(subject: EvaluatedPolicy, which: EvalTasks) -> int | None:
    """Return how many questions of a file or published set are in the training file; None if this is not known.

    A run left out only the questions of its own ``environment.eval_tasks``.
    """
    environment = subject.run.environment
    if which.tasks is None or not subject.folder:
        return None
    if environment.tasks == WORLD or not Path(environment.tasks).is_file():
        return None
    trained = load_tasks(environment.tasks).tasks
    if environment.eval_tasks and Path(environment.eval_tasks).is_file():
        trained = without_overlap(trained, load_tasks(environment.eval_tasks, whole=True).tasks)
    return len(overlap(trained, load_set(which.tasks, which.data).tasks))


def _config_in_process(run: RunConfig, place: Place, index: Path | None = None) -> SamplerConfig:
    """Return what is needed to sample in this process as a run does; ``index`` is None for the run's own."""
    retrieval = {"num_retrievers": 0, "index": str(index or index_of(run, place))}
    return sampler_config(run, env_runners={"num_env_runners": 0}, retrieval=retrieval)


def evaluation_tasks(
    run: RunConfig, tasks: str | Path | None, num_tasks: int | None, data: Path | None = None
) -> tuple[Task, ...]:
    """Return the first ``num_tasks`` tasks of a file, a published set or what the run held out; None is all of them.

    Raises:
        DataError: the file cannot be used, or more tasks are asked for than the run held out.
    """
    num_held_out, environment = run.evaluation.num_tasks, run.environment
    count = num_tasks or num_held_out
    if tasks is not None:
        return load_set(tasks, data).tasks[:num_tasks]
    if count > num_held_out and environment.tasks != WORLD and not environment.eval_tasks:
        raise DataError(
            f"the run held {num_held_out:,} tasks out, got --num-tasks {count}: the rest it was trained on; ask for "
            "fewer, or name a file with --tasks"
        )
    _, held_out, _ = split_tasks(run, max(count, num_held_out))
    return held_out[:count]


def eval_result(summaries: Sequence[GroupSummary], num_failed: int) -> EvalResult:
    """Average the groups without a failed trajectory; ``num_failed`` tasks have none."""
    answered = [summary for summary in summaries if not summary.num_failed]
    mean = mean_over([summary.means for summary in answered])
    per_task = {name: mean[name] for name in _IN_RESULT}
    queries_per_round = mean["queries"] / mean["rounds"] if mean["rounds"] else 0.0
    return EvalResult(**per_task, queries_per_round=queries_per_round, num_tasks=len(answered), num_failed=num_failed)


@dataclass(frozen=True)
class SelectionSettings:
    """How tasks are sampled and which are kept; RAG-R1's numbers where it has one."""

    num_samples: int = 10
    """Trajectories per task."""
    temperature: float = 1.2
    max_turns: int = 11
    """Ten searches, and the answer."""
    max_pass_rate: float = 0.5
    """A task is hard if at most this share of its samples is correct. Not RAG-R1's; see above."""
    easy_share: float = 0.25
    """The share of the easier tasks that is kept."""


@dataclass(frozen=True)
class SelectionCounts:
    """What became of the tasks of a file; each is one of never, hard, easy, always and failed."""

    tasks: int
    never: int
    """No sample was correct; dropped."""
    hard: int
    """Some samples were correct, at most the share ``max_pass_rate``; kept."""
    easy: int
    """More were correct, but not all; a share of these and of ``always`` is kept."""
    always: int
    failed: int
    """The machinery failed on them, retries included; dropped."""
    kept_easy: int
    """Kept of ``easy`` and ``always``."""
    kept: int


def select(
    source: str,
    tasks: Path,
    out: Path,
    settings: SelectionSettings,
    *,
    overrides: Sequence[str] = (),
    index: Path | None = None,
    on_task: Callable[[int, int], None] = lambda done, total: None,
) -> SelectionCounts:
    """Sample every task of a file and write the tasks worth training on, in the file's order, with their pass rates.

    Each line is a task that ``environment.tasks`` takes::

        {"id": "17", "question": "...", "golden_answers": ["Delhi"], "pass_rate": 0.3, "num_samples": 10}

    ``source`` is a recipe, whose ``policy.model`` samples; or a run or checkpoint, whose policy does. ``overrides`` are
    ``section.key=value`` for it. ``out`` does not exist yet. ``index`` is None for the recipe's or the run's own.
    ``on_task`` is called with the number of tasks done and the number of all tasks.

    Raises:
        UserError: a file, recipe or run cannot be used; or no task would be kept.
        FleetError: every task failed.
    """
    _check_arguments(out, settings)
    found = load_tasks(tasks).tasks
    config = _selection_config(source, settings, overrides, index)
    check_sampler(config)
    with session_for(config), scratch_folder() as scratch:
        index_dir = prepare_index(config, scratch)
        policy_dir = prepare_policy(config, scratch, found, index_dir)
        with Sampler(config, share(policy_dir), index_dir, share=share) as sampler:
            successes = _sample(sampler, found, settings, on_task)
    kept, counts = choose(found, successes, settings, config.debugging.seed)
    if not kept:
        raise DataError(
            f"none of the {counts.tasks:,} tasks of {tasks} would be kept ({counts.never:,} never answered, "
            f"{counts.always:,} always); take another policy, more --num-samples or a larger --easy-share"
        )
    records = [_record(task, successes[task.task_id], settings.num_samples, tasks.stem) for task in kept]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_file(out, lambda writing: writing.write_text(text, encoding="utf-8"))
    return counts


def _check_arguments(out: Path, settings: SelectionSettings) -> None:
    if out.exists():
        raise DataError(f"{out} exists already; choose another --out, or delete it")
    if not out.absolute().parent.is_dir():
        raise DataError(f"there is no folder {out.absolute().parent} for --out; make it first")
    if not os.access(out.absolute().parent, os.W_OK):
        raise DataError(f"cannot write into {out.absolute().parent}; choose another --out")
    if not 0 <= settings.temperature < math.inf:
        raise DataError(f"got --temperature {settings.temperature}, expected a finite number, 0 for greedy")


def _selection_config(
    source: str, settings: SelectionSettings, overrides: Sequence[str], index: Path | None
) -> SamplerConfig:
    """Return how a recipe, run or checkpoint samples, with its policy and index; ``UserError`` on an unknown one."""
    for name in (assignment.partition("=")[0] for assignment in overrides):
        if name in _TAKEN_AS:
            raise ConfigError(f"got {name}, which select takes as {_TAKEN_AS[name]}")
    is_recipe = source in recipe_names() or Path(source).suffix in (".yaml", ".yml")
    own_index = ""
    if is_recipe or not (Path(source).is_dir() or "/" in source):
        sections = read_recipe(source)
    else:
        place, policy_dir = find_checkpoint(source)
        sections = open_run_directory(place).model_dump()
        sections["policy"]["model"] = str(policy_dir.absolute())
        if not index:
            own_index = str(place.bring(INDEX)) if place.bring(INDEX).is_dir() else ""
    config = resolve(override(sections, overrides))
    found_index = str(index or config.retrieval.index or own_index)
    return sampler_config(config, environment={"max_turns": settings.max_turns}, retrieval={"index": found_index})


def _sample(
    sampler: Sampler, tasks: tuple[Task, ...], settings: SelectionSettings, on_task: Callable[[int, int], None]
) -> dict[str, int]:
    """Return the number of correct answers by task id, for every task that did not fail."""
    successes: dict[str, int] = {}

    def on_group(group: FinishedGroup) -> None:
        summary = group.summary
        if not summary.num_failed:
            successes[group.request.issue.task.task_id] = round(summary.means["em"] * len(summary.rewards))
            on_task(len(successes), len(tasks))

    on_task(0, len(tasks))
    sampler.sample_tasks(tasks, settings.num_samples, settings.temperature, on_group)
    return successes


def choose(
    tasks: Sequence[Task], successes: dict[str, int], settings: SelectionSettings, seed: int
) -> tuple[list[Task], SelectionCounts]:
    """Return the tasks to keep, in their order, and the number of tasks per class.

    ``successes`` has the correct answers among ``settings.num_samples``, by task id; a task without an entry has
    failed. ``seed`` is that of the draw among the easier tasks.
    """
    classes: dict[str, list[Task]] = {name: [] for name in ("never", "hard", "easy", "always", "failed")}
    for task in tasks:
        classes[_class(successes.get(task.task_id), settings)].append(task)
    easy = classes["easy"] + classes["always"]
    drawn = random.Random(f"select {seed}").sample(easy, round(settings.easy_share * len(easy)))
    kept_ids = {task.task_id for task in (*classes["hard"], *drawn)}
    kept = [task for task in tasks if task.task_id in kept_ids]
    sizes = {name: len(members) for name, members in classes.items()}
    return kept, SelectionCounts(tasks=len(tasks), **sizes, kept_easy=len(drawn), kept=len(kept))


def _class(num_correct: int | None, settings: SelectionSettings) -> str:
    if num_correct is None:
        return "failed"
    if num_correct == 0:
        return "never"
    if num_correct / settings.num_samples <= settings.max_pass_rate:
        return "hard"
    return "always" if num_correct == settings.num_samples else "easy"


def _record(task: Task, num_correct: int, num_samples: int, stem: str) -> dict[str, Any]:
    known = {"category": task.category, "supporting_ids": list(task.supporting_ids)}
    return {
        "id": task.task_id.removeprefix(f"{stem}/"),  # the reader of the new file puts that file's stem before it
        "question": task.question,
        "golden_answers": list(task.golden_answers),
        **{name: value for name, value in known.items() if value},
        "pass_rate": num_correct / num_samples,
        "num_samples": num_samples,
    }
