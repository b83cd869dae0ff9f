"""What a run needs before its first actor starts: tasks, index, policy folder and demonstrations.

``prepare`` loads or makes all of it and returns a ``Workspace``. The fleets are built from that, see ``algorithm.py``.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.base import ENVS, exact_match
from envs.demonstrations import Demonstrator, evidence_demonstration
from envs.search import SearchEnv, search_prompt
from envs.tasks.files import load_tasks, overlap, without_overlap
from envs.tasks.paths import shown
from envs.teacher import load_demonstrations
from envs.world import make_world
from learners.algorithms.segments import segment
from ragr1_actors.core.config import RunConfig, SamplerConfig, read_tiny
from ragr1_actors.core.digests import write_list
from ragr1_actors.core.errors import DataError, FleetError
from ragr1_actors.core.files import POLICY_FILES, write_folder
from ragr1_actors.core.folders import on_this_node
from ragr1_actors.core.resolve import CORRECT, MIXTURE, STATIC, TINY, WORLD, load_object, named_folder, path_of
from ragr1_actors.core.types import StopReason, Task, Trajectory, TrajectoryGroup
from ragr1_actors.rollout.engines.base import load_tokenizer
from ragr1_actors.runs.places import POLICY
from ragr1_actors.runs.run_directory import run_of_policy
from ragr1_actors.training.tiny_policy import make_tiny_policy
from retrieval.base import Passage, needs_index
from retrieval.build import build_index
from retrieval.corpora.corpus import Corpus
from retrieval.corpora.readers import read_passages
from retrieval.local import named_index

HELD_OUT_SHARE = 0.2
"""The largest share of a task file that is held out if no file of evaluation tasks is given."""

_SPARE_TOKENS = 8
"""A question may be cut into other tokens inside a prompt than by itself."""

Demonstrate = Callable[[Task, random.Random], list[str]]
"""Returns the turns of one scripted attempt at a task."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workspace:
    """Everything on disk and in memory that the fleets are built from."""

    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    index_dir: Path | None
    """None if ``retrieval.type`` needs no index."""
    policy_dir: str
    """Hugging Face folder, or hub name, of the policy before training."""
    demonstrated_tasks: tuple[Task, ...]
    """Tasks that ``demonstrate`` takes: the training tasks, or those of a teacher's file."""
    demonstrate: Demonstrate
    notes: tuple[str, ...]
    """What a person should know about the data."""


def prepare(config: RunConfig, run_dir: Path) -> Workspace:
    """Load the tasks, and build what is missing: index and tiny policy; ``UserError`` on unusable or too few tasks."""
    environment = config.environment
    run_dir = run_dir.absolute()  # actors may have another working directory
    train, held_out, notes = split_tasks(config, config.evaluation.num_tasks)
    evaluation = held_out[: config.evaluation.num_tasks]
    if not evaluation:
        raise DataError(
            f"{shown(environment.tasks)}: {len(train)} tasks are too few to hold one in five out; name a file of "
            "evaluation tasks in environment.eval_tasks"
        )
    if not train:
        raise DataError(f"{shown(environment.tasks)}: no training task is left after holding the evaluation tasks out")
    demonstrated, turns_of = train, None
    if config.sft.num_steps and path_of(config.sft.demonstrations, CORRECT, MIXTURE) is not None:
        loaded, turns_of = load_demonstrations(config.sft.demonstrations, environment.query_format)
        demonstrated = without_overlap(loaded.tasks, held_out)
        if not demonstrated:
            raise DataError(
                f"sft.demonstrations: all {len(loaded.tasks):,} demonstrations of {config.sft.demonstrations} answer "
                "evaluation questions; name another file"
            )
        notes += (f"{loaded.report}; {len(loaded.tasks) - len(demonstrated):,} of evaluation questions left out",)
    index_notes: list[str] = []
    index_dir = prepare_index(config, run_dir, index_notes.append)
    notes += tuple(index_notes)
    policy_dir = keep_policy(prepare_policy(config, run_dir, train, index_dir), run_dir)
    notes += tuple(long_prompts(config, policy_dir, train))
    demonstrate = _demonstrate(config, train, index_dir) if turns_of is None else _repeat(turns_of)
    return Workspace(train, evaluation, index_dir, policy_dir, demonstrated, demonstrate, notes)


def long_prompts(config: SamplerConfig, policy_dir: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Say how many tasks have a prompt that fills the context, so that no turn can follow.

    Only for environments whose prompt is known beforehand, ``SearchEnv``'s. The tokenizer is loaded only if a prompt
    has as many bytes as the context has tokens.

    Raises:
        DataError: all of them have.
    """
    environment, limit = config.environment, config.env_runners.max_context_tokens
    env_class: Any = load_object(environment.env, ENVS)
    if not (isinstance(env_class, type) and issubclass(env_class, SearchEnv)) or env_class.reset is not SearchEnv.reset:
        return
    longest = max(tasks, key=lambda task: len(task.question.encode()))
    if len(search_prompt(environment, longest)[0].content.encode()) < limit:
        return
    tokenizer = load_tokenizer(on_this_node(policy_dir), config.policy)
    num_fixed = len(tokenizer.prompt_ids(search_prompt(environment, replace(longest, question=""))))
    doubtful = [task for task in tasks if num_fixed + len(task.question.encode()) + _SPARE_TOKENS >= limit]
    harmless = (replace(task, question=tokenizer.defuse(task.question)) for task in doubtful)
    found = (len(tokenizer.prompt_ids(search_prompt(environment, task))) for task in harmless)
    lengths = [length for length in found if length >= limit]
    if len(lengths) == len(tasks):
        raise DataError(
            f"{shown(environment.tasks)}: the prompt of every task fills the context: {min(lengths):,} tokens or more "
            f"of {limit:,}; raise env_runners.max_context_tokens, or shorten environment.prompt or the questions"
        )
    if lengths:
        yield (
            f"{len(lengths):,} of {len(tasks):,} tasks have a prompt of {limit:,} tokens or more, up to "
            f"{max(lengths):,}: no turn can follow; raise env_runners.max_context_tokens, or leave them out"
        )


def _repeat(turns_of: Mapping[str, tuple[str, ...]]) -> Demonstrate:
    """Return what writes the demonstrations of a file."""
    return lambda task, _: list(turns_of[task.task_id])


def _demonstrate(config: RunConfig, tasks: Sequence[Task], index_dir: Path | None) -> Demonstrate:
    """Return what writes scripted demonstrations; of a file's tasks, with the titles of their evidence as queries."""
    environment = config.environment
    max_queries, query_format = environment.max_queries_per_turn, environment.query_format
    if environment.tasks == WORLD:
        return Demonstrator(make_world(environment.world_seed), max_queries, query_format).demonstrate
    ids = {name for task in tasks for name in task.supporting_ids}
    titles = Corpus.open(index_dir).titles(ids) if config.sft.num_steps and ids and index_dir is not None else {}

    def demonstrate(task: Task, _: random.Random) -> list[str]:
        names = tuple(titles.get(name) or name for name in task.supporting_ids)
        return evidence_demonstration(replace(task, supporting_ids=names), max_queries, query_format)

    return demonstrate


def split_tasks(config: RunConfig, num_eval_tasks: int) -> tuple[tuple[Task, ...], tuple[Task, ...], tuple[str, ...]]:
    """Return training tasks, all evaluation tasks, and notes; ``DataError`` on a bad file.

    Without a file of evaluation tasks, ``num_eval_tasks`` of the training tasks are held out.
    """
    environment = config.environment
    notes: list[str] = []
    if environment.tasks == WORLD:
        world = make_world(environment.world_seed)
        train, evaluation = world.train_tasks, world.eval_tasks
    else:
        loaded = load_tasks(environment.tasks)
        notes.append(str(loaded.report))
        train, evaluation = loaded.tasks, ()
    if environment.eval_tasks:
        loaded = load_tasks(environment.eval_tasks, whole=True)
        notes.append(str(loaded.report))
        evaluation = loaded.tasks
        shared = len(overlap(train, evaluation))
        if shared:
            notes.append(f"{shared} evaluation questions are also training tasks; they are left out of training")
            train = without_overlap(train, evaluation)
    if not evaluation:
        order = random.Random(config.debugging.seed).sample(range(len(train)), len(train))
        held_out = set(order[: min(num_eval_tasks, int(len(train) * HELD_OUT_SHARE))])
        evaluation = tuple(task for index, task in enumerate(train) if index in held_out)
        train = tuple(task for index, task in enumerate(train) if index not in held_out)
        notes.append(f"{len(evaluation)} tasks held out for evaluation")
    return train, evaluation, tuple(notes)


def prepare_index(config: SamplerConfig, run_dir: Path, on_note: Callable[[str], None] = logger.warning) -> Path | None:
    """Return the index that ``retrieval`` names, or build one in ``run_dir``; None if none is needed.

    ``on_note`` is given what a person should know about the corpus and the encoder of an index that is built.
    """
    settings = config.retrieval
    if not needs_index(settings.type):
        return None
    if settings.index:
        return named_index(settings)
    index_dir = run_dir / "index"
    if index_dir.exists():  # a resumed run: the index is written whole or not at all
        return index_dir
    is_world = settings.corpus == WORLD
    passages: Iterable[Passage] = (
        make_world(config.environment.world_seed).passages if is_world else read_passages(settings.corpus)
    )
    return build_index(
        passages,
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
    policy = config.policy
    if policy.model != TINY:  # absolute: an actor elsewhere must not look for a folder's name on a hub
        folder = named_folder(policy.model)
        return str(folder.absolute()) if folder is not None else policy.model
    directory = run_dir / POLICY

    def write(writing: Path) -> None:
        make_tiny_policy(
            writing,
            _texts(config, tasks, index_dir),
            seed=config.debugging.seed,
            **read_tiny(policy).model_dump(),
            max_position_embeddings=config.env_runners.max_context_tokens,
        )
        write_list(writing)

    if not directory.exists():  # a resumed run: as with the index
        write_folder(directory, write, POLICY_FILES)
    return str(directory)


def keep_policy(policy_dir: str, run_dir: Path) -> str:
    """Return a policy that another run does not remove: one of its checkpoints is copied, any other is kept as it is.

    A run under way deletes its older checkpoints. The files of the copy are hard links where the disk is the same one.
    """
    kept = run_dir / POLICY

    def write(writing: Path) -> None:
        shutil.copytree(policy_dir, writing, copy_function=_link, dirs_exist_ok=True)

    if not kept.is_dir() and run_of_policy(Path(policy_dir)) is not None:
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
    if environment.tasks == WORLD:
        world = make_world(environment.world_seed)
        yield from world.texts()
        yield from Demonstrator(world, environment.max_queries_per_turn, environment.query_format).texts()
        return
    yield from (f" {task.question}" for task in tasks)
    if index_dir is not None:
        yield from (f" {passage.title}: {passage.text}" for passage in Corpus.open(index_dir))


def draw_demonstrations(workspace: Workspace, count: int, seed: int) -> list[tuple[Task, tuple[str, ...]]]:
    """Draw ``count`` demonstrations, seeded. Training tasks repeat if there are fewer; those of a file do not."""
    rng = random.Random(f"demonstrations {seed}")
    drawn: list[tuple[Task, tuple[str, ...]]] = []
    tasks = workspace.demonstrated_tasks
    count = count if tasks == workspace.train_tasks else min(count, len(tasks))
    while len(drawn) < count:
        for task in rng.sample(tasks, min(len(tasks), count - len(drawn))):
            # each attempt has its own id, since the same task may be demonstrated twice
            named = replace(task, task_id=f"{task.task_id}/demonstration{len(drawn)}")
            drawn.append((named, tuple(workspace.demonstrate(task, rng))))
    return drawn


def _why_failed(trajectories: Sequence[Trajectory]) -> str:
    """Return what the demonstrations without decisions ended with, and what to change."""
    errors = [trajectory.error for trajectory in trajectories if trajectory.error]
    if errors:
        return f"the last one with: {errors[-1]}"
    if any(trajectory.stop_reason is StopReason.CONTEXT_FULL for trajectory in trajectories):
        return "their prompts fill env_runners.max_context_tokens: raise it"
    return (
        "their turns were cut before an action ended: raise env_runners.max_new_tokens_per_turn, or "
        "environment.max_turns if the teacher searches more often than the policy may"
    )


def learnable(groups: list[TrajectoryGroup], *, only_correct: bool) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """Return the played demonstrations with decisions, and their number by category: ``{"first_search": 198, ...}``.

    With ``only_correct``, those that end with a right answer. A warning is logged if some demonstrations failed: if
    those that answer all fail, because of a reward for example, the policy would learn never to answer. Another one
    counts those that end wrong.

    Raises:
        FleetError: all demonstrations failed.
        DataError: none ends with a right answer.
    """
    kept: list[TrajectoryGroup] = []
    num_decisions: Counter[str] = Counter()
    num_failed = 0
    for group in groups:
        whole = [trajectory for trajectory in group.trajectories if not trajectory.stop_reason.is_failure]
        segments = [found for trajectory in whole for found in segment(trajectory)]
        num_failed += not segments
        if segments and (not only_correct or all(exact_match(t.answer, t.task.golden_answers) for t in whole)):
            num_decisions.update(found.category.value for found in segments)
            kept.append(group)
    if num_failed:
        reason = _why_failed([trajectory for group in groups for trajectory in group.trajectories])
        if num_failed == len(groups):
            raise FleetError(f"all {len(groups)} demonstrations failed; {reason}")
        logger.warning("%d of %d demonstrations failed and are not learned from; %s", num_failed, len(groups), reason)
    num_wrong = len(groups) - num_failed - len(kept)
    if num_wrong:
        if not kept:
            raise DataError(
                f"sft.demonstrations: none of {num_wrong} demonstrations ends with a right answer when it is played; "
                "environment.max_turns and retrieval must allow the teacher's searches"
            )
        logger.warning(
            "%d of %d demonstrations end without a right answer and are not learned from", num_wrong, len(groups)
        )
    return kept, num_decisions
