"""Agents: their arguments for one task, and their end. ``agent_kinds`` has the kinds of agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.resolve import named
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


class Agent(Protocol):
    """Agent of a recipe."""

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        """Run the agent until it ends; a cancellation ends it and everything that it started."""


def answer_of(returned: object, function: Function) -> str | None:
    """Return the result of an agent's function; raises ``ConfigError`` if it is neither a text nor None."""
    if returned is not None and not isinstance(returned, str):
        raise ConfigError(
            f"{named(function)} returned {shortened(repr(returned))}, expected the answer as a text, or None"
        )
    return returned
