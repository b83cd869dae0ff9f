"""Questions about the prices of a shop, and a passage per thing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from envs.sources import Split
from ragr1_actors import Passage, Task, TaskSource

_THINGS = [
    f"{colour} {thing}" for colour in ("red", "blue", "green", "black") for thing in ("cup", "lamp", "box", "pen")
]
_PRICES = {thing: str(price) for thing, price in zip(_THINGS, range(11, 99, 5), strict=False)}


class Shop(TaskSource):
    """Asks what a thing costs; the evaluation asks in other words."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return a task per thing."""
        asked = "What does the {} cost?" if split == "train" else "What is the price of the {}?"
        return [
            Task(f"shop/{split}/{thing}", asked.format(thing), (price,), supporting_ids=(thing,))
            for thing, price in _PRICES.items()
        ]

    def passages(self) -> Sequence[Passage]:
        """Return a passage per thing."""
        return [Passage(thing, thing, f"The {thing} costs {price}.") for thing, price in _PRICES.items()]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a search for the thing, and its price."""
        return [f"<search>{task.supporting_ids[0]}</search>", f"<answer>{task.golden_answers[0]}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the questions of both splits and the passages: a tiny policy has no other words."""
        yield from (f" {task.question}" for split in ("train", "eval") for task in self.tasks(split))
        yield from (f" {passage.text}" for passage in self.passages())
