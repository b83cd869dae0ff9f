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
    search,   cube root of the recall of the disease's words in what was looked up, and in what was answered
    answer
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.rewards import RewardContext, RewardResult
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Completion, Message, StopReason, Task, ToolCall, Trajectory

WEIGHTS = {"match": 0.8, "search": 0.05, "answer": 0.15}
NUM_SIMILAR, MAX_DISEASES = 3, 5
"""Patients that a match shows (20 in the paper), and diseases that an answer may name."""
_TURN = re.compile(r"\s*<(match|search|answer)>([^<]*)</\1>\s*")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _similar(trajectory: Trajectory) -> list[tuple[set[str], bool]]:
    """Return of every match its phenotypes, and whether it found the disease."""
    gold = trajectory.task.golden_answers[0]
    calls = [call for call in trajectory.calls if call.tool == "match"]
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
    is_valid = all(turn.action != MALFORMED for turn in trajectory.turns)
    if not is_valid or trajectory.stop_reason is not StopReason.ANSWERED:
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
        kind, argument = ("patient/", "phenotypes") if tool == "match" else ("disease/", "diseases")
        asked = [", ".join(names)] if tool == "match" else names[: 2 * MAX_DISEASES]
        hits = await self._context.retriever.search(asked, 20)
        limit = NUM_SIMILAR if tool == "match" else 1
        found = [one for of_query in hits for one in [hit for hit in of_query if hit.id.startswith(kind)][:limit]]
        shown = "".join(f"\n{self._context.defuse(one.text)}" for one in found) + "\n"
        call = ToolCall(tool, {argument: names}, records=tuple(found))
        return StepResult(observation=shown, action=tool, calls=(call,), truncated=not self._turns_left)
