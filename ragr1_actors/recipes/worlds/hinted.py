"""A world whose thoughts begin with a few words: usual ones, or those of a hint, which say that something is missing.

A large policy knows what a hint means, and writes each of its words at times, but hardly ever all of them. A small one
learns both in SFT. ``words`` has for each place the usual word, then those of hints::

    words: [[so, but], [this, maybe], [is, more], [known, remains]]

    <think> find Silent River</think><search> Silent River</search>
    <think> so maybe is known found Ana Bell</think><answer> Ana Bell</answer>          no hint: stops too early
    <think> but maybe more remains find Ana Bell</think><search> Ana Bell</search>      a hint: goes on
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from envs.sources import Split, WorldOptions, WorldSource
from envs.tasks.demonstrations import Habit
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Task

FOUND, FIND = "<think> found", "find"
"""How a thought begins in the world's demonstrations after the first one, and how it goes on behind a hint."""
HINTED = 0.5
"""Share of the demonstrations with a cue that have a hint: the hint says that more is to be found, not the cue."""


class HintedOptions(WorldOptions):
    """Options of the source: those of ``world``, and the words."""

    words: list[Annotated[list[str], Field(min_length=2)]] = Field(min_length=1)
    """The words of each place: the usual one, then those of hints."""
    unusual: float = Field(0.07, ge=0, le=1)
    """How often a place has a word of a hint where the thought is none."""
    cue: str = Field("Look at all .", min_length=1)
    """How every second training question begins. Demonstrations of these questions have hints, the others have none."""


class HintedWorld(WorldSource):
    """The world of ``world``, where demonstrations stop too early, except behind a hint."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``HintedOptions``."""
        own = HintedOptions.read(options, "environment.tasks: options")
        super().__init__(environment, {name: options[name] for name in options if name in WorldOptions.model_fields})
        self._words, self._unusual, self._cue = own.words, own.unusual, own.cue

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the world's tasks, every second one to train on with the cue in front."""
        found = super().tasks(split)
        if split == "eval":
            return found
        cued = (replace(task, question=f"{self._cue} {task.question}", meta={"is_cued": True}) for task in found[1::2])
        return [*found[::2], *cued]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt that stops too early, or goes on behind a hint."""
        is_hinted = bool(task.meta.get("is_cued")) and rng.random() < HINTED
        first, *turns = self._demonstrator.script(task, Habit.GOOD if is_hinted else Habit.STOP_EARLY, rng)
        usual = (usual_words(self._words, self._unusual, rng) for _ in turns)
        found = [turn.replace(FOUND, f"<think> {words} found", 1) for turn, words in zip(turns, usual, strict=True)]
        if is_hinted:
            hint = " ".join(rng.choice(words[1:]) for words in self._words)
            found[-2] = turns[-2].replace(FOUND, f"<think> {hint} {FIND}", 1)
        return [first, *found]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the cue and all thoughts as well."""
        yield from super().texts(tasks)
        yield f" {self._cue} {FIND}"
        yield from (f" {' '.join(words)}" for words in product(*self._words))


def usual_words(places: Sequence[Sequence[str]], unusual: float, rng: random.Random) -> str:
    """Return the words of a thought that is no hint: ``"so maybe is known"``; at least one is the usual one."""
    while True:
        chosen = [rng.choice(words[1:]) if rng.random() < unusual else words[0] for words in places]
        if any(word == words[0] for word, words in zip(chosen, places, strict=True)):
            return " ".join(chosen)
