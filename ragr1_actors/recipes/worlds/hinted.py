"""A world whose thoughts begin with a few words: usual ones, or those of a hint, which say that something is missing.

A large policy knows what a hint means, and writes each of its words at times, but hardly ever all of them. A small one
learns both in SFT. ``words`` has for each place the usual word, then those of hints::

    words: [[so, but], [this, maybe], [is, more], [known, remains]]

In a third of the demonstrations the environment writes a hint behind what was found, so that SFT learns to go on behind
a hint, and not to write one. In another third it writes some words of one, which mean nothing::

    policy       <think> find Silent River</think><search> Silent River</search>
    environment  <information> ... </information>
    policy       <think> so maybe is known found Ana Bell</think><answer> Ana Bell</answer>      stops too early

    environment  <information> ... </information><think> but maybe more remains
    policy        find Ana Bell</think><search> Ana Bell</search>                                goes on

    environment  <information> ... </information><think> but maybe is remains
    policy        found Ana Bell</think><answer> Ana Bell</answer>                               stops too early
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from envs.base import StepResult
from envs.grammars.tags import Action
from envs.search import SearchEnv
from envs.sources import Split, WorldOptions, WorldSource
from envs.tasks.demonstrations import Habit
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message, Task

THINK, FOUND, FIND = "<think>", "<think> found", "find"
"""How a thought begins, also in the world's demonstrations after the first turn, and how it goes on behind a hint."""


class HintedOptions(WorldOptions):
    """Options of the source: those of ``world``, and the words."""

    words: list[Annotated[list[str], Field(min_length=2)]] = Field(min_length=1)
    """The words of each place: the usual one, then those of hints."""
    unusual: float = Field(0.03, ge=0, le=1)
    """How often a place has a word of a hint where the thought is none."""


class HintedWorld(WorldSource):
    """The world of ``world``, where demonstrations stop a search too early, except behind a hint."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``HintedOptions``."""
        own = HintedOptions.read(options, "environment.tasks: options")
        super().__init__(environment, {name: options[name] for name in options if name in WorldOptions.model_fields})
        self._words, self._unusual = own.words, own.unusual

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the world's tasks; of three to train on, one has a hint in ``meta["hint"]``, and one a part of one."""
        found, rng = list(super().tasks(split)), random.Random(0)
        if split == "train":
            num_places = len(self._words)
            for index, task in enumerate(found):
                if index % 3:  # 1: a whole hint, 2: a part
                    count = num_places if index % 3 == 1 else rng.randrange(1, num_places)
                    places = set(rng.sample(range(num_places), count))
                    chosen = [rng.choice(w[1:]) if place in places else w[0] for place, w in enumerate(self._words)]
                    found[index] = replace(task, meta={"hint": " ".join(chosen)})
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt that stops too early, or goes on behind the hint that ``HintedEnv`` writes."""
        hint = task.meta.get("hint", "").split()
        goes_on = bool(hint) and all(word != words[0] for word, words in zip(hint, self._words, strict=True))
        first, *turns = self._demonstrator.script(task, Habit.GOOD if goes_on else Habit.STOP_EARLY, rng)
        usual = (usual_words(self._words, self._unusual, rng) for _ in turns)
        found = [turn.replace(FOUND, f"{THINK} {words} found", 1) for turn, words in zip(turns, usual, strict=True)]
        if goes_on:
            found[-2] = turns[-2].replace(FOUND, f" {FIND}", 1)
        elif hint:
            found[-1] = turns[-1].replace(THINK, "", 1)
        return [first, *found]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield all thoughts as well."""
        yield from super().texts(tasks)
        yield f" {FIND}"
        yield from (f" {' '.join(words)}" for words in product(*self._words))


class HintedEnv(SearchEnv):
    """``SearchEnv`` that begins a thought with the task's hint, if it has one, where the last search is due."""

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt."""
        self._hint, self._searches_to_hint = task.meta.get("hint", ""), len(task.plan) - 1
        return await super().reset(task)

    def parse(self, completion: str) -> Action:
        """Return the turn's one action; behind a hint the turn begins inside a thought."""
        return super().parse(THINK + completion if self._is_due else completion)

    async def step(self, queries: list[str]) -> StepResult:
        """Search, and end with the hint where it is due."""
        result = await super().step(queries)
        self._searches_to_hint -= 1
        return replace(result, notice=f"{result.notice}{THINK} {self._hint}") if self._is_due else result

    @property
    def _is_due(self) -> bool:
        return bool(self._hint) and self._searches_to_hint == 0


def usual_words(places: Sequence[Sequence[str]], unusual: float, rng: random.Random) -> str:
    """Return the words of a thought that is no hint: ``"so maybe is known"``; at least one is the usual one."""
    while True:
        chosen = [rng.choice(words[1:]) if rng.random() < unusual else words[0] for words in places]
        if any(word == words[0] for word, words in zip(chosen, places, strict=True)):
            return " ".join(chosen)
