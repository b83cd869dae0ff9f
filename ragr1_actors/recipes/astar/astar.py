"""A* with a heuristic that a language model learns, and the nodes that it learns from (arXiv:2407.09985).

The policy reads what is between a node n and the goal. It says how much longer the way is than the Manhattan distance::

    h(n) = Manhattan(n, goal) + what the policy says        SFT shows it h*(n) - Manhattan(n, goal)

Training nodes are of the shortest path of a maze. The method draws those near the goal more often. On a path of N
nodes, on which the goal has d = 1 and the node before it d = 2 (``optimal_sample`` of its code)::

    p(n) = softmax(log(N / d) / temperature), which is in proportion to d^(-1 / temperature)

The baseline draws all of them with equal probabilities. What is measured is how many nodes A* expands up to the goal.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, ClassVar

from pydantic import Field

from envs.base import EnvContext, StepResult, TextEnv
from envs.sources import Split, TaskSource
from ragr1_actors import Completion, Task
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import MALFORMED, Message
from ragr1_actors.recipes.worlds.mazes import Maze, Node

NUM_EVAL_MAZES = 300
_SAID = re.compile(r"\s*<answer>\s*(\d+)\s*</answer>\s*")


def residual(maze: Maze, node: Node) -> int:
    """Return what the policy is to say of a node: 4 where the way has six steps and the Manhattan distance is 2."""
    return len(maze.path(node)) - maze.manhattan(node)


class AStarEnv(TextEnv):
    """Asks for the residual of a node. Where the task has no node it searches, and asks for each that it reaches."""

    stop = ("</answer>",)
    measures: ClassVar = {"expansions": lambda ended: ended.metrics.get("expanded", 0.0)}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt."""
        self._prompt, self._num_expanded = settings.prompt, 0
        self._open: list[tuple[int, int, Node]] = []  # f = g + h, and of equal ones the newest first

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt about the node of the task, or about the start."""
        self._maze = Maze(tuple(task.meta["doors"]), task.meta["start"], task.meta["goal"])
        self._is_search = "node" not in task.meta
        first = self._maze.start_node if self._is_search else (task.meta["node"][0], task.meta["node"][1])
        self._cost, self._waiting = {first: 0}, [first]  # g of all nodes that were reached; those without h
        return [self._ask()]

    def _ask(self) -> Message:
        return Message("user", self._prompt.replace("{question}", self._maze.shown(self._waiting[-1])))

    async def act(self, turn: Completion) -> StepResult:
        """Read the residual of a node, or 0 if the turn has none; search on until A* needs that of another node."""
        said = found[1] if (found := _SAID.fullmatch(turn.text)) else ""
        action, node = "estimate" if said else MALFORMED, self._waiting.pop()
        if not self._is_search:
            is_right = said == str(residual(self._maze, node))
            return StepResult(terminated=True, action=action, answer=said, reward=float(is_right))
        f = self._cost[node] + self._maze.manhattan(node) + int(said or 0)
        heappush(self._open, (f, -len(self._cost), node))
        while not self._waiting:
            node, self._num_expanded = heappop(self._open)[2], self._num_expanded + 1
            if node == self._maze.goal_node:
                expanded = float(self._num_expanded)
                return StepResult(terminated=True, action=action, reward=-expanded, metrics={"expanded": expanded})
            # there is one way to each node: none is reached again at a lower cost
            self._waiting = [one for one in self._maze.near(node) if one not in self._cost]
            self._cost |= dict.fromkeys(self._waiting, self._cost[node] + 1)
        return StepResult(action=action, restart=(self._ask(),))


class MazeOptions(Section):
    """Options of the source."""

    size: int = Field(10, ge=2)
    """Columns, and rows."""
    num_mazes: int = Field(16_000, ge=1)
    """Training mazes, of each of which one node is drawn."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of the draw at the top of this file. null draws all nodes equally often."""


class Mazes(TaskSource):
    """A node of each training maze, and evaluation mazes to search."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``MazeOptions``."""
        super().__init__(environment, {})
        self._options = MazeOptions.read(options, "environment.tasks: options")

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the drawn nodes, or 300 other mazes."""
        count = self._options.num_mazes if split == "train" else NUM_EVAL_MAZES
        return [self._task(split, number) for number in range(count)]

    def _task(self, split: Split, number: int) -> Task:
        name = f"mazes/{split}/{number}"
        rng = random.Random(name)
        maze = Maze.draw(self._options.size, rng)
        meta = {"doors": list(maze.doors), "start": maze.start, "goal": maze.goal}
        if split == "eval":
            return Task(name, maze.shown(maze.start_node), (), meta=meta)
        path = maze.path(maze.start_node)
        (node,) = rng.choices(path, self.weights(len(path)))
        return Task(name, maze.shown(node), (str(residual(maze, node)),), meta={**meta, "node": list(node)})

    def weights(self, num_nodes: int) -> list[float]:
        """Return p(n) of a path up to a factor, the goal's last: ``[1.0, 1.41]`` for two nodes at temperature 2."""
        exponent = 0.0 if self._options.temperature is None else 1 / self._options.temperature
        return [(num_nodes / d) ** exponent for d in range(num_nodes, 0, -1)]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return ``<answer> 12</answer>``."""
        return [f"<answer> {task.golden_answers[0]}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of questions and the numbers, the same for all temperatures."""
        yield "at doors goal"
        yield from (f" {number}" for number in range(self._options.size**2))
