"""Fleet: the supervisor of actors that die, hang, are added and are removed.

Env runners, retrievers, encoders, learner ranks and the actors that embed a corpus are each a fleet::

    scale_to ──► starting ──all its actors answer──► ready ──scale_to, drain_nodes──► draining ──end──► gone
                    ▲       (and the owner admits)     │
                    ├──── Ray starts it again ◄────────┤ it died or hangs: its next life
                    └──────────────► lost ◄────────────┘ it cannot start, or hung too often

A member is one actor, or several that only work together, such as the actors of the shards of an index. A ``Watchdog``
asks every actor for its ``Pulse`` in a thread, so a fleet is supervised while its owner trains, evaluates or serves. In
a gang, such as the learner ranks, one that hangs ends all, and ``restart`` starts all in their next life.

The cause of a death is one line from Ray's texts of up to forty lines with advice on Ray's settings. Ray's memory
monitor ends the newest actors of a node that is almost full, not the one that filled it. An actor that may restart
fails with ``ActorUnavailableError``, which names no cause; Ray's table of processes has it.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

import ray
from ray._private.state import state  # no public function has the table of ended processes without Ray's dashboard
from ray._private.state import state as ray_state  # no public function says how often an actor was restarted
from ray.actor import ActorHandle
from ray.core.generated.common_pb2 import WorkerExitType  # type: ignore[attr-defined]  # generated
from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from cluster.supervision.watchdog import LOOK_S, Finding, Watchdog, kill
from ragr1_actors.core.errors import FleetError

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Limit of an actor's deaths while it loads, after which it counts as unable to load."""
MAX_FAILED_LOADS = 3
"""Limit of consecutive times that an actor was up but could not work, after which its member is lost."""
VERDICT_TIMEOUT_S = 60.0
"""Longest wait in seconds for Ray's verdict on an actor: Ray declares a node lost after several health checks."""
_VERDICT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Process:
    """Process of an actor; a restart gives the actor another one."""

    node_id: str
    """Ray's id of its node: 56 hexadecimal digits."""
    pid: int

    @classmethod
    def current(cls) -> Self:
        """Return the process of the calling actor."""
        return cls(ray.get_runtime_context().get_node_id(), os.getpid())


@dataclass(frozen=True, slots=True)
class Pulse:
    """Answer of an actor to the watchdog; a kind of actor may add to its process."""

    process: Process


P = TypeVar("P", bound=Pulse)


class MemberState(StrEnum):
    """Stage in the life of a member."""

    STARTING = "starting"
    """Waits for room, loads, or waits until its owner admits it; also after a death."""
    READY = "ready"
    DRAINING = "draining"
    """Gets no new work, and is ended by its owner."""
    LOST = "lost"
    """Cannot start again."""


@dataclass(frozen=True, slots=True)
class MemberId:
    """Index and life of a member; each death begins another life."""

    index: int
    life: int


@dataclass(slots=True, eq=False)
class Member(Generic[P]):
    """Member of a fleet, as the fleet sees it."""

    name: str
    """Name for people: ``env runner 3``."""
    index: int
    actors: Sequence[Any]
    life: int = 1
    pulses: dict[int, P] = field(default_factory=dict)
    """Newest pulse of each actor that is up, by its position in ``actors``."""
    is_admitted: bool = False
    """Whether its owner lets it work in this life."""
    is_draining: bool = False
    is_lost: bool = False
    died_at: float | None = None
    """Time of its death; None if it is ready, or never was ready."""
    num_failed_loads: int = 0
    num_hangs: int = 0
    """Number of hangs in a row: its owner sets it to 0 when the member has finished work."""

    @property
    def id(self) -> MemberId:
        """Index and life."""
        return MemberId(self.index, self.life)

    @property
    def is_up(self) -> bool:
        """Whether all its actors have answered in this life."""
        return len(self.pulses) == len(self.actors)

    @property
    def is_serving(self) -> bool:
        """Whether its actors can be called; a draining member continues its work."""
        return self.is_admitted and self.is_up and not self.is_lost

    @property
    def state(self) -> MemberState:
        """Stage in its life."""
        if self.is_lost or self.is_draining:
            return MemberState.LOST if self.is_lost else MemberState.DRAINING
        return MemberState.READY if self.is_serving else MemberState.STARTING


class Fleet(Generic[P]):
    """Members of one kind; each has an index that no other member had before."""

    def __init__(
        self,
        kind: str,
        start: Callable[[int], Sequence[Any]],
        ask: Callable[[Any], Any],
        hang_timeout_s: float,
        *,
        interval_s: float = LOOK_S,
        max_hangs: int | None = None,
        is_gang: bool = False,
        owner_admits: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin without members.

        Args:
            kind: word for names and messages: ``env runner``.
            start: starts the actors of the member of the given index, and returns their handles.
            ask: calls a method of an actor that its work does not block, and returns the reference of its ``Pulse``.
            hang_timeout_s: silence in seconds after which an actor is ended.
            interval_s: seconds between two pulses of an actor.
            max_hangs: number of hangs in a row after which a member is lost; None sets no limit.
            is_gang: a member that hangs ends all; of one that dies the owner, who waits for all, calls ``fail``.
            owner_admits: whether a member that is up waits for ``admit`` in each life; else it is ready at once.
            on_change: called when a member has begun or ceased to serve, perhaps in the watchdog's thread.
        """
        self.kind = kind
        self.members: list[Member[P]] = []
        """Members that were not ended; the list is replaced, not changed."""
        self.num_restarts = self.num_hangs = 0
        """Numbers of deaths and hangs since the fleet began. A hang also counts as a death."""
        self.failure = ""
        """Reason why a gang was ended, or the last member was lost."""
        self._ask = ask
        self._start, self._hang_timeout_s, self._max_hangs = start, hang_timeout_s, max_hangs
        self._is_gang, self._owner_admits, self._on_change = is_gang, owner_admits, on_change
        self._num_started = 0
        self.changed = threading.Condition(threading.RLock())
        """Condition that is held while members change, and that callers wait on for a change."""
        self._watchdog = Watchdog[tuple[Member[P], int]](ask, self.note, hang_timeout_s, interval_s=interval_s)

    # -- size ----------------------------------------------------------------------------------------------------

    def scale_to(self, num_members: int, load: Callable[[Member[P]], float] = lambda member: 0.0) -> list[Member[P]]:
        """Start members, or let some drain, and return the latter; draining members are not counted.

        Members that are lost or starting drain first, then those with the least ``load``, the newest first.
        """
        with self.changed:
            members = [member for member in self.members if not member.is_draining]
            for _ in range(num_members - len(members)):
                index, self._num_started = self._num_started, self._num_started + 1
                self._watch(Member(f"{self.kind} {index}", index, self._start(index)))
            members.sort(key=lambda m: (not m.is_lost, m.is_serving, load(m), -m.index))
            leaving = members[: max(0, len(members) - num_members)]
            for member in leaving:
                member.is_draining = True
            return leaving

    def _watch(self, member: Member[P]) -> None:
        self.members = [*self.members, member]
        self._watchdog.start()
        for number, actor in enumerate(member.actors):
            self._watchdog.watch((member, number), actor)

    def drain_nodes(self, node_ids: Collection[str]) -> int:
        """Let the members with an actor on these nodes of Ray drain, and return their number.

        The next ``scale_to`` replaces them.
        """
        with self.changed:
            members = [member for member in self.members if not member.is_draining]
            leaving = [m for m in members if any(pulse.process.node_id in node_ids for pulse in m.pulses.values())]
            for member in leaving:
                member.is_draining = True
            return len(leaving)

    def end(self, member: Member[P]) -> None:
        """End a member's actors, without a restart. Their calls fail."""
        with self.changed:
            self.members = [other for other in self.members if other is not member]
            self._forget(member)
        kill(*member.actors)

    def _forget(self, member: Member[P]) -> None:
        for number in range(len(member.actors)):
            self._watchdog.forget((member, number))

    def restart(self) -> None:
        """End the rest of a gang, and start all its members, each in its next life."""
        before = self.members
        self.end_all()
        with self.changed:
            for member in before:
                self._watch(Member(member.name, member.index, self._start(member.index), life=member.life + 1))

    def end_all(self) -> None:
        """End all members; no restart is possible."""
        for member in self.members:
            self.end(member)
        self.failure = ""

    def stop(self) -> None:
        """End all members, and stop the watchdog."""
        self._watchdog.stop()
        self.end_all()

    # -- state of the members ------------------------------------------------------------------------------------

    def num(self, state: MemberState) -> int:
        """Return the number of members in a state."""
        return sum(member.state is state for member in self.members)

    @property
    def serving(self) -> list[Member[P]]:
        """Members whose actors can be called."""
        return [member for member in self.members if member.is_serving]

    def unplaced(self) -> list[Any]:
        """Return the actors of starting members that have not answered: they load or wait for room."""
        starting = [member for member in self.members if member.state is MemberState.STARTING]
        return [a for member in starting for number, a in enumerate(member.actors) if number not in member.pulses]

    def wait_until_up(self, timeout_s: float) -> None:
        """Return once all actors have answered; the watchdog ends those that hang, and Ray starts them again.

        Raises:
            FleetError: a member cannot start, has died ``MAX_DEATHS`` times, or has not answered in time.
        """
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while waiting := [member for member in self.members if member.is_lost or not member.is_up]:
                if self.failure:
                    raise FleetError(self.failure)
                if time.monotonic() > deadline:
                    raise FleetError(
                        f"{len(waiting)} of {len(self.members)} {self.kind}s did not start in {timeout_s:g} s"
                    )
                for member in waiting:
                    if (num_deaths := max(map(_num_deaths, member.actors))) >= MAX_DEATHS:
                        raise FleetError(f"{member.name} did not start: it died {num_deaths} times while it loaded")
                self.changed.wait(LOOK_S)

    def wait_for_verdict(self, member: Member[P]) -> None:
        """Return once the first actor of a member answers or Ray says that it is dead, after a minute at the latest.

        Before that, Ray may still take the node of the actor for alive, and would place a new actor on it.
        """
        deadline_s = time.monotonic() + VERDICT_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                ray.get(self._ask(member.actors[0]), timeout=left_s)
            except ActorUnavailableError:  # neither of the two
                time.sleep(_VERDICT_INTERVAL_S)
            except RayError:
                return
            else:
                return

    def patient(self, silence_s: float) -> AbstractContextManager[None]:
        """Allow its actors a longer silence within the context."""
        return self._watchdog.patient(silence_s)

    # -- lives ---------------------------------------------------------------------------------------------------

    def admit(self, member_id: MemberId) -> None:
        """Let a member that is up work, unless it has died meanwhile."""
        with self.changed:
            member = self._find(member_id)
            if member is not None and member.is_up:
                self._admit(member)
                self._tell_change()

    def note_failure(self, member_id: MemberId, error: RayError) -> None:
        """Note that a call of a member failed: either it is dead, or it is up and broken and is ended."""
        with self.changed:
            if (member := self._find(member_id)) is not None:
                self._note_error(member, 0, error)
                self._tell_change()

    def note_process(self, member_id: MemberId, process: Process) -> None:
        """Note the process from which a member has answered; a new one means that it died meanwhile."""
        with self.changed:
            member = self._find(member_id)
            if member is not None and 0 in member.pulses and member.pulses[0].process != process:
                self._note_death(member, 0, "died while no call of it was open, and has loaded again")
                self._tell_change()

    def _find(self, member_id: MemberId) -> Member[P] | None:
        return next((member for member in self.members if member.id == member_id and not member.is_lost), None)

    def _tell_change(self) -> None:
        self._on_change()
        self.changed.notify_all()

    def note(self, key: tuple[Member[P], int], finding: Finding) -> None:
        """Act on a finding of the watchdog, in its thread."""
        member, number = key
        with self.changed:
            if member not in self.members or member.is_lost:
                return
            before = member.is_serving
            if finding.silent_s:
                self._note_hang(member, number, finding.silent_s)
            elif finding.error is not None:
                self._note_error(member, number, finding.error)
            else:
                self._note_pulse(member, number, finding.answer)
            if before != member.is_serving:
                self._on_change()
            self.changed.notify_all()

    def _note_pulse(self, member: Member[P], number: int, pulse: P) -> None:
        before = member.pulses.get(number)
        if before is not None and before.process != pulse.process:
            self._note_death(member, number, "died while no call of it was open, and has loaded again")
        member.pulses[number] = pulse
        if member.is_up and not member.is_admitted and not self._owner_admits:
            self._admit(member)

    def _admit(self, member: Member[P]) -> None:
        member.is_admitted, member.num_failed_loads = True, 0
        if member.died_at is not None:
            logger.warning("%s is back after %.0f s", member.name, time.monotonic() - member.died_at)
            member.died_at = None

    def _note_hang(self, member: Member[P], number: int, silent_s: float) -> None:
        self.num_hangs += 1
        member.num_hangs += 1
        self._note_death(member, number, f"hangs: it has not answered for {silent_s:.0f} s")
        if member.num_hangs == self._max_hangs:
            self._lose(
                member,
                f"{member.name} hung {member.num_hangs} times without finished work in between; if a step of it takes "
                f"longer than {self._hang_timeout_s:g} s, raise debugging.fault_tolerance.hang_timeout_s",
            )

    def _note_error(self, member: Member[P], number: int, error: RayError) -> None:
        if self._is_gang:
            return  # the owner's call fails, too, and knows more
        if isinstance(error, RayTaskError):  # the process is alive, but cannot do its work
            member.num_failed_loads += not member.is_admitted
            if member.num_failed_loads < MAX_FAILED_LOADS:
                kill(member.actors[number], restarts=True)
        if number in member.pulses:
            self._note_death(member, number, f"died ({last_line(error)})")
        fails_to_start = isinstance(error, RayActorError) and error.actor_init_failed
        if fails_to_start or member.num_failed_loads == MAX_FAILED_LOADS:
            again = " again" if member.life > 1 else ""
            self._lose(member, f"{member.name} did not start{again}: {last_line(error)}")

    def _note_death(self, member: Member[P], number: int, cause: str) -> None:
        member.pulses.pop(number, None)
        if self._is_gang:
            self.fail(f"{member.name} {cause}")
            return
        member.is_admitted = False
        member.life += 1
        member.died_at = member.died_at or time.monotonic()
        self.num_restarts += 1
        self._warn(f"{member.name} {cause}")

    def fail(self, reason: str) -> None:
        """End a gang; ``failure`` has the reason from now on, and ``restart`` starts it again."""
        with self.changed:
            self.failure = self.failure or reason
            for member in self.members:
                member.is_lost = True
                self._forget(member)
                kill(*member.actors)
            self.changed.notify_all()

    def _lose(self, member: Member[P], reason: str) -> None:
        self._warn(reason)
        self._forget(member)
        member.is_lost, self.failure = True, reason
        kill(*member.actors)

    def _warn(self, what: str) -> None:
        logger.warning("%s; %d of %d go on", what, self.num(MemberState.READY), len(self.members))


def wait_or_kill(calls: Mapping[Any, ActorHandle[Any]], timeout_s: float) -> Iterator[tuple[Any, RayError | None]]:
    """Yield each call as it ends, with its error; ``calls`` maps calls to their actors.

    An actor hangs if none of its calls ends within ``timeout_s``: it is killed, and Ray restarts it.
    """
    left = dict(calls)
    while left:
        done, hanging = ray.wait(list(left), timeout=timeout_s)
        for call in done or hanging:
            handle = left.pop(call)
            error: RayError | None = None
            if not done:
                kill(handle, restarts=True)
                error = GetTimeoutError(f"no answer in {timeout_s:g} s")
            else:
                try:
                    ray.get(call)
                except RayError as raised:
                    error = raised
            yield call, error


def _num_deaths(actor: Any) -> int:
    return int(ray_state.actor_table(actor._actor_id.hex()).get("NumRestarts", 0))


MAX_LINE = 160
"""Limit of characters, so that a line with the actor's name and the reaction has at most 200."""
_MAX_NAME = 40
_RECENT_S = 60.0
"""Age in seconds above which a report is about an earlier death of the same actor."""
_NODE = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_LARGEST = re.compile(r"COMMAND\s+\d+\t([\d.]+)\t(.+)")
_HAS_ENDED = re.compile(r"The actor (was restarted|is restarting)|its worker process has died")
_UNAVAILABLE = re.compile(r"temporarily unavailable: (?:IOError: )?(.+?)\.* The task may or may not")
PROCESSES = {
    "ray::LearnerWorker": ("learner", "learners.micro_batch_tokens"),
    "ray::EnvRunnerActor": ("env runner", "env_runners.max_concurrent_trajectories"),
    "VLLM::EngineCore": ("vLLM", "env_runners.max_concurrent_trajectories"),
    "ray::RetrieverActor": ("retriever", "retrieval.num_retrievers"),
    "ray::EncoderActor": ("encoder", "retrieval.encoders.num_encoders"),
    "ray::EmbeddingActor": ("encoder", "retrieval.encoders.num_encoders"),
    "ragr1 train": ("driver", "learners.micro_batch_tokens"),
    "ragr1_actors train": ("driver", "learners.micro_batch_tokens"),
}
"""Role in a run and the key that makes it smaller, by a part of a process's command. A driver may be the learner."""


def death_line(error: Exception) -> str:
    """Return what ended an actor or put it out of reach; empty for every other error."""
    if report := _memory_report(error):
        return memory_line(report)
    if not isinstance(error, RayActorError) or error.actor_init_failed:
        return ""
    line = (str(error).splitlines() or [""])[-1]
    if _HAS_ENDED.search(line):
        return "its process was killed or crashed"
    if isinstance(error, ActorUnavailableError) and (reason := _UNAVAILABLE.search(line)):
        line = reason[1]
    return textwrap.shorten(f"{type(error).__name__}: {line}", MAX_LINE, placeholder=" ...")


def last_line(error: Exception) -> str:
    """Return what ended an actor, else an error's class and the line of its message that names the cause.

    That is the line after the last traceback, since CUDA's advice follows it over several lines; else the last line.
    """
    if death := death_line(error):
        return death
    lines = [line for line in str(error).splitlines() if line.strip()]
    last_frame = max((at for at, line in enumerate(lines) if line.lstrip().startswith('File "')), default=None)
    behind = [] if last_frame is None else [line for line in lines[last_frame + 1 :] if not line[0].isspace()]
    chosen = (behind or lines[-1:] or [""])[0].strip()
    return f"{type(error).__name__}: {chosen}" if chosen else type(error).__name__


def memory_line(report: str) -> str:
    """Return the line for a report of Ray's memory monitor.

    ``ended by Ray's memory monitor, node 21.8 of 23.5 GB; largest: learner 14.6 GB; lower learners.micro_batch_tokens``
    """
    parts = ["ended by Ray's memory monitor"]
    if node := _NODE.search(report):
        parts[0] += f", node {float(node[1]):.1f} of {float(node[2]):.1f} GB"
    if largest := _LARGEST.search(report):
        name = next((name for name in PROCESSES if name in largest[2]), "")
        if not name:
            parts.append(f"largest: {textwrap.shorten(largest[2], _MAX_NAME, placeholder='...')} {_gb(largest[1])}")
        else:
            part, key = PROCESSES[name]
            parts += [f"largest: {part} {_gb(largest[1])}", f"lower {key}"]
    return "; ".join(parts)


def _gb(size: str) -> str:
    return f"{float(size):.1f} GB"


def _memory_report(error: Exception) -> str:
    """Return the report of Ray's memory monitor on the actor of this error, or an empty text."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    actor_id = error.actor_id if isinstance(error, RayActorError) else None
    if not actor_id or not ray.is_initialized():
        return ""
    since_ms, selected = 1000 * (time.time() - _RECENT_S), f"Selected to kill: (Actor({actor_id})"
    for data in state._connect_and_get_accessor().get_worker_table():
        worker = WorkerTableData.FromString(data)
        is_recent = worker.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY and worker.end_time_ms > since_ms
        if is_recent and selected in worker.exit_detail:
            return str(worker.exit_detail)
    return ""
