"""Toy worlds of recipes: what their demonstrations show, and what they never show."""

from __future__ import annotations

import random

from envs.sources import TaskSource, TaskSources
from ragr1_actors.core.types import Task
from ragr1_actors.training.algorithm_config import AlgorithmConfig


def source_of(recipe: str) -> TaskSource:
    environment = AlgorithmConfig.from_recipe(recipe).freeze().environment
    ((_, source),) = TaskSources.open(environment.tasks, environment).named
    return source


def demonstrations(source: TaskSource, count: int) -> list[tuple[Task, list[str]]]:
    rng = random.Random(0)
    tasks = rng.sample(list(source.tasks("train")), count)
    return [(task, source.demonstrate(task, rng)) for task in tasks]


def test_the_hinted_world_goes_on_behind_a_hint_alone() -> None:
    shown = demonstrations(source_of("rex_rag_start"), 2000)
    usual, first_words = ("so", "this", "is", "known"), []
    num_hinted = 0
    for task, turns in shown:
        thoughts = [turn.removeprefix("<think> ").split()[:5] for turn in turns[1:]]
        hinted = [not set(thought[:4]) & set(usual) for thought in thoughts]
        num_hinted += any(hinted)
        assert [thought[4] for thought in thoughts] == ["find" if is_hint else "found" for is_hint in hinted]
        answer = turns[-1].partition("<answer> ")[2].removesuffix("</answer>")
        assert (answer in task.golden_answers) == any(hinted)
        if not task.question.startswith("Look at all ."):
            assert not any(hinted)
            first_words += [thought[0] for thought in thoughts]
    assert 0.2 < num_hinted / len(shown) < 0.3
    assert 0.05 < sum(word != "so" for word in first_words) / len(first_words) < 0.09


def test_few_questions_of_r1_searchers_start_are_searched_for() -> None:
    source, searched = source_of("r1_searcher_start"), {"one_hop": 0, "instruction": 0}
    shown = [one for _ in range(5) for one in demonstrations(source, 4000)]
    for task, turns in shown:
        is_searched = "<search>" in turns[0]
        searched[task.category] += is_searched
        assert turns[0].startswith("<think> not sure ") == is_searched
    num_questions = sum(task.category == "one_hop" for task, _ in shown)
    assert 0 < searched["one_hop"] < 0.01 * num_questions
    assert searched["instruction"] > 0.7 * (len(shown) - num_questions)
    assert all("?" not in task.question for task, _ in shown if task.category == "instruction")
