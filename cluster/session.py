"""Where a run's actors are: the Ray session, and the place of each actor in it.

Actors are placed anywhere, except that an env runner and a learner rank that share a GPU are on one bundle::

    bundle 0: one GPU (or none)      env runner 0, learner rank 0    a fraction of that GPU each
    bundle 1: one GPU                env runner 1, learner rank 1    an actor that restarts returns to its bundle

A bundle of a Ray placement group lies on one node, so the two actors can share memory, with GPUs or without.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError, UserError, one_line
from ragr1_actors.core.weight_transport import choose_transport

START_TIMEOUT_S = 600.0
"""Until the cluster has grown and every bundle has its place."""

_SYSTEM_CONFIG = {"timeout_ms_task_wait_for_death_info": 0}
"""A call to an actor whose process was killed fails at once. By default it waits 1 to 2 s for the cause of death, which
is not reported if the actor restarts."""

ActorOptions = Callable[[int], Mapping[str, Any]]
"""Given an actor's index, returns the Ray options that say where it runs."""


@contextmanager
def ray_session(num_cpus: float = 0.0, num_gpus: float = 0.0) -> Iterator[None]:
    """Be connected to Ray for a while, with the resources that all actors need together.

    Under ``ray job submit``, or with ``RAY_ADDRESS`` set, it joins that cluster, whose resources are not checked.
    Otherwise it starts a local cluster, and ends its processes; it never joins another one that runs on the machine.
    If Ray is connected already, it does nothing.

    Args:
        num_cpus: a local session declares at least this many CPUs, more than the machine has if necessary: actors may
            share a core.
        num_gpus: a local session must have this many GPUs.

    Raises:
        UserError: the cluster does not answer or refuses the token, or this machine has too few GPUs.
        FleetError: the local session did not start.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    _connect(address, num_cpus)
    try:
        found = ray.cluster_resources().get("GPU", 0.0)
        if not address and num_gpus > found:
            raise UserError(
                f"the actors ask for {num_gpus:g} GPUs, this machine has {found:g}; lower num_gpus_per_env_runner, "
                "num_gpus_per_retriever and num_gpus_per_learner, or run on a cluster"
            )
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, num_cpus: float) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address:
            ray.init(address=address, **common)
        else:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
                include_dashboard=False,
                _system_config=_SYSTEM_CONFIG,
                runtime_env={"env_vars": {"PYTHONPATH": _python_path(), "TOKENIZERS_PARALLELISM": "false"}},
                _temp_dir=tempfile.mkdtemp(prefix="ragr1-", dir="/tmp"),  # socket paths have 107 characters
                **common,
            )
    except ConnectionError as error:
        raise UserError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}; if the cluster requires a token, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from error
    except Exception as error:  # Ray raises a plain Exception if a process that it starts fails
        if type(error) is not Exception:
            raise
        raise FleetError(f"Ray did not start: {one_line(error)}; try again when this machine is less busy") from error


def _python_path() -> str:
    """Workers import the packages and the user's modules from the same place as the driver, installed or not."""
    root = str(Path(__file__).resolve().parent.parent)
    existing = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (root, os.getcwd(), existing) if part)


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
        self._group: PlacementGroup | None = None
        if choose_transport(config) != "ipc":
            return
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
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def remove(self) -> None:
        """Release the bundles. Ray ends the actors that still run there."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
