"""EnvRunnerGroup: the rollout fleet. Requests go in; trajectory groups come out in the order in which they finish.

::

    submit ──► pending ──► runner with the least to do ──► in flight ──► collect
                  ▲                                            │
                  └── the runner died: give it to another ─────┘

Ray restarts a runner that dies; it gets the newest weights and is used again. A runner that hangs is killed first. A
runner that cannot start again is lost: this is logged, and the fleet continues with the others, down to one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.placement import ActorOptions, anywhere
from cluster.rpc import last_line, outcomes
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import FleetError, RagR1Error
from ragr1_actors.core.folders import AnyFolder
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.rollout.env_runner import EnvRunner, EnvRunnerActor, GroupRequest, GroupSummary, summarize
from retrieval.base import Retriever

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Time limit of an engine to load."""
PROBE_INTERVAL_S = 1.0
"""Between two probes of a runner that is not healthy, and the longest wait for a group before the next probes."""
PING_INTERVAL_S = 10.0
"""Between two pings of a healthy runner."""
PING_TIMEOUT_S = 120.0
"""A runner that has not answered for this long hangs. A long prefill on a CPU takes seconds."""
MAX_FAILED_LOADS = 3
"""Consecutive failures of an engine to load beside learners after its actor was restarted; then the runner is lost."""
RESTART_TIMEOUT_S = 300.0
"""How long the fleet waits for a runner to come back if none is healthy."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A sampled group: its summary, and a reference to its tokens."""

    request: GroupRequest
    summary: GroupSummary
    batch: Any
    """``ray.ObjectRef`` of the group's record batch; the record batch itself if the driver samples."""


@dataclass(slots=True)
class _Runner:
    index: int
    handle: Any
    is_healthy: bool = True
    is_lost: bool = False
    """It cannot start again."""
    num_deaths: int = 0
    num_failed_loads: int = 0
    num_in_flight: int = 0
    """Trajectories that it was asked for and has not returned."""
    probe: Any = None
    """Reference of the call that is open: a ping of a healthy runner, else ``catch_up`` with the newest weights."""
    probed_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"env runner {self.index}"

    @property
    def life(self) -> str:
        return f"{self.name}, life {1 + self.num_deaths}"


class EnvRunnerGroup:
    """N runners as actors, or one runner in the driver if ``num_env_runners = 0``."""

    def __init__(
        self,
        config: SamplerConfig,
        policy: AnyFolder,
        retriever: Retriever,
        version: int = 0,
        actor_options: ActorOptions = anywhere,
    ) -> None:
        """Start the runners, which load while the caller goes on.

        ``version`` is that of the policy in ``policy``, a Hugging Face folder or hub name. ``actor_options``
        returns the Ray options of the runner with an index, such as its place.

        Raises:
            FleetError: a runner did not start.
        """
        settings = config.env_runners
        self._pending: deque[GroupRequest] = deque()
        self._in_flight: dict[Any, tuple[GroupRequest, _Runner, Any]] = {}  # the last is the reference of the batch
        self._runners: list[_Runner] = []
        self._newest: tuple[int, Callable[[], Any]] | None = None  # version, and what fetches its weights once
        self._last_loss = "none came back in time"
        self.num_restarts = 0
        self._local: EnvRunner | None = None
        self._loads: list[tuple[float, int]] = []  # for ``metrics``: load and queue
        # trajectories; twice what a runner runs at once, so that the next request is there when one ends
        self._max_in_flight = 2 * settings.max_concurrent_trajectories
        if settings.num_env_runners == 0:
            self._local = EnvRunner.load(config, policy, retriever, version)
            self._loop = asyncio.new_event_loop()
            return
        actor_class: Any = ray.remote(EnvRunnerActor)
        for index in range(settings.num_env_runners):
            placed = actor_class.options(
                num_cpus=settings.num_cpus_per_env_runner,
                num_gpus=settings.num_gpus_per_env_runner,
                max_restarts=-1,
                max_task_retries=0,  # the group gives the request to another runner
                max_concurrency=2 * self._max_in_flight,
                **actor_options(index),
            )
            self._runners.append(_Runner(index, placed.remote(config, policy, retriever, version)))

    def wait_until_ready(self) -> None:
        """Return once every runner has loaded its engine; ``FleetError`` if one did not."""
        if not self._runners:
            return
        try:
            ray.get([runner.handle.ping.remote() for runner in self._runners], timeout=START_TIMEOUT_S)
        except RayError as error:
            raise FleetError(f"an env runner did not start: {last_line(error)}") from error

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not collected."""
        return len(self._pending) + len(self._in_flight)

    @property
    def num_healthy(self) -> int:
        """Runners that take requests."""
        return 1 if self._local is not None else sum(runner.is_healthy for runner in self._runners)

    def metrics(self) -> dict[str, float]:
        """Health and load of the fleet; ``num_restarts`` counts the deaths since the start.

        ``load`` is the number of trajectories in flight per healthy runner and ``queue`` the number of groups that wait
        for a runner, both averaged over the calls of ``collect`` since the last call of this method.
        """
        loads, self._loads = self._loads or [(0.0, 0)], []
        return {
            "num_healthy": float(self.num_healthy),
            "num_restarts": float(self.num_restarts),
            "num_lost": float(sum(runner.is_lost for runner in self._runners)),
            "load": sum(load for load, _ in loads) / len(loads),
            "queue": sum(queue for _, queue in loads) / len(loads),
        }

    def foreach_env_runner(self, func: Callable[[EnvRunner], T]) -> list[T]:
        """Return ``func(runner)`` of every healthy runner, from its process; ``FleetError`` if it raised or died."""
        if self._local is not None:
            return [func(self._local)]
        calls: list[Any] = [runner.handle.apply.remote(func) for runner in self._runners if runner.is_healthy]
        try:
            return list(ray.get(calls)) if calls else []
        except RayError as error:
            raise FleetError(f"foreach_env_runner: {last_line(error)}") from error

    def submit(self, request: GroupRequest) -> None:
        """Queue a group."""
        self._pending.append(request)
        if self._local is None:
            self._dispatch()

    def collect(self) -> list[FinishedGroup]:
        """Wait until a group is finished and return all finished groups; nothing if none was submitted.

        Raises:
            FleetError: no runner is left and none comes back; the message has the reason of the last.
        """
        if self._local is not None:
            self._loads.append((float(sum(request.num_trajectories for request in self._pending)), 0))
            return self._loop.run_until_complete(self._collect_local(self._local))
        loads = [runner.num_in_flight for runner in self._runners if runner.is_healthy]
        self._loads.append((sum(loads) / max(1, len(loads)), len(self._pending)))
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while self.num_unfinished:
            self._probe()
            self._dispatch()
            if self._in_flight:
                deadline = time.monotonic() + RESTART_TIMEOUT_S
                done, _ = ray.wait(list(self._in_flight), timeout=PROBE_INTERVAL_S)
                more, _ = ray.wait(list(self._in_flight), num_returns=len(self._in_flight), timeout=0)
                finished = [group for ref in {*done, *more} if (group := self._finish(ref)) is not None]
                if finished:
                    return finished
            elif time.monotonic() > deadline or all(runner.is_lost for runner in self._runners):
                raise FleetError(f"none of {len(self._runners)} env runners is left; {self._last_loss}")
            else:
                time.sleep(PROBE_INTERVAL_S / 10)
        return []

    async def _collect_local(self, runner: EnvRunner) -> list[FinishedGroup]:
        requests, self._pending = list(self._pending), deque()
        groups = await asyncio.gather(*(runner.sample_group(request) for request in requests))
        return [
            FinishedGroup(request, summarize(group), groups_to_record_batch([group]))
            for request, group in zip(requests, groups, strict=True)
        ]

    @property
    def receivers(self) -> dict[str, Any]:
        """Actors of the healthy runners, each in one of its lives: ``{"env runner 3, life 1": handle}``."""
        return {runner.life: runner.handle for runner in self._runners if runner.is_healthy}

    def expect(self, version: int, fetch: Callable[[], Any]) -> None:
        """Note a version that a transport publishes; ``fetch`` returns its weights for runners that come back."""
        self._newest = version, cache(fetch)
        for runner in self._runners:
            if not runner.is_healthy:
                runner.probe = None  # it may carry older weights

    def update_weights(self, weights: Any, version: int, receivers: Collection[str] | None = None) -> None:
        """Publish a policy version, and keep it for runners that come back later.

        ``weights`` is ``{name: array}``, or an ``ObjectRef`` of it; ``receivers`` names those that need it, None is
        every runner.
        """
        if self._local is not None:
            found = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights  # the learners may be actors
            self._loop.run_until_complete(self._local.engine.update_weights(found, version))
            return
        self.expect(version, lambda: weights)
        self.call_engines("update_weights", weights, version, receivers=receivers)

    def wait_for_restarts(self) -> None:
        """Wait for the runners that load their engine after a restart; one that takes too long is ended.

        Afterwards none loads until the next ``collect``: a runner that restarts meanwhile waits to be called.
        """
        loading = {r.probe: r for r in self._runners if r.probe is not None and not r.is_healthy}
        for probe, _ in outcomes({probe: r.handle for probe, r in loading.items()}, START_TIMEOUT_S):
            self._read_probe(loading[probe], time.monotonic())

    def call_engines(self, method: str, *arguments: Any, receivers: Collection[str] | None = None) -> None:
        """Call the engines of healthy runners, all or ``receivers``, by ``EnvRunnerActor.call_engine``, and wait.

        Runners that die during it, or hang, are restarted.
        """
        chosen = [r for r in self._runners if r.is_healthy and (receivers is None or r.life in receivers)]
        calls = {runner.handle.call_engine.remote(method, *arguments): runner for runner in chosen}
        for call, error in outcomes({call: r.handle for call, r in calls.items()}, START_TIMEOUT_S):
            if isinstance(error, RayTaskError):
                raise error
            if error is not None:
                self._mark_dead(calls[call], error)

    def stop(self) -> None:
        """End all runners. Groups in flight are lost."""
        if self._local is not None:
            left = asyncio.all_tasks(self._loop)  # after an interrupt
            for task in left:
                task.cancel()
            if left:  # awaited, else asyncio prints a message for each
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._local.engine.close())
            self._loop.close()
            self._local = None
        for runner in self._runners:
            ray.kill(runner.handle, no_restart=True)
        self._runners = []
        self._in_flight.clear()
        self._pending.clear()

    def _dispatch(self) -> None:
        while self._pending:
            free = [r for r in self._runners if r.is_healthy and r.num_in_flight < self._max_in_flight]
            if not free:
                return
            runner = min(free, key=lambda r: r.num_in_flight)
            request = self._pending.popleft()
            summary, batch = runner.handle.sample_group.options(num_returns=2).remote(request)
            runner.num_in_flight += request.num_trajectories
            self._in_flight[summary] = request, runner, batch

    def _finish(self, ref: Any) -> FinishedGroup | None:
        request, runner, batch = self._in_flight.pop(ref)
        runner.num_in_flight -= request.num_trajectories
        try:
            summary = ray.get(ref)
        except RayActorError as error:
            self._pending.appendleft(request)
            self._mark_dead(runner, error)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, RagR1Error):
                raise error.cause from None
            raise FleetError(f"an env runner failed on {request.issue.issue_id}: {last_line(error)}") from error
        return FinishedGroup(request, summary, batch)

    def _mark_dead(self, runner: _Runner, error: RayError) -> None:
        if runner.is_healthy:
            runner.is_healthy, runner.probe = False, None
            runner.num_deaths += 1
            self.num_restarts += 1
            logger.warning(
                "%s died (%s); %d of %d go on", runner.name, last_line(error), self.num_healthy, len(self._runners)
            )
        fails_to_start = isinstance(error, RayActorError) and error.actor_init_failed
        if (fails_to_start or runner.num_failed_loads == MAX_FAILED_LOADS) and not runner.is_lost:
            runner.is_lost = True
            self._last_loss = f"{runner.name} did not start again: {last_line(error)}"
            logger.warning("%s; %d of %d go on", self._last_loss, self.num_healthy, len(self._runners))

    def _probe(self) -> None:
        """Ping the healthy runners, and use those that came back again once they have the newest weights."""
        now = time.monotonic()
        for runner in self._runners:
            if runner.is_lost:
                continue
            interval = PING_INTERVAL_S if runner.is_healthy else PROBE_INTERVAL_S
            if runner.probe is None and now - runner.probed_at > interval:
                runner.probed_at = now
                if self._newest is not None and not runner.is_healthy:
                    version, fetch = self._newest
                    weights = fetch()  # before the call: it may have to put the other engines to sleep
                    runner.probe = runner.handle.catch_up.remote(weights, version)
                else:
                    runner.probe = runner.handle.ping.remote()
            if runner.probe is not None:
                self._read_probe(runner, now)

    def _read_probe(self, runner: _Runner, now: float) -> None:
        if not ray.wait([runner.probe], timeout=0)[0]:
            if runner.is_healthy and now - runner.probed_at > PING_TIMEOUT_S:
                ray.kill(runner.handle, no_restart=False)  # its requests fail, and go to other runners
                runner.probe = None
            return
        probe, runner.probe = runner.probe, None
        try:
            ray.get(probe)
        except RayError as error:  # dead, or still restarting: it is probed again
            if isinstance(error, RayTaskError):  # the actor is alive, without an engine
                runner.num_failed_loads += not runner.is_healthy
                ray.kill(runner.handle, no_restart=runner.num_failed_loads == MAX_FAILED_LOADS)
            self._mark_dead(runner, error)
            return
        runner.is_healthy, runner.num_failed_loads = True, 0
