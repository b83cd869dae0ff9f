"""``ragr1 check-env``: what is wrong with an environment is said before a run is spent on it."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from small_world import invoke
from typer.testing import CliRunner
from vision_world import page

from envs import checker
from envs.base import EnvContext, StepResult, TextEnv
from envs.checker import check_env, check_reward, made_up
from envs.grammars.tags import Action, Malformed
from envs.measures import RewardContext, RewardResult
from envs.search import SearchEnv
from ragr1_actors.cli import main as cli
from ragr1_actors.core.config import EnvironmentSettings, ModelSettings
from ragr1_actors.core.types import Completion, Message, Sampling, Task, TokenKind, ToolCall, Trajectory
from ragr1_actors.rollout.groups import GroupRequest, Play, RolloutStrategy, try_strategy
from ragr1_actors.rollout.runners.stored_groups import problem_of_arrays
from ragr1_actors.training.algorithm_config import AlgorithmConfig

RESET, STEP = "reset returns the prompt as messages", "step returns a StepResult"
PARSE, SUBMIT = "parse reads any text, odd ones too", "submit ends the episode with a finite reward"
EMPTY, ASYNC = "submit takes an empty answer", "its methods are async where they wait, and plain where they do not"
STOP, ACT = "stop is a tuple of texts", "act takes any text, odd ones too"


class NoMessages(SearchEnv):
    async def reset(self, task: Task) -> list[Message]:
        await super().reset(task)
        return [Message("user", "Answer.")]


class Fragile(SearchEnv):
    def parse(self, completion: str) -> Action:
        completion[0]
        return super().parse(completion)


class Plain(SearchEnv):
    def malformed(self, reason: str) -> Any:
        return super().malformed(reason)


class NoResult(SearchEnv):
    async def step(self, queries: list[str]) -> Any:
        return "found"


class Endless(SearchEnv):
    async def submit(self, answer: str) -> StepResult:
        return StepResult(reward=1.0)


class NaN(SearchEnv):
    async def submit(self, answer: str) -> StepResult:
        return StepResult(reward=1.0 if answer else math.nan, terminated=True)


class Stop(SearchEnv):
    stop: Any = "</search>"


class Calculator(TextEnv):
    """Another grammar: ``=`` asks for the sum, anything else is the answer."""

    stop = ("=",)

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        pass

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", task.question)]

    async def act(self, turn: Completion) -> StepResult:
        if turn.text.endswith("="):
            return StepResult(observation="5", action="sum")
        return StepResult(terminated=True, action="answer", answer=turn.text)


class Fussy(Calculator):
    async def act(self, turn: Completion) -> StepResult:
        if not turn.text:
            raise ValueError("nothing was said")
        return await super().act(turn)


class Absent(Calculator):
    async def act(self, turn: Completion) -> Any:
        return None


class Dicts(Calculator):
    async def act(self, turn: Completion) -> StepResult:
        calls: Any = ({"tool": "sum"},)
        return StepResult(terminated=True, calls=calls)


class NoMetrics(Calculator):
    async def act(self, turn: Completion) -> StepResult:
        metrics: Any = None
        return StepResult(terminated=True, metrics=metrics)


class Elsewhere(Calculator):
    async def act(self, turn: Completion) -> Any:
        return json.loads("{")


class Tagless(Calculator):
    def left_open(self, text: str) -> Any:
        return None


class Unmeasured(Calculator):
    measures: ClassVar[Any] = {"cost": lambda trajectory: trajectory.cost}


class Infinite(Calculator):
    measures: ClassVar[Any] = {"cost": lambda trajectory: math.inf}


class Counted(Calculator):
    """Its measure looks at what its own turn called."""

    measures: ClassVar[Any] = {"cost": lambda trajectory: 1 / len(trajectory.turns[0].calls)}

    async def act(self, turn: Completion) -> StepResult:
        return replace(await super().act(turn), calls=(ToolCall("sum", {}),))


class Listed(Calculator):
    measures: ClassVar[Any] = [1]


class Other(Calculator):
    options_class: Any = dict


class Asking(SearchEnv):
    """Asks a model of the recipe."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self._judge = context.models["judge"]

    async def submit(self, answer: str) -> StepResult:
        said = await self._judge.chat([Message("user", answer)], Sampling(1))
        return replace(await super().submit(answer), reward=float(said == "yes"))


class Waits(Calculator):
    async def reset(self, task: Task) -> list[Message]:
        return await asyncio.Event().wait() or []


class GivesUp(Calculator):
    async def reset(self, task: Task) -> list[Message]:
        raise TimeoutError("my own")


class Polite(SearchEnv):
    def parse(self, completion: str) -> Action:
        return Malformed("never") if "please" not in completion else super().parse(completion)


@pytest.mark.parametrize(
    ("env_class", "name", "problem"),
    [
        (NoMessages, RESET, "expected the question in one of them"),
        (Fragile, PARSE, "parse('') failed at "),
        (Plain, ASYNC, "Plain.malformed ({}) is plain, expected async def"),
        (NoResult, STEP, "NoResult.step ({}) returned 'found', expected a StepResult"),
        (Endless, SUBMIT, "expected True"),
        (NaN, EMPTY, "NaN.submit ({}) gave a reward of nan, expected a finite number"),
        (Stop, STOP, "got '</search>', expected a tuple"),
        (Fussy, ACT, "act('') failed at {}: ValueError: nothing was said"),
        (Absent, ACT, "Absent.act ({}) returned None, expected a StepResult"),
        (Dicts, ACT, "Dicts.act ({}) gave calls=({'tool': 'sum'},), expected a tuple of ToolCall"),
        (NoMetrics, ACT, "NoMetrics.act ({}) gave metrics=None, expected numbers by name"),
        (Elsewhere, ACT, "act('') failed at {}: JSONDecodeError: "),
        (Tagless, "left_open returns text", "Tagless.left_open ({}) returned None for '', expected text"),
        (Unmeasured, "measures are finite numbers", "{}: AttributeError: 'Trajectory' object has no attribute 'cost'"),
        (
            Infinite,
            "measures are finite numbers",
            "the measure cost of Infinite ({}) gave inf, expected a finite number",
        ),
        (Listed, "measures are finite numbers", "measures of Listed ({}) is [1], expected functions by name"),
        (Other, "options_class reads environment.options", "options_class of Other ({}) is <class 'dict'>, expected"),
    ],
)
async def test_one_fault_is_found_where_it_is(env_class: type[TextEnv], name: str, problem: str) -> None:
    found = {check.name: check.problem for check in await check_env(env_class, EnvironmentSettings()) if check.problem}
    assert list(found) == [name], found
    place = r"[^()]*test_envs_checker\.py, line \d+"
    assert re.search(re.escape(problem).replace(r"\{\}", place), found[name]), found[name]


class Pictured(SearchEnv):
    async def reset(self, task: Task) -> list[Message]:
        (asked,) = await super().reset(task)
        return [Message("user", (page(), f"Look: {asked.text}"))]


@pytest.mark.parametrize("query_format", ["lines", "comma", "json", "single"])
@pytest.mark.parametrize("env_class", [SearchEnv, Polite, Calculator, Counted, Pictured])
async def test_an_environment_that_works_has_no_fault(env_class: type[TextEnv], query_format: str) -> None:
    settings = AlgorithmConfig().environment(options={"query_format": query_format}).freeze().environment
    assert [check for check in await check_env(env_class, settings) if check.problem] == []


async def test_models_of_the_recipe_have_stand_ins() -> None:
    """Each model says yes; no server is asked."""
    settings = EnvironmentSettings(models={"judge": ModelSettings(url="http://nowhere.invalid/v1", model="m")})
    assert [check for check in await check_env(Asking, settings) if check.problem] == []


async def test_what_never_ends_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "QUESTION_TIMEOUT_S", 0.05)
    found = {check.name: check.problem for check in await check_env(Waits, EnvironmentSettings())}
    said = r"TimeoutError: got no result within 0\.05 s, expected one; mend what it waits for"
    match = re.search(rf"test_envs_checker\.py, line (\d+): {said}$", found[RESET])
    assert match is not None, found[RESET]
    assert "Event().wait()" in Path(__file__).read_text().splitlines()[int(match[1]) - 1]
    own = {check.name: check.problem for check in await check_env(GivesUp, EnvironmentSettings())}
    assert own[RESET].endswith("TimeoutError: my own")


async def waits(trajectory: Trajectory, context: RewardContext) -> float:
    return float(await asyncio.Event().wait())


class Idle(RolloutStrategy):
    """Waits for ever, once it has played."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        await asyncio.gather(play(0), asyncio.Event().wait())
        return []


async def test_a_reward_or_a_strategy_that_never_ends_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "QUESTION_TIMEOUT_S", 0.05)
    checks = [
        *await check_reward(EnvironmentSettings(reward=f"{__name__}:waits")),
        *await try_strategy(Idle({})),
    ]
    assert len(checks) == 5
    for check in checks:
        assert re.fullmatch(r".*test_envs_checker\.py, line \d+: TimeoutError: got no result within .*", check.problem)


def of_one_turn(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    return RewardResult(1.0, [0.0])


def the_only_turn(trajectory: Trajectory, context: RewardContext) -> float:
    (turn,) = trajectory.turns
    return turn.reward


def of_each_call(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    (record,) = (record for call in trajectory.calls for record in call.records)
    assert trajectory.calls[0].arguments["query"] and record.text in trajectory.turns[0].observation
    return RewardResult(1.0, [float(turn.action == "search") for turn in trajectory.turns])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("of_one_turn", "gave per_turn=[0.0], expected a number for each of 2 turns, or none"),
        ("the_only_turn", "ValueError: too many values to unpack (expected 1)"),
        ("of_each_call", ""),
    ],
)
async def test_a_reward_is_asked_for_trajectories_of_two_turns(name: str, problem: str) -> None:
    for check in await check_reward(EnvironmentSettings(reward=f"{__name__}:{name}")):
        assert check.problem.endswith(problem) and bool(check.problem) == bool(problem), check


@pytest.mark.parametrize("answer", ["Riga", ""])
def test_a_made_up_trajectory_is_consistent(answer: str) -> None:
    made = made_up(answer, 3)
    assert problem_of_arrays(made) == "" and made.trajectory_id == "check/0/3"
    is_model = made.kinds == TokenKind.MODEL
    assert made.turn_lengths == (1, 1) and made.num_model_tokens == 2
    assert [at.tolist() for at in made.turn_positions] == [[1], [3]]
    assert (made.policy_versions[is_model] == 0).all() and (made.policy_versions[~is_model] == -1).all()
    assert [turn.action for turn in made.turns] == ["search", "answer" if answer else "malformed"]
    assert made.is_well_formed == bool(answer) and made.answer == answer


def test_options_that_cannot_be_read_are_one_problem() -> None:
    printed = invoke("check-env", "envs.search:SearchEnv", "environment.options={max_querys: 2}")
    wrong = [line for line in printed.splitlines() if "wrong" in line]
    assert len(wrong) == 1 and "unknown key environment.options.max_querys" in wrong[0], printed


def test_the_command_prints_a_line_per_check_and_fails_if_one_fails() -> None:
    good = CliRunner().invoke(cli.app, ["check-env", f"{__name__}:Polite", "environment.max_turns=2"])
    assert good.exit_code == 0, good.output
    assert len(good.output.splitlines()) == 11
    assert "wrong" not in good.output
    bad = CliRunner().invoke(cli.app, ["check-env", f"{__name__}:NaN"])
    assert bad.exit_code == 1
    assert f"wrong  {EMPTY}: NaN.submit (" in bad.output
    assert invoke("check-env", "json:dumps").startswith("error: environment.env: json:dumps is a function")
