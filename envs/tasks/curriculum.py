"""Curriculum: chooses the next task, by the results of the trained trajectories of each (``TaskStats``).

``TaskLedger`` keeps the books: each task is trained or skipped once per epoch.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.resolve import blamed, make_part, place_of
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Task

_ROW = np.dtype([("num_trajectories", "<i4"), ("num_passed", "<i4"), ("total_reward", "<f8")])


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Results of a task's trajectories that were trained since the start of the run; there is at least one."""

    num_trajectories: int
    num_passed: int
    """Number of trajectories whose reward was above 0: right, or partly right."""
    total_reward: float

    @property
    def mean_reward(self) -> float:
        """Mean reward per trajectory."""
        return self.total_reward / self.num_trajectories

    @property
    def pass_rate(self) -> float:
        """Share of the trajectories that passed, 0 to 1."""
        return self.num_passed / self.num_trajectories

    def plus(self, rewards: Sequence[float]) -> TaskStats:
        """Return the stats with the rewards of further trajectories."""
        num_passed = self.num_passed + sum(reward > 0 for reward in rewards)
        return TaskStats(self.num_trajectories + len(rewards), num_passed, self.total_reward + sum(rewards))


NO_STATS = TaskStats(0, 0, 0.0)
Stats = Mapping[str, TaskStats]
"""Stats by task id, of all tasks with a trained trajectory."""


def pack_stats(stats: Stats, tasks: Sequence[Task]) -> str:
    """Return the stats as text: 16 bytes for each of the ``tasks``, in their order, compressed, in base64."""
    known = (stats.get(task.task_id, NO_STATS) for task in tasks)
    rows = np.array([(one.num_trajectories, one.num_passed, one.total_reward) for one in known], _ROW)
    return b64encode(zlib.compress(rows.tobytes(), 1)).decode()


def unpack_stats(text: str, tasks: Sequence[Task]) -> dict[str, TaskStats]:
    """Return the stats from a text of ``pack_stats`` for the same tasks."""
    rows = np.frombuffer(zlib.decompress(b64decode(text)), _ROW).tolist()
    return {task.task_id: TaskStats(*row) for task, row in zip(tasks, rows, strict=True) if row[0]}


KEY = "environment.curriculum"


class Curriculum(ABC):
    """Orders the tasks of an epoch, and says which to skip; in a recipe, ``environment.curriculum=my_module:Mine``.

    Its methods get all they need, and it keeps no state: a resumed run makes a new one.
    """

    is_fixed: ClassVar[bool] = False
    """Whether ``order`` is called only at the start of an epoch; else it is called again after each batch."""
    options_class: ClassVar[type[Section] | None] = None
    """Class that reads ``environment.curriculum_options``. None: the constructor gets the mapping unchanged."""

    def __init__(self, options: Any) -> None:
        """Take the options of the recipe."""
        self.options = options

    @abstractmethod
    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        """Return the positions of ``rest`` in the order in which its tasks shall come, each position once.

        Args:
            rest: tasks of the epoch that were neither issued nor skipped, in the order of their files, including those
                in quarantine, which are passed over later.
            stats: stats of the trained trajectories.
            epoch: number of the epoch, from 0.
            rng: generator that depends only on seed, epoch and number of tasks in ``rest``, also in a resumed run.
        """

    def skip(self, task: Task, stats: Stats) -> bool:
        """Return whether this epoch skips the task; called when the task would come next."""
        return False


class Shuffle(Curriculum):
    """``shuffle``: another random order in each epoch."""

    is_fixed = True
    options_class = Section

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        """Return a random order."""
        return list(map(int, rng.permutation(len(rest))))


class DifficultyOptions(Section):
    """Options of ``difficulty``."""

    field: str = "pass_rate"
    """Field of the task file that has the pass rate; the default is the one that ``ragr1 select`` writes."""


class Difficulty(Curriculum):
    """``difficulty``: easy tasks first, by the pass rate that the task file has; equal ones in random order."""

    is_fixed = True
    options_class = DifficultyOptions

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        """Return the order of falling pass rates; ``ConfigError`` on a task without one."""
        return _ascending([-self._pass_rate(task) for task in rest], rng)

    def _pass_rate(self, task: Task) -> float:
        field = self.options.field
        found = task.meta.get(field)
        if isinstance(found, bool) or not isinstance(found, Real) or not np.isfinite(float(found)):
            got = f"{field} {shortened(repr(found))}" if field in task.meta else f"no {field}"
            raise ConfigError(
                f"{KEY}: got {got} in task {task.task_id}, expected a number, as in the files that `ragr1 select` "
                f"writes; train on such a file, or name another field: {KEY}_options={{field: ...}}"
            )
        return float(found)


class Adaptive(Curriculum):
    """``adaptive``: first the tasks that were passed about half of the time.

    Tasks are ordered by the distance of their pass rate from 1/2, equal ones at random. The reason is that the
    advantages in a group come from the differences of its rewards, whose variance p (1 - p) is largest at 1/2. A task
    without trained trajectories counts as 1/4 away, the mean distance if every rate is equally likely. The first epoch
    is a shuffle.
    """

    options_class = Section

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        """Return the order of rising distances."""
        return _ascending([self._distance(stats.get(task.task_id)) for task in rest], rng)

    def _distance(self, known: TaskStats | None) -> float:
        if known is None:
            return 0.25
        return abs(known.num_passed - known.num_trajectories / 2) / known.num_trajectories  # the same for 1/3 and 2/3


CURRICULA: dict[str, type[Curriculum] | str] = {"shuffle": Shuffle, "difficulty": Difficulty, "adaptive": Adaptive}
"""Curricula by the value of ``environment.curriculum``."""


def make_curriculum(settings: EnvironmentSettings) -> Curriculum:
    """Make the curriculum that a recipe names; ``ConfigError`` if it is unknown, or its options do not fit."""
    return make_part(KEY, settings.curriculum, CURRICULA, settings.curriculum_options)


def checked_order(
    curriculum: Curriculum, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator
) -> list[int]:
    """Return the result of ``order``; ``ConfigError``, with its place, if it is no permutation, or it raises."""
    with blamed(KEY, curriculum.order):
        returned: Iterable[Any] = curriculum.order(list(rest), stats, epoch, rng)  # a copy, which it may change
        try:
            order = [index(position) for position in returned]
        except TypeError:  # no sequence, or not of whole numbers
            order = []
    if sorted(order) == list(range(len(rest))):
        return order
    if not order:
        got = shortened(repr(returned))
    elif len(order) != len(rest):
        got = f"{len(order):,} positions"
    else:
        times = Counter(order)
        wrong = next(at for at in order if times[at] > 1 or not 0 <= at < len(rest))
        got = f"position {wrong}" + (f" {times[wrong]} times" if times[wrong] > 1 else "")
    raise _returned(curriculum.order, got, f"each of the {len(rest):,} positions from 0 to {len(rest) - 1} once")


def checked_skip(curriculum: Curriculum, task: Task, stats: Stats) -> bool:
    """Return the result of ``skip``; ``ConfigError``, with its file and line, if it is no bool, or it raises."""
    with blamed(KEY, curriculum.skip):
        found: object = curriculum.skip(task, stats)
    if not isinstance(found, bool | np.bool_):
        raise _returned(curriculum.skip, shortened(repr(found)), "True or False")
    return bool(found)


def all_skipped(curriculum: Curriculum, num_tasks: int, epoch: int) -> ConfigError:
    """Return the error for an epoch in which no task is left."""
    got = f"True for all of {num_tasks:,} tasks of epoch {epoch}"
    return _returned(curriculum.skip, got, "False for some: nothing is left to train on")


def check_first_epoch(curriculum: Curriculum, tasks: Sequence[Task], seed: int) -> None:
    """Raise a ``ConfigError`` if the curriculum cannot order the tasks of a new run, or skips them all."""
    stats: Stats = MappingProxyType({})
    order = checked_order(curriculum, tasks, stats, 0, np.random.default_rng(seed))
    if all(checked_skip(curriculum, tasks[at], stats) for at in order):
        raise all_skipped(curriculum, len(tasks), 0)


def _returned(method: Callable[..., Any], got: str, expected: str) -> ConfigError:
    place = place_of(method) or "it"
    return ConfigError(f"{KEY}: {method.__qualname__} returned {got}, expected {expected}; mend {place}")


def _ascending(keys: Sequence[float], rng: np.random.Generator) -> list[int]:
    """Return the positions by rising keys, in random order for equal keys."""
    shuffled = rng.permutation(len(keys))
    return list(map(int, shuffled[np.argsort(np.array(keys)[shuffled], kind="stable")]))
