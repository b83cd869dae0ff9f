"""EnvRunnerGroup: the rollout fleet. Requests go in; trajectory groups come out in the order in which they finish.

::

    submit ──► pending ──► runner with the least to do ──► in flight ──► collect
                  ▲                                            │
                  └── the runner died: give it to another ─────┘

A group that takes several times as long as usual is sampled by an idle runner, too; the first to finish counts, and the
other is cancelled. Both sample with the same seeds.

Ray restarts a runner that dies; it gets the newest weights and is used again. A runner that hangs is killed first. A
runner that cannot start again is lost: this is logged, and the fleet continues with the others, down to one.

A ``Watchdog`` ends a runner that hangs, in its own thread: the driver may wait for weights, an evaluation or a learner.

No call fails if a runner dies while none is open, and Ray restarts it with the weights of the run's start. Therefore
every answer names the process that gave it; what another process than the one it was sent to has sampled is sampled
again.

``scale_to`` changes the number of runners meanwhile. A runner that is added gets the newest weights before its first
request, as one that restarts does. A runner that is removed ends once it has returned the requests it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from queue import SimpleQueue
from statistics import median
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.autoscaler import FleetState
from cluster.placement import ActorOptions, anywhere
from cluster.rpc import last_line, outcomes
from cluster.watchdog import Finding, Watchdog, pings
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import FleetError, RagR1Error
from ragr1_actors.core.folders import AnyFolder
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.env_runner_actor import EnvRunnerActor, Process
from ragr1_actors.rollout.fleet_members import FinishedGroup, Flight, Newest, Runner
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.summary import summarize
from retrieval.base import Retriever

T = TypeVar("T")
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Time limit of an engine to load."""
PROBE_INTERVAL_S = 1.0
"""Between two probes of a runner that is not healthy, and the longest wait for a group before the next probes."""
PING_INTERVAL_S = 5.0
"""Between two questions of the watchdog to a runner that answers."""
_USUAL_GROUPS = 64
"""Groups that finished last, of which the median time is usual."""
_HEDGE_AFTER_S = 5.0
"""No group is sampled twice before."""
MAX_FAILED_LOADS = 3
"""Consecutive failures of an engine to load beside learners after its actor was restarted; then the runner is lost."""
MAX_HANGS = 3
"""Hangs in a row, without a finished group in between; then the runner is lost: its work takes longer than allowed."""
RESTART_TIMEOUT_S = 300.0
"""How long the fleet waits for a runner to come back if none is healthy."""


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
        self.on_wait: Callable[[], None] = lambda: None
        """Called about once a second while ``collect`` waits."""
        self.on_finished: Callable[[FinishedGroup], None] = lambda group: None
        """Called in the driver, where it samples itself, with each group as it finishes: ``collect`` waits for all."""
        self._pending: deque[GroupRequest] = deque()
        self._in_flight: dict[Any, Flight] = {}  # by the reference of the summary
        self._is_held = False  # what is queued stays there
        self._num_extra = 0  # flights of groups that another flight or result stands for
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL_GROUPS))
        self._fault_tolerance = config.debugging.fault_tolerance
        self.num_hedged = 0
        self._finished: list[FinishedGroup] = []
        self._runners: list[Runner] = []
        self._findings: SimpleQueue[tuple[Runner, Finding]] = SimpleQueue()
        self._watchdog = self._make_watchdog()
        self._error: RagR1Error | None = None  # of a group that was looked at while learners worked
        self._num_started = 0
        self._newest: Newest | None = None
        self._busy_s, self._num_sampled, self._accounted_at = 0.0, 0, time.monotonic()
        self._last_loss = "none came back in time"
        self.num_restarts = self.num_hangs = 0
        self._local: EnvRunner | None = None
        self._loads: list[tuple[float, int]] = []  # for ``metrics``: load and queue
        # trajectories; twice what a runner runs at once, so that the next request is there when one ends
        self._max_in_flight = 2 * settings.max_concurrent_trajectories
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
        for _ in range(settings.num_env_runners):
            self._start(is_healthy=True)  # all have the same weights: requests may wait at a runner that still loads
        self._watchdog.start()

    def _make_watchdog(self) -> Watchdog[Runner]:
        return Watchdog(
            lambda handle: handle.pulse.remote(),
            lambda runner, finding: self._findings.put((runner, finding)),
            self._fault_tolerance.hang_timeout_s,
            interval_s=PING_INTERVAL_S,
        )

    def _start(self, *, is_healthy: bool) -> None:
        index, self._num_started = self._num_started, self._num_started + 1
        actor_class: Any = ray.remote(EnvRunnerActor)
        options = {**self._fixed_options, **self._actor_options(index)}
        handle = actor_class.options(**options).remote(*self._arguments)
        # one that is not healthy yet is probed at once
        probed_at = time.monotonic() if is_healthy else -math.inf
        self._runners.append(runner := Runner(index, handle, is_healthy, probed_at=probed_at))
        self._watchdog.watch(runner, handle)

    def wait_until_ready(self) -> None:
        """Return once every runner has loaded its engine; ``FleetError`` if one did not."""
        if not self._runners:
            return
        try:  # the watchdog ends one that hangs while it loads
            processes = pings([runner.handle for runner in self._runners], START_TIMEOUT_S)
        except RayError as error:
            raise FleetError(f"an env runner did not start: {last_line(error)}") from error
        self._take_findings()  # one that hung while it loaded has loaded again
        for runner, process in zip(self._runners, processes, strict=True):
            runner.is_healthy, runner.process, runner.died_at = True, process, None

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not collected."""
        return len(self._pending) + len(self._in_flight) - self._num_extra + len(self._finished)

    @property
    def num_finished(self) -> int:
        """Groups that are finished and not collected."""
        return len(self._finished)

    @property
    def num_healthy(self) -> int:
        """Runners that take requests."""
        return 1 if self._local is not None else sum(runner.takes_requests for runner in self._runners)

    @property
    def num_starting(self) -> int:
        """Runners that load, after a restart or at their first start, or for which Ray has no room yet."""
        return sum(not (r.is_healthy or r.is_lost or r.is_draining) for r in self._runners)

    def state(self) -> FleetState:
        """Return what the fleet's autoscaler reads; requests are trajectories."""
        self._account()
        queued = sum(request.num_trajectories for request in self._pending)
        return FleetState(
            time.monotonic(),
            self.num_healthy,
            self.num_starting,
            ongoing=float(sum(runner.num_in_flight for runner in self._runners)),
            queued=float(queued),
            busy_s=self._busy_s,
            num_answered=float(self._num_sampled),
        )

    def scale_to(self, num_env_runners: int) -> None:
        """Add runners, or let some drain, while the others sample; a runner that drains is not counted.

        Removes those first that are lost or still start, and then those with the least to do.
        """
        assert self._local is None and num_env_runners >= 1, num_env_runners
        members = [runner for runner in self._runners if not runner.is_draining]
        for _ in range(num_env_runners - len(members)):
            self._start(is_healthy=False)
        members.sort(key=lambda r: (not r.is_lost, r.is_healthy, r.num_in_flight, -r.index))
        for runner in members[: max(0, len(members) - num_env_runners)]:
            runner.is_draining = True
        self._end_drained()

    def drain_nodes(self, node_ids: Collection[str]) -> int:
        """Let the runners on these nodes of Ray drain, and return their number; ``scale_to`` replaces them."""
        members = [runner for runner in self._runners if not runner.is_draining]
        leaving = [r for r in members if r.process is not None and r.process.node_id in node_ids]
        for runner in leaving:
            runner.is_draining = True
        return len(leaving)

    @property
    def actors(self) -> list[Any]:
        """The actors of the healthy runners."""
        return [runner.handle for runner in self._runners if runner.is_healthy]

    def unplaced(self) -> list[Any]:
        """Return the actors of the runners that load or wait for room."""
        return [r.handle for r in self._runners if not (r.is_healthy or r.is_lost or r.is_draining)]

    def metrics(self) -> dict[str, float]:
        """Health and load of the fleet; ``num_restarts`` counts deaths since the start, ``num_hangs`` those by a hang.

        ``load`` is the number of trajectories in flight per healthy runner and ``queue`` the number of groups that wait
        for a runner, both averaged over the calls of ``collect`` since the last call of this method.
        """
        loads, self._loads = self._loads or [(0.0, 0)], []
        return {
            "num_healthy": float(self.num_healthy),
            "num_restarts": float(self.num_restarts),
            "num_hangs": float(self.num_hangs),
            "num_hedged": float(self.num_hedged),
            "num_lost": float(sum(runner.is_lost for runner in self._runners)),
            "num_draining": float(sum(runner.is_draining for runner in self._runners)),
            "load": sum(load for load, _ in loads) / len(loads),
            "queue": sum(queue for _, queue in loads) / len(loads),
        }

    def foreach_env_runner(self, func: Callable[[EnvRunner], T]) -> list[T]:
        """Return ``func(runner)`` of every healthy runner, from its process; ``FleetError`` if it raised or died."""
        if self._local is not None:
            return [func(self._local)]
        calls: list[Any] = [runner.handle.apply.remote(func) for runner in self._runners if runner.is_healthy]
        try:
            return list(ray.get(calls)) if calls else []  # the watchdog ends one that hangs, and so its call
        except RayError as error:
            raise FleetError(f"foreach_env_runner: {last_line(error)}") from error

    def submit(self, request: GroupRequest, *, is_urgent: bool = False) -> None:
        """Queue a group; one that is urgent before those that wait for a runner."""
        if is_urgent:
            self._pending.appendleft(request)
        else:
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
            self.on_wait()
            return self._loop.run_until_complete(self._collect_local(self._local))
        loads = [runner.num_in_flight for runner in self._runners if runner.takes_requests]
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
                ray.wait(list(self._in_flight), timeout=PROBE_INTERVAL_S)
            elif time.monotonic() > deadline or all(runner.is_lost for runner in self._runners):
                raise FleetError(f"none of {len(self._runners)} env runners is left; {self._last_loss}")
            else:
                time.sleep(PROBE_INTERVAL_S / 10)
        return []

    def finish_in_flight(self) -> None:
        """Wait until no runner samples. Requests that no runner has begun stay queued, and begin after the call."""
        self._is_held = True
        try:
            while self._in_flight:
                self.poll()
                self.on_wait()
                if self._in_flight:
                    ray.wait(list(self._in_flight), timeout=PROBE_INTERVAL_S)
        finally:
            self._is_held = False

    def poll(self, *, learners_are_busy: bool = False) -> None:
        """Do without waiting what ``collect`` does: note finished groups, give out requests, look after runners.

        Weights that must be fetched from the learners first are not, while those are busy.
        """
        if self._local is not None:
            return
        self._account()
        self._probe(can_fetch=not learners_are_busy)
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
        self._busy_s += (now - self._accounted_at) * sum(runner.num_in_flight > 0 for runner in self._runners)
        self._accounted_at = now

    def _end_drained(self) -> None:
        for runner in [r for r in self._runners if r.is_draining and not r.num_in_flight]:
            self._watchdog.forget(runner)
            ray.kill(runner.handle, no_restart=True)
            self._runners.remove(runner)

    async def _collect_local(self, runner: EnvRunner) -> list[FinishedGroup]:
        requests, self._pending = list(self._pending), deque()

        async def sample(request: GroupRequest) -> FinishedGroup:
            group = await runner.sample_group(request)
            finished = FinishedGroup(request, summarize(group), groups_to_record_batch([group]))
            self.on_finished(finished)
            return finished

        return await asyncio.gather(*map(sample, requests))

    @property
    def receivers(self) -> dict[str, Any]:
        """Actors of the healthy runners, each in one of its lives: ``{"env runner 3, life 1": handle}``."""
        return {runner.life: runner.handle for runner in self._runners if runner.is_healthy}

    def expect(self, version: int, fetch: Callable[[], Any]) -> None:
        """Note a version that a transport publishes; ``fetch`` returns its weights for runners that come back."""
        self._newest = Newest(version, fetch)
        self._forget_probes()

    def _forget_probes(self) -> None:
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
        self._newest = Newest(version, lambda: weights, weights)
        self._forget_probes()
        self.call_engines("update_weights", weights, version, receivers=receivers)

    @property
    def num_loading(self) -> int:
        """Runners that load their engine, at the start or after a restart."""
        return len(self._loading)

    @property
    def _loading(self) -> list[Runner]:
        return [runner for runner in self._runners if runner.probe is not None]

    def wait_for_restarts(self) -> None:
        """Wait for the runners that load their engine after a restart; one that takes too long is ended.

        Afterwards none loads until the next ``collect``: a runner that restarts meanwhile waits to be called.
        """
        loading = {runner.probe: runner for runner in self._loading}
        for probe, _ in outcomes({probe: r.handle for probe, r in loading.items()}, START_TIMEOUT_S):
            self._read_probe(loading[probe])

    def call_engines(self, method: str, *arguments: Any, receivers: Collection[str] | None = None) -> None:
        """Call the engines of healthy runners, all or ``receivers``, by ``EnvRunnerActor.call_engine``, and wait.

        Runners that die during it, or hang, are restarted.
        """
        chosen = [r for r in self._runners if r.is_healthy and (receivers is None or r.life in receivers)]
        calls = {runner.handle.call_engine.remote(method, *arguments): runner for runner in chosen}
        for call, error in outcomes({call: r.handle for call, r in calls.items()}, START_TIMEOUT_S):
            if isinstance(error, RayTaskError):
                if isinstance(error.cause, RagR1Error):
                    raise error.cause from None
                raise FleetError(f"{calls[call].name} failed in {method}: {last_line(error)}") from error
            if error is not None:
                self._mark_dead(calls[call], error)

    def stop(self) -> None:
        """End all runners. Groups in flight are lost."""
        if self._local is not None:
            self._local.close(self._loop)
            self._local = None
        self._watchdog.stop()
        for runner in self._runners:
            ray.kill(runner.handle, no_restart=True)
        self._runners = []
        self._in_flight.clear()
        self._num_extra = 0
        self._pending.clear()
        self._finished.clear()

    def _dispatch(self) -> None:
        while self._pending and not self._is_held:
            free = [r for r in self._runners if r.takes_requests and r.num_in_flight < self._max_in_flight]
            if not free:
                return
            self._send(self._pending.popleft(), min(free, key=lambda r: r.num_in_flight))

    def _send(self, request: GroupRequest, runner: Runner) -> Flight:
        summary, batch = runner.handle.sample_group.options(num_returns=2).remote(request)
        runner.num_in_flight += request.num_trajectories
        self._in_flight[summary] = flight = Flight(request, runner, summary, batch, runner.process)
        return flight

    def _hedge(self) -> None:
        """Send groups that take long to runners that have nothing to do, once each."""
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
            idle = next((r for r in self._runners if r.takes_requests and not r.num_in_flight), None)
            if idle is None:
                return
            twin = self._send(flight.request, idle)
            flight.twin, twin.twin = twin, flight
            flight.was_hedged = twin.was_hedged = True
            self._num_extra += 1
            self.num_hedged += 1
            logger.warning(
                "%s takes %.0f s at %s, %.1f s are usual; %s samples it, too",
                *(flight.request.issue.group_id, takes_s, flight.runner.name, usual_s, idle.name),
            )

    def _finish(self, ref: Any) -> FinishedGroup | None:
        flight = self._in_flight.pop(ref)
        request, runner, twin = flight.request, flight.runner, flight.twin
        runner.num_in_flight -= request.num_trajectories
        if flight.is_abandoned:
            self._num_extra -= 1
            with contextlib.suppress(RayError):
                ray.get(ref)
            return None
        try:
            process, summary = ray.get(ref)
        except RayActorError as error:
            self._sample_again(flight)
            self._mark_dead(runner, error)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, RagR1Error):
                raise error.cause from None
            raise FleetError(f"an env runner failed on {request.issue.issue_id}: {last_line(error)}") from error
        if flight.process not in {None, process}:  # its weights may be those of the run's start
            self._sample_again(flight)
            self._compare_process(runner, process)
            return None
        if twin is not None:
            twin.is_abandoned, twin.twin = True, None
            ray.cancel(twin.summary)
        runner.num_hangs = 0
        self._took_s[request.num_trajectories].append(time.monotonic() - flight.sent_at)
        self._num_sampled += request.num_trajectories
        return FinishedGroup(request, summary, flight.batch)

    def _sample_again(self, flight: Flight) -> None:
        """Give a group to another runner, unless its twin samples it."""
        if flight.twin is None:
            self._pending.appendleft(flight.request)
        else:
            flight.twin.twin = None
            self._num_extra -= 1

    def _compare_process(self, runner: Runner, process: Process) -> None:
        """Note the process that a healthy runner answered from; another than before means that it died meanwhile."""
        if runner.is_healthy and runner.process not in {None, process}:
            self._note_death(runner, "died while no call of it was open, and has loaded again")
        runner.process = process

    def _note_death(self, runner: Runner, cause: str) -> None:
        runner.is_healthy, runner.probe = False, None
        runner.died_at = time.monotonic()
        runner.num_deaths += 1
        self.num_restarts += 1
        logger.warning("%s %s; %d of %d go on", runner.name, cause, self.num_healthy, len(self._runners))

    def _mark_dead(self, runner: Runner, error: RayError) -> None:
        self._take_findings()  # that it hung is the reason why its call failed
        if runner.is_healthy:
            self._note_death(runner, f"died ({last_line(error)})")
        fails_to_start = isinstance(error, RayActorError) and error.actor_init_failed
        if (fails_to_start or runner.num_failed_loads == MAX_FAILED_LOADS) and not runner.is_lost:
            again = " again" if runner.num_deaths else ""
            self._give_up(runner, f"{runner.name} did not start{again}: {last_line(error)}")

    def _probe(self, *, can_fetch: bool) -> None:
        """Use new runners and those that came back once they have the newest weights."""
        self._take_findings()
        now, newest = time.monotonic(), self._newest
        for runner in self._runners:
            if runner.is_lost or runner.is_healthy:
                continue
            if runner.probe is None and now - runner.probed_at > PROBE_INTERVAL_S:
                if newest is None:
                    runner.probe = runner.handle.ping.remote()
                elif newest.weights is not None or can_fetch:
                    if newest.weights is None:  # before the call: it may have to put the other engines to sleep
                        newest.weights = newest.fetch()
                    runner.probe = runner.handle.catch_up.remote(newest.weights, newest.version)
                runner.probed_at = now
            if runner.probe is not None:
                self._read_probe(runner)

    def _take_findings(self) -> None:
        """Act on what the watchdog has found since the last call."""
        while not self._findings.empty():
            runner, finding = self._findings.get()
            if runner not in self._runners or runner.is_lost:
                continue
            if finding.silent_s:
                self._note_hang(runner, finding.silent_s)
            elif finding.answer is not None:
                self._compare_process(runner, finding.answer)
            elif runner.is_healthy and finding.error is not None:  # else its probe tells
                self._note_failed_call(runner, finding.error)

    def _note_hang(self, runner: Runner, silent_s: float) -> None:
        """Note that a runner was ended because it hung; its requests fail, and go to other runners."""
        self.num_hangs += 1
        runner.num_hangs += 1
        self._note_death(runner, f"hangs: it has not answered for {silent_s:.0f} s")
        if runner.num_hangs == MAX_HANGS:
            ray.kill(runner.handle, no_restart=True)
            self._give_up(
                runner,
                f"{runner.name} hung {MAX_HANGS} times without a group in between; if a pass of its engine takes "
                f"longer than {self._fault_tolerance.hang_timeout_s:g} s, raise "
                "debugging.fault_tolerance.hang_timeout_s",
            )

    def _give_up(self, runner: Runner, reason: str) -> None:
        self._watchdog.forget(runner)
        runner.is_lost, self._last_loss = True, reason
        logger.warning("%s; %d of %d go on", reason, self.num_healthy, len(self._runners))

    def _note_failed_call(self, runner: Runner, error: RayError) -> None:
        """Note that a ping or probe failed: the runner is dead, or alive without an engine and then ended."""
        if isinstance(error, RayTaskError):
            runner.num_failed_loads += not runner.is_healthy
            ray.kill(runner.handle, no_restart=runner.num_failed_loads == MAX_FAILED_LOADS)
        self._mark_dead(runner, error)

    def _read_probe(self, runner: Runner) -> None:
        if not ray.wait([runner.probe], timeout=0)[0]:
            return
        probe, runner.probe = runner.probe, None
        try:
            process = ray.get(probe)
        except RayError as error:  # dead, or still restarting: it is probed again
            self._note_failed_call(runner, error)
            return
        runner.num_failed_loads = 0
        runner.is_healthy, runner.process = True, process
        if runner.died_at is not None:
            logger.warning("%s is back after %.0f s", runner.name, time.monotonic() - runner.died_at)
            runner.died_at = None
