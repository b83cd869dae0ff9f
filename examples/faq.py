"""Fetch or skip: a policy that decides per question whether looking an answer up is worth its price.

To train with it, without SFT, whose demonstrations search::

    ragr1 train quickstart environment.env=examples.faq:FaqEnv environment.reward=none sft.num_steps=0 \\
      environment.tasks=tasks.jsonl retrieval.corpus=passages.json

A line of tasks.jsonl: ``{"question": ..., "answer": ..., "follow_up": true}``; the environment reads the last field in
``Task.meta``. The quickstart's policy is untrained: ``policy.model=FOLDER`` names one that can answer.
"""

from __future__ import annotations

from envs.base import EnvContext
from ragr1_actors import Completion, Record, StepResult, Task, TextEnv, ToolCall
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message

PRICE = 0.25


class FaqEnv(TextEnv):
    """``fetch`` shows a passage, ``skip`` does not; then the policy answers. Rewards are per turn."""

    stop = ("</act>", "</answer>")

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        self._context = context

    async def reset(self, task: Task) -> list[Message]:
        self._task, self._has_acted = task, False
        rule = "Write <act>fetch</act> to look it up or <act>skip</act>, then <answer>your answer</answer>."
        return [Message("user", f"{rule}\n{task.question}")]

    async def act(self, turn: Completion) -> StepResult:
        if self._has_acted:
            said = turn.text.partition("<answer>")[2].partition("</answer>")[0].strip()
            is_right = said in self._task.golden_answers
            return StepResult(terminated=True, action="answer", answer=said, reward=float(is_right))
        self._has_acted = True
        if "<act>skip</act>" in turn.text:
            # a follow-up is about what was shown before: fetching again would be a waste
            return StepResult(action="skip", reward=PRICE if self._task.meta.get("follow_up") else 0.0)
        (found,) = await self._context.retriever.search([self._task.question], 1)
        records = tuple(Record(one.id, one.title, one.text, one.score) for one in found)
        call = ToolCall("fetch", {"question": self._task.question}, records=records)
        shown = "".join(f"\n{self._context.defuse(one.text)}\n" for one in found)
        return StepResult(observation=shown, action="fetch", calls=(call,), reward=-PRICE)
