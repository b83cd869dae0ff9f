"""Agents (a function, a program, a Ray task): their arguments for one task, their start and their end.

A program or Ray task is ended with the processes that it started; a plain function in a thread cannot be ended.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError, one_line, shortened
from ragr1_actors.core.process.tied_process import tied
from ragr1_actors.core.process.users_code import contained, in_daemon_thread
from ragr1_actors.core.resolve import load_object, named, raised_at
from ragr1_actors.core.service_settings import AgentSettings
from ragr1_actors.core.types import Task


@dataclass(frozen=True, slots=True)
class AgentSession:
    """Arguments with which an agent asks the policy: ``OpenAI(base_url=session.base_url, api_key=session.api_key)``."""

    url: str
    """Address of the gateway: ``http://127.0.0.1:40123``."""
    api_key: str = field(repr=False)  # a message of the agent's error must not have it
    """Key that is valid until the agent ends."""
    seed: int
    """Seed of the agent's random draws; it differs between attempts."""
    deadline_s: float
    """Seconds for the agent."""

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def host(self) -> str:
        """Host of the gateway, for which no proxy must be used: ``127.0.0.1``."""
        return str(urlsplit(self.url).hostname)

    @property
    def search_url(self) -> str:
        """URL of the run's retriever, in Search-R1's protocol, with the same key."""
        return f"{self.url}/retrieve"


@dataclass(frozen=True, slots=True)
class Ended:
    """End of an agent."""

    answer: str | None = None
    """Answer; None if it returned or printed none, so that the posted one counts."""
    problem: str = ""
    """Reason of a failure; empty without one."""
    output: str = ""
    """End of its output."""


Function = Callable[[Task, AgentSession], Any]


def answer_of(returned: object, function: Function) -> str | None:
    """Return the result of an agent's function; raises ``ConfigError`` if it is neither a text nor None."""
    if returned is not None and not isinstance(returned, str):
        raise ConfigError(
            f"{named(function)} returned {shortened(repr(returned))}, expected the answer as a text, or None"
        )
    return returned


# -- kinds of agents ---------------------------------------------------------------------------------------------------


MAX_OUTPUT_BYTES = 2**16
"""Limit of a program's output that is kept, in bytes: the end of it."""
END_TIMEOUT_S = 30.0
"""Limit in seconds for the end of a program and of the processes that it started."""
_MAX_ARGUMENT = 100_000  # Linux refuses longer ones


class FunctionAgent:
    """Function in the env runner's process; a plain one runs in a thread, in which it cannot be ended."""

    def __init__(self, function: Function) -> None:
        """Take ``function(task, session)``."""
        self._function = function

    async def solve(self, task: Task, session: AgentSession, begun: asyncio.Event) -> Ended:
        """Return the result of the function."""
        begun.set()
        try:
            if is_async(self._function):
                returned = await contained(self._function(task, session))
            else:
                returned = await contained(in_daemon_thread(self._function, task, session))
            return Ended(answer_of(returned, self._function))
        except Exception as error:  # a user's agent may raise anything; only its trajectory ends
            return Ended(problem=raised_at(error, self._function))


class CommandAgent:
    """Program. The processes that it started end with it, and with this process, even if this one is killed."""

    def __init__(self, command: list[str]) -> None:
        """Take a command, whose ``{question}`` and ``{task_id}`` are replaced.

        The command ``python`` means this process's interpreter, with the packages of the run.
        """
        self._command = [sys.executable, *command[1:]] if command[0] == "python" else command

    async def solve(self, task: Task, session: AgentSession, begun: asyncio.Event) -> Ended:
        """Return the last line that the program prints."""
        begun.set()
        question = task.question.replace("\0", "")
        command = [one.replace("{task_id}", task.task_id).replace("{question}", question) for one in self._command]
        if (longest := max(len(one.encode()) for one in (*command, question))) > _MAX_ARGUMENT:
            got = f"the question of {task.task_id} makes an argument of {longest} bytes"
            return Ended(problem=f"{got}, expected at most {_MAX_ARGUMENT} for a program; name a function instead")
        process = await asyncio.create_subprocess_exec(
            *tied(command, has_input=False),
            stdin=asyncio.subprocess.PIPE,  # it ends with this process, however that ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C does not reach it
            env=os.environ
            | {name: ",".join(filter(None, (os.environ.get(name), session.host))) for name in ("NO_PROXY", "no_proxy")}
            | {
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "RAGR1_SEARCH_URL": session.search_url,
                "RAGR1_QUESTION": question,
                "RAGR1_TASK_ID": task.task_id,
                "RAGR1_SEED": str(session.seed),
            },
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        printed, errors = bytearray(), bytearray()
        running = asyncio.gather(_keep(process.stdout, printed), _keep(process.stderr, errors), process.wait())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:  # its attempt ends; its output is kept
            process.stdin.close()  # ends the program and its processes
        *_, status = await asyncio.wait_for(running, END_TIMEOUT_S)
        answer, said = (part.decode("utf-8", "replace") for part in (printed, errors))
        output = answer + said
        if status:
            last = _last_line(said) or _last_line(answer)
            return Ended(
                problem=f"{command[0]} ended with status {status}{last and f': {shortened(last)}'}", output=output
            )
        return Ended(_last_line(answer) or None, output=output)


class RayAgent:
    """Plain function that Ray runs in a process on the node of its env runner, which is killed to end it."""

    def __init__(self, function: Function, num_cpus: float) -> None:
        """Reserve ``num_cpus`` for each call."""
        import ray

        def announced(task: Task, session: AgentSession) -> Iterator[Any]:
            yield None  # it has its CPUs now
            yield function(task, session)

        self._function = function
        self._remote = ray.remote(num_cpus=num_cpus, max_retries=0)(announced)

    async def solve(self, task: Task, session: AgentSession, begun: asyncio.Event) -> Ended:
        """Return the result of the function."""
        import ray
        from ray.exceptions import RayError, RayTaskError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        items: Any = self._remote.options(scheduling_strategy=here).remote(task, session)
        try:
            await (await anext(items))
            begun.set()
            return Ended(answer_of(await (await anext(items)), self._function))
        except asyncio.CancelledError:
            ray.cancel(items, force=True)
            raise
        except ConfigError as error:
            return Ended(problem=one_line(error))
        except RayTaskError as error:
            return Ended(problem=f"{type(error.cause).__name__}: {one_line(error.cause)}")
        except RayError as error:
            return Ended(problem=f"its process ended: {one_line(error)}")


Agent = FunctionAgent | CommandAgent | RayAgent
"""Agent of a recipe. ``solve`` sets ``begun`` when it runs; a cancellation ends it and everything that it started."""


def is_async(function: Function) -> bool:
    """Return whether a function, or the ``__call__`` of an object, is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _keep(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read to the end, and keep the last bytes."""
    while part := await stream.read(2**16):
        kept += part
        del kept[:-MAX_OUTPUT_BYTES]


def _last_line(text: str) -> str:
    """Return the last line that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def make_agent(settings: AgentSettings) -> Agent:
    """Return the agent of a recipe.

    Raises:
        ConfigError: not exactly one of function, command and ray is given, or there is no such function.
    """
    given = [name for name in ("function", "command", "ray") if getattr(settings, name)]
    if len(given) != 1:
        raise ConfigError(
            f"environment.agent: got {' and '.join(given) or 'nothing'}, expected one of function, command and ray"
        )
    if settings.command:
        return CommandAgent(settings.command)
    function: Function = load_object(settings.function or settings.ray, dict[str, Function]())
    _check_function(function, settings)
    if settings.ray:
        return RayAgent(function, settings.num_cpus)
    return FunctionAgent(function)


def check_agent(config: SamplerConfig) -> None:
    """Raise a ``ConfigError`` if the agent of a recipe cannot run, or not with its other settings."""
    agent = config.environment.agent
    if agent is None:
        return
    make_agent(agent)
    if agent.ray and not config.env_runners.num_env_runners:
        raise ConfigError(
            "environment.agent.ray: got env_runners.num_env_runners=0; set it to 1 or more, or use function for ray"
        )
    if config.policy.chat_format == "tags":
        raise ConfigError("policy.chat_format: got tags with environment.agent; set it to auto, or to a form of calls")
    if isinstance(config, RunConfig) and config.sft.num_steps:
        raise ConfigError(
            f"sft.num_steps: got {config.sft.num_steps} with environment.agent, which has no demonstrations; set it to "
            "0, and learn the format by SFT with environment.env: tools in another run"
        )


def _check_function(function: Function, settings: AgentSettings) -> None:
    expected = "expected a function of (task, session), or an object that is called as one"
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"environment.agent: got {named(function)}, {expected}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"environment.agent: {named(function)}: {error}; {expected}") from None
    if settings.ray and is_async(function):
        raise ConfigError(
            f"environment.agent.ray: {named(function)} is async, which a Ray task cannot be; name a plain one"
        )
