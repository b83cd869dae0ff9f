"""Plan of a run's actors on nodes, computed before any starts. Pure: no Ray.

::

    RunConfig ──► actor_demands ──► Demand: 4 env runners, each 1 CPU, 2 GPUs, on nodes with these labels
    Demands, Nodes ──► plan ──► PlacementPlan: env runners on 10.0.0.3 x 3, and 1 that finds no place, with the reason

An actor is on one node, so an engine of ``tensor_parallel_size`` 2 needs a node with two free GPUs. A part of a GPU is
a part of one GPU: two actors of 0.6 need two. Actors start where the plan has them: if Ray chose node by node, the
first could take the only room of the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ragr1_actors.core.config import RetrievalSettings, RunConfig, SamplerConfig
from ragr1_actors.core.weight_transport import choose_transport

MAX_NODES_SHOWN = 4
_EPSILON = 1e-6


@dataclass(frozen=True)
class Node:
    """Machine, or the free part of it."""

    name: str
    """Unique name, such as ``10.0.0.3``."""
    num_cpus: float
    num_gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    node_id: str = ""
    """Id in Ray, 56 hexadecimal digits."""


@dataclass(frozen=True)
class Demand:
    """Actors of one kind, each of which needs one node."""

    role: str
    """Name of the actors in the plural, such as ``env runners``."""
    count: int
    num_cpus: float
    """CPUs of one actor, as ``num_gpus`` its GPUs."""
    num_gpus: float = 0.0
    label_selector: Mapping[str, str] = field(default_factory=dict)
    strategy: Literal["any", "pack", "spread"] = "any"
    """Strategy: ``pack`` uses as few nodes as possible, ``spread`` as many."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that Ray reserves for one actor. Ray accepts no bundle without a resource: a byte is the least."""
        resources = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: number for name, number in resources.items() if number} or {"memory": 1.0}

    @property
    def each(self) -> str:
        """Needs of one actor: ``1 CPU, 2 GPUs, labels role=runner``."""
        parts = [_counted(self.num_cpus, "CPU")] + ([_counted(self.num_gpus, "GPU")] if self.num_gpus else [])
        labels = ", ".join(f"{key}={value}" for key, value in self.label_selector.items())
        return ", ".join(parts) + (f", labels {labels}" if labels else "")


@dataclass(frozen=True)
class Placed:
    """Demand, with the nodes of its actors."""

    demand: Demand
    seats: tuple[Node, ...]
    """Nodes of the actors 0, 1, ...; the missing ones find no place."""
    reason: str = ""
    """Reason why some actors find no place."""

    @property
    def nodes(self) -> Mapping[str, int]:
        """Number of actors by node: ``{"10.0.0.3": 2}``."""
        return Counter(node.name for node in self.seats)

    @property
    def num_missing(self) -> int:
        """Number of actors that find no place."""
        return self.demand.count - len(self.seats)

    @property
    def where(self) -> str:
        """Nodes as a text: ``10.0.0.3 x 3, 10.0.0.4``."""
        ordered = sorted(self.nodes.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{name} x {count}" if count > 1 else name for name, count in ordered[:MAX_NODES_SHOWN]]
        if len(ordered) > MAX_NODES_SHOWN:
            shown.append(f"{len(ordered) - MAX_NODES_SHOWN} more nodes")
        if self.num_missing:
            shown.append(f"no place for {self.num_missing}")
        return ", ".join(shown)


@dataclass(frozen=True)
class PlacementPlan:
    """Nodes of all actors, and the actors that find no place."""

    rows: tuple[Placed, ...]

    def node_ids(self, role: str) -> list[str]:
        """Return the ids of the nodes of the actors 0, 1, ... of a role."""
        return [node.node_id for row in self.rows if row.demand.role == role for node in row.seats]

    def spare_cpus(self, role: str) -> int:
        """Return the CPUs that no actor reserves on the node of a role's first actor; 0 if it finds no place."""
        seats = [(node, row.demand) for row in self.rows for node in row.seats]
        own = next((node for node, demand in seats if demand.role == role), None)
        if own is None:
            return 0
        return int(own.num_cpus - sum(demand.num_cpus for node, demand in seats if node == own) + _EPSILON)

    @property
    def missing(self) -> str:
        """Text with the actors that find no place, and why; empty if all find one."""
        return "; ".join(
            f"{row.num_missing} of {row.demand.count} {row.demand.role} find no place: each needs {row.demand.each} on "
            f"one node, {row.reason}"
            for row in self.rows
            if row.num_missing
        )


def actor_demands(config: SamplerConfig, *, has_index: bool) -> tuple[Demand, ...]:
    """Return the actors that a configuration starts with; only a ``RunConfig`` has learners.

    ``has_index`` tells whether retrievers need an index, and so are actors.
    """
    runners, retrieval = config.env_runners, config.retrieval
    num_replicas = retrieval.num_retrievers if has_index else 0
    demands = [
        Demand(
            retriever_role(retrieval),
            num_replicas * retrieval.num_shards,
            retrieval.num_cpus_per_retriever,
            retrieval.num_gpus_per_retriever,
            retrieval.label_selector,
        ),
        Demand(
            "encoders",
            retrieval.encoders.num_encoders if num_replicas else 0,
            retrieval.encoders.num_cpus,
            retrieval.encoders.num_gpus,
            retrieval.label_selector,
        ),
    ]
    if isinstance(config, RunConfig):
        demands.insert(0, learner_demand(config))
    if choose_transport(config) != "ipc":
        counts = (runners.num_env_runners, runners.num_cpus_per_env_runner, runners.num_gpus_per_env_runner)
        demands.append(Demand("env runners", *counts, runners.label_selector))
    agent = config.environment.agent
    if agent is not None and agent.ray and agent.num_cpus:  # room for one call per runner; others wait
        demands.append(Demand("agent tasks", runners.num_env_runners, agent.num_cpus, 0, runners.label_selector))
    return tuple(demand for demand in demands if demand.count)


def retriever_role(retrieval: RetrievalSettings) -> str:
    """Return the name of the actors that hold the index, or a shard of it."""
    return "index shards" if retrieval.num_shards > 1 else "retrievers"


def learner_demand(config: RunConfig) -> Demand:
    """Return the learner ranks, with the env runners that share their devices, if any.

    A shared GPU is reserved whole, so that no other actor gets a part of it.
    """
    runners, learners = config.env_runners, config.learners
    ranks = Demand(
        "learner ranks",
        learners.num_learners,
        learners.num_cpus_per_learner,
        learners.num_gpus_per_learner,
        learners.label_selector,
        learners.placement,
    )
    if choose_transport(config) != "ipc":
        return ranks
    return replace(
        ranks,
        role="pairs of an env runner and a learner rank",
        num_cpus=ranks.num_cpus + runners.num_cpus_per_env_runner,
        num_gpus=1.0 if ranks.num_gpus else 0.0,
    )


def place_actors(demands: Iterable[Demand], nodes: Sequence[Node]) -> PlacementPlan:
    """Place every actor that finds room; those that are hardest to place come first.

    Those that only some nodes may hold are placed before those that need more GPUs.
    """
    rooms = [_Room(node) for node in nodes]
    order = sorted(demands, key=lambda demand: (not demand.label_selector, -demand.num_gpus, -demand.num_cpus))
    return PlacementPlan(tuple(_place(demand, rooms) for demand in order))


def matches(label_selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether Ray chooses a node with these labels for the selector.

    A value of a selector is ``a``, ``!a``, ``in(a, b)`` or ``!in(a, b)``; ``!`` is also true without the label.
    """
    for key, value in label_selector.items():
        wanted = re.sub(r"^!?(in)?\(|^!|\)$", "", value)
        if (labels.get(key) in re.split(", ?", wanted)) == value.startswith("!"):
            return False
    return True


class _Room:
    """Room that is still free on a node while the plan is made."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.num_cpus = node.num_cpus
        self.gpus = [1.0] * int(node.num_gpus + _EPSILON)
        if (part := node.num_gpus - len(self.gpus)) > _EPSILON:
            self.gpus.append(part)
        self.num_ranks = 0
        """Number of actors of the demand that is being placed."""

    def take(self, demand: Demand) -> bool:
        """Place one actor here, if there is room."""
        chosen = self._choose_gpus(demand.num_gpus)
        if chosen is None or self.num_cpus < demand.num_cpus - _EPSILON:
            return False
        self.num_cpus -= demand.num_cpus
        for index in chosen:
            self.gpus[index] -= min(1.0, demand.num_gpus)
        self.num_ranks += 1
        return True

    def _choose_gpus(self, num_gpus: float) -> list[int] | None:
        share = min(1.0, num_gpus)
        fitting = [index for index, free in enumerate(self.gpus) if free >= share - _EPSILON]
        fitting.sort(key=lambda index: self.gpus[index])  # a GPU of which a part is taken comes first
        num_devices = round(num_gpus) if num_gpus > 1 else int(num_gpus > 0)
        return fitting[:num_devices] if len(fitting) >= num_devices else None

    def capacity(self, demand: Demand) -> int:
        """Return how many actors would fit, at most ``demand.count``."""
        copy = _Room(replace(self.node, num_cpus=self.num_cpus, num_gpus=0.0))
        copy.gpus = list(self.gpus)
        return sum(copy.take(demand) for _ in range(demand.count))


def _place(demand: Demand, rooms: Sequence[_Room]) -> Placed:
    suitable = [room for room in rooms if matches(demand.label_selector, room.node.labels)]
    for room in suitable:
        room.num_ranks = 0
    if demand.strategy == "pack":  # the smallest node that holds all; else those that hold most
        suitable.sort(key=lambda room: (-room.capacity(demand), sum(room.gpus), room.num_cpus))
    else:  # a node with few GPUs or none comes first, so that other actors find the GPUs free
        suitable.sort(key=lambda room: (sum(room.gpus), room.num_cpus))
    seats: list[Node] = []
    for _ in range(demand.count):
        if demand.strategy == "spread":
            suitable.sort(key=lambda room: room.num_ranks)
        taken = next((room for room in suitable if room.take(demand)), None)
        if taken is None:
            return Placed(demand, tuple(seats), _reason(suitable))
        seats.append(taken.node)
    return Placed(demand, tuple(seats))


def _reason(suitable: Sequence[_Room]) -> str:
    if not suitable:
        return "and no node has these labels"
    room = max(suitable, key=lambda room: (sum(room.gpus), room.num_cpus))
    free = f"{_counted(sum(room.gpus), 'GPU')} and {_counted(room.num_cpus, 'CPU')}"
    return f"and of such nodes the one with most room, {room.node.name}, has {free} left"


def _counted(number: float, unit: str) -> str:
    return f"{number:g} {unit}" + ("s" if number != 1 else "")
