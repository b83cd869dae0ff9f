"""Placement of actors: anywhere, except that an env runner and a learner rank that share a GPU sit on one bundle.

::

    bundle 0: one GPU (or none)      env runner 0, learner rank 0    a fraction of that GPU each
    bundle 1: one GPU                env runner 1, learner rank 1    an actor that restarts returns to its bundle

A bundle of a Ray placement group lies on one node, so the two actors can share memory, with GPUs or without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.weight_transport import choose_transport

START_TIMEOUT_S = 600.0
"""Until the cluster has grown and every bundle has its place."""

ActorOptions = Callable[[int], Mapping[str, Any]]
"""Given an actor's index, returns the Ray options that say where it runs."""


def anywhere(index: int) -> Mapping[str, Any]:
    """``ActorOptions`` without a constraint."""
    return {}


class Placement:
    """The bundles of a run, until ``remove`` or the end of the driver. Without shared devices there is no bundle."""

    def __init__(self, config: RunConfig) -> None:
        """Reserve the bundles, each with a whole GPU if learners use GPUs, so that no other actor shares it.

        Raises:
            FleetError: the cluster has no room within ``START_TIMEOUT_S``.
        """
        self._group: Any = None
        if choose_transport(config) != "ipc":
            return
        import ray
        from ray.util.placement_group import placement_group

        runners, learners = config.env_runners, config.learners
        # Ray accepts no bundle without a resource
        bundle = {"CPU": max(0.001, runners.num_cpus_per_env_runner + learners.num_cpus_per_learner)}
        if learners.num_gpus_per_learner:
            bundle["GPU"] = 1.0
        self._group = placement_group([dict(bundle) for _ in range(learners.num_learners)])
        try:
            ray.get(self._group.ready(), timeout=START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            self.remove()
            raise FleetError(
                f"no room for {learners.num_learners} pairs of an env runner and a learner, each {bundle}, in "
                f"{START_TIMEOUT_S:g} s; start fewer, or add nodes to the cluster"
            ) from error

    def options(self, index: int) -> Mapping[str, Any]:
        """``ActorOptions`` of env runners and learner ranks."""
        if self._group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def remove(self) -> None:
        """Release the bundles. Ray ends the actors that still run there."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
