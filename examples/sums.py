"""Sums: a task source of one's own, and a tool that the policy calls.

To train with it, without SFT, whose demonstrations search; ``policy.model=FOLDER`` names a policy that can call tools::

    ragr1 train quickstart environment.tasks=examples.sums:Sums retrieval.corpus=world environment.env=tools \\
      environment.tools=[examples.sums:add] environment.options={} policy.chat_format=hermes sft.num_steps=0
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from envs.sources import Split
from ragr1_actors import Task, TaskSource


class Sums(TaskSource):
    """Asks for sums of three numbers; the training tasks and the others have no question in common."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 1,000 tasks for training, or 100 for evaluation."""
        rng = random.Random(0)
        drawn = dict.fromkeys(tuple(rng.randint(10, 999) for _ in range(3)) for _ in range(1200))
        found = [_task(numbers) for numbers in drawn]
        return found[:1000] if split == "train" else found[1000:1100]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the answer alone: SFT can only show searches, and this source has nothing to find."""
        return [f"<answer> {task.golden_answers[0]}</answer>"]


def _task(numbers: tuple[int, ...]) -> Task:
    text = " + ".join(map(str, numbers))
    return Task(f"sums/{text}", f"What is {text}?", (str(sum(numbers)),), meta={"numbers": list(numbers)})


def add(numbers: list[int]) -> int:
    """Add whole numbers.

    Args:
        numbers: The numbers to add.
    """
    return sum(numbers)
