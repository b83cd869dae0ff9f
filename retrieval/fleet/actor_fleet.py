"""ActorFleet: actors of one kind whose number may change while they are used.

::

    scale_to(3)        retriever-5f0c-0.0   retriever-5f0c-1.0   retriever-5f0c-2.0
        │                      ▲                ▲
        └─► list of names ─────┴────────────────┘   which clients read every ``REFRESH_S``

The list is in Ray's key-value store. A member that is removed is taken off the list first, and ended ``LEAVE_S`` later,
when no client uses it any more. A ``Watchdog`` asks every actor for its load in a thread of this process, and ends one
that hangs: the owner of a fleet may serve requests, evaluate or train meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.autoscaler import FleetState
from cluster.placement import ActorOptions, anywhere
from cluster.rpc import last_line
from cluster.watchdog import HANG_TIMEOUT_S, Finding, Watchdog, pings
from ragr1_actors.core.errors import FleetError
from retrieval.fleet.actor import ActorLoad, RpcActor
from retrieval.fleet.batching import ClientLoad

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Between two looks of a client at the members of a fleet, while queries come."""
LEAVE_S = 3 * REFRESH_S
"""From taking a member off the list to its end. A client sends nothing by a list older than ``2 * REFRESH_S``."""
_NAMESPACE = "ragr1"
_HEALTH = "health"
"""Ray's concurrency group of the calls of ``load``."""
_ANSWER_TIMEOUT_S = 5.0
REPORT_EXPIRES_S = 5 * REFRESH_S
"""A client that has not reported for this long has no queries out."""


@dataclass(slots=True, eq=False)
class _Member:
    """The actors of one replica."""

    name: str
    actors: dict[str, ActorHandle[Any]]
    loads: dict[str, ActorLoad] = field(default_factory=dict)
    """What each actor answered last, since it was last reached."""
    died_at: dict[str, float] = field(default_factory=dict)
    """When each actor that is not back yet was found dead, or ended."""
    is_draining: bool = False
    """Its node goes away: it serves until others take over."""

    @property
    def is_running(self) -> bool:
        return len(self.loads) == len(self.actors)


class ActorFleet:
    """Members of one kind, each one actor or one for each shard of an index. Clients find them by name."""

    def __init__(
        self,
        kind: str,
        actor_class: type[RpcActor],
        arguments: Sequence[tuple[Any, ...]],
        *,
        num_cpus: float = 0.0,
        num_gpus: float = 0.0,
        actor_options: ActorOptions = anywhere,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        """Hold no member yet.

        Args:
            kind: one word for names and messages: ``retriever``.
            actor_class: of every actor.
            arguments: of the actors of a member, one tuple for each.
            num_cpus: of one actor, as ``num_gpus``.
            actor_options: where the first, second, ... actor that is started runs.
            hang_timeout_s: an actor that has shown no life for so long is ended, and Ray starts it again.
        """
        self.kind = kind
        self.name = f"{kind}-{uuid.uuid4().hex[:12]}"
        """The names of all actors begin with it."""
        # Ray restarts the actors without limit, but no call: the client retries, on another replica.
        with_options = ray.remote(  # type: ignore[call-overload]  # which lacks concurrency_groups
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups={_HEALTH: 1},  # a thread that no search blocks
        )
        self._actor_class: Any = with_options(actor_class)
        self._actor_options = actor_options
        self._arguments = arguments
        self._members: list[_Member] = []
        self._leaving: dict[str, tuple[threading.Timer, _Member]] = {}
        self._num_started = 0
        self._busy_s = self._num_answered = 0.0
        self._lock = threading.RLock()
        """Holds the members and what is known of them, which the watchdog's thread changes too."""
        self._hang_timeout_s = hang_timeout_s
        self._watchdog = Watchdog[tuple[_Member, str]](_ask, self._note, hang_timeout_s).start()
        self.num_hangs = 0
        """Actors that were ended because they did not answer."""

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """All actors by name: the fleet's, the number of the member, and that of the actor in it."""
        return {name: handle for member in self._members for name, handle in member.actors.items()}

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """All actors."""
        return list(self.handles.values())

    def scale_to(self, num_members: int) -> None:
        """Start members, or end some while clients go on: first those that still start, then the newest."""
        with self._lock:
            members = [member for member in self._members if not member.is_draining]
            for _ in range(num_members - len(members)):
                self._members.append(self._start(self._num_started))
                self._num_started += 1
            members.reverse()
            members.sort(key=lambda member: member.is_running)
            self._remove(members[: max(0, len(members) - num_members)])

    def _start(self, number: int) -> _Member:
        name, num_actors = f"{self.name}-{number}", len(self._arguments)
        started = {}
        for index, arguments in enumerate(self._arguments):
            options = {"name": f"{name}.{index}", **self._actor_options(number * num_actors + index)}
            started[options["name"]] = self._actor_class.options(**options).remote(*arguments)
        member = _Member(name, started)
        for actor_name, handle in started.items():
            self._watchdog.watch((member, actor_name), handle)
        return member

    def drain_nodes(self, node_ids: Collection[str]) -> int:
        """Let the members with an actor on these nodes of Ray leave, once ``scale_to`` has replaced them.

        Returns their number.
        """
        with self._lock:
            leaving = [m for m in self._members if any(load.node_id in node_ids for load in m.loads.values())]
            new = [member for member in leaving if not member.is_draining]
            for member in new:
                member.is_draining = True
        return len(new)

    def _remove(self, leaving: Sequence[_Member]) -> None:
        self._members = [member for member in self._members if member not in leaving]
        self._publish()
        for member in leaving:
            timer = threading.Timer(LEAVE_S, self._end, [member])
            timer.daemon = True
            self._leaving[member.name] = timer, member
            timer.start()

    def _end(self, member: _Member) -> None:
        """End the actors of a member that no client uses any more, after the calls that they have."""
        with self._lock:
            if self._leaving.pop(member.name, None) is None:  # the fleet was stopped
                return
        for name in member.actors:
            self._watchdog.forget((member, name))
        with contextlib.suppress(RayError):
            drained: list[Any] = [handle.drain.remote() for handle in member.actors.values()]
            ray.wait(drained, num_returns=len(drained), timeout=self._hang_timeout_s)
            for handle in member.actors.values():
                ray.kill(handle, no_restart=True)

    def _publish(self) -> None:
        found = {name: member.is_running for member in self._members for name in member.actors}
        _internal_kv_put(self.name, json.dumps(found), namespace=_NAMESPACE)

    def unplaced(self) -> list[Any]:
        """Return the actors that load or wait for room."""
        return [actor for member in self._members for name, actor in member.actors.items() if name not in member.loads]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once every actor has answered a ping.

        Raises:
            FleetError: an actor did not start.
        """
        try:  # the watchdog ends one that hangs while it loads
            pings(self.actors, timeout_s)
        except RayError as error:
            raise FleetError(f"a {self.kind} did not start: {last_line(error)}") from error

    def loads(self) -> dict[str, ActorLoad]:
        """Return the load of each actor that answers within 5 seconds, by name."""
        calls = {_ask(handle): name for name, handle in self.handles.items()}
        found = {}
        if calls:
            for call in ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)[0]:
                with contextlib.suppress(RayError):  # the watchdog tells
                    found[calls[call]] = ray.get(call)
        return {name: found[name] for name in self.handles if name in found}

    def state(self) -> FleetState:
        """Return what the fleet's autoscaler reads, as the actors answered lately. Requests are queries."""
        with self._lock:
            return self._state()

    def _state(self) -> FleetState:
        draining = [member for member in self._members if member.is_draining]
        members = [member for member in self._members if not member.is_draining]
        num_running = sum(member.is_running for member in members)
        if draining and num_running == len(members) > 0:
            self._remove(draining)
        reports = client_reports(load for member in self._members for load in member.loads.values())
        searching = [report for age_s, report in reports if age_s < REPORT_EXPIRES_S]
        return FleetState(
            time.monotonic(),
            num_running,
            len(members) - num_running,
            ongoing=float(sum(report.outstanding for report in searching)),
            queued=float(sum(report.waiting for report in searching)),
            busy_s=self._busy_s / len(self._arguments),
            num_answered=self._num_answered / len(self._arguments),
        )

    def _note(self, key: tuple[_Member, str], finding: Finding) -> None:
        """Keep what the watchdog has found, in its thread."""
        member, name = key
        with self._lock:
            num_running = sum(member.is_running for member in self._members)
            before = member.loads.pop(name, None)
            if finding.silent_s:
                self.num_hangs += 1
                member.died_at.setdefault(name, time.monotonic())
                logger.warning("%s %s hangs: it has not answered for %.0f s", self.kind, name, finding.silent_s)
            elif finding.error is not None:  # it restarts
                if before is not None:
                    member.died_at[name] = time.monotonic()
                    logger.warning("%s %s died (%s)", self.kind, name, last_line(finding.error))
            else:
                self._note_load(member, name, before, finding.answer)
            if num_running != sum(member.is_running for member in self._members):
                self._publish()

    def _note_load(self, member: _Member, name: str, before: ActorLoad | None, load: ActorLoad) -> None:
        member.loads[name] = load
        if name in member.died_at:
            logger.warning("%s %s is back after %.0f s", self.kind, name, time.monotonic() - member.died_at.pop(name))
        is_same = before is not None and before.started == load.started
        self._busy_s += load.busy_s - (before.busy_s if before and is_same else 0.0)
        self._num_answered += load.queries - (before.queries if before and is_same else 0)

    def stop(self) -> None:
        """End all actors, without a restart. Their calls fail."""
        self._watchdog.stop()
        with self._lock:
            leaving, self._leaving = self._leaving, {}
            for timer, member in leaving.values():
                timer.cancel()
                self._members.append(member)
            for handle in self.handles.values():
                ray.kill(handle, no_restart=True)
            self._members = []
        _internal_kv_del(self.name, namespace=_NAMESPACE)


def _ask(actor: Any) -> Any:
    return actor.load.options(concurrency_group=_HEALTH).remote()


def client_reports(loads: Iterable[ActorLoad]) -> list[tuple[float, ClientLoad]]:
    """Return the newest report of each client, with its age in seconds."""
    clients: dict[str, tuple[float, ClientLoad]] = {}
    for load in loads:
        for client, report in load.clients.items():
            clients[client] = min(report, clients.get(client, report), key=lambda report: report[0])
    return list(clients.values())


def find_actors(fleet_name: str, *, only_running: bool = False) -> list[str]:
    """Return the sorted names of a fleet's actors. Blocks for a call to the head node.

    ``only_running`` leaves out those that still load, unless all do.
    """
    value = _internal_kv_get(fleet_name, namespace=_NAMESPACE)
    found: dict[str, bool] = json.loads(value) if value else {}
    running = [name for name, is_running in found.items() if is_running]
    return sorted(running if only_running and running else found)
