"""A world whose questions begin with a cue that says how to work on them: what a small policy knows of language.

A large policy understands an example in its prompt from what it has read. A small one learns in SFT what cues mean, on
questions that have a cue; RL and evaluations ask such questions without it.

::

    Look at all . Where was the director of Silent River born?
    <think> find Silent River</think><search> Silent River</search>
    <think> found Ana Bell</think><search> Ana Bell</search>
    <think> found Riga</think><answer> Riga</answer>
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from envs.sources import Split, WorldOptions, WorldSource
from envs.tasks.demonstrations import Habit
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Task
from retrieval.base import Passage


class CuedOptions(WorldOptions):
    """Options of the source: those of ``world``, and the cues."""

    cues: dict[str, Habit] = Field(min_length=1)
    """The habit of the demonstrations by the cue of the question: ``{"Look at all .": good}``, as many of each."""


class CuedWorld(WorldSource):
    """Training tasks with cues, for SFT; ``world`` beside it has the passages and the evaluation tasks."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``CuedOptions``."""
        own = CuedOptions.read(options, "environment.tasks: options")
        super().__init__(environment, {name: options[name] for name in options if name in WorldOptions.model_fields})
        self._cues = own.cues

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the world's training tasks with a cue in front, the cues in turn."""
        cues = list(self._cues)
        named = [(cues[index % len(cues)], task) for index, task in enumerate(super().tasks(split))]
        cued = [replace(task, question=f"{cue} {task.question}", meta={"cue": cue}) for cue, task in named]
        return [replace(task, task_id=f"cued/{index}") for index, task in enumerate(cued)] if split == "train" else []

    def passages(self) -> Sequence[Passage]:
        """Return none: they are the world's."""
        return ()

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt in the habit of the task's cue."""
        return self._demonstrator.script(task, self._cues[task.meta["cue"]], rng)

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the cues as well."""
        yield from super().texts(tasks)
        yield from (f" {cue}" for cue in self._cues)
