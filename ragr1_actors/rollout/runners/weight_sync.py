"""WeightSync: publishes policy versions from the learners into the engines of env runners, by one of three transports.

object store   Learner rank 0 puts all weights into Ray's object store, once per node, and the runners read them part by
               part. Fits everywhere.
broadcast      The learner ranks send them to engines on other GPUs, by vLLM's ``nccl``.
ipc            Learner rank i sends them to runner i, which takes turns with it on one GPU, by vLLM's ``ipc``.

Broadcast and ipc are vLLM's handshake, driven by learner rank 0 (``send``). Without GPUs, with the transformers engine
and with adapters, chunks travel through the object store in that handshake (backend ``host``). A runner that dies or
hangs, or whose engine refuses a part, gets this version as a whole through the object store, and is counted. With ipc::

    sampling       engines have the device   what learners train is in the hosts' memory, see ``offload_states``
    update, save   learners have it          engines sleep without weights and cache: ``make_room`` to ``publish``
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray

from cluster.supervision.fleet import last_line, wait_or_kill
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import one_line
from ragr1_actors.core.weight_transport import PART_BYTES, TIMEOUT_S, choose_transport, in_parts

if TYPE_CHECKING:
    from learners.learner import Learner
    from learners.ranks.learner_group import LearnerGroup
    from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup

logger = logging.getLogger(__name__)


@dataclass
class Delivery:
    """Delivery of one policy version: vLLM's ``VLLMWeightSyncClient`` over the runners' actors."""

    backend: Literal["host", "nccl", "ipc"]
    num_workers: int = 1  # processes of each engine that hold weights: tensor times pipeline parallelism
    version: int = 0
    receivers: Mapping[str, Any] = field(default_factory=dict)
    """Actors of the runners, each in one of its lives: ``{"env runner 3, life 1": handle}``."""
    bucket_bytes: int = PART_BYTES
    timeout_s: float = TIMEOUT_S
    missed: dict[str, str] = field(default_factory=dict, init=False)  # receivers that do not get it, and why
    _pending: dict[Any, str] = field(default_factory=dict, init=False)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join. vLLM numbers the workers of one engine; here all workers need different ranks."""
        for index, (name, handle) in enumerate(self.receivers.items()):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self.num_workers
            self._pending[handle.call_engine.remote("init_weight_transfer", info)] = name
        self.wait()

    def start_weight_update(self) -> None:  # noqa: D102 - these three are the steps of vLLM's protocol
        self.call("start_weight_update")
        self.wait()

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: D102
        self.call("receive_weights", update_info)
        self.wait()

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: D102
        self.call("finish_weight_update", self.version)
        self.wait()

    def call(self, method: str, *arguments: Any) -> None:
        """Wait for the previous call, then begin one for every receiver that has missed nothing so far."""
        self.wait()
        for name, handle in self.receivers.items():
            if name not in self.missed:
                self._pending[handle.call_engine.remote(method, *arguments)] = name

    def wait(self) -> None:
        """Wait for the calls. A runner that does not answer in time hangs: it is killed, and Ray restarts it."""
        pending, self._pending = self._pending, {}
        for call, error in wait_or_kill({call: self.receivers[name] for call, name in pending.items()}, self.timeout_s):
            if error is not None:
                self.missed[pending[call]] = last_line(error)
                if self.backend == "nccl":  # the broadcast would wait for this runner
                    _leave()


@dataclass(frozen=True)
class PolicySource:
    """vLLM's ``WeightSource`` over a learner: DeepSpeed gathers one parameter after the other, in one pass."""

    learner: Learner
    stream: Iterator[tuple[str, Any]]

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor, as vLLM's ``ParamMeta``, without gathering."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(t.name, self.learner.dtype, t.shape) for t in self.learner.published_tensors()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield name and whole tensor."""
        return self.stream


def send(delivery: Delivery, learner: Learner) -> dict[str, str]:
    """Send a version, on every rank; rank 0 returns the receivers that missed it, with the reasons.

    Their engines continue with the previous version, or wait for ``Engine.update_weights``.
    """
    source = PolicySource(learner, ((tensor.name, tensor.gather()) for tensor in learner.published_tensors()))
    if delivery.backend != "host":
        _send_by_vllm(delivery, source, learner.rank)
    elif learner.rank == 0:
        _send_by_host(delivery, source, learner.adapter_base)
    for _ in source:  # ZeRO-3 gathers each parameter from all ranks, which would wait for this one
        pass
    return delivery.missed


def _send_by_host(delivery: Delivery, source: PolicySource, base: str) -> None:
    """Send chunks through the object store; the next one is gathered while the runners load the present one."""
    from safetensors.torch import save

    delivery.start_weight_update()
    on_host = ((name, tensor.contiguous().cpu()) for name, tensor in source)
    for part in in_parts(on_host, delivery.bucket_bytes):
        delivery.call("receive_weights", {"base": base}, ray.put(np.frombuffer(save(part), np.uint8)))
    delivery.finish_weight_update()


_trainers: dict[tuple[str, ...], Any] = {}
"""Trainer engine of vLLM on this rank, by its receivers: at most one, kept between versions."""


def _send_by_vllm(delivery: Delivery, source: PolicySource, rank: int) -> None:
    """Send with vLLM's trainer engine. A broadcast that fails on one rank fails for all receivers."""
    names, missed = tuple(delivery.receivers), delivery.missed
    is_broadcast = delivery.backend == "nccl"
    try:
        if names not in _trainers:
            _leave()
            _trainers[names] = _join(delivery, source, rank)
        trainer = _trainers[names]
        if not (is_broadcast and missed):  # by ipc the other receivers continue
            trainer.source, trainer.client = source, delivery
            trainer.send_weights()
    except (RuntimeError, ValueError, AssertionError, OSError) as error:  # of NCCL, CUDA, the store where ranks meet
        if not is_broadcast:  # the other ranks wait for this one in vLLM's gather: all have to start again
            raise
        missed.setdefault(names[0], one_line(error))
    if is_broadcast and missed:
        _leave()
        missed.update(dict.fromkeys(names, next(iter(missed.values()))))


def _leave() -> None:
    for names in tuple(_trainers):
        if trainer := _trainers.pop(names, None):  # a thread of vLLM's may leave at the same time
            trainer.shutdown()


def _join(delivery: Delivery, source: PolicySource, rank: int) -> Any:
    """Let the sender and the workers of all engines meet; return vLLM's trainer engine."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, ipc_engine, nccl_engine
    from vllm.utils.network_utils import get_open_port

    if delivery.backend == "ipc":
        # One parameter must fit into the buffer, which stays within the learner's part of the GPU
        size = max(delivery.bucket_bytes, *(m.dtype.itemsize * int(np.prod(m.shape)) for m in source.metadata()))
        info = ipc_engine.IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
    else:
        info = nccl_engine.NCCLTrainerInitInfo(
            master_address=ray.util.get_node_ip_address(),
            master_port=get_open_port(),
            world_size=1 + len(delivery.receivers) * delivery.num_workers,
            rank=rank,
            packed_buffer_size_bytes=delivery.bucket_bytes,
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=delivery, source=source)


def _release_cache(learner: Learner) -> None:
    """Give memory that torch still holds after an update to the engine that wakes up on this device."""
    from ragr1_actors.core.models.process_memory import release_cache

    release_cache(learner.device)


class WeightSync:
    """Publishes from learners to env runners."""

    def __init__(self, config: RunConfig, learners: LearnerGroup, env_runners: EnvRunnerGroup) -> None:
        """Publish by the transport of ``config``; with ``ipc``, the runners are awake and have version 0."""
        transport, runners = choose_transport(config), config.env_runners
        on_gpus = runners.num_gpus_per_env_runner and config.learners.num_gpus_per_learner
        # Adapters are small, and vLLM's transfer cannot merge them
        by_vllm = runners.engine == "vllm" and on_gpus and not config.learners.lora
        size = runners.engine_options.get
        self.delivery = Delivery(  # of the last published version
            backend="host" if not by_vllm else "ipc" if transport == "ipc" else "nccl",
            num_workers=int(size("tensor_parallel_size", 1)) * int(size("pipeline_parallel_size", 1)),
        )
        self.num_fallbacks = 0  # versions that some runner got through the object store instead
        self.shares_devices = transport == "ipc"  # learners and runners take turns on the same devices
        self._learners, self._env_runners = learners, env_runners
        self._is_direct = transport != "object_store"
        self._has_room = False
        if self.shares_devices:
            env_runners.expect(0)

    def publish(self, version: int) -> None:
        """Make ``version`` the policy that every runner samples with."""
        self.make_room()
        self.delivery = replace(self.delivery, version=version)
        self._env_runners.expect(version)
        self._deliver()

    def make_room(self) -> None:
        """Let the runners leave the devices that they share with learners, until ``publish``."""
        if self.shares_devices and not self._has_room:
            self._env_runners.wait_for_restarts()  # an engine that loads takes memory, too
            self._env_runners.call_engines("sleep")
            self._env_runners.hold(is_held=True)
            self._has_room = True

    @contextmanager
    def room(self) -> Iterator[None]:
        """Make room within the context, if there is none; then runners continue with the last published version."""
        if not self.shares_devices or self._has_room:
            yield
            return
        self.make_room()
        yield
        self._deliver()  # the engines have dropped it

    def _deliver(self) -> None:
        if self.shares_devices:
            self._learners.foreach_learner(_release_cache)
            self._env_runners.call_engines("wake_up", "weights")
        version, receivers = self.delivery.version, self._env_runners.receivers if self._is_direct else {}
        missed: dict[str, str] | None = None  # None means every runner
        if receivers:
            missed, *_ = self._learners.foreach_learner(partial(send, replace(self.delivery, receivers=receivers)))
        if missed:
            self.num_fallbacks += 1
            logger.warning(
                "version %d goes to %d of %d env runners through the object store: %s: %s",
                *(version, len(missed), len(receivers), *next(iter(missed.items()))),
            )
        if missed != {}:
            self._env_runners.update_weights(self._learners.weights_ref(), version, missed)
        if self.shares_devices:
            self._learners.offload_states()
            self._env_runners.call_engines("wake_up", "kv_cache")
            self._env_runners.hold(is_held=False)
            self._has_room = False

    def catch_up(self) -> None:
        """Give returned runners the last published version, while the learners are idle."""
        if self._env_runners.needs_weights:
            with self.room():
                self._env_runners.offer(self._learners.weights_ref())
