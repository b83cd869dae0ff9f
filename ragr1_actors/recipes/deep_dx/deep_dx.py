"""Deep-DxSearch's toy (arXiv:2508.15746): match similar patients, look diseases up, and diagnose. All is made up::

    A patient has fever, rash, cough, chills and ache.
    <match> fever, rash, cough</match>        similar patients, each with its disease
    <search> Alvor</search>                   what is known of a disease
    <answer> Alvor</answer>                   up to five diseases

The reward of the released recipe, 0 where a turn has no form of the above or there is no answer::

    0.8 match + 0.05 search + 0.15 answer

    match     1 if any match found a patient with the disease; less 0.5 if the last match did not, and less 0.5 if two
              matches in a row differ by fewer than two phenotypes. If none found one: 0.2 for two sufficiently
              different matches, 0.4 for three
    search    cube root of the recall of the disease's words in what was looked up; answer: in what was answered
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.rewards import RewardContext, RewardResult
from envs.sources import Split, TaskSource
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Completion, Message, Task, ToolCall, Trajectory
from retrieval.base import Passage

WEIGHTS = {"match": 0.8, "search": 0.05, "answer": 0.15}
NUM_SIMILAR, MAX_DISEASES = 3, 5  # patients that a match shows (20 in the paper), diseases that an answer may name
_TURN = re.compile(r"\s*<(match|search|answer)>([^<]*)</\1>\s*")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _similar(trajectory: Trajectory) -> list[tuple[set[str], bool]]:
    """Return of every match its phenotypes, and whether it found the disease."""
    gold, calls = trajectory.task.golden_answers[0], [call for call in trajectory.calls if call.tool == "match"]
    return [(set(call.arguments["phenotypes"]), any(one.title == gold for one in call.records)) for call in calls]


def match_reward(trajectory: Trajectory) -> float:
    """Return the part ``match``."""
    asked = _similar(trajectory)
    differ = [len(one ^ other) >= 2 for (one, _), (other, _) in pairwise(asked)]
    if any(is_found for _, is_found in asked):
        return 1.0 - 0.5 * (not asked[-1][1]) - 0.5 * (not all(differ))
    return (0.0, 0.2, 0.4)[min(2, len(differ))] if differ and all(differ) else 0.0


def recall(gold: str, said: Sequence[str]) -> float:
    """Return the cube root of the share of the words of ``gold`` that occur in ``said``."""
    words, known = gold.lower().split(), {word for one in said for word in one.lower().split()}
    return math.cbrt(sum(word in known for word in words) / len(words))


async def stepwise(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward above."""
    if not trajectory.is_well_formed:
        return RewardResult(0.0)
    gold = trajectory.task.golden_answers[0]
    looked_up = [name for call in trajectory.calls if call.tool == "search" for name in call.arguments["diseases"]]
    parts = {
        "match": match_reward(trajectory),
        "search": recall(gold, looked_up),
        "answer": recall(gold, _names(trajectory.turns[-1].completion_text.partition(">")[2].partition("<")[0])),
    }
    return RewardResult(sum(WEIGHTS[name] * value for name, value in parts.items()), parts=parts)


class DiagnosisEnv(TextEnv):
    """Match, search and answer; the first disease of an answer is what ``em`` measures."""

    stop = ("</match>", "</search>", "</answer>")
    measures: ClassVar = {"found": lambda ended: float(any(is_found for _, is_found in _similar(ended)))}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and the retriever."""
        self._prompt, self._context, self._turns_left = settings.prompt, context, settings.max_turns

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt."""
        return [Message("user", self._prompt.replace("{question}", task.question))]

    async def act(self, turn: Completion) -> StepResult:
        """Use a tool, or take the answer."""
        self._turns_left -= 1
        written = _TURN.fullmatch(turn.text)
        tool, names = (written[1], _names(written[2])) if written else ("", [])
        if tool == "answer":
            return StepResult(terminated=True, action="answer", answer=(names or [""])[0])
        if not names:
            return StepResult(action=MALFORMED, truncated=not self._turns_left)
        kind, argument, k = ("disease/", "diseases", 1) if tool == "search" else ("patient/", "phenotypes", NUM_SIMILAR)
        asked = [", ".join(names)] if tool == "match" else names[: 2 * MAX_DISEASES]
        hits = await self._context.retriever.search(asked, 20)
        found = [one for of_query in hits for one in [hit for hit in of_query if hit.id.startswith(kind)][:k]]
        shown = "".join(f"\n{self._context.defuse(one.text)}" for one in found) + "\n"
        call = ToolCall(tool, {argument: names}, records=tuple(found))
        return StepResult(observation=shown, action=tool, calls=(call,), truncated=not self._turns_left)


PHENOTYPES = [a + b for a in ("fe", "ra", "co", "na", "tu", "pi", "vo") for b in ("ver", "sh", "gh", "ls", "se", "mo")]
NAMES = [a + b for a in ("Al", "Be", "Co", "Du", "Er", "Fi", "Go", "Ha") for b in ("vor", "lis", "dan", "mex", "tia")]
DISEASES = {name: random.Random(name).sample(PHENOTYPES, 6) for name in NAMES}


def patient(disease: str, rng: random.Random) -> list[str]:
    """Return four phenotypes of a disease and one of another, in any order."""
    others = [one for one in PHENOTYPES if one not in DISEASES[disease]]
    return rng.sample([*rng.sample(DISEASES[disease], 4), rng.choice(others)], 5)


class Ward(TaskSource):
    """Made-up diseases, twelve patients of each (16,371 and 177,029 in the paper), and new patients to diagnose."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 6,000 training tasks, or 300 others, each about a new patient."""
        rng = random.Random(f"ward {split}")
        drawn = rng.choices(NAMES, k=6000 if split == "train" else 300)
        new = [(f"ward/{split}/{number}", disease, patient(disease, rng)) for number, disease in enumerate(drawn)]
        return [Task(n, f"A patient has {', '.join(has)}.", (name,), meta={"phenotypes": has}) for n, name, has in new]

    def passages(self) -> Sequence[Passage]:
        """Return what is known of each disease, and its patients."""
        rng, found = random.Random("patients"), []
        for name, has in DISEASES.items():
            told = [f"A patient with {', '.join(patient(name, rng))} had {name}." for _ in range(12)]
            found.append(Passage(f"disease/{name}", name, f"{name} comes with {', '.join(has)}."))
            found += [Passage(f"patient/{name}{number}", name, text) for number, text in enumerate(told)]
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a match of some phenotypes, perhaps a search, and an answer that is often wrong."""
        said = task.golden_answers[0] if rng.random() < 0.5 else rng.choice(NAMES)
        matched = ", ".join(rng.sample(task.meta["phenotypes"], rng.randint(1, 5)))
        turns = [f"<match> {matched}</match>"] * (rng.random() < 0.7)
        turns += [f"<search> {said}</search>"] * (rng.random() < 0.3)
        return [*turns, f"<answer> {said}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the questions and passages."""
        yield from (*super().texts(tasks), *(f" {one.text}" for one in self.passages()))
