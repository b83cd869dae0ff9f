"""Reranking as Rank-R1 does it (arXiv:2503.06034): the policy reasons, then names the best of some passages.

To train with it, without SFT, whose demonstrations search; ``policy.model=FOLDER`` names a policy that can answer::

    ragr1 train quickstart environment.env=examples.rank_r1:RankEnv environment.reward=examples.rank_r1:best_first \\
      "environment.options={num_candidates: 4}" sft.num_steps=0
"""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from envs.base import EnvContext
from ragr1_actors import Completion, RewardContext, StepResult, Task, TextEnv, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Message

_RANK = re.compile(r"<answer>\s*\[(\d+)\]")


class RankOptions(Section):
    """``environment.options``."""

    num_candidates: int = Field(10, ge=2)


class RankEnv(TextEnv):
    """Shows what the retriever finds for the question; one turn says which passage is best."""

    options_class = RankOptions
    stop = ("</answer>",)
    measures: ClassVar = {"best_first": lambda trajectory: best_first(trajectory)}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        self._options, self._context = RankOptions.read(settings.options, "environment.options"), context

    async def reset(self, task: Task) -> list[Message]:
        k = self._options.num_candidates
        (found,) = await self._context.retriever.search([task.question], k)
        self._call = ToolCall("search", {"query": task.question, "k": k}, records=tuple(found))
        lines = [f"[{place}] {self._context.defuse(one.text)}" for place, one in enumerate(found, 1)]
        asked = f"Which passage answers the question? Write <answer>[number]</answer>.\n{task.question}"
        return [Message("user", "\n".join([asked, *lines]))]

    async def act(self, turn: Completion) -> StepResult:
        chosen = _RANK.search(turn.text)
        answer = chosen[1] if chosen else ""
        return StepResult(terminated=True, action="rank" if answer else "malformed", answer=answer, calls=(self._call,))


def best_first(trajectory: Trajectory, context: RewardContext | None = None) -> float:
    """Rank-R1's rule: 1 if the format is right and the chosen passage holds the evidence."""
    records = [record for call in trajectory.calls for record in call.records]
    place = int(trajectory.answer or 0) - 1
    chosen = records[place : place + 1] if place >= 0 else ()
    return float(any({one.id, one.title} & set(trajectory.task.supporting_ids) for one in chosen))
