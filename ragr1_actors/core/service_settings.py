"""The keys of ``environment.agent``, and of one server of ``environment.mcp``, with the tools that it listed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from ragr1_actors.core.section import Section


class McpServer(Section):
    """Server of tools that speaks the Model Context Protocol."""

    url: str = ""
    """Address of the server, such as ``http://10.0.0.2:9000/mcp``; empty with ``command``."""
    command: list[str] = []
    """Command with which each env runner starts the server, to speak over standard input and output: ``[python,
    server.py]``; empty with ``url``. It gets the environment variables and the working directory of the env runner."""
    key_env: str = ""
    """Name of the environment variable with the bearer token for ``url``; empty: no token is sent."""
    only: list[str] = []
    """Names of the tools that the policy gets; empty: all tools that the server lists."""
    per_trajectory: bool = False
    """Whether each trajectory has a separate session, and with ``command`` a separate process: for a server that keeps
    state. By default the trajectories of an env runner share one session."""
    timeout_s: float = Field(60, gt=0)
    """Limit in seconds of the start of a session, and of each call."""
    _tools: tuple[Mapping[str, Any], ...] | None = PrivateAttr(None)  # not a key: a description may hold any text

    @model_validator(mode="after")
    def _take_one_way(self) -> Self:
        if bool(self.url) == bool(self.command):
            raise ValueError("expected either url or command")
        return self

    @property
    def address(self) -> str:
        """URL or command, for messages."""
        return self.url or shlex.join(self.command)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """Tools of ``only``, or all, that the server listed before the run; None before it was asked."""
        return self._tools

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return these settings with the tools that the policy gets."""
        copied = self.model_copy()
        copied._tools = tuple(tools)
        return copied


class AgentSettings(Section):
    """Agent that asks the policy at the gateway, started by one of ``function``, ``command`` and ``ray``."""

    function: str = ""
    """Function ``my_agent:solve`` of ``(task, session)``, plain (in a thread) or async, which returns the answer."""
    command: list[str] = []
    """Program and its arguments, with ``{question}`` and ``{task_id}``; the last line that it prints is the answer:
    ``[python, agent.py, "{question}"]``."""
    ray: str = ""
    """Plain function like ``function``, called as a Ray task on the env runner's node."""
    num_cpus: float = Field(1, ge=0)
    """CPUs that Ray reserves for each call of ``ray``."""
    deadline_s: float = Field(600, gt=0)
    """Seconds for one attempt of the agent, after which it is ended."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address of the env runner's node on which the gateway listens; only this node can reach the default."""


def named_function(value: Any) -> Any:
    """Return the keys of ``environment.agent``; the value may be the name of a function. None for an empty text."""
    return {"function": value} if isinstance(value, str) and value else value or None
