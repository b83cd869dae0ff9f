"""Placement of a run's actors: room for all of them before the first starts, and bundles for learner ranks.

::

    wait_for_room ──► the plan of placement_plan.py over the cluster's nodes
                      no room: a group of bundles is asked for, and Ray's autoscaler starts nodes or says that it cannot

    Placement:   bundle 0: one GPU (or none)     learner rank 0, and env runner 0 where they share devices
                 bundle 1: one GPU               learner rank 1; an actor that restarts returns to its bundle
                 other actors                    start on the node that the plan has for them

Learner ranks are packed or spread by ``learners.placement``. A bundle of a Ray placement group lies on one node, so a
runner and a rank in it can share memory, with GPUs or without. Other actors may move: an actor whose node is lost or
full, or which a fleet adds, runs on any node with its labels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import state  # no public function says which nodes drain; Ray Data reads them here too
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, as the next module is generated
from ray.actor import ActorHandle
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement_plan import (
    Demand,
    Node,
    PlacementPlan,
    actor_demands,
    learner_demand,
    place_actors,
    retriever_role,
)
from cluster.session.ray_session import ray_session
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import FleetError, UserError
from ragr1_actors.core.weight_transport import choose_transport

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Longest time in seconds until the cluster has grown and every bundle has its place."""
_NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray sets on every node."""
_POLL_S = 0.5
_SETTLE_S = 10.0
"""Limit in seconds for nodes to report that a reservation is gone."""
_REPLY_TIMEOUT_S = 10.0

ActorOptions = Callable[[int], Mapping[str, Any]]
"""Function that returns the Ray options with the place of the actor of an index."""


def anywhere(index: int) -> Mapping[str, Any]:
    """Return no constraint, as ``ActorOptions``."""
    return {}


def labelled(label_selector: Mapping[str, str]) -> ActorOptions:
    """Return the ``ActorOptions`` of actors that may run on any node with these labels."""
    return lambda index: {"label_selector": dict(label_selector)}


class Placement:
    """Places where the actors of a run start, and bundles of its learner ranks until ``remove`` or the driver's end."""

    def __init__(self, config: SamplerConfig, *, has_index: bool = True) -> None:
        """Plan, and reserve the bundles; a single rank that shares no device needs none.

        Only a ``RunConfig`` has learners. ``has_index`` tells whether retrievers are actors.

        Raises:
            FleetError: the cluster has no room within ``START_TIMEOUT_S``.
        """
        self._config = config
        self._shares_devices = choose_transport(config) == "ipc"
        self._group: PlacementGroup | None = None
        nodes = _nodes(_cluster_status(), free=True) if ray.is_initialized() else []  # else there is no actor
        self._plan = place_actors(actor_demands(config, has_index=has_index), nodes)
        if not isinstance(config, RunConfig):
            return
        demand = learner_demand(config)
        if not self._shares_devices and demand.count < 2:
            return
        self._group = _reserve([demand], demand.strategy.upper())
        try:
            ray.get(self._group.ready(), timeout=START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            self.remove()
            raise FleetError(
                f"no room for {demand.count} {demand.role}, each {demand.each}, in {START_TIMEOUT_S:g} s; start fewer, "
                "or add nodes to the cluster"
            ) from error

    def learner_options(self, rank: int) -> Mapping[str, Any]:
        """Return the place of a learner rank, as ``ActorOptions``."""
        assert isinstance(self._config, RunConfig)
        if self._group is None:
            return self._seat("learner ranks", rank, self._config.learners.label_selector)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank)}

    @property
    def spare_cpus(self) -> int:
        """CPUs that no actor of the run reserves on the node of the first learner rank; 0 if no node is planned."""
        return self._plan.spare_cpus("learner ranks")

    def runner_options(self, index: int) -> Mapping[str, Any]:
        """Return the place of an env runner, as ``ActorOptions``."""
        if self._shares_devices:
            return self.learner_options(index)
        return self._seat("env runners", index, self._config.env_runners.label_selector)

    def retriever_options(self, index: int) -> Mapping[str, Any]:
        """Return the place of a retriever, as ``ActorOptions``; replica 0 and its shards come first."""
        retrieval = self._config.retrieval
        return self._seat(retriever_role(retrieval), index, retrieval.label_selector)

    def encoder_options(self, index: int) -> Mapping[str, Any]:
        """Return the place of an encoder, as ``ActorOptions``."""
        return self._seat("encoders", index, self._config.retrieval.label_selector)

    def _seat(self, role: str, index: int, label_selector: Mapping[str, str]) -> Mapping[str, Any]:
        anywhere_labelled = labelled(label_selector)(index)
        node_ids = self._plan.node_ids(role)
        if index >= len(node_ids):
            return anywhere_labelled
        # Not NodeAffinitySchedulingStrategy, as Ray's autoscaler starts no node for an actor that has one
        seat = {_NODE_ID_LABEL: node_ids[index], **label_selector}
        return {"label_selector": seat, "fallback_strategy": [anywhere_labelled]}

    def remove(self) -> None:
        """Release the bundles. Ray ends the actors that still run in them."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


@contextmanager
def session_with_room(
    demands: Sequence[Demand],
    most: Sequence[Demand] = (),
    show: Callable[[PlacementPlan], None] = lambda plan: None,
    say: Callable[[str], None] = logger.warning,
) -> Iterator[None]:
    """Enter a Ray session with room for all these actors, or none without actors. Raises as ``wait_for_room``.

    A local session has CPUs for ``most``, the sizes to which the fleets may grow.
    """
    if not demands:
        yield
        return
    with ray_session(sum(demand.count * demand.num_cpus for demand in most or demands), forks_workers=True):
        wait_for_room(demands, show, say)
        yield


def wait_for_room(demands: Sequence[Demand], show: Callable[[PlacementPlan], None], say: Callable[[str], None]) -> None:
    """Return once the cluster has room for all these actors at the same time.

    Args:
        demands: result of ``actor_demands``.
        show: called once with the plan on the present nodes.
        say: called with one sentence if the cluster has to grow, or other jobs have to end, before.

    Raises:
        UserError: the cluster cannot grow enough; the message names the missing resources.
        FleetError: it has not grown within ``START_TIMEOUT_S``.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    status = _cluster_status()
    found = place_actors(demands, _nodes(status, free=True))
    show(found)
    if not found.missing:
        return
    group = _reserve(demands, "PACK")  # the actors take the room afterwards
    try:
        is_said = False
        is_ready = group.ready()  # PlacementGroup.wait does not keep its timeout
        while not ray.wait([is_ready], timeout=_POLL_S)[0]:
            status = _cluster_status()
            at_most = place_actors(demands, _nodes(status, free=False))
            if at_most.missing and not _may_grow(status, group):
                raise UserError(
                    f"the cluster has no room and cannot grow enough: {at_most.missing}; start fewer, ask for less, or "
                    "add nodes"
                )
            if time.monotonic() > deadline:
                raise FleetError(f"no room on the cluster in {START_TIMEOUT_S:g} s: {found.missing}")
            if not is_said:
                cause = "the cluster grows" if at_most.missing else "other jobs on the cluster end"
                say(f"waiting until {cause}: {found.missing}")
                is_said = True
    finally:
        remove_placement_group(group)
    deadline = min(deadline, time.monotonic() + _SETTLE_S)  # Ray found room; the plan may still miss some
    while place_actors(demands, _nodes(_cluster_status(), free=True)).missing and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # until the nodes report that the group is gone


def _reserve(demands: Sequence[Demand], strategy: str) -> PlacementGroup:
    wanted = [demand for demand in demands for _ in range(demand.count)]
    selectors = [dict(demand.label_selector) for demand in wanted]
    bundles = [demand.bundle for demand in wanted]
    group: PlacementGroup = placement_group(bundles, strategy, bundle_label_selector=selectors)
    return group


def _cluster_status() -> GetClusterStatusReply:
    """Return the nodes, and the autoscaler's answer to the demands that it saw last.

    ``ray.autoscaler.v2.sdk.get_cluster_status`` reads the same and drops the demands that cannot be met.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reply = GetClusterStatusReply()
    reply.ParseFromString(client.get_cluster_status(timeout_s=_REPLY_TIMEOUT_S))
    return reply


def _nodes(status: GetClusterStatusReply, *, free: bool) -> list[Node]:
    """Return the nodes that are up, with their free resources or with all."""
    found = []
    for node in status.cluster_resource_state.node_states:
        if node.status not in (NodeStatus.DEAD, NodeStatus.DRAINING):
            has = node.available_resources if free else node.total_resources
            name = f"{node.node_ip_address} ({node.node_id.hex()[:6]})"
            node_id = node.node_id.hex()
            found.append(Node(name, has.get("CPU", 0.0), has.get("GPU", 0.0), dict(node.labels), node_id))
    return found


def _may_grow(status: GetClusterStatusReply, group: PlacementGroup) -> bool:
    """Return whether there is an autoscaler (v2) that has not answered that the group cannot be met."""
    answer = status.autoscaling_state
    refused = [request.details for request in answer.infeasible_gang_resource_requests]
    return bool(answer.autoscaler_state_version) and not any(group.id.hex() in details for details in refused)


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray takes back: idle nodes, and nodes that are about to be lost."""
    return set(state.get_draining_nodes())


def num_without_room(actors: Iterable[ActorHandle[Any]]) -> int:
    """Return how many of these actors wait for a worker process, because Ray has no room for them yet."""
    infos = [state.actor_table(actor._actor_id.hex()) for actor in actors]
    # Ray's table has no actor that the head does not know yet: handles come before the registration.
    # A waiting actor already has an address, of the raylet that queues it.
    return sum(info["State"] == "PENDING_CREATION" and not info["Pid"] for info in infos if info)


def free_resources() -> str:
    """Return the CPUs and GPUs that no actor reserves: ``0.5 of 4 CPU, 0 of 2 GPU``."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
