"""ActorFleet: actors of one kind whose number may change while they are used. Clients find them by name.

::

    fleet.scale_to(3)          retriever-5f0c-0   retriever-5f0c-1   retriever-5f0c-2
                                       ▲                ▲
    find_actors("retriever-5f0c") ─────┴────────────────┘   from any process of the job

A member is one actor, or a few that work together (the shards of an index). Ray restarts a dead actor under its name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ragr1_actors.core.errors import FleetError

PING_TIMEOUT_S = 5.0

StartMember = Callable[[str], Mapping[str, ActorHandle[Any]]]
"""Given a member's name, starts its actors under names that begin with it, and returns them."""


class ActorFleet:
    """Starts, counts and ends the members of a fleet. Every actor has the methods ``ping`` and ``drain``."""

    def __init__(self, kind: str, start_member: StartMember) -> None:
        """Hold no member yet.

        Args:
            kind: one word for names and messages: ``retriever``.
            start_member: starts a member.
        """
        self.kind = kind
        self.name = f"{kind}-{uuid.uuid4().hex[:12]}"
        """The names of all actors begin with it."""
        self._start_member = start_member
        self._members: dict[str, dict[str, ActorHandle[Any]]] = {}
        self._num_started = 0

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """All actors by name."""
        return {name: handle for actors in self._members.values() for name, handle in actors.items()}

    def scale_to(self, num_members: int) -> None:
        """Start members, or end the newest: an actor answers the calls it has before it ends."""
        while len(self._members) < num_members:
            name = f"{self.name}-{self._num_started}"
            self._num_started += 1
            self._members[name] = dict(self._start_member(name))
        while len(self._members) > num_members:
            _, actors = self._members.popitem()
            for handle in actors.values():
                handle.drain.remote()
                handle.__ray_terminate__.remote()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once every actor has answered a ping.

        Raises:
            FleetError: an actor did not start; all are stopped.
        """
        try:
            ray.get([handle.ping.remote() for handle in self.handles.values()], timeout=timeout_s)
        except RayError as error:
            self.stop()
            raise FleetError(f"a {self.kind} did not start: {last_line(error)}") from error

    def num_healthy(self) -> int:
        """Number of actors that answer a ping within ``PING_TIMEOUT_S``."""
        return len(answers({name: handle.ping.remote() for name, handle in self.handles.items()}))

    def stop(self) -> None:
        """End all actors, without a restart. Their calls fail."""
        for handle in self.handles.values():
            ray.kill(handle, no_restart=True)
        self._members = {}


def answers(calls: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the calls that succeed within ``PING_TIMEOUT_S``, under the same names."""
    if not calls:
        return {}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=PING_TIMEOUT_S)
    found = {}
    for name, call in calls.items():
        if call in ready:
            try:
                found[name] = ray.get(call)
            except RayError:
                continue
    return found


def find_actors(fleet_name: str) -> list[str]:
    """Return the sorted names of a fleet's actors. Blocks for a call to the head node."""
    return sorted(name for name in ray.util.list_named_actors() if name.startswith(f"{fleet_name}-"))


def last_line(error: RayError) -> str:
    """Return the error's class and the last line of its message, the cause: Ray puts remote tracebacks before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
