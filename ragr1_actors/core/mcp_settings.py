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
    """Its address, such as ``http://10.0.0.2:9000/mcp``; empty with ``command``."""
    command: list[str] = []
    """Starts it in each env runner, to speak through standard input and output: ``[python, server.py]``; empty with
    ``url``. It has the environment and the working directory of the env runner."""
    key_env: str = ""
    """Name of the environment variable with the bearer token for ``url``; empty sends none."""
    only: list[str] = []
    """The tools that are taken, by name; empty takes all that it lists."""
    per_trajectory: bool = False
    """Whether each trajectory has a session of its own, and with ``command`` a process: for a server that remembers.
    By default those of an env runner share one."""
    timeout_s: float = Field(60, gt=0)
    """For its start, and for each call."""
    _tools: tuple[Mapping[str, Any], ...] | None = PrivateAttr(None)  # no key: a description may hold anything

    @model_validator(mode="after")
    def _take_one_way(self) -> Self:
        if bool(self.url) == bool(self.command):
            raise ValueError("expected either url or command")
        return self

    @property
    def address(self) -> str:
        """Its URL or its command, for messages."""
        return self.url or shlex.join(self.command)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """What it listed before the run, of which ``only`` were taken; None as long as it was not asked."""
        return self._tools

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return these settings with the tools that the policy is told of."""
        copied = self.model_copy()
        copied._tools = tuple(tools)
        return copied
