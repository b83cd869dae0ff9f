"""What a run needs before its first actor starts: tasks, corpus, index, policy folder and demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.demonstrations import Demonstrator, evidence_demonstration
from envs.tasks import load_tasks, overlap, without_overlap
from envs.world import World, make_world
from ragr1_actors.core.config import EnvironmentSettings, RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.files import write_folder
from ragr1_actors.core.types import Task
from retrieval.base import Passage
from retrieval.corpora.corpus import Corpus
from retrieval.corpora.readers import read_passages
from retrieval.evaluation import evaluate_index
from retrieval.indexes.build import build_index
from retrieval.indexes.manifest import Manifest
from retrieval.registry import needs_index

WORLD = "world"
TINY = "tiny"
HELD_OUT_SHARE = 0.2
"""Most of a task file that is held out where no file of evaluation tasks is given."""

Demonstrate = Callable[[Task, random.Random], list[str]]
"""The model's turns of one scripted attempt."""


@dataclass(frozen=True)
class Workspace:
    """Everything on disk and in memory that the actors are built from."""

    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    index_dir: Path | None
    """None where ``retrieval.type`` needs no index."""
    policy_dir: str
    """Hugging Face folder, or hub name, of the policy before training."""
    demonstrate: Demonstrate
    recall: dict[str, float]
    """``{"recall@3": 0.61, ...}`` of the evaluation questions, where their evidence is known."""
    notes: tuple[str, ...]
    """What is worth telling a person about the data."""


def prepare(config: RunConfig, run_dir: Path) -> Workspace:
    """Load the tasks, and build what is missing: the index from the corpus, the tiny policy from the texts.

    Raises:
        UserError: a file that cannot be used; the message says which and why.
    """
    environment, retrieval = config.environment, config.retrieval
    needs_world = WORLD in (environment.tasks, retrieval.corpus)
    world = make_world(environment.world_seed) if needs_world else None
    train_tasks, eval_tasks, notes = _load_tasks(config, world)
    index_dir = _make_index(config, run_dir, world) if needs_index(retrieval.type) else None
    recall = {}
    if index_dir is not None and any(task.supporting_ids for task in eval_tasks):
        recall = evaluate_index(index_dir, eval_tasks)
    demonstrate: Demonstrate = _evidence(environment)
    texts: Iterable[str] = [environment.prompt]
    if environment.tasks == WORLD and world is not None:
        demonstrator = Demonstrator(world, environment.max_queries_per_turn, environment.query_format)
        demonstrate = demonstrator.demonstrate
        texts = [*texts, *world.texts(), *demonstrator.texts()]
    else:
        texts = [*texts, *(f" {task.question}" for task in train_tasks)]
        if index_dir is not None:
            texts += [f" {p.title}: {p.text}" for p in Corpus.open(index_dir)]
    policy_dir = _make_policy(config, run_dir, texts)
    return Workspace(train_tasks, eval_tasks, index_dir, policy_dir, demonstrate, recall, notes)


def _load_tasks(config: RunConfig, world: World | None) -> tuple[tuple[Task, ...], tuple[Task, ...], tuple[str, ...]]:
    environment = config.environment
    notes: list[str] = []
    if environment.tasks == WORLD:
        assert world is not None
        train, evaluation = world.train_tasks, world.eval_tasks
    else:
        loaded = load_tasks(environment.tasks)
        notes.append(str(loaded.report))
        train, evaluation = loaded.tasks, ()
    if environment.eval_tasks:
        loaded = load_tasks(environment.eval_tasks)
        notes.append(str(loaded.report))
        evaluation = loaded.tasks
        shared = len(overlap(train, evaluation))
        if shared:
            notes.append(f"{shared} evaluation questions also stand in the training tasks; left out of training")
            train = without_overlap(train, evaluation)
    if not evaluation:
        order = random.Random(config.debugging.seed).sample(range(len(train)), len(train))
        num_held_out = min(config.evaluation.num_tasks, int(len(train) * HELD_OUT_SHARE))
        held_out = set(order[:num_held_out])
        evaluation = tuple(task for index, task in enumerate(train) if index in held_out)
        train = tuple(task for index, task in enumerate(train) if index not in held_out)
        notes.append(f"{len(evaluation)} tasks held out for evaluation")
    return train, evaluation[: config.evaluation.num_tasks], tuple(notes)


def _make_index(config: RunConfig, run_dir: Path, world: World | None) -> Path:
    settings = config.retrieval
    if settings.index:
        manifest = Manifest.read(settings.index)
        if manifest.is_dense and settings.encoder not in (
            manifest.encoder,
            Path(manifest.encoder).name,
            "static" if manifest.encoder == "encoder" else "",
        ):
            raise DataError(
                f"{settings.index} was built with encoder {manifest.encoder!r}, but retrieval.encoder is "
                f"{settings.encoder!r}; name the same encoder, or build another index"
            )
        return Path(settings.index)
    index_dir = run_dir / "index"
    if index_dir.exists():  # a resumed run: the index appeared whole or not at all
        return index_dir
    passages: Iterable[Passage]
    if settings.corpus == WORLD:
        assert world is not None
        passages = world.passages
    else:
        passages = read_passages(settings.corpus)
    return build_index(
        passages,
        index_dir,
        encoder=settings.encoder,
        index_type=settings.type,
        num_shards=settings.num_shards,
        options=settings.options,
        seed=config.debugging.seed,
        progress=False,
    )


def _make_policy(config: RunConfig, run_dir: Path, texts: Iterable[str]) -> str:
    policy = config.policy
    if policy.model != TINY:
        return policy.model
    from ragr1_actors.training.tiny_policy import make_tiny_policy  # pulls in torch

    directory = run_dir / "policy"

    def write(writing: Path) -> None:
        make_tiny_policy(
            writing,
            texts,
            seed=config.debugging.seed,
            vocab_size=policy.vocab_size,
            hidden_size=policy.hidden_size,
            num_layers=policy.num_layers,
            num_heads=policy.num_heads,
            max_position_embeddings=config.env_runners.max_context_tokens,
        )

    if not directory.exists():  # a resumed run: as with the index
        write_folder(directory, write)
    return str(directory)


def _evidence(environment: EnvironmentSettings) -> Demonstrate:
    return lambda task, _: evidence_demonstration(task, environment.max_queries_per_turn, environment.query_format)


def demonstrations(workspace: Workspace, count: int, seed: int) -> list[tuple[Task, tuple[str, ...]]]:
    """Draw ``count`` scripted attempts over the training tasks, seeded; tasks repeat where there are fewer."""
    rng = random.Random(f"demonstrations {seed}")
    tasks: Sequence[Task] = workspace.train_tasks
    drawn: list[tuple[Task, tuple[str, ...]]] = []
    while len(drawn) < count:
        for task in rng.sample(tasks, min(len(tasks), count - len(drawn))):
            # the id is the attempt's, since the same task may be demonstrated twice
            named = replace(task, task_id=f"{task.task_id}/demonstration{len(drawn)}")
            drawn.append((named, tuple(workspace.demonstrate(task, rng))))
    return drawn
