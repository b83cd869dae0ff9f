"""Task sources: they give tasks, and passages and demonstrations if these are known.

::

    environment.tasks: world                         a name of SOURCES
    environment.tasks: [a.json, data/nq]             files, see envs/tasks/paths.py: one source
    environment.tasks: my_module:MySource            a class
    environment.tasks:                               several
      - {source: world, options: {seed: 1}}
      - {source: hotpotqa.json, weight: 2}

A source has training tasks, its own evaluation tasks, or both. ``retrieval.corpus`` may name one, too.
"""

from __future__ import annotations

import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator

from envs.base import reads_calls, search_options
from envs.tasks.demonstrations import DEFAULT_MIXTURE, Demonstrator, Habit, evidence_demonstration, load_demonstrations
from envs.tasks.files import LoadedTasks, load_tasks
from envs.tasks.paths import NamedTasks, shown, task_files
from envs.tasks.world import CATEGORY_SHARES, World, make_world
from ragr1_actors.core.config import EnvironmentSettings, SourceSettings, TaskNames
from ragr1_actors.core.errors import ConfigError, DataError, UserError, nearest, one_line, shortened
from ragr1_actors.core.resolve import blamed, load_object, named, raised_at
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Task
from retrieval.base import Passage

T = TypeVar("T")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
Split = Literal["train", "eval"]


class TaskSource(ABC):
    """Source of tasks.

    A recipe names a class as ``environment.tasks: my_module:MySource``; it is made as ``MySource(environment,
    options)``, with the section of the recipe and the options of this source.
    """

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Refuse any option."""
        if options:
            raise ConfigError(f"got the options {', '.join(options)} of a task source that takes none; leave them out")
        self.search = search_options(environment)
        """Options of searches, for demonstrations."""

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the training tasks, or the source's own evaluation tasks; ``()`` if it has none.

        Ids are unique, and the same each time. Raises ``DataError`` if they cannot be read.
        """

    def passages(self) -> Sequence[Passage]:
        """Return passages that answer the tasks, for a recipe without another corpus; the default is none."""
        return ()

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the turns of one attempt at a training task, for SFT.

        By default they search for the evidence that is known, and answer. ``task.supporting_ids`` are titles here,
        where the index has the passages.
        """
        return evidence_demonstration(task, self.search.max_queries_per_turn, self.search.query_format)

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield texts whose words the vocabulary of a tiny policy needs; the default is the questions of ``tasks``."""
        yield from (f" {task.question}" for task in tasks)

    def report(self) -> str:
        """Return a line for people about the tasks that were read; the default is an empty text."""
        return ""


class WorldOptions(Section):
    """Options of the source ``world``."""

    seed: int = 0
    """Seed of the generated world; the same seed gives the same passages and tasks on every machine."""
    shares: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(dict(CATEGORY_SHARES))
    """Shares of the categories in the tasks: ``{one_hop: 0.5, two_hop: 0.5}``. They sum to 1. Training has fewer tasks
    if the world has too few questions of a category: about 4,600 of three hops."""
    habits: dict[str, dict[Habit, Annotated[float, Field(ge=0)]]] = Field({})
    """Probability of each habit in the demonstrations of a category: ``{one_hop: {good: 0.2, guess: 0.8}}``, of habits
    that its default mixture has, or ``guess``; the other categories keep their default."""

    @field_validator("shares", "habits")
    @classmethod
    def _know_the_categories(cls, by_category: dict[str, Any]) -> dict[str, Any]:
        if wrong := [name for name in by_category if name not in CATEGORY_SHARES]:
            raise ValueError(f"there is no category {wrong[0]}{nearest(wrong[0], CATEGORY_SHARES)}")
        return by_category

    @field_validator("shares")
    @classmethod
    def _sum_to_one(cls, shares: dict[str, float]) -> dict[str, float]:
        if not math.isclose(total := sum(shares.values()), 1.0, abs_tol=1e-6):
            raise ValueError(f"the shares sum to {total:g}, expected 1")
        return shares

    @field_validator("habits")
    @classmethod
    def _can_be_shown(cls, habits: dict[str, dict[Habit, float]]) -> dict[str, dict[Habit, float]]:
        for category, weights in habits.items():
            known = {**DEFAULT_MIXTURE[category], Habit.GUESS: 0.0}
            if wrong := [habit for habit in weights if habit not in known]:
                raise ValueError(f"{category}: got {wrong[0]}, expected habits of {', '.join(known)}")
            if not sum(weights.values()) > 0:
                raise ValueError(f"{category}: the probabilities sum to 0, expected more; leave it out for the default")
        return habits


class WorldSource(TaskSource):
    """Source of the generated world, ``envs/tasks/world.py``."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take the options of ``WorldOptions``."""
        super().__init__(environment, {})
        self._options = WorldOptions.read(options, "environment.tasks: options")

    @cached_property
    def _world(self) -> World:
        return make_world(self._options.seed, self._options.shares)

    @cached_property
    def _demonstrator(self) -> Demonstrator:
        mixture = {**DEFAULT_MIXTURE, **self._options.habits}
        return Demonstrator(self._world, self.search.max_queries_per_turn, self.search.query_format, mixture)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 12,000 training tasks, or 300 evaluation tasks about other facts."""
        return self._world.train_tasks if split == "train" else self._world.eval_tasks

    def passages(self) -> Sequence[Passage]:
        """Return one passage per entity."""
        return self._world.passages

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a scripted attempt, in a good or a bad habit."""
        return self._demonstrator.demonstrate(task, rng)

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield every passage, question and demonstration."""
        yield from self._world.texts()
        yield from self._demonstrator.texts()


class FileSource(TaskSource):
    """Task files: all for training or, with ``whole``, all for evaluation."""

    def __init__(self, environment: EnvironmentSettings, named: NamedTasks, *, whole: bool = False) -> None:
        """Take the name of task files; they are read when the tasks are asked for, see ``load_tasks``."""
        super().__init__(environment, {})
        self._named, self._whole = named, whole

    @cached_property
    def _loaded(self) -> LoadedTasks:
        return load_tasks(self._named, whole=self._whole)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of the files, if they are for this split."""
        return self._loaded.tasks if (split == "eval") == self._whole else ()

    def report(self) -> str:
        """Return the counts of tasks that were read and left out."""
        return str(self._loaded.report)

    def check_files(self) -> None:
        """Raise a ``DataError`` if the files do not exist; nothing is read."""
        task_files(self._named, *SOURCES)


class TeacherSource(TaskSource):
    """File with a teacher's demonstrations; see ``envs/tasks/demonstrations.py``."""

    def __init__(self, environment: EnvironmentSettings, path: str | Path) -> None:
        """Read the file; raises ``DataError`` if it cannot be used."""
        super().__init__(environment, {})
        keeps_calls = reads_calls(environment)
        self._loaded, self._turns_of = load_demonstrations(path, self.search.query_format, keeps_calls=keeps_calls)

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks that the teacher answered."""
        return self._loaded.tasks if split == "train" else ()

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the teacher's turns."""
        return list(self._turns_of[task.task_id])

    def report(self) -> str:
        """Return the counts of tasks that were read and left out."""
        return str(self._loaded.report)


SOURCES: dict[str, type[TaskSource] | str] = {"world": WorldSource}
"""Known names in ``environment.tasks`` and ``retrieval.corpus``; any other is a class, or the path of files."""


@dataclass(frozen=True)
class TaskSources:
    """Sources that ``environment.tasks`` or ``environment.eval_tasks`` names."""

    named: tuple[tuple[SourceSettings, TaskSource], ...]

    @classmethod
    def open(cls, tasks: TaskNames, environment: EnvironmentSettings, *, whole: bool = False) -> TaskSources:
        """Make the sources; files are for evaluation if ``whole``, else for training.

        Raises:
            ConfigError: a name or an option of a source is wrong.
        """
        found = [(settings, _open(settings, environment, whole=whole)) for settings in _separate(tasks)]
        return cls(tuple(found))

    def tasks(self, split: Split, seed: int) -> tuple[Task, ...]:
        """Return the tasks of all sources, one source after the other, each task with its source's name.

        With weights, the numbers of training tasks have the ratio of the weights: the source with the fewest tasks for
        its weight gives all, the others a part that ``seed`` draws.

        Raises:
            DataError: two sources have a task of the same id, or a source cannot be read.
        """
        parts = [checked_tasks(source, split) for _, source in self.named]
        if len(parts) == 1:
            return tuple(parts[0])
        if repeated := _repeated(task.task_id for part in parts for task in part):
            raise DataError(
                f"environment.tasks: {len(repeated):,} tasks are in two sources, such as {repeated[0]}; give them "
                "other ids, or files other names, or name one source"
            )
        weights = [settings.weight for settings, _ in self.named]
        if split == "train" and any(weight is not None for weight in weights):
            parts = _weighted(parts, [1.0 if weight is None else weight for weight in weights], seed)
        return tuple(
            replace(task, source=name) for name, part in zip(self.names(), parts, strict=True) for task in part
        )

    def names(self) -> list[str]:
        """Return a name of each source, for metrics: ``["world", "hotpotqa"]``; a second equal name ends in #2."""
        names: list[str] = []
        for settings, _ in self.named:
            name = _short(settings)
            names.append(name if name not in names else f"{name}#{1 + sum(n.partition('#')[0] == name for n in names)}")
        return names

    def passages(self) -> list[Passage]:
        """Return the passages of all sources; raises ``DataError`` if two have the same id."""
        passages = [one for _, source in self.named for one in checked_passages(source)]
        if repeated := _repeated(passage.id for passage in passages):
            raise DataError(
                f"{len(repeated):,} passages of the task sources have the id of another one, such as {repeated[0]}; "
                "name a corpus in retrieval.corpus"
            )
        return passages

    def source_of(self, task: Task) -> TaskSource:
        """Return the source that a task came from."""
        return self.named[self.names().index(task.source) if len(self.named) > 1 else 0][1]

    def reports(self) -> tuple[str, ...]:
        """Return the lines of the sources about the tasks that were read."""
        return tuple(report for _, source in self.named if (report := source.report()))

    @property
    def by_name(self) -> dict[str, TaskSource]:
        """Map each name to its source, files left out: ``{"world": ...}``."""
        return {settings.source: source for settings, source in self.named if isinstance(settings.source, str)}

    @property
    def files(self) -> list[FileSource]:
        """Return the sources that are files."""
        return [source for _, source in self.named if isinstance(source, FileSource)]


def checked_tasks(source: TaskSource, split: Split) -> list[Task]:
    """Return the tasks of a source; ``DataError`` if it fails, or returns other objects or equal ids."""
    tasks = _checked(source.tasks, "a sequence of Task", Task, split)
    for task in tasks:
        if problem := _problem_of(task):
            raise DataError(f"{named(source.tasks)} returned {shortened(repr(task), 200)}, {problem}")
    _refuse_repeated(source.tasks, (task.task_id for task in tasks))
    return tasks


def checked_passages(source: TaskSource) -> list[Passage]:
    """Return the passages of a source; ``DataError`` if it fails, or returns other objects or equal ids."""
    passages = _checked(source.passages, "a sequence of Passage", Passage)
    for one in passages:
        if not _are_texts((one.id, one.title, one.text)):
            got = shortened(repr(one), 200)
            raise DataError(f"{named(source.passages)} returned {got}, expected texts as id, title and text")
    _refuse_repeated(source.passages, (passage.id for passage in passages))
    return passages


def _problem_of(task: Task) -> str:
    """Return what is wrong with a task's fields, such as a text instead of a tuple of texts; empty if all are right."""
    if not _are_texts((task.task_id, task.question, task.category, task.source)):
        return "expected texts as task_id, question, category and source"
    lists = {"golden_answers": task.golden_answers, "supporting_ids": task.supporting_ids}
    wrong = [name for name, texts in lists.items() if not _are_texts(texts)]
    if not isinstance(task.plan, tuple | list) or not all(map(_are_texts, task.plan)):
        return "expected as plan a tuple with a tuple of texts for each round"
    try:
        json.dumps(dict(task.meta), default=str).encode()
    except (TypeError, ValueError, RecursionError) as error:  # not a mapping, or one that contains itself
        return f"expected as meta what JSON can hold: {one_line(error)}"
    return f"expected a tuple of texts as {wrong[0]}" if wrong else ""


def _are_texts(values: object) -> bool:
    """Return whether a value is a tuple or list of texts that can be encoded, without halves of surrogate pairs."""
    if not isinstance(values, tuple | list) or not all(isinstance(one, str) for one in values):
        return False
    return all(one.isascii() or not _SURROGATE.search(one) for one in values)


def _checked(method: Callable[..., Iterable[Any]], expected: str, kind: type[T], *arguments: Any) -> list[T]:
    try:
        returned: object = method(*arguments)
        found: list[Any] = list(returned) if isinstance(returned, Iterable) else [returned]
    except UserError:
        raise
    except Exception as error:  # a user's source may raise anything
        raise DataError(f"{method.__qualname__} failed at {raised_at(error, method)}; mend it") from error
    wrong = [one for one in found if not isinstance(one, kind)]
    if wrong or not isinstance(returned, Iterable):
        got = shortened(repr(wrong[0] if wrong else returned))
        raise DataError(f"{named(method)} returned {got}, expected {expected}")
    return found


def _refuse_repeated(method: Callable[..., Any], ids: Iterable[str]) -> None:
    if repeated := _repeated(ids):
        raise DataError(
            f"{named(method)}: {len(repeated):,} ids occur twice, such as {repeated[0]}; expected each once"
        )


def _repeated(ids: Iterable[str]) -> list[str]:
    return [one for one, times in Counter(ids).items() if times > 1]


def shown_names(tasks: TaskNames) -> str:
    """Return what ``environment.tasks`` names, for people: ``"world, hotpotqa.json"``."""
    return ", ".join(shown(settings.source) for settings in _separate(tasks))


def is_source(name: str) -> bool:
    """Return whether a name names a source or a class, and not the path of a file."""
    return name in SOURCES or (":" in name and not Path(name).exists())


def open_source(name: str, environment: EnvironmentSettings, options: Mapping[str, Any]) -> TaskSource:
    """Make the source ``world`` or ``my_module:MySource``; ``ConfigError`` if it is unknown or an option is wrong."""
    source_class: Any = load_object(name, SOURCES)
    if not (isinstance(source_class, type) and issubclass(source_class, TaskSource)):
        raise ConfigError(f"got {name}, which is {named(source_class)}, expected a subclass of envs.sources.TaskSource")
    with blamed(name, source_class):
        source: TaskSource = source_class(environment, options)
        return source


def _separate(tasks: TaskNames) -> list[SourceSettings]:
    """Return the entries of ``environment.tasks``, source by source; files that are listed alone are one source."""
    if isinstance(tasks, str):
        return [SourceSettings(source=tasks)]
    files = [one for one in tasks if isinstance(one, str) and not is_source(one)]
    if len(files) == len(tasks):
        return [SourceSettings(source=files)]
    return [SourceSettings(source=one) if isinstance(one, str) else one for one in tasks]


def _open(settings: SourceSettings, environment: EnvironmentSettings, *, whole: bool) -> TaskSource:
    if isinstance(settings.source, str) and is_source(settings.source):
        return open_source(settings.source, environment, settings.options)
    if settings.options:
        raise ConfigError(f"got options of the files {shown(settings.source)}, which take none; leave them out")
    return FileSource(environment, settings.source, whole=whole)


def _short(settings: SourceSettings) -> str:
    if isinstance(settings.source, str) and is_source(settings.source):
        return settings.source.rpartition(":")[2]
    return Path(shown(settings.source)).name.partition(".")[0]


def _weighted(parts: Sequence[list[Task]], weights: Sequence[float], seed: int) -> list[list[Task]]:
    """Return as many tasks of each part as its weight allows, in their order; at least one of each that has any."""
    scale = min((len(part) / weight for part, weight in zip(parts, weights, strict=True) if part), default=0.0)
    if not math.isfinite(scale):
        raise ConfigError(f"environment.tasks: got the weights {', '.join(map(str, weights))}; give larger ones")
    rng = random.Random(f"weights {seed}")
    kept = []
    for part, weight in zip(parts, weights, strict=True):
        drawn = rng.sample(range(len(part)), min(len(part), max(1, round(scale * weight))))
        kept.append([part[position] for position in sorted(drawn)])
    return kept
