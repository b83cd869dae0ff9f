"""Preparation of a run before its first actor starts: tasks, index, policy folder and demonstrations.

``prepare`` loads or makes all of it and returns a ``PreparedRun``. ``Algorithm`` builds the fleets from that.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from envs.base import ENVS, search_options
from envs.measures import exact_match
from envs.search import SearchEnv, search_prompt
from envs.sources import TaskSources, TeacherSource, shown_names
from envs.tasks.curriculum import check_first_epoch, make_curriculum
from envs.tasks.files import overlap, without_overlap
from learners.algorithms.segments import decisions
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.disk.digests import write_list
from ragr1_actors.core.disk.files import POLICY, POLICY_FILES, write_folder
from ragr1_actors.core.disk.folders import on_this_node
from ragr1_actors.core.errors import DataError, FleetError, shortened
from ragr1_actors.core.resolve import CORRECT, MIXTURE, STATIC, load_object, named_folder, path_of
from ragr1_actors.core.types import FinishReason, StopReason, Task, Trajectory, TrajectoryGroup
from ragr1_actors.planning.plan import corpus_of
from ragr1_actors.planning.tiny_policy import policy_maker
from ragr1_actors.rollout.engines.base import load_tokenizer
from ragr1_actors.rollout.runners.stored_groups import StoredGroups
from ragr1_actors.runs.run_directory import run_of_policy
from retrieval.base import needs_index
from retrieval.build import build_index
from retrieval.corpora.corpus import Corpus
from retrieval.local import named_index

HELD_OUT_SHARE = 0.2
"""Limit of the share of a task file that is held out if no file of evaluation tasks is given."""

_SPARE_TOKENS = 8
"""Tokens of reserve, as a question may have other tokens inside a prompt than alone."""

Demonstrate = Callable[[Task, random.Random], list[str]]
"""Function that returns the turns of one scripted attempt at a task."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """Data on disk and in memory from which the fleets are built."""

    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    index_dir: Path | None
    """Index directory; None if ``retrieval.type`` needs no index."""
    policy_dir: str
    """Hugging Face folder, or hub name, of the policy before training."""
    demonstrated_tasks: tuple[Task, ...]
    """Tasks for ``demonstrate``, from ``environment.tasks`` or from a teacher's file."""
    is_taught: bool
    """Whether the demonstrations are from a teacher's file."""
    demonstrate: Demonstrate
    notes: tuple[str, ...]
    """Notes for people about the data."""


def prepare(config: RunConfig, run_dir: Path) -> PreparedRun:
    """Load the tasks, and build missing index and tiny policy; ``UserError`` for unusable or too few tasks."""
    environment = config.environment
    run_dir = run_dir.absolute()  # actors may have another working directory
    known, held_out, notes = split_tasks(config, config.evaluation.num_tasks)
    train, demonstrated, teacher = known, known, None  # SFT does not depend on the source of RL's trajectories
    stored = StoredGroups(Path(folder)) if (folder := config.training.from_trajectories) else None
    if stored is not None:
        train = without_overlap(stored.tasks, held_out)
    evaluation = in_turn(held_out)[: config.evaluation.num_tasks]
    if not evaluation:
        raise DataError(
            f"{shown_names(environment.tasks)}: {len(train)} tasks are too few to hold one in five out; name a file of "
            "evaluation tasks in environment.eval_tasks"
        )
    if not train:
        raise DataError(
            f"{shown_names(environment.tasks)}: no training task is left after holding the evaluation tasks out"
        )
    # a curriculum that cannot order these tasks, or skips all, ends the run before the rest is made
    check_first_epoch(make_curriculum(environment), train, config.debugging.seed)
    sources = TaskSources.open(environment.tasks, environment)
    if config.sft.num_steps and path_of(config.sft.demonstrations, CORRECT, MIXTURE) is not None:
        teacher = TeacherSource(environment, config.sft.demonstrations)
        written = teacher.tasks("train")
        demonstrated = without_overlap(written, held_out)
        if not demonstrated:
            raise DataError(
                f"sft.demonstrations: all {len(written):,} demonstrations of {config.sft.demonstrations} answer "
                "evaluation questions; name another file"
            )
        notes += (f"{teacher.report()}; {len(written) - len(demonstrated):,} of evaluation questions left out",)
    if config.sft.num_steps and not demonstrated:
        raise DataError(
            f"sft.num_steps: got {config.sft.num_steps}, and {shown_names(environment.tasks)} has no training task to "
            "demonstrate; name one in environment.tasks, or a file in sft.demonstrations, or set sft.num_steps to 0"
        )
    index_notes: list[str] = []
    index_dir = prepare_index(config, run_dir, index_notes.append)
    notes += tuple(index_notes)
    policy_dir = keep_policy(prepare_policy(config, run_dir, known, index_dir), run_dir)
    if stored is not None:
        stored.check_tokens(load_tokenizer(on_this_node(policy_dir), config.policy).decode)
    notes += tuple(long_prompts(config, policy_dir, train))
    demonstrate = _demonstrate(config, sources, known, index_dir) if teacher is None else teacher.demonstrate
    return PreparedRun(train, evaluation, index_dir, policy_dir, demonstrated, teacher is not None, demonstrate, notes)


def long_prompts(config: SamplerConfig, policy_dir: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a sentence on the number of tasks whose prompt fills the context, so that no turn can follow.

    It is only for ``SearchEnv``, whose prompt is known beforehand. The tokenizer is loaded only if a prompt has as many
    bytes as the context has tokens.

    Raises:
        DataError: all tasks have such a prompt.
    """
    environment, limit = config.environment, config.env_runners.max_context_tokens
    env_class: Any = load_object(environment.env, ENVS)
    if not (isinstance(env_class, type) and issubclass(env_class, SearchEnv)) or env_class.reset is not SearchEnv.reset:
        return
    options = search_options(environment)
    if options.mode == "rag":  # its prompt has passages
        return
    prompt_of = partial(search_prompt, environment.prompt, options)
    longest = max(tasks, key=lambda task: len(task.question.encode()))
    if len(prompt_of(longest)[0].text.encode()) < limit:
        return
    tokenizer = load_tokenizer(on_this_node(policy_dir), config.policy)
    num_fixed = len(tokenizer.prompt_ids(prompt_of(replace(longest, question=""))))
    doubtful = [task for task in tasks if num_fixed + len(task.question.encode()) + _SPARE_TOKENS >= limit]
    harmless = (replace(task, question=tokenizer.defuse(task.question)) for task in doubtful)
    found = (len(tokenizer.prompt_ids(prompt_of(task))) for task in harmless)
    lengths = [length for length in found if length >= limit]
    if len(lengths) == len(tasks):
        raise DataError(
            f"{shown_names(environment.tasks)}: the prompt of every task fills the context: {min(lengths):,} tokens or "
            f"more of {limit:,}; raise env_runners.max_context_tokens, or shorten environment.prompt or the questions"
        )
    if lengths:
        yield (
            f"{len(lengths):,} of {len(tasks):,} tasks have a prompt of {limit:,} tokens or more, up to "
            f"{max(lengths):,}: no turn can follow; raise env_runners.max_context_tokens, or leave them out"
        )


def _demonstrate(config: RunConfig, sources: TaskSources, tasks: Sequence[Task], index_dir: Path | None) -> Demonstrate:
    """Return the writer of the sources' demonstrations, which needs the titles of a task's evidence, not the ids."""
    ids = {name for task in tasks for name in task.supporting_ids}
    titles = Corpus.open(index_dir).titles(ids) if config.sft.num_steps and ids and index_dir is not None else {}

    def demonstrate(task: Task, rng: random.Random) -> list[str]:
        names = tuple(titles.get(name) or name for name in task.supporting_ids)
        return sources.source_of(task).demonstrate(replace(task, supporting_ids=names), rng)

    return demonstrate


def in_turn(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks with their sources in turn, so that the first tasks are from all sources."""
    by_source: dict[str, list[Task]] = {}
    for task in tasks:
        by_source.setdefault(task.source, []).append(task)
    rounds = zip_longest(*by_source.values())
    return tuple(task for row in rounds for task in row if task is not None)


def split_tasks(config: RunConfig, num_eval_tasks: int) -> tuple[tuple[Task, ...], tuple[Task, ...], tuple[str, ...]]:
    """Return training tasks, all evaluation tasks, and notes; ``DataError`` for a bad file.

    Without evaluation tasks, of files or of the sources, ``num_eval_tasks`` of the training tasks are held out.
    """
    environment, seed = config.environment, config.debugging.seed
    sources = TaskSources.open(environment.tasks, environment)
    train = sources.tasks("train", seed)
    notes = list(sources.reports())
    if environment.eval_tasks:
        others = TaskSources.open(environment.eval_tasks, environment, whole=True)
        evaluation = others.tasks("eval", seed)
        if not evaluation:
            raise DataError(
                f"environment.eval_tasks: {shown_names(environment.eval_tasks)} has no tasks; name another source, or "
                "leave the key empty to hold training tasks out"
            )
        notes += others.reports()
    else:
        evaluation = sources.tasks("eval", seed)
    if shared := len(overlap(train, evaluation)):
        notes.append(f"{shared} evaluation questions are also training tasks; they are left out of training")
        train = without_overlap(train, evaluation)
    if not evaluation:
        order = random.Random(seed).sample(range(len(train)), len(train))
        held_out = set(order[: min(num_eval_tasks, int(len(train) * HELD_OUT_SHARE))])
        evaluation = tuple(task for index, task in enumerate(train) if index in held_out)
        train = tuple(task for index, task in enumerate(train) if index not in held_out)
        notes.append(f"{len(evaluation)} tasks held out for evaluation")
    return train, evaluation, tuple(notes)


def prepare_index(config: SamplerConfig, run_dir: Path, on_note: Callable[[str], None] = logger.warning) -> Path | None:
    """Return the index that ``retrieval`` names, or build one in ``run_dir``; None if none is needed.

    ``on_note`` is called with notes on the corpus and the encoder of an index that is built.
    """
    settings = config.retrieval
    if not needs_index(settings.type):
        return None
    if settings.index:
        return named_index(settings)
    index_dir = run_dir / "index"
    if index_dir.exists():  # a resumed run: the index is written whole or not at all
        return index_dir
    return build_index(
        corpus_of(config),
        index_dir,
        encoder=settings.encoder or STATIC,
        index_type=settings.type,
        num_shards=settings.num_shards,
        options=settings.options,
        seed=config.debugging.seed,
        progress=sys.stdout.isatty(),
        on_note=on_note,
    )


def prepare_policy(config: SamplerConfig, run_dir: Path, tasks: Sequence[Task], index_dir: Path | None) -> str:
    """Return ``policy.model``, or make a tiny policy in ``run_dir`` for the words of ``tasks`` and index."""
    policy, maker = config.policy, policy_maker(config.policy)
    if maker is None:  # absolute: an actor elsewhere must not look for a folder's name on a hub
        folder = named_folder(policy.model)
        return str(folder.absolute()) if folder is not None else policy.model
    directory = run_dir / POLICY

    def write(writing: Path) -> None:
        texts, limit = _texts(config, tasks, index_dir), config.env_runners.max_context_tokens
        maker.write(writing, texts, seed=config.debugging.seed, max_position_embeddings=limit)
        write_list(writing)

    if not directory.exists():  # a resumed run, as with the index
        write_folder(directory, write, POLICY_FILES)
    return str(directory)


def keep_policy(policy_dir: str, run_dir: Path) -> str:
    """Return a policy that another run does not remove: a copy of a checkpoint of a run, or any other policy unchanged.

    A live run deletes its older checkpoints. The files of the copy are hard links if the disk is the same.
    """
    kept = run_dir / POLICY
    if not kept.is_dir() and run_of_policy(Path(policy_dir)) is not None:
        write = partial(shutil.copytree, policy_dir, copy_function=_link, dirs_exist_ok=True)
        write_folder(kept, write, ("config.json",))
    return str(kept) if kept.is_dir() else policy_dir


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _texts(config: SamplerConfig, tasks: Sequence[Task], index_dir: Path | None) -> Iterator[str]:
    """Yield the texts that the policy reads and writes."""
    environment = config.environment
    yield environment.prompt
    sources = TaskSources.open(environment.tasks, environment)
    for name, (_, source) in zip(sources.names(), sources.named, strict=True):
        yield from source.texts([task for task in tasks if task.source in ("", name)])
    if index_dir is not None and not sources.passages():
        yield from (f" {passage.title}: {passage.text}" for passage in Corpus.open(index_dir))


def draw_demonstrations(prepared: PreparedRun, count: int, seed: int) -> list[tuple[Task, tuple[str, ...]]]:
    """Draw ``count`` demonstrations, seeded. Tasks repeat if there are fewer, but not those of a teacher's file."""
    rng = random.Random(f"demonstrations {seed}")
    drawn: list[tuple[Task, tuple[str, ...]]] = []
    tasks = prepared.demonstrated_tasks
    count = min(count, len(tasks)) if prepared.is_taught else count
    while len(drawn) < count:
        some = rng.sample(tasks, min(len(tasks), count - len(drawn)))
        drawn += [(task, tuple(prepared.demonstrate(task, rng))) for task in some]
    return drawn


def _why_failed(trajectories: Sequence[Trajectory]) -> str:
    """Return the stop reasons of the demonstrations without decisions, and what to change."""
    errors = [trajectory.error for trajectory in trajectories if trajectory.error]
    if errors:
        return f"the last one with: {errors[-1]}"
    if any(trajectory.stop_reason is StopReason.CONTEXT_FULL for trajectory in trajectories):
        return "their prompts fill env_runners.max_context_tokens: raise it"
    if any(turn.finish_reason is FinishReason.LENGTH for trajectory in trajectories for turn in trajectory.turns):
        return "their turns were cut before an action ended: raise env_runners.max_new_tokens_per_turn"
    return (
        "the environment reads none of their turns as an action: it must be able to act on what its source demonstrates"
    )


def learnable(groups: list[TrajectoryGroup], *, only_correct: bool) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """Return the played demonstrations with decisions, and their number by category: ``{"first_search": 198, ...}``.

    With ``only_correct``, return those that end with a right answer. A warning is logged if some demonstrations failed:
    if all with an answer fail, for example by a reward, the policy would learn not to answer. Another warning counts
    wrong answers.

    Raises:
        FleetError: all demonstrations failed.
        DataError: none ends with a right answer.
    """
    kept: list[TrajectoryGroup] = []
    num_decisions: Counter[str] = Counter()
    num_failed = 0
    for group in groups:
        whole = [trajectory for trajectory in group.trajectories if not trajectory.stop_reason.is_failure]
        made = [found for trajectory in whole for found in decisions(trajectory)]
        num_failed += not made
        if made and (not only_correct or all(exact_match(t.answer, t.task.golden_answers) for t in whole)):
            num_decisions.update(found.value for found in made)
            kept.append(group)
    if num_failed:
        reason = _why_failed([trajectory for group in groups for trajectory in group.trajectories])
        if num_failed == len(groups):
            raise FleetError(f"all {len(groups)} demonstrations failed; {reason}")
        logger.warning("%d of %d demonstrations failed and are not learned from; %s", num_failed, len(groups), reason)
    num_wrong = len(groups) - num_failed - len(kept)
    if num_wrong:
        if not kept:
            wrong = next(t for group in groups for t in group.trajectories if not t.stop_reason.is_failure)
            raise DataError(
                f"sft.demonstrations: none of {num_wrong} demonstrations ends with a right answer when it is played: "
                f'{shortened(wrong.task.question)} is answered with "{wrong.answer or ""}", and its gold answers are '
                f"{', '.join(wrong.task.golden_answers)}; gold answers must be of the same form, and "
                "environment.max_turns and retrieval must allow the teacher's searches"
            )
        logger.warning(
            "%d of %d demonstrations end without a right answer and are not learned from", num_wrong, len(groups)
        )
    return kept, num_decisions
