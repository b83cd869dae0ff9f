"""Rewards: each form that a user may write, how they are put together, and what is wrong with one."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.checker import check_reward
from envs.measures import (
    Reward,
    RewardContext,
    RewardFn,
    RewardResult,
    by_source,
    exact_match_reward,
    gate,
    stage_switch,
    token_f1_reward,
    weighted,
)
from ragr1_actors.core.config import EnvironmentSettings, ModelSettings
from ragr1_actors.core.errors import ConfigError, ServiceError
from ragr1_actors.core.resolve import raised_at
from ragr1_actors.core.types import Sampling, StopReason, Task, Trajectory, Turn

HERE = "test_envs_rewards"
TASK = Task("t/0", "Where?", ("Riga",), source="lamps")
TRAINING = RewardContext("train", 0.5)


def trajectory(answer: str = "Riga", task: Task = TASK) -> Trajectory:
    empty = np.zeros(0, np.int32)
    return Trajectory(
        "t/0/0",
        task,
        empty,
        empty.astype(np.uint8),
        empty.astype(np.float32),
        empty,
        (Turn("", 0, "look"), Turn("", 0, "answer")),
        StopReason.ANSWERED,
        0.0,
        answer,
    )


def plain(trajectory: Trajectory, context: RewardContext) -> float:
    return float(len(trajectory.answer)) + context.progress


def old(task: Task, answer: str) -> float:
    return float(answer == task.golden_answers[0])


async def waiting(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    await asyncio.sleep(0)
    return RewardResult(0.5, parts={"format": 0.25})


class Judge:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.least = options.get("least", 0)

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> float:
        return float(len(trajectory.answer) >= self.least)


class PlainJudge(Judge):
    def __call__(self, trajectory: Trajectory, context: RewardContext) -> float:  # type: ignore[override]
        return 0.0 if context.split == "eval" else 2.0


def without_parameters() -> float:
    return 1.0


def text(trajectory: Trajectory, context: RewardContext) -> Any:
    return "1"


def nan(trajectory: Trajectory, context: RewardContext) -> float:
    return math.nan


def odd_part(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    return RewardResult(1.0, parts={"format": math.inf})


def failing(trajectory: Trajectory, context: RewardContext) -> float:
    raise KeyError("format")


class Broken:
    def __init__(self, options: Mapping[str, Any]) -> None:
        options["model"]


def optional(trajectory: Trajectory, context: RewardContext) -> float:
    return float(context.options["worth"])


def handing_on(trajectory: Trajectory, context: RewardContext) -> Any:
    return waiting(trajectory, context)


NOT_CALLABLE = 3


def given(name: str, answer: str = "Riga", context: RewardContext = TRAINING, **options: Any) -> RewardResult:
    name = name if name in ("exact_match", "token_f1", "none") else f"{HERE}:{name}"
    reward = Reward(EnvironmentSettings(reward=name, reward_options=options))
    return asyncio.run(reward(trajectory(answer), context))


def test_every_form_of_a_reward() -> None:
    assert given("exact_match") == RewardResult(1.0)
    assert given("exact_match", "Oslo") == given("none") == RewardResult(0.0)
    assert given("token_f1", "the Riga lake").total == pytest.approx(2 / 3)
    assert given("plain") == RewardResult(4.5)
    assert (given("old").total, given("old", "").total) == (1.0, 0.0)
    assert given("waiting") == RewardResult(0.5, parts={"format": 0.25})
    assert given("optional", worth=2).total == 2.0
    assert given("handing_on") == RewardResult(0.5, parts={"format": 0.25})
    assert (given("Judge", least=4).total, given("Judge", least=5).total) == (1.0, 0.0)
    assert (given("PlainJudge").total, given("PlainJudge", context=RewardContext("eval")).total) == (2.0, 0.0)


async def test_a_plain_function_that_waits_holds_no_other_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open = threading.Event()

    def slow(trajectory: Trajectory, context: RewardContext) -> float:
        assert is_open.wait(60)
        return 1.0

    monkeypatch.setitem(globals(), "slow", slow)
    reward = Reward(EnvironmentSettings(reward=f"{HERE}:slow"))
    first = asyncio.create_task(reward(trajectory(), TRAINING))
    assert (await Reward(EnvironmentSettings())(trajectory(), TRAINING)).total == 1.0
    assert not first.done()
    is_open.set()
    assert (await first).total == 1.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("text", "gave '1', expected a number or a RewardResult"),
        ("nan", "gave nan as the reward, expected a finite number"),
        ("odd_part", "gave inf as the part format, expected a finite number"),
    ],
)
def test_what_is_no_reward_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(name)
    assert str(caught.value) == f"{name} ({__file__}, line {line_of(name)}) {problem}"


def line_of(name: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if f"def {name}(" in line)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("without_parameters", {}, "cannot be called with (trajectory, context): too many positional arguments"),
        ("NOT_CALLABLE", {}, "got 3, which cannot be called, expected a reward of (trajectory, context)"),
        ("old", {"least": 1}, "got least for test_envs_rewards:old, which has no options; leave them out"),
        ("exact_match", {"least": 1}, "got least for exact_match, which has no options"),
        ("Missing", {}, "has no 'Missing'"),
        ("Broken", {}, "environment.reward: Broken failed at "),
    ],
)
def test_a_wrong_form_is_refused_before_a_run(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given(name, **options)
    assert problem in str(caught.value)


def value(reward: RewardFn, context: RewardContext = TRAINING, task: Task = TASK, answer: str = "Riga") -> Any:
    asked: Callable[..., Any] = reward
    return asyncio.run(asked(trajectory(answer, task), context))


def test_rewards_are_put_together() -> None:
    both = weighted({"em": (1.0, exact_match_reward), "length": (0.1, plain)})
    assert value(both) == RewardResult(1.0 + 0.1 * 4.5, (0.0, 0.0), {"em": 1.0, "length": 4.5})
    gated = gate(exact_match_reward, plain)
    assert (value(gated).total, value(gated, answer="Oslo").total) == (4.5, 0.0)
    staged = stage_switch([(0.3, plain), (1.0, exact_match_reward)])
    assert [value(staged, RewardContext("train", at)).total for at in (0.0, 0.29, 0.3, 1.0)] == [4.0, 4.29, 1.0, 1.0]
    per_source = by_source({"lamps": plain}, exact_match_reward)
    assert (value(per_source).total, value(per_source, task=replace(TASK, source="world")).total) == (4.5, 1.0)
    with pytest.raises(ValueError, match=r"^nan \(.*test_envs_rewards\.py, line \d+\) gave nan"):
        value(weighted({"odd": (1.0, nan)}))


def test_a_reward_may_say_what_each_turn_earned() -> None:
    async def by_turn(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        return RewardResult(1.0, (0.25, 0.5))

    assert value(weighted({"a": (2.0, by_turn), "b": (1.0, by_turn), "c": (1.0, plain)})).per_turn == (0.75, 1.5)
    assert value(gate(exact_match_reward, by_turn)).per_turn == (0.25, 0.5)


def of_three_turns(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    return RewardResult(1.0, (0.0, 0.5, 0.5))


def of_a_bad_turn(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    return RewardResult(1.0, (0.5, math.nan))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("of_three_turns", r"gave per_turn=\(0.0, 0.5, 0.5\), expected a number for each of 2 turns"),
        ("of_a_bad_turn", "gave nan as the reward of turn 2, expected a finite number"),
    ],
)
def test_wrong_rewards_of_turns_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        given(name)


def test_a_service_that_does_not_answer_is_told_apart() -> None:
    async def judged(trajectory: Trajectory, context: RewardContext) -> float:
        raise ServiceError("http://judge: no answer")

    with pytest.raises(ServiceError, match="http://judge"):
        value(gate(judged, plain))


def wide(trajectory: Trajectory, context: RewardContext, weight: float) -> float:
    return weight


class Made:
    def __init__(self, options: Mapping[str, Any]) -> None: ...

    def __call__(self, trajectory: Trajectory, context: RewardContext) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("put_together", "problem"),
    [
        (lambda: weighted({"wide": (1.0, wide)}), r"^weighted: wide \(.*, line \d+\) cannot be called with"),
        (lambda: gate(wide, plain), r"^gate: wide \(.*, line \d+\) cannot be called with"),
        (lambda: gate(plain, Made), r"^gate: got Made \(.*, line \d+\), a class that is not made, expected a reward"),
        (lambda: stage_switch([(1.0, Made)]), r"^stage_switch: got Made \("),
        (lambda: stage_switch([]), r"^stage_switch got no stage"),
        (lambda: by_source({"world": wide}, plain), r"^by_source: wide \("),
        (lambda: by_source({}, wide), r"^by_source: wide \("),
    ],
)
def test_what_cannot_be_put_together_is_refused_at_once(put_together: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        put_together()


def test_a_reward_of_the_old_form_may_be_a_part() -> None:
    def right(task: Task, answer: str) -> float:
        return 2.0 * (answer in task.golden_answers)

    assert value(weighted({"right": (0.5, right), "f1": (1.0, token_f1_reward)})).total == 2.0


def test_a_plain_function_may_return_an_awaitable() -> None:
    async def scaled(scale: float, trajectory: Trajectory, context: RewardContext) -> float:
        return scale

    assert (
        value(weighted({"a": (1.0, partial(scaled, 3.0)), "b": (1.0, lambda *given: scaled(4.0, *given))})).total == 7
    )


def turns_as_number(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    turns: Any = 1.0
    return RewardResult(1.0, turns)


def parts_as_list(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    parts: Any = ["format"]
    return RewardResult(1.0, parts=parts)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("turns_as_number", r"\) gave per_turn=1\.0, expected"),
        ("parts_as_list", r"\) gave parts=\['format'\], expected"),
    ],
)
def test_a_result_of_other_types_is_said_with_its_line(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} \(.*test_envs_rewards\.py, line \d+{problem}"):
        given(name)


async def judged(trajectory: Trajectory, context: RewardContext) -> float:
    said = await context.models["judge"].chat([], Sampling(1))
    return 1.0 if said == "yes" or context.split == "eval" else math.nan


def train_only(trajectory: Trajectory, context: RewardContext) -> float:
    return math.nan if context.split == "train" else 1.0


async def test_a_check_asks_in_training_too_and_no_judge() -> None:
    models = {"judge": ModelSettings(url="http://nowhere.invalid/v1", model="m")}
    checks = await check_reward(EnvironmentSettings(reward=f"{HERE}:judged", models=models))
    assert [one.problem for one in checks] == [""] * 3
    (first, *_) = await check_reward(EnvironmentSettings(reward=f"{HERE}:train_only"))
    assert "gave nan as the reward" in first.problem


def elsewhere(trajectory: Trajectory, context: RewardContext) -> Any:
    return json.loads("{")


@pytest.mark.parametrize(
    ("name", "check", "problem"),
    [
        ("nan", "an answer", "gave nan as the reward"),
        ("failing", "no answer", ": KeyError: 'format'"),
        ("elsewhere", "no answer", "test_envs_rewards.py, line "),
    ],
)
async def test_what_is_wrong_with_a_reward_is_said_before_a_run(name: str, check: str, problem: str) -> None:
    found = {one.name: one.problem for one in await check_reward(EnvironmentSettings(reward=f"{HERE}:{name}"))}
    (title,) = [title for title in found if title.startswith(f"the reward of {check}")]
    assert problem in found[title]


def halved_in_evaluation(trajectory: Trajectory, context: RewardContext) -> float:
    return 0.5 if context.split == "eval" else 1.0


async def test_a_reward_that_works_has_no_fault_and_its_values_are_shown() -> None:
    checks = await check_reward(EnvironmentSettings())
    assert [one.problem for one in checks] == [""] * 3
    assert [one.name.partition(" is ")[2] for one in checks] == ["1", "wrong is 0", "0"]
    (first, *_) = await check_reward(EnvironmentSettings(reward=f"{HERE}:halved_in_evaluation"))
    assert first.name == "the reward of a right answer is 1, in an evaluation 0.5"


def finds_nothing(trajectory: Trajectory, context: RewardContext) -> float:
    return float(next(iter([])))


def exits(trajectory: Trajectory, context: RewardContext) -> float:
    sys.exit(7)


async def awaits_what_was_cancelled(trajectory: Trajectory, context: RewardContext) -> float:
    waiting = asyncio.ensure_future(asyncio.sleep(60))
    waiting.cancel()
    await waiting
    return 0.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("finds_nothing", "next() without a default found nothing"),
        ("exits", "it called sys.exit(7)"),
        ("awaits_what_was_cancelled", "it awaited what was cancelled"),
    ],
)
async def test_whatever_a_reward_raises_is_an_error_with_its_line(name: str, problem: str) -> None:
    reward = Reward(EnvironmentSettings(reward=f"{HERE}:{name}"))
    with pytest.raises(RuntimeError, match=re.escape(problem)) as caught:
        await asyncio.wait_for(reward(trajectory(), TRAINING), 60)
    assert re.search(r"test_envs_rewards\.py, line \d+", raised_at(caught.value))


async def test_a_cancellation_from_outside_ends_a_reward() -> None:
    reward = Reward(EnvironmentSettings(reward=f"{HERE}:sleeping"))
    asking = asyncio.ensure_future(reward(trajectory(), TRAINING))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def sleeping(trajectory: Trajectory, context: RewardContext) -> float:
    await asyncio.sleep(3600)
    return 0.0


def overwrites(trajectory: Trajectory, context: RewardContext) -> float:
    trajectory.metrics["em"] = math.nan
    trajectory.token_ids[:] = 0
    return 1.0


async def test_a_reward_cannot_change_what_was_sampled() -> None:
    one = replace(trajectory(), token_ids=np.ones(3, np.int32), metrics={"em": 1.0})
    with pytest.raises(ValueError, match="read-only"):
        await Reward(EnvironmentSettings(reward=f"{HERE}:overwrites"))(one, TRAINING)
    assert (one.token_ids.tolist(), one.metrics) == ([1, 1, 1], {"em": 1.0})
