r"""ReSearch's reward (arXiv:2503.19470, section 2.4), and a start that needs it.

======================  =========
trajectory              reward
======================  =========
a wrong format          0
F1 of the answer is 0   0.1
any other               F1
======================  =========

A right format: thoughts are closed, and there is at least one; each search is closed and answered; one answer ends the
attempt, and it is in a box: ``<answer> \boxed{ Riga}</answer>``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from envs.grammars.tags import Action, Answer
from envs.measures import token_f1
from envs.search import SearchEnv
from envs.sources import WorldSource
from ragr1_actors import RewardContext, RewardResult, Task, Trajectory
from ragr1_actors.core.types import FinishReason

FORMAT = 0.1
"""What a right format earns where the answer has no word of a gold answer."""
CARELESS = 0.3
"""Share of the turns of ``CarelessWorld`` that do not think, and of its answers that are in no box."""
_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)


def is_valid(trajectory: Trajectory) -> float:
    """Return 1.0 where the format is right, else 0.0; an attempt that was cut, or has no answer, is wrong."""
    text = "".join(turn.completion_text for turn in trajectory.turns)
    num_thoughts = text.count("<think>")
    was_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in trajectory.turns)
    is_complete = trajectory.is_well_formed and not was_cut  # each search was answered
    has_pairs = num_thoughts == text.count("</think>") > 0 and text.count("<search>") == text.count("</search>")
    has_answer = text.count("<answer>") == text.count("</answer>") == 1
    is_boxed = _BOX.search(text.rpartition("<answer>")[2]) is not None
    return float(is_complete and has_pairs and has_answer and is_boxed)


async def research(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward of the table above."""
    valid, f1 = is_valid(trajectory), token_f1(trajectory.answer, trajectory.task.golden_answers)
    return RewardResult(valid * (f1 or FORMAT), parts={"valid": valid, "f1": f1})


class BoxedEnv(SearchEnv):
    """The search environment, whose answers are read out of their box; an answer without one is read as it is."""

    measures: ClassVar = {"valid": is_valid}

    def parse(self, completion: str) -> Action:
        """Read the turn's one action."""
        action = super().parse(completion)
        if isinstance(action, Answer) and (box := _BOX.search(action.text)):
            return Answer(box[1].strip())
        return action


class CarelessWorld(WorldSource):
    """The generated world, whose demonstrations leave out some thoughts and boxes."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a scripted attempt with a box around the answer, or without it."""
        turns = super().demonstrate(task, rng)
        if rng.random() >= CARELESS:
            turns[-1] = _boxed(turns[-1])
        return [turn.partition("</think>")[2] if rng.random() < CARELESS else turn for turn in turns]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the box too."""
        yield from super().texts(tasks)
        yield from [_boxed("<answer> Riga</answer>")] * 100  # a common word of the vocabulary


def _boxed(turn: str) -> str:
    before, tag, answer = turn.partition("<answer>")
    return f"{before}{tag} \\boxed{{{answer.replace('</answer>', '}</answer>')}"
