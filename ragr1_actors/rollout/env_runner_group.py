"""EnvRunnerGroup: the fleet of env runners. It takes requests and returns groups in the order in which they finish.

::

    submit ──► pending ──► runner with the least to do ──► in flight ──► collect
                  ▲                                            │
                  └── the runner died: give it to another ─────┘

A group that takes several times the usual time is also sampled by an idle runner; the first result counts, and the
other is cancelled. Both sample with the same seeds.

Ray restarts a runner that dies; it gets the newest weights and is used again. A runner that hangs is killed first. A
runner that cannot start again is lost: this is logged, and the fleet continues with the others, down to one.

No call fails if a runner dies while none is open, and Ray restarts it with the weights of the run's start. So every
answer names its process; a group from a process other than the one to which it was sent is sampled again.

``scale_to`` changes the number of runners meanwhile. An added runner gets the newest weights before its first request,
like a restarted one. A removed runner ends once it has returned its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.autoscaler import FleetState
from cluster.placement import ActorOptions, anywhere
from cluster.supervision.deaths import last_line
from cluster.supervision.fleet import Fleet, Member, MemberId, MemberState, Process, Pulse, wait_or_kill
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.disk.folders import AnyFolder
from ragr1_actors.core.errors import FleetError, RagR1Error
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.env_runner_actor import EnvRunnerActor
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, summarize
from retrieval.base import Retriever

T = TypeVar("T")
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Limit in seconds for an engine to load."""
WAIT_S = 1.0
"""Longest wait in seconds for a group before the fleet is looked after again."""
PULSE_INTERVAL_S = 5.0
"""Seconds between two questions of the watchdog to a runner that answers."""
_USUAL_GROUPS = 64
"""Number of the last finished groups whose median time is the usual one."""
_HEDGE_AFTER_S = 5.0
"""Seconds before which no group is sampled twice."""
MAX_HANGS = 3
"""Limit of hangs in a row, without a finished group in between; then the runner is lost, as its work takes too long."""
RESTART_TIMEOUT_S = 300.0
"""Seconds for which the fleet waits for a runner to come back if none is healthy."""


@dataclass(slots=True, eq=False)
class PendingGroup:
    """Group at a runner."""

    request: GroupRequest
    runner: Member[Pulse]
    runner_id: MemberId
    """Index and life of the runner that was asked."""
    process: Process
    summary: Any
    """References of the two results."""
    batch: Any
    sent_at: float = field(default_factory=time.monotonic)
    twin: PendingGroup | None = None
    """Flight of the same group at another runner."""
    was_hedged: bool = False
    is_abandoned: bool = False
    """Whether its twin has finished."""


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
        """Start the runners, which load while the caller continues.

        ``version`` is the version of ``policy``, a Hugging Face folder or hub name. ``actor_options`` returns the Ray
        options of the runner with an index, such as its place.
        """
        settings = config.env_runners
        self.on_wait: Callable[[], None] = lambda: None
        """Callback that runs about once a second while ``collect`` waits."""
        self.on_finished: Callable[[FinishedGroup], None] = lambda group: None
        """Callback of a driver that samples itself, with each group as it finishes: ``collect`` waits for all."""
        self._pending: deque[GroupRequest] = deque()
        self._in_flight: dict[Any, PendingGroup] = {}  # by the reference of the summary
        self._is_held = False  # queued groups stay queued
        self._num_extra = 0  # flights of groups that have another flight or a result
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL_GROUPS))
        self._fault_tolerance = config.debugging.fault_tolerance
        self.num_hedged = 0
        self._finished: list[FinishedGroup] = []
        self._num_in_flight: Counter[int] = Counter()  # trajectories that a runner, by index, has not returned
        self.admissions: dict[MemberId, Any] = {}  # open calls of ``catch_up``, in which a runner may load its engine
        self._error: RagR1Error | None = None  # of a group that was looked at while learners worked
        self._version: int | None = None  # published last, and its weights once they are here
        self._weights: Any = None
        self._busy_s, self._num_sampled, self._accounted_at = 0.0, 0, time.monotonic()
        self._local: EnvRunner | None = None
        self._loads: list[tuple[float, int]] = []  # for ``metrics``: load and queue
        # trajectories: twice the number that a runner runs at once, so that the next request is there when one ends
        self._max_in_flight = 2 * settings.max_concurrent_trajectories
        self.fleet = Fleet[Pulse](
            "env runner",
            self._start,
            lambda actor: actor.pulse.remote(),
            self._fault_tolerance.hang_timeout_s,
            interval_s=PULSE_INTERVAL_S,
            max_hangs=MAX_HANGS,
            owner_admits=True,
        )
        if settings.num_env_runners == 0:
            self._local = EnvRunner.load(config, policy, retriever, version)
            self._loop = asyncio.new_event_loop()
            return
        self._fixed_options: dict[str, Any] = {
            "num_cpus": settings.num_cpus_per_env_runner,
            "num_gpus": settings.num_gpus_per_env_runner,
            "max_restarts": -1,
            "max_task_retries": 0,  # the group gives the request to another runner
            "max_concurrency": 2 * self._max_in_flight,
        }
        self._actor_options, self._arguments = actor_options, (config, policy, retriever, version)
        self.fleet.scale_to(settings.num_env_runners)

    def _start(self, index: int) -> list[Any]:
        actor_class: Any = ray.remote(EnvRunnerActor)
        options = {**self._fixed_options, **self._actor_options(index)}
        return [actor_class.options(**options).remote(*self._arguments)]

    def wait_until_ready(self) -> None:
        """Return once every runner has loaded its engine; ``FleetError`` if one did not."""
        if self._local is None:
            self.fleet.wait_until_up(START_TIMEOUT_S)
            self._admit()

    @property
    def num_unfinished(self) -> int:
        """Number of requests submitted and not collected."""
        return len(self._pending) + len(self._in_flight) - self._num_extra + len(self._finished)

    @property
    def num_finished(self) -> int:
        """Number of groups that are finished and not collected."""
        return len(self._finished)

    @property
    def num_healthy(self) -> int:
        """Number of runners that take requests."""
        return 1 if self._local is not None else self.fleet.num(MemberState.READY)

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are trajectories."""
        self._account()
        return FleetState(
            time.monotonic(),
            self.num_healthy,
            self.fleet.num(MemberState.STARTING),
            ongoing=float(self._num_in_flight.total()),
            queued=float(sum(request.num_trajectories for request in self._pending)),
            busy_s=self._busy_s,
            num_answered=float(self._num_sampled),
        )

    def scale_to(self, num_env_runners: int) -> None:
        """Add runners, or let some drain, while the others sample; a draining runner is not counted.

        Runners that are lost or still starting are removed first, then those with the least load.
        """
        assert self._local is None and num_env_runners >= 1, num_env_runners
        self.fleet.scale_to(num_env_runners, lambda runner: self._num_in_flight[runner.index])
        self._end_drained()

    @property
    def actors(self) -> list[Any]:
        """Actors of the runners that can be called."""
        return [runner.actors[0] for runner in self.fleet.serving]

    def metrics(self) -> dict[str, float]:
        """Return health and load of the fleet; ``num_restarts`` counts deaths since the start, ``num_hangs`` the hangs.

        ``load`` is the number of trajectories in flight per healthy runner and ``queue`` the number of groups that wait
        for a runner, both averaged over the calls of ``collect`` since the last call of this method.
        """
        loads, self._loads = self._loads or [(0.0, 0)], []
        return {
            "num_healthy": float(self.num_healthy),
            "num_restarts": float(self.fleet.num_restarts),
            "num_hangs": float(self.fleet.num_hangs),
            "num_hedged": float(self.num_hedged),
            "num_lost": float(self.fleet.num(MemberState.LOST)),
            "num_draining": float(self.fleet.num(MemberState.DRAINING)),
            "load": sum(load for load, _ in loads) / len(loads),
            "queue": sum(queue for _, queue in loads) / len(loads),
        }

    def foreach_env_runner(self, func: Callable[[EnvRunner], T]) -> list[T]:
        """Return ``func(runner)`` for every healthy runner, from its process; ``FleetError`` if it raised or died."""
        if self._local is not None:
            return [func(self._local)]
        calls: list[Any] = [actor.apply.remote(func) for actor in self.actors]
        try:
            return list(ray.get(calls)) if calls else []  # the watchdog ends one that hangs, and so its call
        except RayError as error:
            raise FleetError(f"foreach_env_runner: {last_line(error)}") from error

    def submit(self, request: GroupRequest, *, is_urgent: bool = False) -> None:
        """Queue a group; an urgent one goes before those that wait for a runner."""
        if is_urgent:
            self._pending.appendleft(request)
        else:
            self._pending.append(request)
        if self._local is None:
            self._dispatch()

    def collect(self) -> list[FinishedGroup]:
        """Wait until a group is finished and return all finished groups; return none if none was submitted.

        Raises:
            FleetError: no runner is left and none comes back; the message has the last one's reason.
        """
        if self._local is not None:
            self._loads.append((float(sum(request.num_trajectories for request in self._pending)), 0))
            self.on_wait()
            return self._loop.run_until_complete(self._collect_local(self._local))
        loads = [self._num_in_flight[runner.index] for runner in self._ready]
        self._loads.append((sum(loads) / max(1, len(loads)), len(self._pending)))
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while self.num_unfinished:
            self.poll()
            self.on_wait()
            if self._error is not None:
                raise self._error
            if self._finished:
                finished, self._finished = self._finished, []
                return finished
            if self._in_flight:
                deadline = time.monotonic() + RESTART_TIMEOUT_S
                ray.wait(list(self._in_flight), timeout=WAIT_S)
            elif time.monotonic() > deadline or all(runner.is_lost for runner in self.fleet.members):
                why = self.fleet.failure or "none came back in time"
                raise FleetError(f"none of {len(self.fleet.members)} env runners is left; {why}")
            else:
                time.sleep(WAIT_S / 10)
        return []

    def finish_in_flight(self) -> None:
        """Wait until no runner samples. Requests that no runner has begun stay queued, and begin after the call."""
        self._is_held = True
        try:
            while self._in_flight:
                self.poll()
                self.on_wait()
                if self._in_flight:
                    ray.wait(list(self._in_flight), timeout=WAIT_S)
        finally:
            self._is_held = False

    def poll(self) -> None:
        """Note finished groups, give out requests and look after runners, like ``collect`` but without waiting."""
        if self._local is not None:
            return
        self._account()
        self._admit()
        if self._in_flight:
            done, _ = ray.wait(list(self._in_flight), num_returns=len(self._in_flight), timeout=0)
            try:
                self._finished += [group for ref in done if (group := self._finish(ref)) is not None]
            except RagR1Error as error:  # of an environment: ``collect`` raises it
                self._error = error
        self._dispatch()
        self._hedge()
        self._end_drained()

    def _account(self) -> None:
        """Count the seconds since the last call for each runner that had work."""
        now = time.monotonic()
        self._busy_s += (now - self._accounted_at) * sum(number > 0 for number in self._num_in_flight.values())
        self._accounted_at = now

    def _end_drained(self) -> None:
        for runner in self.fleet.members:
            if runner.is_draining and not self._num_in_flight[runner.index]:
                self.fleet.end(runner)

    async def _collect_local(self, runner: EnvRunner) -> list[FinishedGroup]:
        requests, self._pending = list(self._pending), deque()

        async def sample(request: GroupRequest) -> FinishedGroup:
            group = await runner.sample_group(request)
            finished = FinishedGroup(request, summarize(group), groups_to_record_batch([group]))
            self.on_finished(finished)
            return finished

        return await asyncio.gather(*map(sample, requests))

    @property
    def _ready(self) -> list[Member[Pulse]]:
        return [runner for runner in self.fleet.members if runner.state is MemberState.READY]

    @property
    def receivers(self) -> dict[str, Any]:
        """Actors of the runners that can be called, each in one of its lives: ``{"env runner 3, life 1": handle}``."""
        return {_life(runner): runner.actors[0] for runner in self.fleet.serving}

    def expect(self, version: int) -> None:
        """Note a version that a transport publishes; returning runners wait for ``offer``."""
        self._version, self._weights = version, None
        self.admissions.clear()  # they may carry older weights

    @property
    def needs_weights(self) -> bool:
        """Whether a returned runner waits for the weights of the version that ``expect`` named."""
        is_expected = self._version is not None and self._weights is None
        return is_expected and any(_waits(runner) for runner in self.fleet.members)

    def offer(self, weights: Any) -> None:
        """Give returning runners the weights of the newest version, or an ``ObjectRef`` of them."""
        self._weights = weights

    def _admit(self) -> None:
        """Use the runners that are up once they have the newest weights."""
        for runner in filter(_waits, self.fleet.members):
            if self._version is None:
                self.fleet.admit(runner.id)
            elif runner.id in self.admissions:
                self._read_admission(runner.id)
            elif self._weights is not None:
                self.admissions[runner.id] = runner.actors[0].catch_up.remote(self._weights, self._version)

    def _read_admission(self, runner_id: MemberId) -> None:
        if not ray.wait([self.admissions[runner_id]], timeout=0)[0]:
            return
        try:
            process = ray.get(self.admissions.pop(runner_id))
        except RayError as error:
            self.fleet.note_failure(runner_id, error)
            return
        self.fleet.note_process(runner_id, process)
        self.fleet.admit(runner_id)

    def update_weights(self, weights: Any, version: int, receivers: Collection[str] | None = None) -> None:
        """Publish a policy version, and keep it for runners that return later.

        ``weights`` is ``{name: array}``, or an ``ObjectRef`` of it; ``receivers`` names the runners that need it, None
        means all.
        """
        if self._local is not None:
            found = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights  # the learners may be actors
            self._loop.run_until_complete(self._local.engine.update_weights(found, version))
            return
        self.expect(version)
        self.offer(weights)
        self.call_engines("update_weights", weights, version, receivers=receivers)

    def wait_for_restarts(self) -> None:
        """Wait for the runners that load their engine after a restart; a runner that takes too long is ended.

        Then none loads until the next ``collect``: a runner that restarts meanwhile waits for its call.
        """
        handles = {runner.id: runner.actors[0] for runner in self.fleet.members}
        loading = {call: runner_id for runner_id, call in self.admissions.items() if runner_id in handles}
        for call, _ in wait_or_kill({call: handles[one] for call, one in loading.items()}, START_TIMEOUT_S):
            self._read_admission(loading[call])

    def call_engines(self, method: str, *arguments: Any, receivers: Collection[str] | None = None) -> None:
        """Call the engines of healthy runners, all or ``receivers``, by ``EnvRunnerActor.call_engine``, and wait.

        Runners that die during it, or hang, are restarted.
        """
        chosen = [r for r in self.fleet.serving if receivers is None or _life(r) in receivers]
        calls = {r.actors[0].call_engine.remote(method, *arguments): (r.name, r.id, r.actors[0]) for r in chosen}
        for call, error in wait_or_kill({call: actor for call, (*_, actor) in calls.items()}, START_TIMEOUT_S):
            name, runner_id, _ = calls[call]
            if isinstance(error, RayTaskError):
                if isinstance(error.cause, RagR1Error):
                    raise error.cause from None
                raise FleetError(f"{name} failed in {method}: {last_line(error)}") from error
            if error is not None:
                self.fleet.note_failure(runner_id, error)

    def stop(self) -> None:
        """End all runners. Groups in flight are lost."""
        if self._local is not None:
            self._local.close(self._loop)
            self._local = None
        self.fleet.stop()
        self._in_flight.clear()
        self._num_extra = 0
        self._pending.clear()
        self._finished.clear()

    def _dispatch(self) -> None:
        with self.fleet.changed:  # so that a chosen runner has a process
            while self._pending and not self._is_held:
                runner = min(self._ready, key=lambda runner: self._num_in_flight[runner.index], default=None)
                if runner is None or self._num_in_flight[runner.index] >= self._max_in_flight:
                    return
                self._send(self._pending.popleft(), runner)

    def _send(self, request: GroupRequest, runner: Member[Pulse]) -> PendingGroup:
        runner_id, process = runner.id, runner.pulses[0].process
        summary, batch = runner.actors[0].sample_group.options(num_returns=2).remote(request)
        self._num_in_flight[runner.index] += request.num_trajectories
        self._in_flight[summary] = flight = PendingGroup(request, runner, runner_id, process, summary, batch)
        return flight

    def _hedge(self) -> None:
        """Send groups that take long to idle runners, once each."""
        has_work = self._pending and not self._is_held
        if not self._fault_tolerance.hedge_factor or has_work:
            return
        now = time.monotonic()
        for flight in list(self._in_flight.values()):
            took_s = self._took_s[flight.request.num_trajectories]
            if len(took_s) < _USUAL_GROUPS // 4:
                continue
            usual_s, takes_s = median(took_s), now - flight.sent_at
            if flight.was_hedged or takes_s < max(_HEDGE_AFTER_S, self._fault_tolerance.hedge_factor * usual_s):
                continue
            with self.fleet.changed:
                idle = next((runner for runner in self._ready if not self._num_in_flight[runner.index]), None)
                if idle is None:
                    return
                twin = self._send(flight.request, idle)
            flight.twin, twin.twin = twin, flight
            flight.was_hedged = twin.was_hedged = True
            self._num_extra += 1
            self.num_hedged += 1
            logger.warning(
                "%s takes %.0f s at %s, %.1f s are usual; %s samples it, too",
                *(flight.request.group_id, takes_s, flight.runner.name, usual_s, idle.name),
            )

    def _finish(self, ref: Any) -> FinishedGroup | None:
        flight = self._in_flight.pop(ref)
        request, runner, twin = flight.request, flight.runner, flight.twin
        self._num_in_flight[runner.index] -= request.num_trajectories
        if flight.is_abandoned:
            self._num_extra -= 1
            with contextlib.suppress(RayError):
                ray.get(ref)
            return None
        try:
            process, summary = ray.get(ref)
        except RayActorError as error:
            self._sample_again(flight)
            self.fleet.note_failure(flight.runner_id, error)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, RagR1Error):
                raise error.cause from None
            raise FleetError(f"an env runner failed on {request.issue_id}: {last_line(error)}") from error
        if flight.process != process:  # its weights may be those of the run's start
            self._sample_again(flight)
            self.fleet.note_process(flight.runner_id, process)
            return None
        if twin is not None:
            twin.is_abandoned, twin.twin = True, None
            ray.cancel(twin.summary)
        runner.num_hangs = 0
        self._took_s[request.num_trajectories].append(time.monotonic() - flight.sent_at)
        self._num_sampled += request.num_trajectories
        return FinishedGroup(request, summary, flight.batch)

    def _sample_again(self, flight: PendingGroup) -> None:
        """Give a group to another runner, unless its twin samples it."""
        if flight.twin is None:
            self._pending.appendleft(flight.request)
        else:
            flight.twin.twin = None
            self._num_extra -= 1


def _life(runner: Member[Pulse]) -> str:
    return f"{runner.name}, life {runner.life}"


def _waits(runner: Member[Pulse]) -> bool:
    """Return whether a runner is up and waits to be admitted."""
    return runner.is_up and not runner.is_admitted and runner.state is MemberState.STARTING
