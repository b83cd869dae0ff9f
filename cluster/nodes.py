"""Ray's knowledge of nodes: which of them drain, and which actors have no room yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray._private.state import state  # no public function says which nodes drain; Ray Data reads them here too
from ray.actor import ActorHandle


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
