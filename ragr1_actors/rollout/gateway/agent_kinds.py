"""Kinds of agents: a function, a program, a Ray task; how each is run for one task, and how it is ended.

What an agent leaves behind is ended with it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from concurrent.futures import ThreadPoolExecutor

from ragr1_actors.core.agent_settings import AgentSettings
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.resolve import load_object, named, raised_at
from ragr1_actors.core.tied_process import tied
from ragr1_actors.core.types import Task
from ragr1_actors.core.users_code import carried, contained
from ragr1_actors.rollout.gateway.agents import Agent, AgentSession, Ended, Function, answer_of

MAX_OUTPUT_BYTES = 2**16
"""Of what a program prints, its end is kept."""
END_TIMEOUT_S = 30.0
"""For the end of a program and of all that it started."""
_MAX_ARGUMENT = 100_000  # Linux refuses longer ones


class FunctionAgent:
    """A function in the env runner's process; a plain one has a thread, in which it cannot be ended."""

    def __init__(self, function: Function, max_threads: int) -> None:
        """Call ``function(task, session)``, ``max_threads`` at a time if it is a plain one."""
        self._function = function
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="agent")

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        """Return what the function returns."""
        try:
            if inspect.iscoroutinefunction(self._function):
                returned = await contained(self._function(task, session))
            else:
                loop = asyncio.get_running_loop()
                returned = await contained(loop.run_in_executor(self._threads, carried(self._function), task, session))
            return Ended(answer_of(returned, self._function))
        except Exception as error:  # a user's agent may raise anything; only its own trajectory ends
            return Ended(problem=raised_at(error, self._function))


class CommandAgent:
    """A program; whatever it started ends with it, and with this process, also where that is killed."""

    def __init__(self, command: list[str]) -> None:
        """Run ``command`` with the question and the task's id in their places."""
        self._command = command

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        """Return the last line that the program prints."""
        question = task.question.replace("\0", "")
        command = [one.replace("{task_id}", task.task_id).replace("{question}", question) for one in self._command]
        if (longest := max(len(one.encode()) for one in (*command, question))) > _MAX_ARGUMENT:
            got = f"the question of {task.task_id} makes an argument of {longest} bytes"
            return Ended(problem=f"{got}, expected at most {_MAX_ARGUMENT} for a program; name a function instead")
        process = await asyncio.create_subprocess_exec(
            *tied(command),
            stdin=asyncio.subprocess.PIPE,  # it ends with this process, however that ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C does not reach it
            env=os.environ
            | {
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "RAGR1_SEARCH_URL": session.search_url,
                "RAGR1_QUESTION": question,
                "RAGR1_TASK_ID": task.task_id,
                "RAGR1_SEED": str(session.seed),
            },
        )
        assert process.stdin is not None and process.stdout is not None
        output = bytearray()
        try:
            while part := await process.stdout.read(2**16):
                output += part
                del output[:-MAX_OUTPUT_BYTES]
            status = await process.wait()
        finally:
            process.stdin.close()  # which ends what is left
            await asyncio.shield(asyncio.wait_for(_ended(process.stdout, process), END_TIMEOUT_S))
        text = output.decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if status:
            last = f": {shortened(lines[-1])}" if lines else ""
            return Ended(problem=f"{command[0]} ended with status {status}{last}", output=text)
        return Ended(lines[-1] if lines else None, output=text)


async def _ended(stdout: asyncio.StreamReader, process: asyncio.subprocess.Process) -> int:
    while await stdout.read(2**16):  # asyncio says that a process has ended once its output was read
        pass
    return await process.wait()


def make_agent(settings: AgentSettings, max_concurrent: int) -> Agent:
    """Return the agent of a recipe.

    Raises:
        ConfigError: it names none of function, command and ray, or several; or there is no such function.
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
        from ragr1_actors.rollout.gateway.ray_agent import RayAgent

        return RayAgent(function, settings.num_cpus)
    return FunctionAgent(function, max_concurrent)


def check_agent(config: SamplerConfig) -> None:
    """Raise a ``ConfigError`` if the agent of a recipe cannot be run, or not with its other settings."""
    agent = config.environment.agent
    if agent is None:
        return
    make_agent(agent, 1)
    if agent.ray and not config.env_runners.num_env_runners:
        raise ConfigError(
            "environment.agent.ray: got env_runners.num_env_runners=0; set it to 1 or more, or name function"
        )
    if config.policy.chat_format == "tags":
        raise ConfigError("policy.chat_format: got tags, in which no agent asks; set it to auto, or to a form of calls")
    if isinstance(config, RunConfig) and config.sft.num_steps:
        raise ConfigError(
            f"sft.num_steps: got {config.sft.num_steps} with environment.agent, of which there are no demonstrations; "
            "set it to 0, and train the format with environment.env: tools in another run"
        )


def _check_function(function: Function, settings: AgentSettings) -> None:
    expected = "expected a function of (task, session)"
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"environment.agent: got {named(function)}, {expected}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"environment.agent: {named(function)}: {error}; {expected}") from None
    if settings.ray and inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"environment.agent.ray: {named(function)} is async, which a Ray task cannot be; name a plain one"
        )
