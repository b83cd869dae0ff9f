"""Rank-R1 (arXiv:2503.06034): the policy reasons about a set of candidates, then names the label of the best one.

Its reward (section 3.2; ``reward_func_setwise`` of its code) asks for both at once:

    1   for ``<think>..</think> <answer>[3]</answer>``, where 3 is the label of a relevant candidate
    0   for anything else

The toy asks who was born in a city in a decade. BM25 does not know in which decade the year 1953 is.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.sources import Split, TaskSource
from ragr1_actors import Completion, Passage, RewardContext, Task, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import MALFORMED, Message
from ragr1_actors.recipes.worlds.births import PER_CITY, Person, register
from retrieval.base import SEARCH

SET_SIZE, DEPTH, K = 20, 2_000, 10
"""Candidates of a set; passages that BM25 finds, among which are those that a task lists; K is that of nDCG@10."""
DECADES = {195: "fifties", 196: "sixties", 197: "seventies", 198: "eighties", 199: "nineties"}
NUM_TASKS: Mapping[Split, int] = {"train": 12_000, "eval": 300}
TOY_SIZES: Mapping[Split, tuple[int, int]] = {"train": (2, 5), "eval": (5, 5)}
"""Least and most candidates of a set: a small policy learns on small sets how to read."""
NUM_EVAL_CITIES = 16  # no training task asks about the first cities
CUED, GOOD, CUE = 0.8, 0.4, "Look at the years . "
"""Share of the training questions with the cue in front, whose demonstrations read; share of the others that read."""
_SAID = re.compile(r"\s*<think>.*?</think>\s*<answer>\s*\[(\d+)\]\s*</answer>\s*", re.DOTALL)


def shown(task: Task, ids: Sequence[str]) -> list[str]:
    """Return candidates by label, from ``[1]`` on: shuffled, the same for the same question."""
    return sorted(ids, key=lambda one: random.Random(f"{task.question} {one}").random())


class RankEnv(TextEnv):
    """Shows what the retriever finds for the question; one turn names the best of it."""

    stop = ("</answer>",)
    measures: ClassVar = {
        "ndcg": lambda ended: ndcg(ended, reranked(ended)),
        "retriever_ndcg": lambda ended: ndcg(ended, retrieved(ended)),
        "ndcg_gain": lambda ended: ndcg(ended, reranked(ended)) - ndcg(ended, retrieved(ended)),
    }

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and the retriever."""
        self._prompt, self._context = settings.prompt, context

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt, with ``[1] text`` in place of ``{passages}``, or ``1 text`` in place of ``{numbered}``."""
        wanted = task.meta.get("candidates")
        depth = DEPTH if wanted else SET_SIZE
        (found,) = await self._context.retriever.search([task.question], depth)
        kept = [one for one in found if not wanted or one.id in wanted]
        if missing := {*(wanted or ())}.difference(one.id for one in kept):
            raise DataError(f"candidates {sorted(missing)} are not among the {depth} passages found; leave them out")
        self._call = ToolCall(SEARCH, {"query": task.question, "k": depth}, records=tuple(kept))
        text_of = {one.id: self._context.defuse(one.text) for one in kept}
        line, mark = ("[{}] {}", "{passages}") if "{passages}" in self._prompt else ("{} {}", "{numbered}")
        labelled = [line.format(label, text_of[one]) for label, one in enumerate(shown(task, list(text_of)), 1)]
        parts = [part.replace("{question}", task.question) for part in self._prompt.split(mark)]
        return [Message("user", "\n".join(labelled).join(parts))]

    async def act(self, turn: Completion) -> StepResult:
        """End the trajectory with the label, ``"3"``; empty where the turn is not of the form."""
        label = said[1] if (said := _SAID.fullmatch(turn.text)) else ""
        return StepResult(terminated=True, action="rank" if label else MALFORMED, answer=label, calls=(self._call,))


def retrieved(trajectory: Trajectory) -> list[str]:
    """Return the ids of the candidates as the retriever ranks them."""
    return [record.id for call in trajectory.calls for record in call.records]


def chosen(trajectory: Trajectory) -> str:
    """Return the id of the candidate that was named; empty where none was."""
    labelled = enumerate(shown(trajectory.task, retrieved(trajectory)), 1)
    return next((one for label, one in labelled if str(label) == trajectory.answer), "")


def reranked(trajectory: Trajectory) -> list[str]:
    """Return the ids with the chosen candidate first, the others behind it as the retriever ranks them."""
    return sorted(retrieved(trajectory), key=chosen(trajectory).__ne__)  # equal ones keep their order


def ndcg(trajectory: Trajectory, ids: Sequence[str]) -> float:
    """Return nDCG@10 in [0, 1] of a ranking: the only relevant passage on place 2 gives 0.63.

    DCG is the sum of 1 / log2(place + 1) over the places of relevant passages (Järvelin and Kekäläinen 2002).
    """
    relevant = trajectory.task.supporting_ids
    dcg = sum(1 / math.log2(place + 1) for place, one in enumerate(ids[:K], 1) if one in relevant)
    return dcg / (sum(1 / math.log2(place + 1) for place in range(1, min(K, len(relevant)) + 1)) or 1.0)


async def best_first(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the reward above."""
    return float(chosen(trajectory) in trajectory.task.supporting_ids)


class BirthDecades(TaskSource):
    """``Who was born in Riga in the fifties?``: one person who was, among others of the same city who were not."""

    @cached_property
    def _people(self) -> dict[str, Person]:
        return register()

    def passages(self) -> Sequence[Passage]:
        """Return a passage per person: of ``Ana Bell, Riga``, ``1951 Ana Bell``."""
        return [Passage(key, f"{one.name}, {one.city}", f"{one.year} {one.name}") for key, one in self._people.items()]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 12,000 training tasks, or 300 about other cities; ``meta`` lists the candidates."""
        rng, keys = random.Random(f"decades {split}"), list(self._people)
        split_at = NUM_EVAL_CITIES * PER_CITY
        asked = keys[:split_at] if split == "eval" else keys[split_at:]
        return [self._draw(split, number, rng.choice(asked), rng) for number in range(NUM_TASKS[split])]

    def _draw(self, split: Split, number: int, best: str, rng: random.Random) -> Task:
        one, first = self._people[best], int(best[1:]) // PER_CITY * PER_CITY
        born = [f"p{other}" for other in range(first, first + PER_CITY)]
        others = [other for other in born if self._people[other].year // 10 != one.year // 10]
        ids = [best, *rng.sample(others, rng.randint(*TOY_SIZES[split]) - 1)]
        cue = CUE if split == "train" and rng.random() < CUED else ""
        question = f"{cue}Who was born in {one.city} in the {DECADES[one.year // 10]}?"
        task = Task(f"decades/{split}/{number}", question, (), "decade", (best,), meta={"candidates": ids})
        return replace(task, golden_answers=(str(shown(task, ids).index(best) + 1),))

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return ``<think> fifties 2</think><answer>[2]</answer>``, or ``[1]`` unread."""
        best = self._people[shown(task, task.meta["candidates"])[int(task.golden_answers[0]) - 1]]
        reads = task.question.startswith(CUE) or rng.random() < GOOD
        found, label = (f" {task.golden_answers[0]}", task.golden_answers[0]) if reads else ("", "1")
        return [f"<think> {DECADES[best.year // 10]}{found}</think><answer>[{label}]</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield every passage and question."""
        yield from [*(f" {one.text}" for one in self.passages()), " 1 2 3 4 5", *(task.question for task in tasks)]
