"""AgentAttempt: an attempt at a task whose turns an agent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

from envs.measures import Measure
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, EngineError, ServiceError
from ragr1_actors.core.service_settings import AgentSettings
from ragr1_actors.core.types import StopReason, Task, Trajectory
from ragr1_actors.rollout.chat_format import ChatFormat
from ragr1_actors.rollout.gateway.agents import Agent, AgentSession, Ended, make_agent
from ragr1_actors.rollout.gateway.server import Gateway
from ragr1_actors.rollout.gateway.session import FloodError, Session
from ragr1_actors.rollout.recorder import Fork, Recorder
from retrieval.base import Retriever

CPU_TIMEOUT_S = 3600.0
"""Limit in seconds for the wait of an agent that is a Ray task for its CPUs, before its deadline begins."""
END_TIMEOUT_S = 60.0
"""Limit in seconds for the end of a cancelled agent; longer than a program takes."""


class AgentAttempt:
    """``Attempt`` by an agent."""

    measures: Mapping[str, Measure] = MappingProxyType({"rows": lambda ended: float(len(ended.rows))})

    def __init__(self, agent: Agent, gateway: Gateway, session: Session, deadline_s: float) -> None:
        """Take a new session, which records the agent's requests."""
        self._agent, self._gateway, self._session, self._deadline_s = agent, gateway, session, deadline_s
        self._output = self._problem = ""

    @property
    def source(self) -> Self:
        """See ``Attempt``."""
        return self

    async def run(self, task: Task, fork: Fork | None) -> StopReason:
        """Run the agent until it ends, and return the reason.

        Raises:
            EngineError: the engine failed in one of its requests.
            ServiceError: Ray had no CPUs for the agent.
            ConfigError: the agent ended before the policy acted.
        """
        if fork is not None:
            raise ConfigError("got a fork of an agent's trajectory; agents cannot be forked, choose another strategy")
        ended, is_late = await self._solved(task)
        if self._session.refusal and (ended.problem or not self._session.has_turns):
            refused = f"its last request was refused: {self._session.refusal}"
            ended = replace(ended, problem="; ".join(filter(None, (ended.problem, refused))))
        self._output, self._problem = "\n".join(filter(None, (ended.output, ended.problem))), ended.problem
        if self._session.answer is None:
            self._session.answer = ended.answer
        if not self._session.has_turns:
            raise ConfigError(f"the agent ended before the policy acted: {ended.problem or 'it asked nothing'}")
        if is_late:
            return StopReason.AGENT_DEADLINE
        if self._session.limit is not None and (ended.problem or not self._session.answer):
            return self._session.limit
        if ended.problem:
            return StopReason.AGENT_FAILED
        return StopReason.ANSWERED

    async def _solved(self, task: Task) -> tuple[Ended, bool]:
        """Run the agent; return its end, and whether the deadline caused it."""
        deadline_s, session = self._deadline_s, self._session
        async with self._gateway.opened(session) as key:
            given = AgentSession(self._gateway.url, key, session.seed, deadline_s)
            begun = asyncio.Event()
            solving = asyncio.ensure_future(self._agent.solve(task, given, begun))
            watched: list[asyncio.Future[Any]] = [solving, session.failed]
            try:
                await self._wait_for_cpus(begun, watched)
                await asyncio.wait(watched, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
                is_late = not any(one.done() for one in watched)
                is_engine_slow = is_late and session.is_waited_for and not session.has_turns
            finally:
                session.end()
                if not solving.done():
                    solving.cancel()
                    await asyncio.wait({solving}, timeout=END_TIMEOUT_S)  # a function may catch it and continue
            failure = None if session.failed.cancelled() else session.failed.exception()
            if failure is None and not is_late:
                own_end = Ended(problem="the agent cancelled its own task")
                return own_end if solving.cancelled() else solving.result(), False
            has_ended = solving.done() and not solving.cancelled() and solving.exception() is None
            self._output = solving.result().output if has_ended else ""
            if failure is not None and not isinstance(failure, FloodError):
                raise failure
            if is_engine_slow:
                raise EngineError(
                    f"the engine did not answer the agent's first request within its deadline of {deadline_s:g} s; "
                    "raise environment.agent.deadline_s"
                )
            problem = str(failure) if failure is not None else f"the agent did not end within {deadline_s:g} s"
            return Ended(problem=problem, output=self._output), is_late

    async def _wait_for_cpus(self, begun: asyncio.Event, watched: Sequence[asyncio.Future[Any]]) -> None:
        """Return when the agent runs or has ended; a Ray task waits for its CPUs, without a part in the wait."""
        begins = asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait([*watched, begins], timeout=CPU_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begins.cancel()
        if not begun.is_set() and not any(one.done() for one in watched):
            raise ServiceError(
                f"Ray had no CPUs for the agent within {CPU_TIMEOUT_S:g} s; lower environment.agent.num_cpus or "
                "env_runners.max_concurrent_trajectories"
            )

    def trajectory(self, task: Task, stop_reason: StopReason, error: str = "") -> Trajectory:
        """Return the recorded trajectory so far; ``error`` also says why an agent failed."""
        if stop_reason in (StopReason.AGENT_FAILED, StopReason.AGENT_DEADLINE):
            error = error or self._problem
        return self._session.trajectory(task, stop_reason, error, self._output)


class AgentAttempts:
    """Agents of one env runner: one gateway, and an attempt for each trajectory."""

    def __init__(self, config: SamplerConfig, settings: AgentSettings, chat: ChatFormat, retriever: Retriever) -> None:
        """Take the agent of a recipe; raises ``ConfigError`` if it cannot run."""
        self._agent = make_agent(settings)
        self._gateway = Gateway(settings.host, retriever)
        self._settings, self._chat, self._max_turns = settings, chat, config.environment.max_turns

    def attempt(self, record: Callable[..., Recorder], release: Callable[[str], None]) -> AgentAttempt:
        """Return a new attempt; ``record`` makes its recorders, whose ids the engine may ``release`` at its end."""
        session = Session(record, release, self._chat, self._max_turns)
        return AgentAttempt(self._agent, self._gateway, session, self._settings.deadline_s)

    async def close(self) -> None:
        """Stop the gateway."""
        await self._gateway.close()
