"""Watchdog: a thread that finds hanging actors of a fleet and ends them. It does not depend on the driver.

::

    actor ── answers a question that its work does not block ──┐
      └───── beats while it loads, in Ray's key-value store ───┴─► Watchdog, a thread ──► Finding ──► the fleet
                                                                     └─► kill, if it shows no life for too long

An actor that is killed fails its open calls, so every wait on an actor ends about ``hang_timeout_s`` after it stops.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import ray
from ray._private.state import state  # no public function says how often an actor was restarted
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from ragr1_actors.core.config import FaultToleranceSettings

Key = TypeVar("Key", bound=Hashable)

HANG_TIMEOUT_S = FaultToleranceSettings().hang_timeout_s
"""Default of the longest silence, for fleets without a recipe, such as the fleet of ``ragr1 index serve``."""
LOOK_S = 1.0
"""Seconds between two looks at the actors, and between two beats."""
_BEAT_S = 2.0
_STOP_TIMEOUT_S = 10.0
_SHORTEST_LOOK_S = 0.2
"""Seconds between two looks while an answer is awaited, so that the start of an actor is noticed soon."""
_NAMESPACE = "ragr1_beats"


def kill(*actors: ActorHandle[Any], restarts: bool = False) -> None:
    """End the processes of actors, whose calls fail; with ``restarts`` Ray starts each again, as often as it may."""
    for actor in actors:
        ray.kill(actor, no_restart=not restarts)


@contextlib.contextmanager
def beating(first_s: float = 0.0) -> Iterator[None]:
    """Send beats while the block runs in an actor that cannot answer meanwhile: it loads, or copies all weights.

    A thread writes them; it gets Python's lock between two steps of an import or a copy (after 0.6 s at most, measured
    while torch, transformers, DeepSpeed, faiss and vLLM were imported on two cores). ``first_s`` is the time of the
    first beat; a block that ends before it writes none.
    """
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor_id is None:  # not in an actor, so no watchdog
        yield
        return
    key, has_ended = _key(actor_id), threading.Event()

    def beat() -> None:
        count = 0
        while not has_ended.wait(_BEAT_S if count else first_s):
            count += 1
            with contextlib.suppress(RayError):  # the head does not answer, but may at the next beat
                _internal_kv_put(key, f"{os.getpid()} {count}", namespace=_NAMESPACE)
        if count:
            with contextlib.suppress(RayError):
                _internal_kv_del(key, namespace=_NAMESPACE)

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def show_life() -> None:
    """Write one beat when an actor begins, so that a stop before its first answer is noticed, too."""
    if ray.is_initialized() and (actor_id := ray.get_runtime_context().get_actor_id()) is not None:
        _internal_kv_put(_key(actor_id), f"{os.getpid()} 0", namespace=_NAMESPACE)


def _key(actor_id: str) -> str:
    return f"beat {actor_id}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a watchdog about an actor; one of the three fields is set."""

    answer: Any = None
    """Answer of the actor to the question."""
    error: RayError | None = None
    """Error of its answer, or its death. A death is reported once until it answers again, except for the last one."""
    silent_s: float = 0.0
    """Seconds without a sign of life: it is killed now. Ray restarts it if it has restarts left."""


@dataclass(slots=True)
class _Watched:
    actor: Any
    alive_at: float | None = None
    """Time of its last sign of life on the watchdog's clock; None before the first in this life: it may lack room."""
    asked_at: float = 0.0
    call: Any = None
    beat: bytes | None = None
    beat_read_at: float = -math.inf
    is_out: bool = False
    """Whether it was dead at the last look."""


class Watchdog(Generic[Key]):
    """Thread that asks actors whether they are alive, and kills those that show no life for ``hang_timeout_s``."""

    def __init__(
        self,
        ask: Callable[[Any], Any],
        tell: Callable[[Key, Finding], None],
        hang_timeout_s: float,
        *,
        interval_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without actors; ``start`` starts the thread.

        Args:
            ask: calls a method of the actor that its work does not block, and returns the reference.
            tell: called in the watchdog's thread with the key of an actor and each finding, a hang before the kill.
            hang_timeout_s: longest silence in seconds.
            interval_s: seconds between two questions to an actor that answers.
            clock: returns the time in seconds.
        """
        self._ask, self._tell, self._clock = ask, tell, clock
        self._hang_timeout_s, self._interval_s = hang_timeout_s, interval_s
        self._watched: dict[Key, _Watched] = {}
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._looked_at = clock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Self:
        """Look at the actors about once a second from now on, in a thread; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def watch(self, key: Key, actor: Any) -> None:
        """Watch an actor from now on; it may still wait for room or load."""
        with self._lock:
            self._watched[key] = _Watched(actor)

    def forget(self, key: Key) -> None:
        """Stop watching an actor; it is no error if it is not watched."""
        with self._lock:
            self._watched.pop(key, None)

    def stop(self) -> None:
        """Stop watching, and return once the thread has ended, unless a head that hangs holds it."""
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def patient(self, silence_s: float) -> Iterator[None]:
        """Allow a silence of ``silence_s`` seconds within the context."""
        before, self._hang_timeout_s = self._hang_timeout_s, max(silence_s, self._hang_timeout_s)
        try:
            yield
        finally:
            with self._lock:
                for actor in self._watched.values():
                    if actor.alive_at is not None:
                        actor.alive_at = self._clock()  # it may have been silent for longer than is allowed from now on
                self._hang_timeout_s = before

    def _run(self) -> None:
        while not self._has_ended.wait(self._pause_s()) and ray.is_initialized():
            self.look()

    def _pause_s(self) -> float:
        with self._lock:
            awaits = any(actor.call is not None for actor in self._watched.values())
        return _SHORTEST_LOOK_S if awaits else LOOK_S

    def look(self) -> None:
        """Look at every actor once."""
        now = self._clock()
        # After Ctrl-Z, a suspended machine, or a head node that did not answer, the actors were not seen meanwhile
        unseen_s = max(0.0, now - self._looked_at - 2 * LOOK_S)
        with self._lock:
            watched = dict(self._watched)
        for key, actor in watched.items():
            if actor.alive_at is not None:
                actor.alive_at += unseen_s
            with contextlib.suppress(RayError):  # the head does not answer, so nothing can be said
                for finding in self._examine(actor, now):
                    if self._has_ended.is_set() or not self._is_watched(key, actor):
                        break
                    self._tell(key, finding)
                    if finding.silent_s:
                        self._end(actor)
        self._looked_at = now

    def _is_watched(self, key: Key, actor: _Watched) -> bool:
        with self._lock:
            return self._watched.get(key) is actor

    def _examine(self, actor: _Watched, now: float) -> Iterator[Finding]:
        is_expected = actor.alive_at is None or actor.is_out  # its first answer, or the first after a death
        if actor.call is None and (is_expected or now - actor.asked_at >= self._interval_s):
            actor.call, actor.asked_at = self._ask(actor.actor), now
        if actor.call is None:
            return
        if ray.wait([actor.call], timeout=0)[0]:
            yield from self._read_answer(actor, now)
        if actor.alive_at == now:
            return
        if now - actor.beat_read_at >= LOOK_S:
            actor.beat_read_at = now
            beat = _internal_kv_get(_key(actor.actor._actor_id.hex()), namespace=_NAMESPACE)
            if beat not in (None, actor.beat):
                actor.beat, actor.alive_at = beat, now
        if actor.alive_at is not None and now - actor.alive_at > self._hang_timeout_s:
            if actor.beat is not None and _has_ended(actor):  # it died while it loaded; the next process may lack room
                _forget_beat(actor)
                actor.alive_at = None
                return
            yield Finding(silent_s=now - actor.alive_at)

    def _read_answer(self, actor: _Watched, now: float) -> Iterator[Finding]:
        call, actor.call = actor.call, None
        try:
            answer = ray.get(call)
        except RayError as error:  # Ray refuses calls until the actor has loaded again: beats tell how that goes
            if not actor.is_out:
                _forget_beat(actor)
                actor.is_out, actor.alive_at = True, None
                yield Finding(error=error)
            elif isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed):
                yield Finding(error=error)
        else:
            actor.is_out, actor.alive_at, actor.beat = False, now, None
            yield Finding(answer=answer)

    def _end(self, actor: _Watched) -> None:
        kill(actor.actor, restarts=True)
        _forget_beat(actor)
        actor.call, actor.alive_at, actor.is_out = None, None, True


def _has_ended(actor: _Watched) -> bool:
    """Return whether the process of the last beat is no longer the actor's, because Ray started another one."""
    assert actor.beat is not None
    return bool(int(actor.beat.split()[0]) != state.actor_table(actor.actor._actor_id.hex()).get("Pid"))


def _forget_beat(actor: _Watched) -> None:
    """Delete the last beat of an ended process, as the next process may wait long for room before it beats."""
    _internal_kv_del(_key(actor.actor._actor_id.hex()), namespace=_NAMESPACE)
    actor.beat = None
