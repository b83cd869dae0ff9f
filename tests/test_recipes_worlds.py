"""Toy worlds of recipes: what their demonstrations show, and what they never show."""

from __future__ import annotations

import random
from functools import partial

import pytest
from fakes import ByteTokenizer, OnePassage

from envs.base import EnvContext
from envs.measures import Reward, RewardContext, Split
from envs.sources import TaskSource, TaskSources
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Sampling, Task, TokenKind
from ragr1_actors.recipes.worlds.hinted import HintedEnv
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.recorder import EnvAttempt, Recorder, run_trajectory
from ragr1_actors.training.algorithm_config import AlgorithmConfig


def environment_of(recipe: str) -> EnvironmentSettings:
    return AlgorithmConfig.from_recipe(recipe).freeze().environment


def source_of(recipe: str) -> TaskSource:
    environment = environment_of(recipe)
    ((_, source),) = TaskSources.open(environment.tasks, environment).named
    return source


def demonstrations(source: TaskSource, count: int) -> list[tuple[Task, list[str]]]:
    rng = random.Random(0)
    tasks = rng.sample(list(source.tasks("train")), count)
    return [(task, source.demonstrate(task, rng)) for task in tasks]


def test_the_hinted_world_goes_on_behind_a_hint_alone() -> None:
    shown = demonstrations(source_of("rex_rag_start"), 2000)
    usual, first_words, shares = {"so", "this", "is", "known"}, [], {"none": 0, "part": 0, "whole": 0}
    for task, turns in shown:
        hint = task.meta.get("hint", "").split()
        kind = "none" if not hint else "part" if usual & {*hint} else "whole"
        shares[kind] += 1
        if kind == "whole":
            assert turns.pop(-2).startswith(" find ")
        answer = turns[-1].partition("<answer> ")[2].removesuffix("</answer>")
        assert (answer in task.golden_answers) == (kind == "whole")
        if kind == "part":
            assert len(hint) == 4 and usual != {*hint}
            assert turns.pop() == f" found {answer}</think><answer> {answer}</answer>"
        thoughts = [turn.removeprefix("<think> ").split()[:5] for turn in turns[1:]]
        assert all(usual & {*thought[:4]} and thought[4] == "found" for thought in thoughts)
        first_words += [thought[0] for thought in thoughts]
    assert all(0.3 < num / len(shown) < 0.37 for num in shares.values()), shares
    assert 0.02 < sum(word != "so" for word in first_words) / len(first_words) < 0.04


@pytest.mark.parametrize(("split", "kind"), [("train", "whole"), ("train", "part"), ("eval", "none")])
async def test_the_hinted_environment_writes_the_hint_before_the_last_search(split: Split, kind: str) -> None:
    source, tokenizer = source_of("rex_rag_start"), ByteTokenizer()
    task = source.tasks(split)[{"none": 0, "whole": 1, "part": 2}[kind]]
    env = HintedEnv(environment_of("rex_rag_start"), EnvContext(OnePassage(), tokenizer.encode))
    engine = ScriptedEngine({"one": source.demonstrate(task, random.Random(0))}, tokenizer.encode)
    recorder = Recorder("one", engine.generate, tokenizer, Sampling(500), 4000, 0)
    reward = partial(Reward(environment_of("rex_rag_start")), context=RewardContext("demonstration"))
    played = await run_trajectory(EnvAttempt(env, recorder), task, reward=reward)
    noticed = tokenizer.decode(played.token_ids[played.kinds == TokenKind.NOTICE].tolist())
    actions = [turn.action for turn in played.turns]
    assert noticed == ("" if kind == "none" else f"<think> {task.meta['hint']}")
    if kind == "whole":
        assert actions == ["search", "search", "search", "answer"]
        assert played.turns[2].calls[0].arguments["query"] == task.plan[2][0]
    else:
        assert actions == ["search", "search", "answer"]
    assert played.reward == (kind == "whole")


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
