"""Rewards: plain functions of a task and an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ragr1_actors.core.text import normalize_answer
from ragr1_actors.core.types import Task

RewardFn = Callable[[Task, str], float]
"""``(task, answer) -> reward``. ``answer`` is empty where the policy gave none."""


def exact_match(answer: str, golden_answers: Sequence[str]) -> float:
    """1.0 where the normalised answer equals any normalised gold answer and is not empty, else 0.0."""
    prediction = normalize_answer(answer)
    return float(bool(prediction) and any(prediction == normalize_answer(gold) for gold in golden_answers))


def token_f1(answer: str, golden_answers: Sequence[str]) -> float:
    """The best harmonic mean of token precision and recall over the gold answers, in [0, 1] (SQuAD's F1)."""
    prediction = normalize_answer(answer).split()
    return max((_f1(prediction, normalize_answer(gold).split()) for gold in golden_answers), default=0.0)


def _f1(prediction: list[str], gold: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(gold)).values())
    return 2 * common / (len(prediction) + len(gold)) if common else 0.0


def exact_match_reward(task: Task, answer: str) -> float:
    """RAG-R1's reward: exact match and nothing else."""
    return exact_match(answer, task.golden_answers)


def token_f1_reward(task: Task, answer: str) -> float:
    """Token F1 against the closest gold answer."""
    return token_f1(answer, task.golden_answers)


REWARDS: dict[str, RewardFn] = {"exact_match": exact_match_reward, "token_f1": token_f1_reward}
"""Rewards a recipe names by a word; any other is named ``my_module:my_function``."""
