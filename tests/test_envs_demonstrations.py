"""Scripted turns: whatever the format of the queries, the environment reads what the script asks."""

import json
import random
from pathlib import Path
from typing import get_args

import pytest

from envs.grammars.tags import Answer, Search, parse_action
from envs.options import QueryFormat
from envs.search import clean_queries
from envs.tasks.demonstrations import Demonstrator, Habit, evidence_demonstration
from envs.tasks.world import World, make_world
from ragr1_actors.core.types import Task
from ragr1_actors.planning.prepare import prepare
from ragr1_actors.training.algorithm_config import AlgorithmConfig

FORMATS: tuple[QueryFormat, ...] = get_args(QueryFormat)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(0)


def asked(turns: list[str], query_format: QueryFormat, limit: int) -> tuple[tuple[str, ...], ...]:
    """The queries of every turn but the last, which answers, as the environment executes them."""
    actions = [parse_action(turn, query_format) for turn in turns]
    assert isinstance(actions[-1], Answer)
    assert all(isinstance(action, Search) for action in actions[:-1]), actions
    return tuple(
        tuple(clean_queries(action.queries, limit).queries) for action in actions if isinstance(action, Search)
    )


@pytest.mark.parametrize("query_format", FORMATS)
def test_a_good_demonstration_asks_the_plan_in_every_format(world: World, query_format: QueryFormat) -> None:
    limit = 1 if query_format == "single" else 3
    demonstrator = Demonstrator(world, 3, query_format)
    for task in world.train_tasks[:300]:
        turns = demonstrator.script(task, Habit.GOOD, random.Random(0))
        plan = tuple((query,) for queries in task.plan for query in queries) if limit == 1 else task.plan
        assert asked(turns, query_format, limit) == plan
        assert parse_action(turns[-1], query_format) == Answer(task.golden_answers[0])


@pytest.mark.parametrize("query_format", FORMATS)
def test_every_habit_writes_turns_that_can_be_read(world: World, query_format: QueryFormat) -> None:
    demonstrator, rng = Demonstrator(world, 2, query_format), random.Random(0)
    for task in world.train_tasks[:200]:
        for habit in demonstrator.mixture[task.category]:
            asked(demonstrator.script(task, habit, rng), query_format, 2)


def test_the_formats_as_they_are_written(world: World) -> None:
    task = next(task for task in world.train_tasks if task.category == "comparison_2")
    a, b = task.plan[0]
    bodies = {"lines": f" {a}\n {b}", "comma": f" {a}, {b}", "json": f'[" {a}", " {b}"]', "single": f" {a}"}
    for query_format in FORMATS:
        first = Demonstrator(world, 3, query_format).script(task, Habit.GOOD, random.Random(0))[0]
        thought = "find first of two" if query_format == "single" else "find both"
        assert first == f"<think> {thought}</think><search>{bodies[query_format]}</search>"


@pytest.mark.parametrize("query_format", FORMATS)
def test_the_evidence_of_a_file_is_asked_for_in_the_format_of_the_run(query_format: QueryFormat) -> None:
    names = ("Martin Luther King, Jr.", "The Think\nTank", 'A "Quiet" <search> Place')
    task = Task("mine/1", "Who?", ("Bo",), supporting_ids=names)
    rounds = asked(evidence_demonstration(task, 2, query_format), query_format, 2)
    assert [len(queries) for queries in rounds] == ([1, 1, 1] if query_format == "single" else [2, 1])
    king = "Martin Luther King Jr." if query_format == "comma" else names[0]  # else it would be two queries
    assert [query for queries in rounds for query in queries] == [king, "The Think Tank", 'A "Quiet" Place']


@pytest.mark.parametrize("tasks", ["world", "file"])
def test_a_run_demonstrates_in_its_own_format(tmp_path: Path, tasks: str) -> None:
    path = tmp_path / "tasks.json"
    names = ("lamp", "cup", "key", "map", "pen")  # one in five is held out
    path.write_text(json.dumps([{"question": f"Where is the {name} ?", "answer": "Riga"} for name in names]))
    config = (
        AlgorithmConfig()
        .environment(tasks=str(path) if tasks == "file" else "world", options={"query_format": "json"})
        .retrieval(corpus="world")
        .policy(model="none of the project's making")
        .evaluation(num_tasks=1)
        .freeze()
    )
    workspace = prepare(config, tmp_path)
    scripts = [workspace.demonstrate(task, random.Random(0)) for task in workspace.train_tasks[:50]]
    queries = [query for turns in scripts for queries in asked(turns, "json", 3) for query in queries]
    assert queries
    assert not any(query.startswith("[") for query in queries)


def test_the_queries_of_a_file_are_titles_of_the_evidence(tmp_path: Path) -> None:
    passages = [{"id": f"c{n}", "title": f"The {name}", "text": "."} for n, name in enumerate(("lamp", "cup"))]
    (tmp_path / "corpus.json").write_text(json.dumps(passages))
    tasks = [{"question": f"q{n}", "answer": "Bo", "supporting_ids": ["c1", "unknown"]} for n in range(5)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    config = (
        AlgorithmConfig()
        .environment(tasks=str(tmp_path / "tasks.json"))
        .retrieval(corpus=str(tmp_path / "corpus.json"))
        .sft(num_steps=1)
        .evaluation(num_tasks=1)
        .freeze()
    )
    workspace = prepare(config, tmp_path)
    turns = workspace.demonstrate(workspace.train_tasks[0], random.Random(0))
    assert [query for queries in asked(turns, "lines", 3) for query in queries] == ["The cup", "unknown"]
