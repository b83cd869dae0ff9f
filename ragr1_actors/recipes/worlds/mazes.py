"""Mazes of columns, with a wall between any two that has one door: there is one way to each cell.

``Maze((2, 0), 1, 1)`` has three columns and three rows. The first wall has its door in row 2, the second one in row 0.
From row 1 of the first column to row 1 of the last one it takes six steps; the Manhattan distance is 2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

Node = tuple[int, int]
"""Column and row of a cell."""


@dataclass(frozen=True)
class Maze:
    """As many rows as columns."""

    doors: tuple[int, ...]  # [size - 1]
    """The row of the door behind each column but the last."""
    start: int
    """Row, in the first column."""
    goal: int
    """Row, in the last column."""

    @classmethod
    def draw(cls, size: int, rng: random.Random) -> Self:
        """Return one of ``size`` columns with everything at random."""
        return cls(tuple(rng.randrange(size) for _ in range(size - 1)), rng.randrange(size), rng.randrange(size))

    @property
    def start_node(self) -> Node:
        """The cell of the start."""
        return 0, self.start

    @property
    def goal_node(self) -> Node:
        """The cell of the goal."""
        return len(self.doors), self.goal

    def path(self, node: Node) -> list[Node]:
        """Return the cells behind ``node`` on the way to the goal, which is the last of them."""
        column, row = node
        found: list[Node] = []
        for target in (*self.doors[column:], self.goal):
            step = 1 if target > row else -1
            found += [(column, at) for at in range(row, target, step)] + [(column, target)]
            column, row = column + 1, target
        return found[1:]

    def near(self, node: Node) -> list[Node]:
        """Return the cells one step away."""
        column, row = node
        found = [(column, at) for at in (row - 1, row + 1) if 0 <= at <= len(self.doors)]
        if node in enumerate(self.doors):
            found.append((column + 1, row))
        if (column - 1, row) in enumerate(self.doors):
            found.append((column - 1, row))
        return found

    def manhattan(self, node: Node) -> int:
        """Return how many steps it would be without walls."""
        return len(self.doors) - node[0] + abs(self.goal - node[1])

    def shown(self, node: Node) -> str:
        """Return in words where a cell is and what lies between it and the goal: ``at 1 doors 2 0 goal 1``."""
        ahead = "".join(f" {door}" for door in self.doors[node[0] :])
        return f"at {node[1]} doors{ahead} goal {self.goal}"
