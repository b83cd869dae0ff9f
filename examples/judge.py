"""A judge over HTTP: a language model says whether an answer is right. Evaluations use exact match, and pay nothing.

To train with it, with the address of your endpoint::

    ragr1 train quickstart environment.reward=examples.judge:Judge \\
      "environment.models={judge: {url: 'http://10.0.0.2:8000/v1', model: qwen, max_in_flight: 32}}"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.measures import exact_match
from ragr1_actors import RewardContext, RewardResult, Trajectory
from ragr1_actors.core.types import Message, Sampling

_QUESTION = (
    "Question: {question}\nReference answers: {golden}\nProposed answer: {answer}\n"
    "Do they mean the same? Reply with yes or no only."
)


class Judge:
    """1 where the model named ``judge`` says yes. An empty answer is not asked about."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._model = options.get("model", "judge")

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> RewardResult:
        is_same = exact_match(trajectory.answer, trajectory.task.golden_answers)
        if context.split != "train" or is_same or not trajectory.answer:
            return RewardResult(is_same, parts={"judged": 0.0})
        task = trajectory.task
        asked = _QUESTION.format(
            question=task.question, golden=" | ".join(task.golden_answers), answer=trajectory.answer
        )
        said = await context.models[self._model].chat([Message("user", asked)], Sampling(4, temperature=0.0))
        return RewardResult(float(said.strip().lower().startswith("yes")), parts={"judged": 1.0})
