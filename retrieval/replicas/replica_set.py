"""ReplicaSet: a fleet of actors that clients find by name, while their number changes.

::

    scale_to(3)        retriever-5f0c-0.0   retriever-5f0c-1.0   retriever-5f0c-2.0
        │                      ▲                ▲
        └─► list of names ─────┴────────────────┘   which clients read every ``REFRESH_S``

The list is in Ray's key-value store. A member that is removed is taken off the list first, and ended ``LEAVE_S`` later,
when no client uses it any more.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.autoscaler import FleetState
from cluster.placement import ActorOptions, anywhere
from cluster.supervision.fleet import Fleet, Member, MemberState, Process
from cluster.supervision.watchdog import HANG_TIMEOUT_S
from retrieval.replicas.actor import ActorLoad, RpcActor
from retrieval.replicas.batching import ClientLoad

REFRESH_S = 2.0
"""Seconds between two reads of a fleet's member list by a client, while queries come."""
LEAVE_S = 3 * REFRESH_S
"""Seconds from taking a member off the list to its end. A client uses no list older than ``2 * REFRESH_S``."""
_NAMESPACE = "ragr1"
_HEALTH = "health"
"""Ray's concurrency group for the calls of ``load``."""
_ANSWER_TIMEOUT_S = 5.0
REPORT_EXPIRES_S = 5 * REFRESH_S
"""Age in seconds from which a client's report is ignored: the client has no queries out."""


class ReplicaSet:
    """Members of one kind; each has one actor, or one for each shard of an index."""

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
        """Begin without members.

        Args:
            kind: one word for names and messages, such as ``retriever``.
            actor_class: class of every actor.
            arguments: arguments of the actors of a member, one tuple for each actor.
            num_cpus: CPUs of one actor, as ``num_gpus`` its GPUs.
            actor_options: returns the placement of the first, second, ... actor that is started.
            hang_timeout_s: see ``Fleet``.
        """
        self.kind = kind
        self.name = f"{kind}-{uuid.uuid4().hex[:12]}"
        """Beginning of the names of all actors."""
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
        self._leaving: dict[int, threading.Timer] = {}
        """Timers of the members that are off the list, by index."""
        self._done: dict[Process, tuple[float, int]] = {}
        """Seconds of work and number of answered queries of each process, at the last call of ``state``."""
        self._hang_timeout_s = hang_timeout_s
        self.fleet = Fleet[ActorLoad](kind, self._start, _ask, hang_timeout_s, on_change=self._publish)

    def _start(self, index: int) -> list[ActorHandle[Any]]:
        started = []
        for number, arguments in enumerate(self._arguments):
            options = self._actor_options(index * len(self._arguments) + number)
            name = self._name(index, number)
            started.append(self._actor_class.options(name=name, **options).remote(*arguments))
        return started

    def _name(self, index: int, number: int) -> str:
        return f"{self.name}-{index}.{number}"

    @property
    def _listed(self) -> list[Member[ActorLoad]]:
        return [member for member in self.fleet.members if member.index not in self._leaving]

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """Listed actors by name: name of the fleet, number of the member, number of the actor in it."""
        return {self._name(m.index, number): handle for m in self._listed for number, handle in enumerate(m.actors)}

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """Actors that are listed."""
        return list(self.handles.values())

    def scale_to(self, num_members: int) -> None:
        """Start members, or end some while clients continue: first those that still start, then the newest."""
        with self.fleet.changed:
            self._take_off(self.fleet.scale_to(num_members))

    def _take_off(self, leaving: Sequence[Member[ActorLoad]]) -> None:
        for member in leaving:
            timer = threading.Timer(LEAVE_S, self._end, [member])
            timer.daemon = True
            self._leaving[member.index] = timer
            timer.start()
        self._publish()

    def _end(self, member: Member[ActorLoad]) -> None:
        """End the actors of a member that no client uses any more, after they answered their calls."""
        if member.index not in self._leaving:  # the fleet was stopped
            return
        with contextlib.suppress(RayError):
            drained: list[Any] = [actor.drain.remote() for actor in member.actors]
            ray.wait(drained, num_returns=len(drained), timeout=self._hang_timeout_s)
            self.fleet.end(member)

    def _publish(self) -> None:
        names = {self._name(m.index, n): m.is_serving for m in self._listed for n in range(len(m.actors))}
        _internal_kv_put(self.name, json.dumps(names), namespace=_NAMESPACE)

    def loads(self) -> dict[str, ActorLoad]:
        """Return the load of each actor that answers within 5 seconds, by name."""
        calls = {_ask(handle): name for name, handle in self.handles.items()}
        found = {}
        if calls:
            for call in ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)[0]:
                with contextlib.suppress(RayError):  # the watchdog reports it
                    found[calls[call]] = ray.get(call)
        return {name: found[name] for name in self.handles if name in found}

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler, from the last answers of the actors. Requests are queries."""
        with self.fleet.changed:
            draining = [member for member in self._listed if member.is_draining]
            num_ready, num_starting = self.fleet.num(MemberState.READY), self.fleet.num(MemberState.STARTING)
            if draining and num_ready and not num_starting:
                self._take_off(draining)
            loads = [load for member in self.fleet.members for load in member.pulses.values()]
        self._done |= {load.process: (load.busy_s, load.queries) for load in loads}
        searching = [report for age_s, report in client_reports(loads) if age_s < REPORT_EXPIRES_S]
        return FleetState(
            time.monotonic(),
            num_ready,
            num_starting,
            ongoing=float(sum(report.outstanding for report in searching)),
            queued=float(sum(report.waiting for report in searching)),
            busy_s=sum(busy_s for busy_s, _ in self._done.values()) / len(self._arguments),
            num_answered=sum(number for _, number in self._done.values()) / len(self._arguments),
        )

    def stop(self) -> None:
        """End all actors, without a restart. Their calls fail."""
        leaving, self._leaving = self._leaving, {}
        for timer in leaving.values():
            timer.cancel()
        self.fleet.stop()
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
    """Return the sorted names of a fleet's actors; ``only_running`` leaves out those that load, unless all do."""
    value = _internal_kv_get(fleet_name, namespace=_NAMESPACE)
    found: Mapping[str, bool] = json.loads(value) if value else {}
    running = [name for name, is_running in found.items() if is_running]
    return sorted(running if only_running and running else found)
