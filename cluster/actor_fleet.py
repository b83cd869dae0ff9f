"""ActorFleet: actors of one kind whose number may change while they are used, found by name.

::

    fleet.scale_to(3)          retriever-5f0c-0   retriever-5f0c-1   retriever-5f0c-2
                                       ▲                ▲
    find_actors("retriever-5f0c") ─────┴────────────────┘   from any process of the job, no directory to keep alive

A member is one actor or a gang of a few (the shards of an index). Ray restarts an actor that dies, under its name.
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
"""Given a member's name, start its actors under names that begin with it, and return them."""


class ActorFleet:
    """Starts, counts and ends the members of a fleet. Every actor has ``ping``, and ``drain`` for before its end."""

    def __init__(self, kind: str, start_member: StartMember) -> None:
        """Hold no member yet.

        Args:
            kind: in a word, for names and messages: ``retriever``.
            start_member: starts one.
        """
        self.kind = kind
        self.name = f"{kind}-{uuid.uuid4().hex[:12]}"
        """What the names of all actors begin with."""
        self._start_member = start_member
        self._members: dict[str, dict[str, ActorHandle[Any]]] = {}
        self._num_started = 0

    @property
    def num_members(self) -> int:
        """Members that were started and not stopped."""
        return len(self._members)

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """All actors by name."""
        return {name: handle for actors in self._members.values() for name, handle in actors.items()}

    def scale_to(self, num_members: int) -> None:
        """Start what is missing, or let the newest go: an actor that goes ends behind the calls it already has."""
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
            FleetError: one did not start; all are stopped.
        """
        try:
            ray.get([handle.ping.remote() for handle in self.handles.values()], timeout=timeout_s)
        except RayError as error:
            self.stop()
            raise FleetError(f"a {self.kind} did not start: {last_line(error)}") from error

    def num_healthy(self) -> int:
        """Actors that answer a ping within ``PING_TIMEOUT_S``. Blocks for as long as they are busy."""
        pings: list[Any] = [handle.ping.remote() for handle in self.handles.values()]
        if not pings:
            return 0
        answered, _ = ray.wait(pings, num_returns=len(pings), timeout=PING_TIMEOUT_S)
        num_healthy = 0
        for ping in answered:
            try:
                ray.get(ping)
            except RayError:
                continue
            num_healthy += 1
        return num_healthy

    def stop(self) -> None:
        """End all actors, without a restart. Calls in flight fail."""
        for handle in self.handles.values():
            ray.kill(handle, no_restart=True)
        self._members = {}


def find_actors(fleet_name: str) -> list[str]:
    """Return the names of a fleet's actors as Ray knows them now, sorted. Blocks for a call to the head node."""
    return sorted(name for name in ray.util.list_named_actors() if name.startswith(f"{fleet_name}-"))


def last_line(error: RayError) -> str:
    """Return the error's kind and the line that says why: Ray puts whole remote tracebacks before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
