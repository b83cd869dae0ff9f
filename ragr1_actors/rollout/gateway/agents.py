"""An agent: what it is given for one task, and how it ends. ``agent_kinds`` has the kinds of agents."""

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
    """What an agent needs to ask the policy: ``OpenAI(base_url=session.base_url, api_key=session.api_key)``."""

    url: str
    """Address of the gateway: ``http://127.0.0.1:40123``."""
    api_key: str = field(repr=False)  # a message of the agent's error must not have it
    """Valid until the agent ends."""
    seed: int
    """Seeds what the agent draws at random; each attempt has another seed."""
    deadline_s: float
    """Seconds that the agent has."""

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def host(self) -> str:
        """The gateway's host, which no proxy reaches: ``127.0.0.1``."""
        return str(urlsplit(self.url).hostname)

    @property
    def search_url(self) -> str:
        """The run's retriever, in Search-R1's protocol, with the same key."""
        return f"{self.url}/retrieve"


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent ended."""

    answer: str | None = None
    """None: it returned or printed none, and the one that it posted counts."""
    problem: str = ""
    """Why it failed; empty if it did not."""
    output: str = ""
    """The end of what it printed."""


Function = Callable[[Task, AgentSession], Any]


class Agent(Protocol):
    """An agent of a recipe."""

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        """Run the agent until it ends; a cancellation ends it, and all that it started."""


def answer_of(returned: object, function: Function) -> str | None:
    """Return what an agent's function returned; ``ConfigError`` if it is neither a text nor None."""
    if returned is not None and not isinstance(returned, str):
        raise ConfigError(
            f"{named(function)} returned {shortened(repr(returned))}, expected the answer as a text, or None"
        )
    return returned
