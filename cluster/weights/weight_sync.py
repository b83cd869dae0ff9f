"""Publishing a policy version: from the learners into every EnvRunner, by one of these transports.

============== ============================================ ======================================= ==================
transport      the way                                      where it fits                           run so far
============== ============================================ ======================================= ==================
object store   learner rank 0 ──► object store ──► runners, anywhere; in the driver's own process   CPU
               whose vLLM workers read it from shared       the weights are handed over as they are
               memory
broadcast      learner rank 0 ──► every engine worker, in   learners and engines on GPUs of their   CPU (``gloo``);
               buckets, by NCCL (GPUs) or ``gloo`` (CPUs);  own                                     NCCL has not
               one host copy less a runner, bf16 as bf16
ipc            learner rank i ──► the engine of runner i,   learner and engine on one GPU, which    CPU (shared
               through buckets that both have open          each leaves while the other works       memory); CUDA IPC
                                                                                                    and sleep have not
============== ============================================ ======================================= ==================

A broadcast or a transfer by ipc, where the driver only gives the word::

    all are the same as last time? ──no──► all join a new group: rank 0 the learner, then the workers of each runner
       │ yes                               (ipc: a pair for each learner rank and its runner)
       ▼
    receive_weights of every runner; send of every learner rank (which gather together; rank 0 sends, by ipc every rank)
       │
       └► a runner died, hangs, or has not got all of it within the deadline: it gets this version through the object
          store, the group is dissolved, and all of that is counted and said

With ipc, who has the device::

    sampling      engines: weights, cache                          learners' states are in the hosts' memory
    make_room     engines sleep: weights and cache are dropped
    update, save                                                   what needs a state brings it back to the device
    publish       engines wake: weights ◄────── the transfer ───── learners
                                                                   offload_states
                  engines wake: cache; requests go on
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cluster.weights import weight_sender
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.weight_transport import WakeTag, choose_transport

if TYPE_CHECKING:  # pulls in torch
    from cluster.weights.weight_stream import Backend

T = TypeVar("T")

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """What publishes, a ``LearnerGroup``."""

    num_restarts: int
    """Times its processes were started anew, with which every group of theirs is gone."""
    num_builds: int
    """Stages that it began, each with a policy of its own to merge adapters into."""

    def weights_ref(self) -> Any:
        """A reference to ``{name: array}``, or the dictionary itself."""
        ...

    def foreach_learner(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function with the learner of every rank, and return what each returned, by rank."""
        ...

    def offload_states(self) -> int:
        """Leave the devices until the next call that needs them."""
        ...


@dataclass(frozen=True, slots=True)
class Receiver:
    """A runner's actor in one of its lives: ``Receiver("env runner 3, life 1", 3, handle)``."""

    name: str
    index: int
    handle: Any


class WeightSink(Protocol):
    """What takes the weights over, an ``EnvRunnerGroup``."""

    @property
    def receivers(self) -> list[Receiver]:
        """The healthy runners."""
        ...

    def expect(self, version: int, fetch: Callable[[], Any]) -> None:
        """Remember the version for runners that come back later; ``fetch`` gets its weights."""
        ...

    def update_weights(self, weights: Any, version: int, receivers: list[str] | None = None) -> None:
        """Swap them in, in the receivers that are named, or in all."""
        ...

    def sleep(self) -> None:
        """Have the engines drop weights and cache."""
        ...

    def wake_up(self, tag: WakeTag) -> None:
        """Have them take room again."""
        ...


class Transport(ABC):
    """The one interface of all transports."""

    num_fallbacks = 0
    """Versions that some runner got by another way than this one."""
    shares_devices = False
    """Whether learners and runners have one device, and only one of them at a time works on it."""

    @abstractmethod
    def publish(self, version: int) -> float:
        """Make ``version`` the policy that every runner samples with, and return the seconds it took."""

    def make_room(self) -> None:  # noqa: B027
        """Have the runners leave the devices that they share with learners, until ``publish``."""

    @contextmanager
    def room(self) -> Iterator[None]:
        """``make_room`` for a while: at the end the runners go on with the version published last."""
        yield


def make_transport(config: RunConfig, source: WeightSource, sink: WeightSink) -> Transport:
    """Make the transport that ``env_runners.weight_transport`` names; see ``choose_transport``."""
    transport = choose_transport(config)
    if transport == "object_store":
        return ObjectStoreTransport(source, sink)
    if transport == "ipc":
        return ColocatedTransport(source, sink)
    has_gpus = config.env_runners.num_gpus_per_env_runner > 0 and config.learners.num_gpus_per_learner > 0
    return DirectTransport(source, sink, "nccl" if has_gpus else "gloo")


class ObjectStoreTransport(Transport):
    """By reference through the object store: the weights never pass through the driver."""

    def __init__(self, source: WeightSource, sink: WeightSink) -> None:
        """Between these two."""
        self._source = source
        self._sink = sink

    def publish(self, version: int) -> float:
        """See ``Transport.publish``."""
        started = time.perf_counter()
        self._sink.update_weights(self._source.weights_ref(), version)
        return time.perf_counter() - started


class DirectTransport(Transport):
    """From the learners straight into the engines' workers, drawn at the head of this file: a broadcast, or by ipc."""

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        backend: Backend,
        *,
        bucket_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Between these two; by default with ``weight_stream``'s ``BUCKET_BYTES`` and ``TIMEOUT_S``."""
        from cluster.weights import weight_stream

        self._source = source
        self._sink = sink
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes or weight_stream.BUCKET_BYTES
        self._timeout_s = timeout_s or weight_stream.TIMEOUT_S
        self._members: list[str] = []
        self.num_groups = 0
        """Times a group, or all the pairs, were formed."""

    def publish(self, version: int) -> float:
        """See ``Transport.publish``."""
        started = time.perf_counter()
        self._sink.expect(version, self._fetch)
        self._deliver(version)
        return time.perf_counter() - started

    def _deliver(self, version: int) -> None:
        receivers = self._sink.receivers
        missed = self._transfer(receivers, version)
        if missed:
            self.num_fallbacks += 1
            name, reason = next(iter(missed.items()))
            logger.warning(
                "version %d goes to %d of %d env runners through the object store: %s: %s",
                *(version, len(missed), len(receivers), name, reason),
            )
            self._sink.update_weights(self._source.weights_ref(), version, list(missed))

    def _fetch(self) -> Any:
        """Of the version published last, for a runner that comes back."""
        return self._source.weights_ref()

    def _sending_rank(self, receiver: Receiver) -> int:
        """Of the learners, who sends to this runner."""
        return receiver.index if self._backend == "ipc" else 0

    def _transfer(self, receivers: list[Receiver], version: int) -> dict[str, str]:
        """Return who has not got it, and why."""
        names = [receiver.name for receiver in receivers]
        if not receivers:
            return {}
        if [*names, self._sender_name] != self._members:
            reason = self._form_group(receivers)
            if reason:
                self._dissolve_group()
                return dict.fromkeys(names, reason)
            self._members = [*names, self._sender_name]
        calls = {receiver.handle.receive_weights.remote(version): receiver for receiver in receivers}
        reasons = self._source.foreach_learner(weight_sender.send)
        missed = self._wait(calls)
        reason_of = {receiver.name: reasons[self._sending_rank(receiver)] for receiver in receivers}
        if missed or any(reason_of.values()):
            self._dissolve_group()
        return {name: reason_of[name] or why for name, why in missed.items()}

    @property
    def _sender_name(self) -> str:
        return f"learners, life {1 + self._source.num_restarts}, stage {self._source.num_builds}"

    def _form_group(self, receivers: list[Receiver]) -> str:
        """Have the sending learners and every worker join new groups; return what went wrong."""
        import ray

        self.num_groups += 1
        try:
            num_ranks = ray.get([r.handle.num_weight_ranks.remote() for r in receivers], timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            return _reason(error)
        first_ranks: list[int] = []
        world_sizes: dict[int, int] = {}  # by sending rank
        for receiver, count in zip(receivers, num_ranks, strict=True):
            sending_rank = self._sending_rank(receiver)
            first_ranks.append(world_sizes.setdefault(sending_rank, 1))
            world_sizes[sending_rank] += count
        listening = partial(weight_sender.listen, world_sizes, self._backend, self._bucket_bytes, self._timeout_s)
        invitations = self._source.foreach_learner(listening)
        for invitation in invitations:
            if isinstance(invitation, str):
                return invitation
        calls = {
            receiver.handle.join_weight_group.remote(invitations[self._sending_rank(receiver)], first_rank): receiver
            for receiver, first_rank in zip(receivers, first_ranks, strict=True)
        }
        reasons = self._source.foreach_learner(weight_sender.join)
        missed = self._wait(calls)
        wrong = [reasons[rank] for rank in world_sizes if reasons[rank]]
        return next(iter([*wrong, *(f"{name}: {why}" for name, why in missed.items())]), "")

    def _dissolve_group(self) -> None:
        self._members = []
        self._source.foreach_learner(weight_sender.leave)

    def _wait(self, calls: dict[Any, Receiver]) -> dict[str, str]:
        """Return which calls failed, and why. A runner that does not answer hangs; it is ended, and Ray restarts it."""
        import ray

        done, hanging = ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s)
        failed = {}
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                failed[calls[call].name] = _reason(error)
        for call in hanging:
            failed[calls[call].name] = f"no answer in {self._timeout_s:g} s"
            ray.kill(calls[call].handle, no_restart=False)
        return failed


class ColocatedTransport(DirectTransport):
    """By ipc, between learners and engines that take turns on their devices, drawn at the head of this file."""

    shares_devices = True

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        *,
        bucket_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Between these two. The runners are awake, with version 0."""
        super().__init__(source, sink, "ipc", bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._has_room = False
        self._version = 0
        sink.expect(0, self._fetch)

    def make_room(self) -> None:
        """See ``Transport.make_room``."""
        if not self._has_room:
            self._sink.sleep()
            self._has_room = True

    @contextmanager
    def room(self) -> Iterator[None]:
        """See ``Transport.room``. What slept before goes on sleeping: who put it to sleep will publish."""
        if self._has_room:
            yield
            return
        self.make_room()
        yield
        self._deliver(self._version)  # the engines have dropped it

    def publish(self, version: int) -> float:
        """See ``Transport.publish``."""
        self.make_room()
        self._version = version
        return super().publish(version)

    def _deliver(self, version: int) -> None:
        self._sink.wake_up("weights")
        super()._deliver(version)
        self._source.offload_states()
        self._sink.wake_up("kv_cache")
        self._has_room = False

    def _fetch(self) -> Any:
        """See ``DirectTransport._fetch``. It comes while the engines work: they make room for the learners again."""
        with self.room():
            return self._source.weights_ref()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
