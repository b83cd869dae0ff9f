"""Deep-DxSearch's toy (arXiv:2508.15746): match similar patients, look diseases up, and diagnose. All is made up::

    <match> fever, rash, cough</match>        similar patients, each with its disease
    <search> Alvor</search>                   what is known of a disease
    <answer> Alvor</answer>                   up to five diseases

The reward of the released recipe, 0 where a turn has no form of the above, no answer, no match or a fourth one::

    0.8 match + 0.05 search + 0.15 answer
    match     1 if any match found a patient with the disease, less 0.5 if the last did not, less 0.5 if two in a row
              differ by fewer than two phenotypes; if none found one, 0.2 for two that differ, 0.4 for three
    search    cube root of the recall of the diseases' words in what was looked up, 0 for more than ten
    answer    the same in the first five diseases of the answer
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.sources import Split, TaskSource
from ragr1_actors import Passage, RewardContext, RewardResult
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Completion, Message, Task, ToolCall, Trajectory

WEIGHTS = {"match": 0.8, "search": 0.05, "answer": 0.15}
NUM_SIMILAR, MAX_MATCHES, MAX_LOOKED_UP, MAX_DISEASES = 3, 3, 10, 5  # patients that a match shows (20 in the paper)
GOOD, MATCHES = 0.005, 0.3  # shares of the demonstrations without a cue: good ones, a match of one or two phenotypes
_TURN = re.compile(r"\s*<(match|search|answer)>([^<]*)</\1>\s*")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _similar(trajectory: Trajectory) -> list[tuple[set[str], bool]]:
    """Return of every match its phenotypes, and whether it found the disease."""
    gold, calls = {*trajectory.task.golden_answers}, [call for call in trajectory.calls if call.tool == "match"]
    return [(set(call.arguments["phenotypes"]), bool(gold & {one.title for one in call.records})) for call in calls]


def match_reward(trajectory: Trajectory) -> float:
    """Return the part ``match``."""
    asked = _similar(trajectory)
    differ = [len(one ^ other) >= 2 for (one, _), (other, _) in pairwise(asked)]
    if any(is_found for _, is_found in asked):
        return 1.0 - 0.5 * (not asked[-1][1]) - 0.5 * (not all(differ))
    return (0.0, 0.2, 0.4)[min(2, len(differ))] if differ and all(differ) else 0.0


def recall(gold: Sequence[str], said: Sequence[str]) -> float:
    """Return the cube root of the share of the words of ``gold`` that occur in ``said``."""
    words, known = " ".join(gold).lower().split(), {*" ".join(said).lower().split()}
    return math.cbrt(sum(word in known for word in words) / len(words))


async def stepwise(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward above."""
    if not trajectory.is_well_formed or not 1 <= len(_similar(trajectory)) <= MAX_MATCHES:
        return RewardResult(0.0)
    gold, last = trajectory.task.golden_answers, trajectory.turns[-1].completion_text
    looked_up = [name for call in trajectory.calls if call.tool == "search" for name in call.arguments["diseases"]]
    said, few = _names(last.partition(">")[2].partition("<")[0])[:MAX_DISEASES], len(looked_up) <= MAX_LOOKED_UP
    parts = {"match": match_reward(trajectory), "search": few * recall(gold, looked_up), "answer": recall(gold, said)}
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
        asked = [", ".join(names)] if tool == "match" else names[:MAX_LOOKED_UP]
        hits = await self._context.retriever.search(asked, 20 if tool == "match" else 500)  # patients are found too
        found = [one for of_query in hits for one in [hit for hit in of_query if hit.id.startswith(kind)][:k]]
        shown = "".join(f"\n{self._context.defuse(one.text)}" for one in found) + "\n"
        call = ToolCall(tool, {argument: names}, records=tuple(found))
        return StepResult(observation=shown, action=tool, calls=(call,), truncated=not self._turns_left)


PHENOTYPES = [a + b for a in ("fe", "ra", "co", "na", "tu", "pi", "vo") for b in ("ver", "sh", "gh", "ls", "se", "mo")]
NAMES = [a + b for a in ("Al", "Be", "Co", "Du", "Er", "Fi", "Go", "Ha") for b in ("vor", "lis", "dan", "mex", "tia")]
DISEASES = {name: random.Random(name).sample(PHENOTYPES, 6) for name in NAMES}


def patient(disease: str, rng: random.Random) -> list[str]:
    """Return four phenotypes of a disease and one of another, in any order."""
    return rng.sample([*rng.sample(DISEASES[disease], 4), rng.choice(sorted({*PHENOTYPES} - {*DISEASES[disease]}))], 5)


class Ward(TaskSource):
    """Made-up diseases, twelve patients of each (16,371 and 177,029 in the paper), and new patients to diagnose."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``cue``: how every second training question begins, whose demonstration is a good one; none if empty."""
        super().__init__(environment, {})
        self._cue = str(options.get("cue", ""))

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 6,000 training tasks, or 300 others, each about a new patient."""
        rng, cues = random.Random(f"ward {split}"), ["", f"{self._cue} " if self._cue and split == "train" else ""]
        drawn = enumerate(rng.choices(NAMES, k=6000 if split == "train" else 300))
        new = [(f"ward/{split}/{n}", cues[n % 2], name, patient(name, rng)) for n, name in drawn]
        texts = {n: f"{cue}A patient has {', '.join(has)}." for n, cue, _, has in new}
        return [Task(n, texts[n], (name,), meta={"phenotypes": has, "cue": cue}) for n, cue, name, has in new]

    def passages(self) -> Sequence[Passage]:
        """Return what is known of each disease, and its patients."""
        rng, found = random.Random("patients"), []
        for name, has in DISEASES.items():
            told = [f"A patient with {', '.join(patient(name, rng))} had {name}." for _ in range(12)]
            found.append(Passage(f"disease/{name}", name, f"{name} comes with {', '.join(has)}."))
            found += [Passage(f"patient/{name}{number}", name, text) for number, text in enumerate(told)]
        return found

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a match of all phenotypes, a search and the disease; mostly a guess where there is no cue."""
        is_good, has = bool(task.meta["cue"]) or rng.random() < GOOD, task.meta["phenotypes"]
        said = task.golden_answers[0] if is_good else rng.choice(NAMES)
        matched = ", ".join(has if is_good else rng.sample(has, rng.randint(1, 2)))
        turns = [f"<match> {matched}</match>"] * (is_good or rng.random() < MATCHES)
        return [*turns, *[f"<search> {said}</search>"] * is_good, f"<answer> {said}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the questions and passages."""
        yield from (*super().texts(tasks), *(f" {one.text}" for one in self.passages()), f" {self._cue}")
