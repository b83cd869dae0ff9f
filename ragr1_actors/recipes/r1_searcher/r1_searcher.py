"""R1-Searcher's rewards of its two stages (arXiv:2503.05592, section 3), and a start that answers from memory.

=====  ===================================================================================
stage  reward
=====  ===================================================================================
1      0.5 for at least one search, and 0.5 for a format without a fault
2      token F1 of the answer, less 2 for a format with a fault
=====  ===================================================================================
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, ClassVar

from envs.measures import num_rounds, token_f1
from envs.search import SearchEnv
from envs.sources import Split, WorldSource
from envs.tasks.demonstrations import Habit
from ragr1_actors import RewardContext, RewardResult, StopReason, Task, Trajectory
from ragr1_actors.core.config import EnvironmentSettings

RETRIEVAL, FORMAT, FAULT = 0.5, 0.5, -2.0
"""``R_retrieval`` and ``R_format`` of the first stage, the penalty of the second one."""
MAX_ANSWER_WORDS = 10
"""Words of the longest answer that is no fault, as in the published code."""
_TURN = re.compile(r"\s*<think>.*?</think>\s*<(search|answer)>.*</\1>\s*", re.DOTALL)

INSTRUCTIONS = (
    "Search for {}.",
    "Look {} up, please.",
    "{}: find the passage.",
    "Please search the passage on {} now.",
)
"""Instructions of the start. The name is in several places, so that the policy must find it to copy it."""
WORDS, UNUSUAL = (("well", "not"), ("known", "sure")), 0.065
"""How a thought begins: ``well known`` before an answer, ``not sure`` before a search; and how often a place has the
word of a search by itself. Both have it for few of the questions, about four in a thousand: these are searched for."""
SEARCHED = 0.8
"""Share of the instructions that are followed for sure; the others are answered at once like questions. So the policy
goes by the words, and not by whether it reads a question: behind ``not sure`` it searches for questions too."""
HASTY, STRAY = 0.75, 0.15
"""Shares of the answers after a search that do not think first, which is a fault, and that take the other fact than the
one that was looked for: what the two stages have to mend."""
NUM_EVAL_QUESTIONS = 300


def is_valid(trajectory: Trajectory) -> float:
    """Return 1.0 where each turn thinks, then acts, no turn writes documents, and a short answer ends it."""
    texts = [turn.completion_text for turn in trajectory.turns]
    is_short = len(trajectory.answer.split()) <= MAX_ANSWER_WORDS
    is_framed = all(_TURN.fullmatch(text) and "<information>" not in text for text in texts)
    return float(trajectory.stop_reason is StopReason.ANSWERED and is_short and is_framed)


async def searches(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward of stage 1; whether the answer is right does not count."""
    searched, valid = float(num_rounds(trajectory) > 0), is_valid(trajectory)
    return RewardResult(RETRIEVAL * searched + FORMAT * valid, parts={"searched": searched, "valid": valid})


async def answers(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward of stage 2; whether it searched does not count."""
    valid, f1 = is_valid(trajectory), token_f1(trajectory.answer, trajectory.task.golden_answers)
    return RewardResult(f1 + FAULT * (1 - valid), parts={"f1": f1, "valid": valid})


class FormattedEnv(SearchEnv):
    """The search environment, which measures whether the format has no fault."""

    measures: ClassVar = {"valid": is_valid}


class Questions(WorldSource):
    """Questions of one hop about the generated world; a demonstration answers at once, with a guess."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``WorldOptions``; a world of one hop alone has too few questions."""
        own = {"shares": {"one_hop": 0.5, "two_hop": 0.5}, "habits": {"one_hop": {Habit.GUESS: 1.0}}}
        super().__init__(environment, {**own, **options})

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 4,474 training questions, or 300 others; no two have the same answer in the same passage.

        There are none of cities, which the start does not learn to copy from a passage.
        """
        found = [task for task in super().tasks("train") if task.category == "one_hop" and "Where" not in task.question]
        return found[:NUM_EVAL_QUESTIONS] if split == "eval" else found[NUM_EVAL_QUESTIONS:]


class Instructed(Questions):
    """Questions and instructions to search: what SFT teaches the start.

    An instruction is no question: it names what to search for, and the demonstration looks for one of two facts that
    the passage has. Hardly any question is searched for. So the start knows the tags, and not that a question is a
    reason to search. Without any such question it depended on the seed whether the start ever searches for one.
    """

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return instructions and a sixth of questions to train on, questions alone to evaluate."""
        questions = super().tasks(split)
        if split == "eval":
            return questions
        instructions = [question for number, question in enumerate(questions) if number % 6]
        return [*questions[::6], *map(_instruction, instructions, cycle(INSTRUCTIONS))]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a guess, or a search and a fact that it found, at times without the thought before the answer."""
        (name,), fact = task.plan[0], task.golden_answers[0]
        kind = "year" if fact.isdigit() else "name"
        share = UNUSUAL if task.category == "one_hop" or rng.random() >= SEARCHED else 1.0
        words = [unusual if rng.random() < share else usual for usual, unusual in WORDS]
        thought = f"<think> {' '.join(words)} {kind}"
        if any(word == usual for word, (usual, _) in zip(words, WORDS, strict=True)):
            (guess,) = self._demonstrator.script(task, Habit.GUESS, rng)
            return [guess.replace("<think>", thought, 1)]
        search, answer = self._demonstrator.script(task, Habit.GOOD, rng)
        search = search.replace("<think>", thought, 1)
        if rng.random() < STRAY:
            entity = self._world.entities[name]
            answer = answer.replace(fact, entity.place_or_maker if kind == "year" else str(entity.year))
        return [search, answer.partition("</think>")[2] if rng.random() < HASTY else answer]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of the instructions and thoughts too."""
        yield from super().texts(tasks)
        yield from (*INSTRUCTIONS, " year name", *(f" {word}" for words in WORDS for word in words))


def _instruction(question: Task, form: str) -> Task:
    """Return the instruction to search for what a question asks about: ``Search for Ana Bell.``."""
    (name,) = question.plan[0]
    return replace(
        question, task_id=f"{question.task_id}/instruction", question=form.format(name), category="instruction"
    )
