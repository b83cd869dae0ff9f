"""BlocksWorld: blocks on a table or on one another. A step takes a block that nothing stands on, and puts it elsewhere.

A task is a state and a goal. In words, each block is followed by what it stands on, and by what it is to stand on::

    A table B, B A table, C table table, D C C        B stands on A, and is to stand on the table, below A
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field

from envs.sources import Split, TaskSource
from ragr1_actors import Task
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.section import Section

BLOCKS, TABLE = ("A", "B", "C", "D"), "table"
State = tuple[str, ...]
"""What each block stands on, in the order of ``BLOCKS``: ``("table", "A", "table", "C")``."""
Move = tuple[str, str]
"""A block, and where it is put: ``("B", "table")``."""
NUM_TASKS: Mapping[Split, int] = {"train": 12_000, "eval": 300}
MIN_DISTANCE = 3
"""Steps that an evaluation task needs at least."""

_SAID = re.compile(r"\s*<answer>\s*(\w+) (\w+)\s*</answer>\s*")


def said_move(text: str) -> Move | None:
    """Return the move of a turn, possible or not: ``<answer> B table</answer>``; None where it has none."""
    return (found[1], found[2]) if (found := _SAID.fullmatch(text)) else None


def moves(state: State) -> list[Move]:
    """Return the moves that are possible."""
    clear = [block for block in BLOCKS if block not in state]
    targets = [(block, target) for block in clear for target in (TABLE, *clear) if target != block]
    return [(block, target) for block, target in targets if state[BLOCKS.index(block)] != target]


def moved(state: State, move: Move) -> State:
    """Return the state after a move."""
    return tuple(move[1] if block == move[0] else under for block, under in zip(BLOCKS, state, strict=True))


@lru_cache
def distances(goal: State) -> Mapping[State, int]:
    """Return how many steps each state is away from the goal; a move can be taken back."""
    found, states = {goal: 0}, [goal]
    for state in states:  # it grows
        new = {one: found[state] + 1 for move in moves(state) if (one := moved(state, move)) not in found}
        found |= new
        states += new
    return found


def shown(state: State, goal: State) -> str:
    """Return both in words."""
    return ", ".join(f"{block} {now} {then}" for block, now, then in zip(BLOCKS, state, goal, strict=True))


class BlocksOptions(Section):
    """Options of the source."""

    right: float = Field(0.8, ge=0, le=1)
    """Share of the demonstrations whose move brings the goal nearer; the others are any move that is possible."""


class Blocks(TaskSource):
    """States and goals for a single move, and others, with ``plan: true``, to plan for."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``BlocksOptions``."""
        super().__init__(environment, {})
        self._options = BlocksOptions.read(options, "environment.tasks: options")

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 300 evaluation tasks, or 12,000 training tasks of others, as many of each number of steps."""
        rng, goals = random.Random("blocks"), sorted(distances((TABLE,) * len(BLOCKS)))
        pairs = [(state, goal) for goal in goals for state in goals if state != goal]
        far = [(state, goal) for state, goal in pairs if distances(goal)[state] >= MIN_DISTANCE]
        drawn = rng.sample(far, NUM_TASKS["eval"])
        if split == "train":
            by_steps = defaultdict[int, list[tuple[State, State]]](list)
            for state, goal in sorted(set(pairs) - set(drawn)):
                by_steps[distances(goal)[state]].append((state, goal))
            drawn = [rng.choice(rng.choice(list(by_steps.values()))) for _ in range(NUM_TASKS[split])]
        metas = [{"state": state, "goal": goal, "plan": split == "eval"} for state, goal in drawn]
        found = enumerate(zip(drawn, metas, strict=True))
        return [Task(f"blocks/{split}/{number}", shown(*pair), (), meta=meta) for number, (pair, meta) in found]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return ``<answer> B table</answer>``."""
        state, goal = tuple(task.meta["state"]), tuple(task.meta["goal"])
        steps = distances(goal)
        possible = moves(state)
        nearer = [move for move in possible if steps[moved(state, move)] < steps[state]]
        block, target = rng.choice(nearer if rng.random() < self._options.right else possible)
        return [f"<answer> {block} {target}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of questions."""
        yield from super().texts(tasks[:100])
