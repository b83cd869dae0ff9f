"""Where actors sit: anywhere, but for runners and learner ranks that share a device, pair by pair.

::

    bundle 0: one GPU (or none)      runner 0, learner rank 0        parts of that GPU, so that they share it
    bundle 1: one GPU                runner 1, learner rank 1        an actor that starts anew comes to its bundle again

A bundle of Ray's placement group lies on one node, so that the two can share memory, with GPUs or without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.weight_transport import choose_transport

START_TIMEOUT_S = 600.0
"""For a cluster to grow."""

ActorOptions = Callable[[int], Mapping[str, Any]]
"""Ray's options for the actor with an index, beside the resources it asks for."""


def anywhere(index: int) -> Mapping[str, Any]:
    """``ActorOptions`` of an actor that may sit where Ray likes."""
    return {}


class Placement:
    """The bundles of a run, there until ``remove`` or until the driver ends; none where nothing shares a device."""

    def __init__(self, config: RunConfig) -> None:
        """Ask Ray for them: a whole GPU each, where there are GPUs, since nobody else is to sit on it.

        Raises:
            FleetError: there is no room within ``START_TIMEOUT_S``.
        """
        self._group: Any = None
        if choose_transport(config) != "ipc":
            return
        import ray
        from ray.util.placement_group import placement_group

        runners, learners = config.env_runners, config.learners
        # Ray wants a bundle of something
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
                f"{START_TIMEOUT_S:g} s; start fewer, or let the cluster grow"
            ) from error

    def options(self, index: int) -> Mapping[str, Any]:
        """``ActorOptions`` of runners and learner ranks."""
        if self._group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def remove(self) -> None:
        """Let go of the bundles; an actor that still sits there ends."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
