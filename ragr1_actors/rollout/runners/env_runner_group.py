"""EnvRunnerGroup: the fleet of env runners, each in an ``EnvRunnerActor``, which samples groups.

::

    sample ──► waiting ──► runner with the least to do ──► call of the runner ──► FinishedGroup
                  ▲                                             │
                  └────── the runner died: to another one ──────┘

Each group is a coroutine, ``sample``, in the ``DriverLoop`` of the fleet. A group that takes several times the usual
time is also sampled by an idle runner; the first result counts, and the other is cancelled. Both sample with the same
seeds.

Ray restarts a runner that dies; it gets the newest weights and is used again. A runner that hangs is killed first. A
runner that cannot start again is lost: this is logged, and the fleet continues with the others, down to one.

No call fails if a runner dies while none is open, and Ray restarts it with the weights of the run's start. So every
answer names its process; a group from a process other than the one to which it was sent is sampled again.

``scale_to`` changes the number of runners meanwhile. An added runner gets the newest weights before its first request,
like a restarted one. A removed runner ends once it has returned its requests.

An actor turns groups into record batches, which stay in the object store while only their references travel.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.autoscaler import FleetState
from cluster.metrics import count, observe
from cluster.placement import ActorOptions, anywhere
from cluster.supervision.fleet import Fleet, Member, MemberId, MemberState, Process, Pulse, last_line, wait_or_kill
from cluster.supervision.watchdog import beating
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.disk.folders import AnyFolder
from ragr1_actors.core.errors import EngineDeadError, FleetError, RagR1Error, TransferError
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, GroupSummary, RequestQueue, failed_group, summarize
from retrieval.base import Retriever

T = TypeVar("T")
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Limit in seconds for an engine to load."""
LOOK_S = 1.0
"""Seconds between two looks at the runners, and a tenth of it while none is ready."""
PULSE_INTERVAL_S = 5.0
"""Seconds between two questions of the watchdog to a runner that answers."""
_USUAL_GROUPS = 64
"""Number of the last finished groups whose median time is the usual one."""
_HEDGE_AFTER_S = 5.0
"""Seconds before which no group is sampled twice."""
MAX_HANGS = 3
"""Limit of hangs in a row, without a finished group in between; then the runner is lost, as its work takes too long."""
_MAX_DEATHS = 3
"""Limit of deaths in a row of the runners of one group; then the group has failed, as it is what ends them."""
RESTART_TIMEOUT_S = 300.0
"""Seconds for which the fleet waits for a runner to come back if none is healthy."""
_FIRST_BEAT_S = 2.0
"""Seconds of an engine's call after which beats are written, as it may keep the runner from answering."""


class EnvRunnerActor:
    """``EnvRunner`` as a Ray actor. Its process exits if the engine dies, and Ray starts both again."""

    def __init__(self, config: SamplerConfig, policy: AnyFolder, retriever: Retriever, version: int) -> None:
        """Build the runner in the actor's process, with the actor's share of the cores.

        ``catch_up`` builds the runner if the actor was restarted and shares its device with a learner, which may be
        using it.
        """
        num_threads = config.debugging.num_threads or max(1, math.floor(config.env_runners.num_cpus_per_env_runner))
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # processes of the engine, such as vLLM's, inherit it
        import torch

        torch.set_num_threads(num_threads)
        self._load = partial(EnvRunner.load, config, policy, retriever, version, beating)
        self._updating = asyncio.Lock()
        waits = choose_transport(config) == "ipc" and ray.get_runtime_context().was_current_actor_reconstructed
        with beating():
            self._loaded: EnvRunner | None = None if waits else self._load()

    @property
    def _runner(self) -> EnvRunner:
        if self._loaded is None:  # it was restarted, and the driver does not know yet
            _exit("it has no engine yet")
        return self._loaded

    async def pulse(self) -> Pulse:
        """Answer, with or without an engine; raise ``EngineDeadError`` if its engine died."""
        if self._loaded is not None:
            await self._loaded.engine.check()
        return Pulse(Process.current())

    async def sample_group(self, request: GroupRequest) -> tuple[tuple[Process, GroupSummary], pa.RecordBatch]:
        """Sample a group; Ray stores the two results under two references."""
        started = time.monotonic()
        group = await _or_exit(self._runner.sample_group(request))
        observe("group_seconds", time.monotonic() - started)
        summary = summarize(group)
        count("trajectories", len(summary.rewards), failed="false")
        count("trajectories", summary.num_failed, failed="true")
        count("tokens", sum(trajectory.num_model_tokens for trajectory in group.trajectories))
        return (Process.current(), summary), groups_to_record_batch([group])

    async def catch_up(self, weights: Mapping[str, NDArray[Any]], version: int) -> Process:
        """Give the engine the newest weights, after loading it if need be; return the actor's process."""
        if self._loaded is None:
            with beating():
                self._loaded = self._load()
        await self.call_engine("update_weights", weights, version)
        return Process.current()

    async def call_engine(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine for weights or memory: see ``ReceivingEngine`` and ``ColocatedEngine``."""
        # one after the other: a runner that catches up may be sent the next version meanwhile
        async with self._updating:
            with beating(_FIRST_BEAT_S):  # an engine may copy all weights at once
                await _or_exit(getattr(self._runner.engine, method)(*arguments))

    async def apply(self, func: Callable[[EnvRunner], Any]) -> Any:
        """Return ``func(runner)``; see ``EnvRunnerGroup.foreach_env_runner``."""
        return func(self._runner)


async def _or_exit(work: Awaitable[T]) -> T:
    """Await ``work``. If the engine is dead the process exits; Ray restarts it, and the group repeats its requests."""
    try:
        return await work
    except EngineDeadError as error:
        _exit(str(error))


def _exit(reason: str) -> NoReturn:
    print(f"env runner {os.getpid()} exits: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


@dataclass(slots=True, eq=False)
class _Call:
    """Group at a runner."""

    request: GroupRequest
    runner: Member[Pulse]
    runner_id: MemberId
    """Index and life of the runner that was asked."""
    process: Process
    summary: Any
    """References of the two results."""
    batch: Any
    ended: asyncio.Task[GroupSummary | None] = field(init=False)
    """Task that waits for the summary; its result is None if the runner has died."""
    sent_at: float = field(default_factory=time.monotonic)
    is_abandoned: bool = False
    """Whether another runner has finished the group."""


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
        self.loop = DriverLoop()
        """Event loop in which groups are sampled, and the runners looked after."""
        self._open: set[asyncio.Task[Any]] = set()  # of groups at runners
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL_GROUPS))
        self._fault_tolerance = config.debugging.fault_tolerance
        self.num_hedged = 0
        self.admissions: dict[MemberId, Any] = {}  # open calls of ``catch_up``, in which a runner may load its engine
        self._version: int | None = None  # published last, and its weights once they are here
        self._weights: Any = None
        self._local: EnvRunner | None = None
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
        # the lock: so that a chosen runner has a process
        self._queue = RequestQueue[Any, _Call](
            lambda: self._ready, self._send, self._max_in_flight, time.monotonic, self.fleet.changed
        )
        if settings.num_env_runners == 0:
            self._local = EnvRunner.load(config, policy, retriever, version)
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
        self.loop.run_beside(self._look_after)

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
    def num_healthy(self) -> int:
        """Number of runners that take requests."""
        return 1 if self._local is not None else self.fleet.num(MemberState.READY)

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are trajectories."""
        return self._queue.state(self.fleet.num(MemberState.STARTING))

    def scale_to(self, num_env_runners: int) -> None:
        """Add runners, or let some drain, while the others sample; a draining runner is not counted.

        Runners that are lost or still starting are removed first, then those with the least load.
        """
        assert self._local is None and num_env_runners >= 1, num_env_runners
        self.fleet.scale_to(num_env_runners, lambda runner: self._queue.num_in_flight[runner])
        self._end_drained()

    @property
    def actors(self) -> list[Any]:
        """Actors of the runners that can be called."""
        return [runner.actors[0] for runner in self.fleet.serving]

    def metrics(self) -> dict[str, float]:
        """Return health and load of the fleet; ``num_restarts`` counts deaths since the start, ``num_hangs`` the hangs.

        ``load`` is the number of trajectories in flight per healthy runner and ``queue`` the number of groups that wait
        for a runner, both averaged over the groups that finished since the last call of this method.
        """
        load, queue = self._queue.take_load()
        return {
            "num_healthy": float(self.num_healthy),
            "num_restarts": float(self.fleet.num_restarts),
            "num_hangs": float(self.fleet.num_hangs),
            "num_hedged": float(self.num_hedged),
            "num_lost": float(self.fleet.num(MemberState.LOST)),
            "num_draining": float(self.fleet.num(MemberState.DRAINING)),
            "load": load,
            "queue": queue,
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

    # -- groups ------------------------------------------------------------------------------------------------------

    async def sample(self, request: GroupRequest, *, is_urgent: bool = False) -> FinishedGroup:
        """Sample a group; an urgent one goes before those that wait for a runner.

        A group whose runners died ``_MAX_DEATHS`` times, the last one with no other group, is returned as failed.

        Raises:
            FleetError: no runner is left and none comes back; the message has the last one's reason.
            RagR1Error: of a runner's settings or environment.
        """
        if self._local is not None:
            return await self._sample_here(self._local, request)
        for num_deaths in range(_MAX_DEATHS):
            asked = replace(request, num_deaths=num_deaths)
            finished = await self._sample_there(asked, is_urgent=is_urgent or num_deaths > 0)
            if finished is not None:
                return replace(finished, request=request)
        lost = failed_group(request, f"{_MAX_DEATHS} env runners died of it in a row, the last one with no other group")
        return FinishedGroup(request, summarize(lost), groups_to_record_batch([lost]))

    async def _sample_here(self, runner: EnvRunner, request: GroupRequest) -> FinishedGroup:
        self._queue.begin(runner, request.num_trajectories)
        try:
            group = await self._open_task(runner.sample_group(request))
        finally:
            self._queue.end(runner, request.num_trajectories)
        return FinishedGroup(request, summarize(group), groups_to_record_batch([group]))

    async def _sample_there(self, request: GroupRequest, *, is_urgent: bool) -> FinishedGroup | None:
        """Return a group from a runner, or from a second one if the first takes long; None if all that had it died."""
        first = await self._queue.place(request, is_urgent=is_urgent)
        calls = {first.ended: first}
        may_hedge = self._fault_tolerance.hedge_factor > 0 and not request.num_deaths  # it may end a second one
        next_look_at = first.sent_at + _HEDGE_AFTER_S
        while calls:
            timeout_s = max(0.0, next_look_at - time.monotonic()) if may_hedge else None
            done, _ = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                call = calls.pop(ended)
                if (summary := ended.result()) is not None:
                    for other in calls.values():
                        other.is_abandoned = True
                        ray.cancel(other.summary)
                    call.runner.num_hangs = 0
                    self._took_s[request.num_trajectories].append(time.monotonic() - call.sent_at)
                    self._queue.num_sampled += request.num_trajectories
                    return FinishedGroup(request, summary, call.batch)
            if may_hedge and not done:
                next_look_at = time.monotonic() + LOOK_S
                if (second := self._hedge(first)) is not None:
                    calls[second.ended] = second
                    may_hedge = False
        return None

    def _send(self, request: GroupRequest, runner: Member[Pulse]) -> _Call:
        runner_id, process = runner.id, runner.pulses[0].process
        summary, batch = runner.actors[0].sample_group.options(num_returns=2).remote(request)
        self._queue.begin(runner, self._queue.size(request))
        call = _Call(request, runner, runner_id, process, summary, batch)
        call.ended = self._open_task(self._summary_of(call))
        return call

    def _open_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.begin(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def _summary_of(self, call: _Call) -> GroupSummary | None:
        """Wait for the summary of a call; None if the runner died, has another process, or was cancelled."""
        try:
            answer: tuple[Process, GroupSummary] = await call.summary
            process, summary = answer
            if call.process != process:  # its weights may be those of the run's start
                self.fleet.note_process(call.runner_id, process)
                return None
        except RayError as error:
            if call.is_abandoned:
                return None
            if isinstance(error, RayActorError):
                self.fleet.note_failure(call.runner_id, error)
                return None
            if isinstance(error, RayTaskError) and isinstance(error.cause, RagR1Error):
                raise error.cause from None
            raise FleetError(f"an env runner failed on {call.request.issue_id}: {last_line(error)}") from error
        finally:
            self._queue.end(call.runner, self._queue.size(call.request))
            self._end_drained()
            self._queue.dispatch()
        return summary

    def _hedge(self, first: _Call) -> _Call | None:
        """Send a group that takes long to an idle runner, if nothing waits for one."""
        request = first.request
        took_s, takes_s = self._took_s[request.num_trajectories], time.monotonic() - first.sent_at
        if len(took_s) < _USUAL_GROUPS // 4 or (self._queue and not self._queue.is_held):
            return None
        usual_s = median(took_s)
        if takes_s < max(_HEDGE_AFTER_S, self._fault_tolerance.hedge_factor * usual_s):
            return None
        with self.fleet.changed:
            idle = next((runner for runner in self._ready if not self._queue.num_in_flight[runner]), None)
            if idle is None:
                return None
            second = self._send(request, idle)
        self.num_hedged += 1
        logger.warning(
            "%s takes %.0f s at %s, %.1f s are usual; %s samples it, too",
            *(request.group_id, takes_s, first.runner.name, usual_s, idle.name),
        )
        return second

    async def finish_in_flight(self) -> None:
        """Wait until no runner samples. Groups that no runner has begun keep waiting until the loop runs again."""
        was_held, self._queue.is_held = self._queue.is_held, True
        try:
            while self._open:
                await asyncio.wait(self._open)
        finally:
            self._queue.is_held = was_held

    async def _look_after(self) -> None:
        """Use returned runners, end drained ones, and fail the waiting groups if no runner is left."""
        last_call_at = time.monotonic()
        while True:
            self._admit()
            self._queue.dispatch()
            self._end_drained()
            now = time.monotonic()
            if self._open or not self._queue:
                last_call_at = now
            elif now - last_call_at > RESTART_TIMEOUT_S or all(runner.is_lost for runner in self.fleet.members):
                why = self.fleet.failure or "none came back in time"
                self._queue.fail(FleetError(f"none of {len(self.fleet.members)} env runners is left; {why}"))
            await asyncio.sleep(LOOK_S if self._ready else LOOK_S / 10)

    def _end_drained(self) -> None:
        for runner in self.fleet.members:
            if runner.is_draining and not self._queue.num_in_flight[runner]:
                self.fleet.end(runner)

    @property
    def _ready(self) -> list[Member[Pulse]]:
        return [runner for runner in self.fleet.members if runner.state is MemberState.READY]

    # -- weights -----------------------------------------------------------------------------------------------------

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
        if self._queue.is_held:
            return
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
            self.loop.run(self._local.engine.update_weights(found, version), is_alone=True)
            return
        self.expect(version)
        self.offer(weights)
        self.call_engines("update_weights", weights, version, receivers=receivers)

    def wait_for_restarts(self) -> None:
        """Wait for the runners that load their engine after a restart; a runner that takes too long is ended.

        Then none loads until the loop runs: a runner that restarts meanwhile waits for its call.
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
            is_raised = isinstance(error, RayTaskError) and not isinstance(error.cause, TransferError)
            if isinstance(error, RayTaskError) and is_raised:
                if isinstance(error.cause, RagR1Error):
                    raise error.cause from None
                raise FleetError(f"{name} failed in {method}: {last_line(error)}") from error
            if error is not None:  # one that refuses the weights loads again, too
                self.fleet.note_failure(runner_id, error)

    def hold(self, *, is_held: bool) -> None:
        """Give runners no work, and let none load its engine, while ``is_held``."""
        self._queue.is_held = is_held

    def stop(self) -> None:
        """End all runners. Groups in flight are lost."""
        local, self._local = self._local, None
        self.fleet.stop()
        self.loop.close(local.close() if local is not None else None)


def _life(runner: Member[Pulse]) -> str:
    return f"{runner.name}, life {runner.life}"


def _waits(runner: Member[Pulse]) -> bool:
    """Return whether a runner is up and waits to be admitted."""
    return runner.is_up and not runner.is_admitted and runner.state is MemberState.STARTING
