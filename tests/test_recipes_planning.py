"""A* with a learned heuristic, and LINVIT: which nodes are learned from, and what value iteration makes of a prior."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from fakes import DictRetriever

from envs.base import EnvContext, StepResult, TextEnv
from ragr1_actors import Completion, Task
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import FinishReason
from ragr1_actors.recipes.astar.astar import AStarEnv, Mazes, residual
from ragr1_actors.recipes.linvit.linvit import FLOOR, LinvitEnv, LinvitOptions, Planner, prior_of
from ragr1_actors.recipes.worlds.blocks import TABLE, Blocks, State, distances, moved, moves
from ragr1_actors.recipes.worlds.mazes import Maze

SETTINGS = EnvironmentSettings(prompt="{question}")
ON_THE_TABLE: State = (TABLE,) * 4
STACKED: State = (TABLE, "A", "B", "C")
Policy = Callable[[str], str]


async def play(env: TextEnv, task: Task, policy: Policy, logprob: float = 0.0) -> list[StepResult]:
    """Return the results of all turns of a policy that says everything with one log-prob."""
    (asked,), results = await env.reset(task), list[StepResult]()
    while not results or results[-1].restart:
        asked = results[-1].restart[0] if results else asked
        results.append(await env.act(Completion([0], [logprob], [0], policy(asked.content), FinishReason.STOP)))
        if results[-1].terminated or results[-1].truncated:
            break
    return results


def context() -> EnvContext:
    return EnvContext(DictRetriever([]), lambda text: list(text.encode()))


# -- A* ----------------------------------------------------------------------------------------------------------------


def test_nodes_near_the_goal_are_drawn_by_the_published_weights() -> None:
    near = Mazes(SETTINGS, {"temperature": 2.0}).weights(4)
    assert near == pytest.approx([1.0, (4 / 3) ** 0.5, 2**0.5, 2.0])  # softmax(log(N / d) / 2) up to a factor
    assert Mazes(SETTINGS, {}).weights(4) == [1.0] * 4


def test_both_arms_have_the_same_mazes_and_as_many_nodes() -> None:
    near, alike = (Mazes(SETTINGS, {"num_mazes": 500, **options}) for options in ({"temperature": 2.0}, {}))
    first, second = near.tasks("train"), alike.tasks("train")
    assert [task.meta["doors"] for task in first] == [task.meta["doors"] for task in second]
    assert near.tasks("eval") == alike.tasks("eval") and len(near.tasks("eval")) == 300
    assert list(near.texts(first)) == list(alike.texts(second))
    columns = [sum(task.meta["node"][0] for task in tasks) / len(tasks) for tasks in (first, second)]
    assert columns[0] > columns[1] + 0.5
    for task in first:
        maze, node = Maze(tuple(task.meta["doors"]), task.meta["start"], task.meta["goal"]), tuple(task.meta["node"])
        assert node in maze.path(maze.start_node) and task.golden_answers == (str(residual(maze, node)),)


@pytest.mark.parametrize(("said", "reward"), [("<answer> 2</answer>", 1.0), ("<answer> 4</answer>", 0.0), ("2", 0.0)])
async def test_a_node_alone_is_one_turn(said: str, reward: float) -> None:
    task = Task("t", "", ("2",), meta={"doors": [2, 0], "start": 1, "goal": 1, "node": [1, 2]})
    (result,) = await play(AStarEnv(SETTINGS, context()), task, lambda asked: said)
    assert (result.terminated, result.reward) == (True, reward)


def from_text(asked: str) -> tuple[Maze, tuple[int, int]]:
    """Return the part of the maze that is shown, and the cell in its first column."""
    row, *doors, goal = [int(word) for word in asked.split() if word.isdigit()]
    return Maze(tuple(doors), 0, goal), (0, row)


async def test_the_better_the_heuristic_the_fewer_nodes_are_expanded() -> None:
    def right(asked: str) -> str:
        return f"<answer> {residual(*from_text(asked))}</answer>"

    def noisy(near: bool) -> Policy:
        def say(asked: str) -> str:
            maze, node = from_text(asked)
            wrong = 8 * random.Random(asked).randrange(2) if (len(maze.doors) < 5) == near else 0
            return f"<answer> {residual(maze, node) + wrong}</answer>"

        return say

    totals = {"right": 0.0, "far": 0.0, "near": 0.0, "none": 0.0}
    policies: dict[str, Policy] = {"right": right, "far": noisy(False), "near": noisy(True), "none": lambda asked: ""}
    for task in Mazes(SETTINGS, {}).tasks("eval")[:40]:
        for name, policy in policies.items():
            totals[name] += (await play(AStarEnv(SETTINGS, context()), task, policy))[-1].metrics["expanded"]
    assert totals["right"] < totals["far"] < totals["near"] < totals["none"]  # errors near the goal cost more


# -- LINVIT ------------------------------------------------------------------------------------------------------------


def test_the_prior_is_what_the_policy_says_with_its_probability() -> None:
    possible = [("A", TABLE), ("B", TABLE), ("C", TABLE)]
    prior = prior_of(possible, ("B", TABLE), 0.6)
    assert prior["B", TABLE] == pytest.approx((1 - FLOOR) * 0.6 + FLOOR / 3)
    assert prior["A", TABLE] == prior["C", TABLE] == pytest.approx((1 - FLOOR) * 0.2 + FLOOR / 3)
    assert set(prior_of(possible, ("D", TABLE), 0.6).values()) == set(prior_of(possible, None, 0.6).values()) == {1 / 3}


def test_values_are_those_of_the_equations() -> None:
    options = LinvitOptions(temperature=0.5, horizon=2, bonus=0.1)
    planner = Planner(options)
    there, back, other = ("D", TABLE), ("D", "C"), ("D", "B")
    planner.prior = {STACKED: {there: 1.0}, ON_THE_TABLE: {back: 0.75, other: 0.25}}
    planner.seen[STACKED, there][ON_THE_TABLE] += 1
    planner.seen[ON_THE_TABLE, back][STACKED] += 4
    planner.plan()
    at_end, at_start = planner.policy[1], planner.policy[0]
    # h = 2: what was taken leads to nothing but the bonus .1 / sqrt(4), what was not taken is worth 1
    weights = 0.75 * math.exp(0.05 / 0.5), 0.25 * math.exp(1 / 0.5)
    assert at_end[ON_THE_TABLE][back] == pytest.approx(weights[0] / sum(weights))
    # h = 1: the value of the state that follows, V = .5 log(exp(.1 / .5)), and the bonus
    weights = 0.75 * math.exp((0.1 + 0.05) / 0.5), weights[1]
    assert at_start[ON_THE_TABLE][back] == pytest.approx(weights[0] / sum(weights))
    assert at_start[STACKED] == {there: pytest.approx(1.0)}


def test_blocks_are_moved_one_at_a_time() -> None:
    assert moves(STACKED) == [("D", TABLE)]
    assert moved(STACKED, ("D", TABLE)) == (TABLE, "A", "B", TABLE)
    assert len(moves(ON_THE_TABLE)) == 12 and len(distances(ON_THE_TABLE)) == 73
    assert distances(ON_THE_TABLE)[STACKED] == 3


def test_evaluation_tasks_are_no_training_tasks_and_need_three_steps() -> None:
    source = Blocks(SETTINGS, {"right": 1.0})
    train, evaluation = source.tasks("train"), source.tasks("eval")
    assert not {task.question for task in train} & {task.question for task in evaluation}
    steps = Counter(distances(task.meta["goal"])[task.meta["state"]] for task in train)
    assert set(steps) == {1, 2, 3, 4, 5, 6} and min(steps.values()) > 1800
    assert len({task.question for task in evaluation}) == 300
    assert min(distances(task.meta["goal"])[task.meta["state"]] for task in evaluation) == 3


async def test_a_good_prior_saves_steps_and_a_doubtful_one_is_overcome() -> None:
    source = Blocks(SETTINGS, {"right": 1.0})

    def words(asked: str) -> tuple[State, State]:
        parts = [part.split() for part in asked.split(", ")]
        return tuple(now for _, now, _ in parts), tuple(then for _, _, then in parts)

    def right(asked: str) -> str:
        state, goal = words(asked)
        return source.demonstrate(Task("t", asked, (), meta={"state": state, "goal": goal}), random.Random(0))[0]

    def first(asked: str) -> str:
        return "<answer> {} {}</answer>".format(*moves(words(asked)[0])[0])

    async def total(policy: Policy, logprob: float, prior: str) -> float:
        settings = EnvironmentSettings(prompt="{question}", options={"max_steps": 5000, "prior": prior})
        played = [
            await play(LinvitEnv(settings, context()), task, policy, logprob) for task in source.tasks("eval")[:10]
        ]
        assert [turns[-1].metrics["solved"] for turns in played] == [1.0] * 10
        return sum(turn.metrics["steps"] for turns in played for turn in turns)

    uniform = await total(right, 0.0, "uniform")
    assert await total(right, 0.0, "policy") < uniform / 10
    assert await total(right, -0.4, "policy") < uniform / 2
    await total(first, -0.4, "policy")  # solves all of them, too
