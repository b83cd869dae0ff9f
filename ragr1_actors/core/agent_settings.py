"""The keys of ``environment.agent``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ragr1_actors.core.section import Section


class AgentSettings(Section):
    """An agent that asks the policy at the gateway, and how it is run: one of ``function``, ``command`` and ``ray``."""

    function: str = ""
    """A function ``my_agent:solve`` of ``(task, session)``, plain (in a thread) or async, which returns the answer."""
    command: list[str] = []
    """A program and its arguments, with ``{question}`` and ``{task_id}``; the last line that it prints is the answer:
    ``[python, agent.py, "{question}"]``."""
    ray: str = ""
    """A plain function as in ``function``, called as a Ray task on the env runner's node."""
    num_cpus: float = Field(1, ge=0)
    """CPUs that Ray reserves for each call of ``ray``."""
    deadline_s: float = Field(600, gt=0)
    """Seconds that the agent has for one attempt; then it is ended."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address of the env runner's node on which the gateway listens; only this node can reach the default."""


def named_function(value: Any) -> Any:
    """Return the keys of ``environment.agent``, which may be the name of a function; None for an empty text."""
    return {"function": value} if isinstance(value, str) and value else value or None
