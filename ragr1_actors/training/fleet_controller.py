"""FleetController: changes the sizes of a live run's fleets, by their load or a person's order.

::

    signals of the fleets, LearnerClock ──► Autoscaler ──┐
                                                         ├──► scale_to ──► log, metrics, report
    scale.json of the run directory (ragr1 scale) ───────┘

A task of the driver's loop calls ``tick`` about once a second while the driver waits for samples or learners.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from cluster.autoscaler import Autoscaler, FleetState, LearnerState, autoscale_retrievers, autoscale_runners
from cluster.metrics import count
from cluster.placement import draining_nodes, free_resources, num_without_room
from cluster.supervision.watchdog import kill
from ragr1_actors.core.config import RetrieverAutoscaling, RunConfig
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.rollout.runners.rollout_fleets import RolloutFleets
from ragr1_actors.runs.run_directory import ScaleAnswer, ScaleOrder, read_answer, read_order, write_answer
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.events import FleetName, ScalingDecision
from retrieval.replicas.replica_set import ReplicaSet

TICK_S = 1.0
"""Seconds between two calls of ``tick``."""
STORED_ORDER_S = 10.0
"""Seconds between two looks at the orders of a run at a URI."""
NO_ROOM_AFTER_S = 60.0
"""Seconds without a place for a new actor after which a warning says so. Adding a node takes Ray about this long."""

logger = logging.getLogger(__name__)


class LearnerClock:
    """Times of the learner, the signals by which env runners are scaled."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a learner that has done nothing yet; ``clock`` returns seconds."""
        self._clock = clock
        self.num_batches = self.num_stale = 0
        """Counts as in ``LearnerState``."""
        self._sums = {"busy": 0.0, "waited": 0.0}
        self._doing: tuple[str, float] | None = None

    def works(self) -> AbstractContextManager[None]:
        """Count the seconds of the block as work of the learner on a batch that it takes now."""
        self.num_batches += 1
        return self._count("busy")

    def waits(self) -> AbstractContextManager[None]:
        """Count the seconds of the block as waiting of the learner for samples."""
        return self._count("waited")

    @contextmanager
    def _count(self, what: str) -> Iterator[None]:
        self._doing = what, self._clock()
        try:
            yield
        finally:
            self._sums = self._sums_now()
            self._doing = None

    def _sums_now(self) -> dict[str, float]:
        if self._doing is None:
            return self._sums
        what, since_s = self._doing
        return self._sums | {what: self._sums[what] + self._clock() - since_s}

    def state(self, num_finished_batches: float) -> LearnerState:
        """Return the sums up to now."""
        sums = self._sums_now()
        return LearnerState(self.num_batches, sums["busy"], sums["waited"], num_finished_batches, self.num_stale)


class Scalable(Protocol):
    """Group of replicas whose number can change."""

    def state(self) -> FleetState:
        """Return the load."""

    def scale_to(self, size: int, /) -> None:
        """Start replicas, or let some drain."""


G = TypeVar("G", bound=Scalable)


@dataclass
class Controlled(Generic[G]):
    """A group of replicas, its size, and what decides about it."""

    name: FleetName
    prefix: str
    """Beginning of the names of its metrics: ``env_runners/``."""
    group: G
    num_replicas: int
    """Wanted size."""
    make_scaler: Callable[[int], Autoscaler] | None
    """Function of the size that returns an autoscaler; None if the fleet has no settings for autoscaling."""
    scaler: Autoscaler | None = field(init=False)
    """Autoscaler; None without settings, and while a person has chosen the size."""
    state: FleetState | None = None
    replica_s: float = 0.0
    """Replica-seconds of replicas that took requests or started."""
    has_no_room_since_s: float | None = None
    said_no_room: bool = False

    def __post_init__(self) -> None:
        """Let the fleet follow its load, if it has settings for that."""
        self.scaler = self.make_scaler and self.make_scaler(self.num_replicas)

    def note(self, state: FleetState) -> None:
        """Keep the newest state."""
        if self.state is not None:
            num_held = self.state.num_running + self.state.num_starting
            self.replica_s += num_held * (state.time_s - self.state.time_s)
        self.state = state

    def metrics(self) -> dict[str, float]:
        """Return the sizes and the replica-seconds so far."""
        running, starting = (self.state.num_running, self.state.num_starting) if self.state else (0, 0)
        values = {"target": self.num_replicas, "running": running, "starting": starting, "replica_s": self.replica_s}
        return {f"{self.prefix}{name}": float(value) for name, value in values.items()}


class FleetSizes(Generic[G]):
    """Sizes of fleets by their load, in a run and in ``ragr1 simulate``."""

    def __init__(
        self,
        fleets: Sequence[Controlled[G]],
        learner: LearnerClock,
        num_finished_batches: Callable[[], float],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with the fleets in their first sizes.

        ``num_finished_batches`` returns the number of batches that wait for the learner, and ``clock`` the time of a
        decision in seconds.
        """
        self.learner = learner
        self._fleets = {fleet.name: fleet for fleet in fleets}
        self._num_finished_batches, self._clock = num_finished_batches, clock
        self._decisions: list[ScalingDecision] = []

    def tick(self) -> None:
        """Look at the fleets, and change their sizes."""
        for controlled in self._fleets.values():
            state = controlled.group.state()
            if controlled.name == "runners":
                state = replace(state, learner=self.learner.state(self._num_finished_batches()))
            controlled.note(state)
            if controlled.scaler is not None:
                decision = controlled.scaler.decide(state)
                if decision.num_replicas != controlled.num_replicas:
                    self._resize(controlled, decision.num_replicas, decision.reason)

    def _resize(self, controlled: Controlled[G], size: int, reason: str) -> None:
        made = ScalingDecision(self._clock(), controlled.name, controlled.num_replicas, size, reason)
        self._decisions.append(made)
        logger.info("%s", made)
        controlled.group.scale_to(size)
        controlled.num_replicas = size

    def metrics(self) -> dict[str, float]:
        """Return the sizes of the fleets: ``{"env_runners/target": 4.0, "env_runners/starting": 1.0, ...}``."""
        return {name: value for fleet in self._fleets.values() for name, value in fleet.metrics().items()}

    def take_decisions(self) -> list[ScalingDecision]:
        """Return the decisions since the last call."""
        taken, self._decisions = self._decisions, []
        return taken


class FleetController(FleetSizes[EnvRunnerGroup | ReplicaSet]):
    """Decides about the sizes of the fleets of one run, also by orders of a person and of Ray's autoscaler."""

    def __init__(
        self,
        config: RunConfig,
        fleets: RolloutFleets,
        store: RunStore,
        num_finished_batches: Callable[[], float],
        learner_actors: Callable[[], list[Any]],
    ) -> None:
        """Begin with the fleets in their first sizes; ``learner_actors`` returns the actors of the learner ranks."""
        self._learner_actors = learner_actors
        self._store = store
        self._refusals: dict[FleetName, str] = {}
        super().__init__(self._find_fleets(config, fleets), LearnerClock(), num_finished_batches)
        self._order_id = ""
        self._ordered_at = 0.0

    def _find_fleets(self, config: RunConfig, fleets: RolloutFleets) -> list[Controlled[EnvRunnerGroup | ReplicaSet]]:
        runners, retrieval = config.env_runners, config.retrieval
        found: list[Controlled[EnvRunnerGroup | ReplicaSet]] = []
        if not runners.num_env_runners:
            self._refusals["runners"] = "the driver samples itself (env_runners.num_env_runners is 0)"
        elif choose_transport(config) == "ipc":
            self._refusals["runners"] = "each runner shares its GPU with a learner rank for good"
        else:
            make = runner_scaler(config)
            found.append(Controlled("runners", "env_runners/", fleets.env_runners, runners.num_env_runners, make))
        names: tuple[FleetName, ...] = ("retrievers", "encoders")
        sizes = (retrieval.num_retrievers, retrieval.encoders.num_encoders)
        settings = (retrieval.autoscaling, retrieval.encoders.autoscaling)
        replica_sets = fleets.retrievers.fleets
        for name, replicas, size, keys in zip(names, replica_sets, sizes, settings, strict=False):
            found.append(Controlled(name, f"retrieval/{replicas.kind}_", replicas, size, retriever_scaler(keys)))
        keys_of = {"retrievers": "retrieval.num_retrievers", "encoders": "retrieval.encoders.num_encoders"}
        for name, key in [(name, keys_of[name]) for name in names[len(replica_sets) :]]:
            self._refusals[name] = f"the run has no actors of this kind ({key} or retrieval.type)"
        return found

    def tick(self) -> None:
        """Look at the orders, at nodes that Ray takes back, and at the fleets."""
        self._take_order()
        leaving = draining_nodes() if self._fleets else set()
        for controlled in self._fleets.values():
            if leaving and (num_moved := controlled.group.fleet.drain_nodes(leaving)):
                self._resize(controlled, controlled.num_replicas, f"Ray takes back the nodes of {num_moved}")
        super().tick()
        for controlled in self._fleets.values():
            self._look_for_room(controlled)

    def _resize(self, controlled: Controlled[EnvRunnerGroup | ReplicaSet], size: int, reason: str) -> None:
        if size != controlled.num_replicas:
            direction = "up" if size > controlled.num_replicas else "down"
            count("scaling_decisions", 1, fleet=controlled.name, direction=direction)
        super()._resize(controlled, size, reason)
        controlled.note(controlled.group.state())  # a row of metrics never has the new target beside the old sizes
        controlled.has_no_room_since_s, controlled.said_no_room = None, False

    def _look_for_room(self, controlled: Controlled[EnvRunnerGroup | ReplicaSet]) -> None:
        """Warn once after a decision if new replicas have no place."""
        if controlled.said_no_room or not (waiting := controlled.group.fleet.unplaced()):
            controlled.has_no_room_since_s = None
            return
        now = time.monotonic()
        controlled.has_no_room_since_s = controlled.has_no_room_since_s or now
        if now - controlled.has_no_room_since_s < NO_ROOM_AFTER_S or not (num := num_without_room(waiting)):
            return
        controlled.said_no_room = True
        reason = (
            f"no room for {num} actors in {NO_ROOM_AFTER_S:g} s, free are {free_resources()}; add nodes to the "
            "cluster, raise the limits of its autoscaler, or lower max_replicas"
        )
        self._decisions.append(
            ScalingDecision(time.time(), controlled.name, controlled.num_replicas, controlled.num_replicas, reason)
        )
        logger.warning("%s: %s", controlled.name, reason)

    def _take_order(self) -> None:
        if self._store.remote is not None:  # each look is a request over the network, during which nothing is done
            if time.monotonic() - self._ordered_at < STORED_ORDER_S:
                return
            self._ordered_at = time.monotonic()
        try:
            order = read_order(self._store)
            if order is None or order.order_id == self._order_id:
                return
            self._order_id = order.order_id
            answer = read_answer(self._store)
            if order.kill is not None and answer is not None and answer.order_id == order.order_id:
                return  # an earlier process of the run has killed
            write_answer(self._store, self._obey(order))
        except (UserError, OSError) as error:  # of a person's file, or of the storage: the run continues
            logger.warning("an order of ragr1 scale is left out: %s", error)

    def _kill(self, order: ScaleOrder) -> ScaleAnswer:
        assert order.kill is not None
        actors = {name: controlled.group.actors for name, controlled in self._fleets.items()}
        found = self._learner_actors() if order.kill == "learners" else actors.get(order.kill, [])
        if not found:
            return ScaleAnswer(order_id=order.order_id, message=f"none of the {order.kill} is up", is_refused=True)
        logger.warning("ragr1 chaos kills one of %d %s", len(found), order.kill)
        kill(random.choice(found), restarts=True)  # chance decides which of them
        return ScaleAnswer(order_id=order.order_id, message=f"killed one of {len(found)} {order.kill}")

    def _obey(self, order: ScaleOrder) -> ScaleAnswer:
        if order.kill is not None:
            return self._kill(order)
        refused = [f"{name}: {why}" for name in order.sizes if (why := self._refusals.get(name, ""))]
        if refused:
            return ScaleAnswer(order_id=order.order_id, message="; ".join(refused), is_refused=True)
        before = {name: controlled.num_replicas for name, controlled in self._fleets.items()}
        if not order.sizes:
            for controlled in self._fleets.values():
                controlled.scaler = controlled.scaler or (
                    controlled.make_scaler and controlled.make_scaler(controlled.num_replicas)
                )
            names = ", ".join(controlled.name for controlled in self._fleets.values() if controlled.scaler)
            message = f"{names} follow their load" if names else "no fleet of this run has settings for autoscaling"
            return ScaleAnswer(order_id=order.order_id, message=message, is_refused=not names)
        for name, size in order.sizes.items():
            self._fleets[name].scaler = None
            self._resize(self._fleets[name], size, "ragr1 scale")
        changes = [f"{name} {before[name]} -> {size}" for name, size in order.sizes.items()]
        return ScaleAnswer(order_id=order.order_id, message=", ".join(changes))


def runner_scaler(config: RunConfig) -> Callable[[int], Autoscaler] | None:
    """Return the function that makes an autoscaler of env runners; None without settings."""
    runners = config.env_runners
    settings = runners.autoscaling
    most, lag = runners.max_concurrent_trajectories, config.training.max_policy_lag
    return None if settings is None else lambda size: autoscale_runners(settings, size, most, lag)


def retriever_scaler(settings: RetrieverAutoscaling | None) -> Callable[[int], Autoscaler] | None:
    """Return the function that makes an autoscaler of retrievers or encoders; None without settings."""
    return None if settings is None else lambda size: autoscale_retrievers(settings, size)
