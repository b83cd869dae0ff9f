"""EnvRunnerActor: the Ray actor around ``EnvRunner``.

It turns groups into record batches, which stay in the object store while only their references travel.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import ray
from numpy.typing import NDArray

from cluster.metrics import count, observe
from cluster.supervision.fleet import Process, Pulse
from cluster.supervision.watchdog import beating
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.disk.folders import AnyFolder
from ragr1_actors.core.errors import EngineDeadError
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.weight_transport import choose_transport
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest, GroupSummary, summarize
from retrieval.base import Retriever

T = TypeVar("T")

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
        self._load = partial(EnvRunner.load, config, policy, retriever, version)
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
