"""``ragr1 check-env``: what is wrong with an environment is said before a run is spent on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from small_world import invoke
from typer.testing import CliRunner

from envs.base import Action, Malformed, StepResult
from envs.checker import check_env
from envs.search import SearchEnv
from ragr1_actors.cli import main as cli
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message, Task
from ragr1_actors.training.algorithm_config import AlgorithmConfig

RESET, STEP = "reset returns the prompt as messages", "step returns a StepResult"
PARSE, SUBMIT = "parse reads any text, odd ones too", "submit ends the episode with a finite reward"
EMPTY, ASYNC = "submit takes an empty answer", "its methods are async where they wait, and plain where they do not"
STOP = "stop is a tuple of texts"


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


class Polite(SearchEnv):
    def parse(self, completion: str) -> Action:
        return Malformed("never") if "please" not in completion else super().parse(completion)


@pytest.mark.parametrize(
    ("env_class", "name", "problem"),
    [
        (NoMessages, RESET, "no message holds the question"),
        (Fragile, PARSE, "parse('') raised IndexError"),
        (Plain, ASYNC, "malformed is plain, expected async def"),
        (NoResult, STEP, "step returned 'found', expected a StepResult"),
        (Endless, SUBMIT, "expected True"),
        (NaN, EMPTY, "gave a reward of nan, expected a finite number"),
        (Stop, STOP, "got '</search>', expected a tuple"),
    ],
)
async def test_one_fault_is_found_where_it_is(env_class: type[SearchEnv], name: str, problem: str) -> None:
    found = {check.name: check.problem for check in await check_env(env_class, EnvironmentSettings()) if check.problem}
    assert list(found) == [name], found
    assert problem in found[name]


@pytest.mark.parametrize("query_format", ["lines", "comma", "json", "single"])
@pytest.mark.parametrize("env_class", [SearchEnv, Polite])
async def test_an_environment_that_works_has_no_fault(env_class: type[SearchEnv], query_format: str) -> None:
    settings = AlgorithmConfig().environment(query_format=query_format).freeze().environment
    assert [check for check in await check_env(env_class, settings) if check.problem] == []


def test_the_command_prints_a_line_per_check_and_fails_if_one_fails() -> None:
    good = CliRunner().invoke(cli.app, ["check-env", f"{__name__}:Polite", "environment.max_turns=2"])
    assert good.exit_code == 0, good.output
    assert len(good.output.splitlines()) == 9
    assert "wrong" not in good.output
    bad = CliRunner().invoke(cli.app, ["check-env", f"{__name__}:NaN"])
    assert bad.exit_code == 1
    assert f"wrong  {EMPTY}: ValueError: submit gave a reward of nan" in bad.output
    assert invoke("check-env", "json:dumps").startswith("error: environment.env: json:dumps is a function")
