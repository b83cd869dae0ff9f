"""RequestQueue: requests that wait for a runner, and what each runner has, in a run and in ``ragr1 simulate``."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from cluster.autoscaler import FleetState
from ragr1_actors.rollout.groups import GroupRequest

R = TypeVar("R")
C = TypeVar("C")


class RequestQueue(Generic[R, C]):
    """Gives each request to the runner with the least to do, once it has room. Counts are in trajectories."""

    def __init__(
        self,
        ready: Callable[[], Sequence[R]],
        call: Callable[[GroupRequest, R], C],
        max_in_flight: int,
        clock: Callable[[], float],
        lock: AbstractContextManager[Any],
    ) -> None:
        """Begin without requests; a runner that has ``max_in_flight`` trajectories gets no further group.

        ``ready`` returns the runners that take requests, ``call`` begins to sample a group at one of them, ``clock``
        returns seconds. ``lock`` is held from the choice of a runner until it is called.
        """
        self._ready, self._call, self._max_in_flight = ready, call, max_in_flight
        self._clock, self._lock = clock, lock
        self._waiting: deque[tuple[GroupRequest, asyncio.Future[C]]] = deque()
        self.is_held = False
        """Whether waiting requests keep waiting."""
        self.num_in_flight: Counter[R] = Counter()
        """Number of trajectories that a runner has not returned."""
        self.num_sampled = 0
        """Number of trajectories since the start."""
        self._busy_s, self._accounted_at = 0.0, clock()
        self._loads: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return the number of requests that wait for a runner."""
        return len(self._waiting)

    async def place(self, request: GroupRequest, *, is_urgent: bool = False) -> C:
        """Wait until a runner was called with a request; an urgent one goes before those that wait."""
        called: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_urgent else self._waiting.append)((request, called))
        self.dispatch()
        return await called

    def dispatch(self) -> None:
        """Call runners that have room."""
        with self._lock:
            while self._waiting and not self.is_held:
                if self._waiting[0][1].done():  # cancelled
                    self._waiting.popleft()
                    continue
                runner = min(self._ready(), key=self.num_in_flight.__getitem__, default=None)
                if runner is None or self.num_in_flight[runner] >= self._max_in_flight:
                    return
                request, called = self._waiting.popleft()
                called.set_result(self._call(request, runner))

    def begin(self, runner: R, num_trajectories: int) -> None:
        """Count a group that a runner was given."""
        self._account()
        self.num_in_flight[runner] += num_trajectories

    def end(self, runner: R, num_trajectories: int) -> None:
        """Count a group that a runner has returned or lost."""
        self._account()
        self._loads.append((self.num_in_flight.total() / max(1, len(self._ready())), len(self._waiting)))
        self.num_in_flight[runner] -= num_trajectories
        if not self.num_in_flight[runner]:
            del self.num_in_flight[runner]

    def fail(self, error: Exception) -> None:
        """Fail all waiting requests."""
        waiting, self._waiting = self._waiting, deque()
        for _, called in waiting:
            if not called.done():
                called.set_exception(error)

    def take_load(self) -> tuple[float, float]:
        """Return trajectories in flight per ready runner, and the length of the queue.

        Both are averaged over the groups that have ended since the last call.
        """
        loads, self._loads = self._loads or [(0.0, 0)], []
        return sum(load for load, _ in loads) / len(loads), sum(queue for _, queue in loads) / len(loads)

    def _account(self) -> None:
        now = self._clock()
        self._busy_s += (now - self._accounted_at) * len(self.num_in_flight)
        self._accounted_at = now

    def state(self, num_starting: int) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are trajectories."""
        self._account()
        return FleetState(
            self._clock(),
            len(self._ready()),
            num_starting,
            ongoing=float(self.num_in_flight.total()),
            queued=float(sum(request.num_trajectories for request, _ in self._waiting)),
            busy_s=self._busy_s,
            num_answered=float(self.num_sampled),
        )
