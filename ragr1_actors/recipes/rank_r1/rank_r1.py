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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.sources import Split, TaskSource
from envs.tasks.world import Entity, EntityKind, make_world
from ragr1_actors import Completion, Passage, RewardContext, Task, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message
from retrieval.base import SEARCH

SET_SIZE, DEPTH, K = 20, 100, 10
"""Candidates of a set: one relevant and 19 others, drawn from the first 100 that BM25 finds. K is that of nDCG@10."""
DECADES = {195: "fifties", 196: "sixties", 197: "seventies", 198: "eighties", 199: "nineties"}
NUM_TASKS: Mapping[Split, int] = {"train": 12_000, "eval": 300}
TOY_SIZES: Mapping[Split, tuple[int, int]] = {"train": (2, 5), "eval": (5, 5)}
"""Least and most candidates of a set: a small policy learns on small sets how to read."""
NUM_EVAL_CITIES = 16
"""No training task asks about these: the policy cannot have learned by heart who was born there."""
GOOD, CUE = 0.4, "Look at the years . "
"""Share of the demonstrations that read, the others name the first candidate; with the cue in front all read."""
_SAID = re.compile(r"\s*<think>.*?</think>\s*<answer>\s*\[(\d+)\]\s*</answer>\s*", re.DOTALL)


def shown(task: Task, ids: Sequence[str]) -> list[str]:
    """Return candidates in the order of their labels, the first is ``[1]``: shuffled, the same for the same set."""
    return sorted(ids, key=lambda one: random.Random(f"{task.task_id} {one}").random())


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
        """Return the prompt, with the candidates and their labels in place of ``{passages}``."""
        (found,) = await self._context.retriever.search([task.question], DEPTH)
        wanted = task.meta.get("candidates", [one.id for one in found[:SET_SIZE]])
        kept = [one for one in found if one.id in wanted]
        self._call = ToolCall(SEARCH, {"query": task.question, "k": DEPTH}, records=tuple(kept))
        text_of = {one.id: self._context.defuse(one.text) for one in kept}
        labelled = [f"[{label}] {text_of[one]}" for label, one in enumerate(shown(task, list(text_of)), 1)]
        parts = [part.replace("{question}", task.question) for part in self._prompt.split("{passages}")]
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
    relevant = trajectory.task.supporting_ids  # at least one
    dcg = sum(1 / math.log2(place + 1) for place, one in enumerate(ids[:K], 1) if one in relevant)
    return dcg / sum(1 / math.log2(place + 1) for place in range(1, min(K, len(relevant)) + 1))


async def best_first(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the reward above."""
    return float(chosen(trajectory) in trajectory.task.supporting_ids)


class BirthDecades(TaskSource):
    """``Who was born in Riga in the fifties?``: one person who was, among others of the same city who were not."""

    @cached_property
    def _people(self) -> dict[str, Entity]:
        return {one.passage_id: one for one in make_world(0).entities.values() if one.kind is EntityKind.PERSON}

    def passages(self) -> Sequence[Passage]:
        """Return a passage per person, as in a register of births: ``1951: Ana Bell of Riga``."""
        text = "{0.year}: {0.name} of {0.place_or_maker}"
        return [Passage(one.passage_id, one.name, text.format(one)) for one in self._people.values()]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 12,000 training tasks, or 300 about other cities; ``meta`` lists the candidates."""
        rng, born = random.Random(f"decades {split}"), defaultdict[str, list[Entity]](list)
        for person in self._people.values():
            born[person.place_or_maker].append(person)
        asked = sorted(born)[:NUM_EVAL_CITIES] if split == "eval" else sorted(born)[NUM_EVAL_CITIES:]
        return [self._draw(split, number, born[rng.choice(asked)], rng) for number in range(NUM_TASKS[split])]

    def _draw(self, split: Split, number: int, born: list[Entity], rng: random.Random) -> Task:
        best = rng.choice(born)
        others = [one.passage_id for one in born if (one.year or 0) // 10 != (best.year or 0) // 10]
        ids = [best.passage_id, *rng.sample(others, rng.randint(*TOY_SIZES[split]) - 1)]
        cue = CUE if split == "train" and number % 2 else ""
        question = f"{cue}Who was born in {best.place_or_maker} in the {DECADES[(best.year or 0) // 10]}?"
        task = Task(f"decades/{split}/{number}", question, (), "decade", (best.passage_id,), meta={"candidates": ids})
        return replace(task, golden_answers=(str(shown(task, ids).index(best.passage_id) + 1),))

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return ``<think> fifties 1 1963 no 2 1951 yes</think><answer>[2]</answer>``, or ``[1]`` without a year."""
        best, reads = int(task.golden_answers[0]), task.question.startswith(CUE) or rng.random() < GOOD
        years = [self._people[one].year or 0 for one in shown(task, task.meta["candidates"])[:best]]
        words = (f" {label} {year} {'yes' if label == best else 'no'}" for label, year in enumerate(years, 1))
        thought = "".join([DECADES[years[-1] // 10], *words][: None if reads else 1])
        return [f"<think> {thought}</think><answer>[{best if reads else 1}]</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield every passage and question."""
        passages = (f" {passage.text}" for passage in self.passages())
        yield from [*passages, *(task.question for task in tasks), " 1 2 3 4 5 no yes"]
