"""``ragr1 select``: selects the tasks that a policy can learn from, by their pass rates.

RAG-R1 (arXiv:2507.02962) sampled the questions that Qwen2.5-72B-Instruct got wrong once up to ten times more, at
temperature 1.2 and with up to ten searches. It kept those with a correct answer among these, and a random quarter of
the questions that the model had got right. Deviation: whether a question is hard is decided by its pass rate over all
samples, not by one attempt, which is a coin toss for a question that is answered half of the time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.session.leftovers import scratch_folder
from cluster.storage import share
from envs.tasks.files import read_files
from envs.tasks.paths import NamedTasks, shown, task_files
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.disk.files import INDEX, write_file
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.process.progress_bar import Shown, unseen
from ragr1_actors.core.resolve import (
    RECIPE_ENDINGS,
    override,
    path_of,
    read_recipe,
    recipe_files,
    resolve,
    split_assignment,
)
from ragr1_actors.core.types import Task
from ragr1_actors.evaluation.evaluated_policy import sampler_config
from ragr1_actors.planning.fit import check_gpus
from ragr1_actors.planning.preflight import check_sampler, check_services
from ragr1_actors.planning.prepare import prepare_index, prepare_policy
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.rollout.runners.rollout_fleets import RolloutFleets, describe_loading, session_for
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory, with_newest_policy

logger = logging.getLogger(__name__)
_TAKEN_AS = {
    "environment.tasks": "--tasks",
    "environment.eval_tasks": "--tasks",
    "environment.max_turns": "--max-turns",
    "env_runners.temperature": "--temperature",
}


@dataclass(frozen=True)
class SelectionArguments:
    """Settings of the sampling and of the choice of tasks; RAG-R1's numbers if it has one."""

    num_samples: int = 10
    """Number of trajectories per task."""
    temperature: float = 1.2
    max_turns: int = 11
    """Number of turns: ten searches, and the answer."""
    max_pass_rate: float = 0.5
    """Largest share of correct samples of a hard task. Not RAG-R1's; see above."""
    easy_share: float = 0.25
    """Share of the easier tasks that is kept."""


@dataclass(frozen=True)
class SelectionCounts:
    """Numbers of a file's tasks by class: never, hard, easy, always and failed."""

    tasks: int
    never: int
    """Tasks without a correct sample; dropped."""
    hard: int
    """Tasks with correct samples, at most the share ``max_pass_rate``; kept."""
    easy: int
    """Tasks with more correct samples, but not all; a share of these and of ``always`` is kept."""
    always: int
    failed: int
    """Tasks on which the machinery failed, retries included; dropped."""
    kept_easy: int
    """Tasks kept of ``easy`` and ``always``."""
    kept: int


def select(
    source: str,
    tasks: NamedTasks,
    out: Path,
    settings: SelectionArguments,
    *,
    overrides: Sequence[str] = (),
    index: Path | None = None,
    on_task: Callable[[int, int], None] = lambda done, total: None,
    show: Shown = unseen,
) -> SelectionCounts:
    """Sample every task of some files and write the tasks worth training on, in their order, with their pass rates.

    Each line is a task that ``environment.tasks`` takes::

        {"id": "17", "question": "...", "golden_answers": ["Delhi"], "pass_rate": 0.3, "num_samples": 10}

    ``source`` is a recipe, whose ``policy.model`` samples, or a run or checkpoint, whose policy samples. ``overrides``
    are ``section.key=value`` for it. ``out`` must not exist. ``index`` is None for the index of the recipe or run.
    ``on_task`` is called with the numbers of finished tasks and of all tasks; ``show`` with what loads before.

    Raises:
        UserError: a file, recipe or run cannot be used; or no task would be kept.
        FleetError: every task failed.
    """
    _check_arguments(out, settings)
    files = task_files(tasks)
    loaded = read_files(files, shown(tasks), whole=False)
    logger.warning("%s", loaded.report)
    found = loaded.tasks
    config = _selection_config(source, settings, overrides, index)
    check_gpus(config)
    check_sampler(config)
    config = check_services(config)
    with session_for(config), scratch_folder() as scratch, ExitStack() as stack:
        index_dir = prepare_index(config, scratch)
        policy_dir = prepare_policy(config, scratch, found, index_dir)
        with show(describe_loading(config)):
            fleets = stack.enter_context(RolloutFleets(config, share(policy_dir), index_dir, share=share))
        successes = _sample(fleets, found, settings, on_task)
    kept, counts = choose(found, successes, settings, config.debugging.seed)
    if not kept:
        raise DataError(
            f"none of the {counts.tasks:,} tasks of {shown(tasks)} would be kept ({counts.never:,} never answered, "
            f"{counts.always:,} always); take another policy, more --num-samples or a larger --easy-share"
        )
    # the reader of the new file puts that file's stem before its ids; ids of several files also need theirs
    before = f"{files[0].source}/" if len(files) == 1 else ""
    records = [_record(task, successes[task.task_id], settings.num_samples, before) for task in kept]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_file(out, lambda writing: writing.write_text(text, encoding="utf-8"))
    return counts


def _check_arguments(out: Path, settings: SelectionArguments) -> None:
    if out.exists():
        raise DataError(f"{out} exists already; choose another --out, or delete it")
    if not out.absolute().parent.is_dir():
        raise DataError(f"there is no folder {out.absolute().parent} for --out; make it first")
    if not os.access(out.absolute().parent, os.W_OK):
        raise DataError(f"cannot write into {out.absolute().parent}; choose another --out")
    if not 0 <= settings.temperature < math.inf:
        raise DataError(f"got --temperature {settings.temperature}, expected a finite number, 0 for greedy")


def _selection_config(
    source: str, settings: SelectionArguments, overrides: Sequence[str], index: Path | None
) -> SamplerConfig:
    """Return the configuration with which a recipe, run or checkpoint samples; ``UserError`` if it is unknown."""
    for name in (split_assignment(assignment)[0] for assignment in overrides):
        if name in _TAKEN_AS:
            raise ConfigError(f"got {name}, which select takes as {_TAKEN_AS[name]}")
    path = path_of(source, *recipe_files())
    own_index = ""
    if path is None or path.suffix in RECIPE_ENDINGS or not (path.is_dir() or "/" in source):
        sections = read_recipe(source)
    else:
        store, policy_dir = find_checkpoint(source)
        sections = open_run_directory(store).model_dump()
        sections["policy"]["model"] = str(policy_dir.absolute())
        if not index:
            own_index = str(store.bring(INDEX)) if store.bring(INDEX).is_dir() else ""
    config = with_newest_policy(resolve(override(sections, overrides)))
    retrieval = {"index": str(index or config.retrieval.index or own_index)}
    if index and not any(assignment.startswith("retrieval.encoder=") for assignment in overrides):
        retrieval["encoder"] = ""  # the encoder of the index
    return sampler_config(config, environment={"max_turns": settings.max_turns}, retrieval=retrieval)


def _sample(
    fleets: RolloutFleets, tasks: tuple[Task, ...], settings: SelectionArguments, on_task: Callable[[int, int], None]
) -> dict[str, int]:
    """Return the number of correct answers by task id, for every task that did not fail."""
    successes: dict[str, int] = {}

    def on_group(group: FinishedGroup) -> None:
        summary = group.summary
        if not summary.num_failed:
            successes[group.request.task.task_id] = round(summary.means["em"] * len(summary.rewards))
            on_task(len(successes), len(tasks))

    on_task(0, len(tasks))
    fleets.sample_tasks(tasks, settings.num_samples, settings.temperature, on_group)
    return successes


def choose(
    tasks: Sequence[Task], successes: dict[str, int], settings: SelectionArguments, seed: int
) -> tuple[list[Task], SelectionCounts]:
    """Return the tasks to keep, in their order, and the number of tasks per class.

    ``successes`` has the numbers of correct answers among ``settings.num_samples``, by task id; a task without an entry
    has failed. ``seed`` seeds the draw among the easier tasks.
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


def _class(num_correct: int | None, settings: SelectionArguments) -> str:
    if num_correct is None:
        return "failed"
    if num_correct == 0:
        return "never"
    if num_correct / settings.num_samples <= settings.max_pass_rate:
        return "hard"
    return "always" if num_correct == settings.num_samples else "easy"


def _record(task: Task, num_correct: int, num_samples: int, before: str) -> dict[str, Any]:
    rounds = [list(asked) for asked in task.plan]
    known = {"category": task.category, "supporting_ids": list(task.supporting_ids), "search_rounds": rounds}
    return {
        **task.meta,
        "id": task.task_id.removeprefix(before),
        "question": task.question,
        "golden_answers": list(task.golden_answers),
        **{name: value for name, value in known.items() if value},
        "pass_rate": num_correct / num_samples,
        "num_samples": num_samples,
    }
