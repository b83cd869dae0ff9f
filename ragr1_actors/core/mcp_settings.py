"""The keys of one server of ``environment.mcp``, and the tools that it listed before the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from ragr1_actors.core.section import Section


class McpServer(Section):
    """A server of tools that speaks the Model Context Protocol."""

    url: str = ""
    """Address of the server, such as ``http://10.0.0.2:9000/mcp``; empty with ``command``."""
    command: list[str] = []
    """Command with which each env runner starts the server, to speak over standard input and output: ``[python,
    server.py]``; empty with ``url``. It has the environment variables and the working directory of the env runner."""
    key_env: str = ""
    """Name of the environment variable with the bearer token for ``url``; empty sends none."""
    only: list[str] = []
    """Names of the tools that the policy gets; empty: all that the server lists."""
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
        """The URL or the command, for messages."""
        return self.url or shlex.join(self.command)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """The tools that the server listed before the run, those of ``only``; None before it was asked."""
        return self._tools

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return these settings with the tools that the policy gets."""
        copied = self.model_copy()
        copied._tools = tuple(tools)
        return copied
