"""The learners' side of a weight transfer: what every learner rank runs when a policy version is published.

Rank 0 drives vLLM's handshake with all env runners: ``init_weight_transfer_engine`` once for a set of runners, then
``start_weight_update``, ``update_weights`` and ``finish_weight_update`` for each version. What carries the bytes::

    nccl    vLLM's NCCLTrainerWeightTransferEngine: packed broadcasts from rank 0 to the workers of all engines
    ipc     vLLM's IPCTrainerWeightTransferEngine: every rank shares a packed buffer with the engine on its GPU
    host    chunks in safetensors' format in Ray's object store, which runners read from shared memory

All ranks iterate over the parameters in lockstep, because ZeRO-3 gathers each one from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ragr1_actors.core.weight_transport import WeightBackend

BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
"""For one step of the handshake; a runner that needs longer hangs."""


class SendingLearner(Protocol):
    """What sends, a ``Learner``; its methods are described there."""

    rank: int
    dtype: Any
    """A ``torch.dtype``."""

    @property
    def adapter_base(self) -> str: ...  # noqa: D102
    def published_tensors(self) -> Iterator[Any]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Receiver:
    """A runner's actor in one of its lives: ``Receiver("env runner 3, life 1", handle)``."""

    name: str
    handle: Any


@dataclass(frozen=True, slots=True)
class Delivery:
    """One policy version on its way."""

    version: int
    receivers: tuple[Receiver, ...]
    backend: WeightBackend = "host"
    num_workers: int = 1
    """Processes of each engine that hold weights: tensor times pipeline parallelism."""
    bucket_bytes: int = BUCKET_BYTES
    timeout_s: float = TIMEOUT_S


class RunnerClient:
    """vLLM's ``VLLMWeightSyncClient`` over the runners' actors. It records who misses the version."""

    def __init__(self, delivery: Delivery) -> None:
        """Talk to the receivers of ``delivery``."""
        self.missed: dict[str, str] = {}
        """Reasons, by the receivers' names."""
        self.abort: Callable[[], None] = lambda: None
        """Called when a receiver misses the version: ends a broadcast that would wait for it."""
        self._delivery = delivery
        self._pending: dict[Any, Receiver] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine join. vLLM numbers the workers of one engine; here those of all have different ranks."""
        for index, receiver in enumerate(self._delivery.receivers):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._delivery.num_workers
            self._pending[receiver.handle.init_weight_transfer.remote(info)] = receiver
        self.wait()

    def start_weight_update(self) -> None:
        """Have every engine prepare."""
        self.call("start_weight_update")
        self.wait()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have every engine receive a part."""
        self.call("receive_weights", update_info)
        self.wait()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every engine go on with the version of the delivery."""
        self.call("finish_weight_update", self._delivery.version)
        self.wait()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every receiver that has missed nothing so far; ``wait`` waits for it."""
        for receiver in self._delivery.receivers:
            if receiver.name not in self.missed:
                self._pending[getattr(receiver.handle, method).remote(*arguments)] = receiver

    def wait(self) -> None:
        """Wait for what was called. A runner that does not answer in time hangs: it is killed, and Ray restarts it."""
        import ray

        calls, self._pending = self._pending, {}
        while calls:
            done, hanging = ray.wait(list(calls), timeout=self._delivery.timeout_s)
            for call in done or hanging:
                self._finish(call, calls.pop(call), hangs=not done)

    def _finish(self, call: Any, receiver: Receiver, *, hangs: bool) -> None:
        import ray

        try:
            if not hangs:
                ray.get(call)
                return
            reason = f"no answer in {self._delivery.timeout_s:g} s"
            ray.kill(receiver.handle, no_restart=False)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip()
        self.missed[receiver.name] = reason
        self.abort()


class PolicySource:
    """vLLM's ``WeightSource`` over a learner: DeepSpeed gathers one parameter after the other."""

    def __init__(self, learner: SendingLearner) -> None:
        """Gather from ``learner``."""
        self._learner = learner
        self._stream = ((tensor.name, tensor.gather()) for tensor in learner.published_tensors())

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of what iteration yields, as vLLM's ``ParamMeta``; nothing is gathered for it."""
        from vllm.distributed.weight_transfer import ParamMeta

        learner = self._learner
        return [ParamMeta(tensor.name, learner.dtype, tensor.shape) for tensor in learner.published_tensors()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor, whole. One pass: what is left of it, ``drain`` goes through."""
        return self._stream

    def drain(self) -> None:
        """Iterate to the end: the other ranks would wait for this one in a gather."""
        for _ in self._stream:
            pass


def send(delivery: Delivery, learner: SendingLearner) -> dict[str, str]:
    """Send a version, on every rank; return on rank 0 which receivers missed it, and why.

    The engine of a receiver that missed it goes on with the version before, or waits for ``Engine.update_weights``.
    """
    source, client = PolicySource(learner), RunnerClient(delivery)
    if delivery.backend == "host":
        if learner.rank == 0:
            _send_by_host(delivery, source, client, learner.adapter_base)
    else:
        _send_by_vllm(delivery, source, client, learner.rank)
    source.drain()
    return client.missed


def _send_by_host(delivery: Delivery, source: PolicySource, client: RunnerClient, base: str) -> None:
    """Send chunks through the object store; the next one is gathered while the runners load the one before."""
    import numpy as np
    import ray
    from safetensors.torch import save

    client.start_weight_update()
    for chunk, is_last in _chunks(source, delivery.bucket_bytes):
        blob = ray.put(np.frombuffer(save(chunk), np.uint8))
        client.wait()
        client.call("receive_weights", {"base": base, "is_last": is_last}, blob)
    client.wait()
    client.finish_weight_update()


def _chunks(source: PolicySource, bucket_bytes: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield parameters of up to ``bucket_bytes`` together, on the CPU, and whether they are the last ones."""
    chunk: dict[str, Any] = {}
    num_bytes = 0
    for name, tensor in source:
        if chunk and num_bytes + tensor.nbytes > bucket_bytes:
            yield chunk, False
            chunk, num_bytes = {}, 0
        chunk[name] = tensor.contiguous().cpu()
        num_bytes += tensor.nbytes
    yield chunk, True


class _Group:
    """This rank's place in vLLM's transfer, kept from one version to the next."""

    receivers: tuple[str, ...] | None = None
    trainer: Any = None

    def leave(self) -> None:
        if self.trainer is not None:
            self.trainer.shutdown()
        self.receivers = self.trainer = None


_group = _Group()


def _send_by_vllm(delivery: Delivery, source: PolicySource, client: RunnerClient, rank: int) -> None:
    """Send with vLLM's trainer engine. A broadcast that fails on one rank fails for all receivers."""
    names = tuple(receiver.name for receiver in delivery.receivers)
    is_broadcast = delivery.backend == "nccl"
    reason = ""
    try:
        if names != _group.receivers:
            _group.leave()
            _group.trainer = _join(delivery, source, client, rank)
            _group.receivers = names
        if is_broadcast:  # it would wait for a receiver that is gone; by ipc the others go on
            client.abort = _group.trainer.shutdown
        if not (is_broadcast and client.missed):
            _group.trainer.source, _group.trainer.client = source, client
            _group.trainer.send_weights()
    except (RuntimeError, ValueError, AssertionError, OSError) as error:  # of NCCL, CUDA, the store where ranks meet
        if not is_broadcast:  # the other ranks wait for this one in vLLM's own gather: all have to start again
            raise
        reason = str(error).strip() or type(error).__name__
    if is_broadcast and (reason or client.missed):
        _group.leave()
        client.missed = dict.fromkeys(names, next(iter(client.missed.values()), reason))


def _join(delivery: Delivery, source: PolicySource, client: RunnerClient, rank: int) -> Any:
    """Have the sender and the workers of all engines meet; return vLLM's trainer engine."""
    import ray
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    info: Any
    if delivery.backend == "ipc":
        # one parameter must fit into the buffer, which stays within the learner's part of the GPU
        size = max(delivery.bucket_bytes, *(m.dtype.itemsize * math.prod(m.shape) for m in source.metadata()))
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
    else:
        world_size = 1 + len(delivery.receivers) * delivery.num_workers
        address = (ray.util.get_node_ip_address(), get_open_port())
        info = NCCLTrainerInitInfo(*address, world_size, rank=rank, packed_buffer_size_bytes=delivery.bucket_bytes)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
