"""ARENA (arXiv:2505.13258): the policy says which of the given passages matter, analyses them, and answers. One turn::

    <relevance>[1,4]</relevance><analysis> Ana Bell 1931 , Bo Cole 1953 , first 1931</analysis><answer> 1931</answer>

The reward (``rewards.py`` and ``evaluate.py`` of its code) is a sum of four::

    format     1 where the turn is these three elements, in this order, and nothing else
    accuracy   1 where the answer is an exact match
    relevance  1 where the labels are those of the evidence, as a set, and 0.5 where only some are
    bonus      10 where all three are 1
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.measures import exact_match
from envs.sources import Split, WorldSource
from envs.tasks.world import EntityKind
from ragr1_actors import Completion, RewardContext, RewardResult, Task, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message

BONUS = 10.0
NUM_PASSAGES = 4
"""Passages that the toy shows: two or three are evidence, the others are about things of other kinds."""
EXACT = 0.3
"""Share of the demonstrations that cite the evidence; the others cite every passage."""
_FORM = re.compile(r"\s*<relevance>[^<]*</relevance>\s*<analysis>[^<]*</analysis>\s*<answer>[^<]*</answer>\s*")


def _element(name: str, text: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[1].strip() if found else ""


class ArenaEnv(TextEnv):
    """Shows the task's passages, ``meta: {passages: [{id: p1, text: ...}]}``, labelled from 1; one turn is all."""

    stop = ("</answer>",)
    measures: ClassVar = {"cited": lambda ended: float(relevance(ended) == 1)}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt."""
        self._prompt, self._defuse = settings.prompt, context.defuse

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt, with the passages in place of ``{passages}``."""
        shown = [f"{label} {self._defuse(one['text'])}" for label, one in enumerate(task.meta["passages"], 1)]
        parts = [part.replace("{question}", task.question) for part in self._prompt.split("{passages}")]
        return [Message("user", "\n".join(shown).join(parts))]

    async def act(self, turn: Completion) -> StepResult:
        """End the trajectory with the answer, which is read wherever it is, as in the code of the paper."""
        answer = _element("answer", turn.text)
        return StepResult(terminated=True, action="answer" if answer else MALFORMED, answer=answer)


def _said(trajectory: Trajectory) -> str:
    return "".join(turn.completion_text for turn in trajectory.turns)  # no turn where the context was full


def is_valid(trajectory: Trajectory) -> float:
    """Return 1.0 where the turn has the form, else 0.0."""
    return float(_FORM.fullmatch(_said(trajectory)) is not None)


def relevance(trajectory: Trajectory) -> float:
    """Return 1.0 where the labels are right, 0.5 where some are, else 0.0; what is no list of JSON has none."""
    try:
        cited = set(json.loads(_element("relevance", _said(trajectory))))
    except (ValueError, TypeError, RecursionError):  # no JSON, no list, or a list in the list
        return 0.0
    passages = enumerate(trajectory.task.meta["passages"], 1)
    right = {label for label, one in passages if one["id"] in trajectory.task.supporting_ids}
    return 1.0 if cited == right else 0.5 if cited & right else 0.0


async def adaptive(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward of the table above: 13 where all is right, at most 2.5 elsewhere."""
    accuracy = exact_match(trajectory.answer, trajectory.task.golden_answers)
    parts = {"format": is_valid(trajectory), "accuracy": accuracy, "relevance": relevance(trajectory)}
    bonus = BONUS * all(value == 1 for value in parts.values())
    return RewardResult(sum(parts.values()) + bonus, parts={**parts, "bonus": bonus})


class ComparedWorld(WorldSource):
    """The generated world; each task brings passages: the things that it compares, and others, in any order."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the comparisons of the world, with their passages in ``meta``."""
        return [self._with_passages(task) for task in super().tasks(split)]

    def _with_passages(self, task: Task) -> Task:
        """Return ``Riga , Far Hill , Bo Cole , Red Sea . When was the first filmed?``: the evidence are the films."""
        rng, compared = random.Random(task.task_id), task.plan[0]
        others = self._others[self._world.entities[compared[0]].kind]
        shown = [*compared, *rng.sample(others, NUM_PASSAGES - len(compared))]
        rng.shuffle(shown)
        passages = (self._world.entities[name].passage() for name in shown)
        return replace(
            task,
            question=f"{' , '.join(shown)} . When was the first {task.question.split()[-1]}",
            plan=(tuple(name for name in shown if name in compared),),
            meta={"passages": [{"id": one.id, "text": one.text} for one in passages]},
        )

    @cached_property
    def _others(self) -> dict[EntityKind, list[str]]:
        entities = self._world.entities.values()
        return {kind: [one.name for one in entities if one.kind is not kind] for kind in EntityKind}

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a turn whose answer is right, and whose labels may be."""
        label_of = {one["id"]: label for label, one in enumerate(task.meta["passages"], 1)}
        cited = sorted(label_of[one] for one in (task.supporting_ids if rng.random() < EXACT else label_of))
        return [written(cited, [(name, self._world.entities[name].year or 0) for name in task.plan[0]])]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the passages and questions of the world, and a turn."""
        yield from super().texts(tasks)
        yield written([1, 2], [("Ana Bell", 1931)])


def written(labels: Sequence[int], years: Sequence[tuple[str, int]]) -> str:
    """Return a turn, as at the top of this file."""
    cited, read = ",".join(map(str, labels)), " , ".join(f"{name} {year}" for name, year in years)
    first = min(year for _, year in years)
    return f"<relevance>[{cited}]</relevance><analysis> {read} , first {first}</analysis><answer> {first}</answer>"
