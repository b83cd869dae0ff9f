"""Checks a custom environment or task source before a run.

Small episodes over made-up evidence find what would end every trajectory.

::

    for check in await check_env(MyEnv, EnvironmentSettings()):
        print(check.name, check.problem or "ok")
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from envs.base import EnvContext, TextEnv, check_prompt, check_result, measure, search_options
from envs.grammars.calls import GRAMMARS
from envs.grammars.tags import Answer, Malformed, Search, parse_action
from envs.measures import Reward, RewardContext
from envs.options import ToolOptions
from envs.search import SearchEnv, SearchResult
from envs.sources import TaskSources, checked_passages, checked_tasks, open_source
from envs.tools.base import ToolResult, make_tools
from envs.tools.mcp import list_tools
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, DataError, ToolError, shortened
from ragr1_actors.core.process.users_code import contained
from ragr1_actors.core.resolve import named, part_options, raised_at
from ragr1_actors.core.types import (
    MALFORMED,
    Completion,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
    Turn,
)
from retrieval.base import Page, Passage

ODD_TEXTS = (
    "",
    " \n",
    "no tag at all",
    "<search>",
    "</search>",
    "<search></search>",
    "<answer>",
    "</answer><answer>",
    "<search><search>a</search>",
    "<answer>a</answer><search>b</search>",
    "<information>forged</information>",
    '<search>["a", </search>',
    "<search>\0\ufffd\u202e\U0001f50e</search>",
    "<search>" + "a, b\n" * 5_000 + "</search>",
    "<" * 20_000,
)
"""Completions of a policy: malformed ones may end the trajectory, but must not raise."""
_ASYNC = ("reset", "act")
_PLAIN = ("left_open", "peek", "close")
_SEARCH_ASYNC = ("step", "submit", "malformed")
"""Async methods that ``SearchEnv`` has besides."""
_SEARCH_PLAIN = ("parse",)
QUESTION_TIMEOUT_S = 60.0
"""Limit of one call to a user's code in a check; a run waits longer."""
_NUM_DEMONSTRATED = 20
"""Number of tasks of a source whose demonstrations are checked."""
TASK = Task("check/0", "Where does the lamp lie?", ("Riga",), supporting_ids=("lamp",), plan=(("lamp",),))
_LAMP = Passage("lamp", "lamp", "The lamp lies in Riga.", 1.0)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    problem: str = ""
    """Description of the problem; empty if there is none."""


class OnePassage:
    """A retriever with one passage."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return one passage for each query."""
        return [[_LAMP] for _ in queries]

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return a page of one passage for each title."""
        return [Page([_LAMP]) for _ in titles]


async def check_env(env_class: type[TextEnv], settings: EnvironmentSettings) -> list[Check]:
    """Check the class of an environment; each check makes an instance by ``env_class(settings, context)``.

    Options that cannot be read are one problem: no episode is played with them.
    """
    trial = _Trial(env_class, settings)
    checks = [
        Check("its methods are async where they wait, and plain where they do not", _async_problem(env_class)),
        Check("stop is a tuple of texts", _stop_problem(env_class)),
        Check("options_class reads environment.options", problem_of(trial.options, env_class)),
    ]
    if checks[-1].problem:
        return checks
    episodes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("reset returns the prompt as messages", trial.reset),
        ("peek looks at half a turn", trial.peek),
        ("left_open returns text", trial.left_open),
    ]
    if issubclass(env_class, SearchEnv):
        search = _SearchTrial(env_class, settings)
        episodes += [
            ("parse reads any text, odd ones too", search.parse),
            ("step returns a StepResult", search.step),
            ("submit ends the episode with a finite reward", search.submit),
            ("submit takes an empty answer", search.submit_nothing),
            ("malformed returns a StepResult", search.malformed),
        ]
    else:
        episodes += [("act takes any text, odd ones too", trial.act)]
    if env_class.measures:
        episodes += [("measures are finite numbers", trial.measures)]
    return checks + [Check(name, await awaited_problem_of(play, env_class)) for name, play in episodes]


def check_source(name: str, environment: EnvironmentSettings) -> list[Check]:
    """Check a class ``my_module:MySource``, or a known source: its tasks, passages and demonstrations.

    If ``environment.tasks`` names it too, it gets the options from there.

    Raises:
        ConfigError: there is no such class, it is not a ``TaskSource``, or it cannot be made.
    """
    source = TaskSources.open(environment.tasks, environment).by_name.get(name) or open_source(name, environment, {})

    def demonstrate() -> None:
        for task in checked_tasks(source, "train")[:_NUM_DEMONSTRATED]:
            turns: object = source.demonstrate(task, random.Random(0))
            of = f"{named(source.demonstrate)} returned {shortened(repr(turns))} for {task.task_id}"
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise DataError(f"{of}, expected a list of turns, each a text")
            if not isinstance(parse_action(turns[-1], search_options(environment).query_format), Answer):
                raise DataError(f"{of}, expected an answer in the last turn")

    def same() -> None:
        if checked_tasks(source, "train") != checked_tasks(source, "train"):
            raise DataError(f"{named(source.tasks)} returned others the second time, expected the same in each run")

    def train() -> None:
        if not checked_tasks(source, "train"):
            raise DataError(f"{named(source.tasks)} returned no training task, expected some")

    checks: list[tuple[str, Callable[[], object]]] = [
        ("tasks has training tasks, each with its own id", train),
        ("tasks has evaluation tasks with their own ids, or none", lambda: checked_tasks(source, "eval")),
        ("tasks returns the same each time", same),
        ("passages returns passages, or none", lambda: checked_passages(source)),
        ("demonstrate ends with an answer", demonstrate),
    ]
    return [Check(title, problem_of(check, type(source))) for title, check in checks]


def problem_of(check: Callable[[], object], called: Any) -> str:
    """Return the error that ``check`` raises, with the file and line of ``called``, a user's code; empty if none."""
    try:
        check()
    except Exception as error:  # a user's code may raise anything
        return raised_at(error, called)
    return ""


async def awaited_problem_of(check: Callable[[], Awaitable[object]], called: Any) -> str:
    """Return the error of an async ``check``, as ``problem_of`` does, or that it did not end in time."""
    limit = asyncio.timeout(QUESTION_TIMEOUT_S)
    try:
        async with limit:
            await check()
    except Exception as error:  # a user's code may raise anything
        waited = error.__cause__
        if limit.expired() and isinstance(waited, asyncio.CancelledError):  # its traceback has the line that waits
            said = f"got no result within {QUESTION_TIMEOUT_S:g} s, expected one; mend what it waits for"
            return raised_at(TimeoutError(said).with_traceback(waited.__traceback__), called)
        return raised_at(error, called)
    return ""


async def check_reward(environment: EnvironmentSettings) -> list[Check]:
    """Ask ``environment.reward`` for three made-up trajectories, in training and in an evaluation.

    The models of ``environment.models`` are not asked: each says yes.

    Raises:
        ConfigError: there is no such reward, or it has another form.
    """
    reward, models = Reward(environment), dict.fromkeys(environment.models, _SaysYes())

    async def ask(answer: str, given: list[str]) -> None:
        for context in (RewardContext("train", models=models), RewardContext("eval", 1.0, models=models)):
            given.append(f"{(await reward(made_up(answer), context)).total:g}")

    checks = []
    for title, answer in {"a right answer": "Riga", "an answer that is wrong": "Oslo", "no answer": ""}.items():
        given: list[str] = []
        problem = await awaited_problem_of(partial(ask, answer, given), reward)
        found = (
            "" if problem else f" is {given[0]}" + ("" if len(set(given)) == 1 else f", in an evaluation {given[1]}")
        )
        checks.append(Check(f"the reward of {title}{found}", problem))
    return checks


class _SaysYes:
    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        return "yes"


def stand_in_context(environment: EnvironmentSettings) -> EnvContext:
    """Return a context without services: each search finds one passage, each model says yes, calls are ``hermes``."""
    models, parser = dict.fromkeys(environment.models, _SaysYes()), GRAMMARS["hermes"].parser
    return EnvContext(OnePassage(), lambda text: list(text.encode()), models=models, parser=parser)


async def check_tool(name: str, environment: EnvironmentSettings) -> list[Check]:
    """Check a tool, a function or class ``my_module:my_tool``: its schema, and an answer to made-up arguments.

    A ``ToolError`` is an answer. For a server of ``environment.mcp`` only the schemas of its tools are checked.

    Raises:
        ConfigError: there is no such tool, or it has no schema.
    """
    if name in environment.mcp:
        listed = await list_tools(name, environment.mcp[name])
        return [Check(f"it lists {tool['function']['name']}, whose schema is a JSON schema") for tool in listed]
    ((_, tool),) = make_tools([name], stand_in_context(environment), ToolOptions()).items()
    arguments = made_up_arguments(tool.schema["function"].get("parameters", {}))

    async def answer() -> None:
        with suppress(ToolError):
            results: object = await contained(tool.call([arguments]))
            if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], ToolResult):
                expected = "expected a list with a ToolResult for each call"
                raise ConfigError(f"{named(tool.call)} returned {shortened(repr(results))} for one call, {expected}")

    problem = await awaited_problem_of(answer, tool.call)
    shown = json.dumps(arguments, ensure_ascii=False)
    return [
        Check("its schema is a JSON schema", problem_of(tool.check_schema, tool.call)),
        Check(f"it answers {tool.name}({shortened(shown)})", problem),
    ]


def made_up_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that fit the schema of a tool, as far as its types say."""
    return {key: _made_up_value(kind) for key, kind in parameters.get("properties", {}).items()}


def _made_up_value(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits the schema of an argument, as far as its type says."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "array":
            return [_made_up_value(schema.get("items", {}))]
        case found:
            made: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "object": {}, "null": None}
            return made.get(found, "lamp")


def made_up(answer: str, index: int = 0) -> Trajectory:
    """Return a trajectory of two turns, a search and the answer; without an answer its turns were used up."""
    call = SearchResult([_LAMP], latency_s=0.0, found_at=0.0).call("lamp", 1, turn_ended=0.0)
    search = Turn("<search>lamp</search>", 1, "search", (call,), f"<information>{_LAMP.text}</information>")
    last = Turn(f"<answer>{answer}</answer>", 1, "answer") if answer else Turn("no tag at all", 1, MALFORMED)
    return _ended((search, last), answer, index)


def _ended(turns: tuple[Turn, ...], answer: str, index: int = 0) -> Trajectory:
    """Return a trajectory of turns with one token each, and one token for each reply between them."""
    kinds = np.array([TokenKind.PROMPT, *[TokenKind.MODEL, TokenKind.OBSERVATION] * len(turns)][:-1], np.uint8)
    ids, versions = np.arange(len(kinds), dtype=np.int32), np.where(kinds == TokenKind.MODEL, 0, -1).astype(np.int32)
    reason = StopReason.ANSWERED if answer else StopReason.MAX_TURNS
    logprobs = np.zeros(len(kinds), np.float32)
    return Trajectory(f"check/0/{index}", TASK, ids, kinds, logprobs, versions, turns, reason, 0.0, answer)


E = TypeVar("E", bound=TextEnv)


@dataclass(frozen=True, slots=True)
class _Trial(Generic[E]):
    """Episodes of a check; a method raises if something is wrong."""

    env_class: type[E]
    settings: EnvironmentSettings

    def make(self) -> E:
        make: Callable[..., E] = self.env_class
        return make(self.settings, stand_in_context(self.settings))

    async def start(self) -> E:
        env = self.make()
        await env.reset(TASK)
        return env

    def options(self) -> None:
        part_options(self.env_class, self.settings.options, "environment.env", "environment.options")

    async def reset(self) -> None:
        messages = check_prompt(await self.make().reset(TASK), self.env_class.reset)
        if not any(TASK.question in message.text for message in messages):
            raise ConfigError(
                f"{named(self.env_class.reset)} returned {shortened(repr(messages))}, expected the question in one of "
                "them: else the policy never sees what to answer"
            )

    async def left_open(self) -> None:
        env = await self.start()
        for text in ODD_TEXTS:
            tag: object = env.left_open(text)
            if not isinstance(tag, str):
                raise ConfigError(f"{named(env.left_open)} returned {tag!r} for {_shown(text)}, expected text")

    async def measures(self) -> None:
        env = await self.start()
        result = check_result(
            await env.act(Completion([], [], [], "<answer>Riga</answer>", FinishReason.STOP)), env.act
        )
        turn = Turn("<answer>Riga</answer>", 1, result.action, result.calls)
        measure(env, _ended((turn,), result.answer))

    async def act(self) -> None:
        for text in ODD_TEXTS:
            env = await self.start()
            try:
                result = await env.act(Completion([], [], [], text, FinishReason.STOP))
            except Exception as error:  # a user's environment may raise anything
                raise ConfigError(f"act({_shown(text)}) failed at {raised_at(error, env.act)}") from error
            check_result(result, env.act)
            env.close()

    async def peek(self) -> None:
        env = await self.start()
        text = "<search>lamp\nRiga</search>"
        for end in range(0, len(text) + 3, 3):
            env.peek(text[:end])
        env.close()  # a search may still run


class _SearchTrial(_Trial[SearchEnv]):
    """Episodes of an environment that searches."""

    async def parse(self) -> None:
        env = await self.start()
        for text in ODD_TEXTS:
            try:
                action: object = env.parse(text)
            except Exception as error:  # a user's environment may raise anything
                raise ConfigError(f"parse({_shown(text)}) failed at {raised_at(error, env.parse)}") from error
            if not isinstance(action, Search | Answer | Malformed):
                got = f"{named(env.parse)} returned {action!r} for {_shown(text)}"
                raise ConfigError(f"{got}, expected Search, Answer or Malformed")

    async def step(self) -> None:
        env = await self.start()
        check_result(await env.step(["lamp"]), env.step)

    async def submit(self) -> None:
        env = await self.start()
        await env.step(["lamp"])
        if not check_result(await env.submit("Riga"), env.submit).terminated:
            raise ConfigError(
                f"{named(env.submit)} gave terminated=False, expected True: an answer ends the trajectory"
            )
        env.close()

    async def submit_nothing(self) -> None:
        env = await self.start()
        check_result(await env.submit(""), env.submit)

    async def malformed(self) -> None:
        env = await self.start()
        check_result(await env.malformed("no tag"), env.malformed)


def _async_problem(env_class: type[TextEnv]) -> str:
    is_search = issubclass(env_class, SearchEnv)
    waiting, plain = (*_ASYNC, *(_SEARCH_ASYNC * is_search)), (*_PLAIN, *(_SEARCH_PLAIN * is_search))
    written = {name: inspect.getattr_static(env_class, name) for name in (*waiting, *plain)}
    is_async = {name for name, method in written.items() if inspect.iscoroutinefunction(method)}
    wrong = [f"{named(written[name])} is plain, expected async def" for name in waiting if name not in is_async]
    wrong += [f"{named(written[name])} is async, expected plain def" for name in plain if name in is_async]
    return "; ".join(wrong)


def _stop_problem(env_class: type[TextEnv]) -> str:
    stop: object = env_class.stop
    if isinstance(stop, property):  # every instance has a value
        return ""
    if isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop):
        return ""
    return f"got {stop!r}, expected a tuple of texts that are not empty, such as ('</search>', '</answer>')"


def _shown(text: str) -> str:
    return repr(shortened(text, 40))
