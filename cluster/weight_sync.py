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
============== ============================================ ======================================= ==================

A broadcast, where the driver only gives the word::

    all are the same as last time? ──no──► all join a new group: rank 0 the learner, then the workers of each runner
       │ yes
       ▼
    receive_weights of every runner; send of every learner rank (which gather together; rank 0 sends)
       │
       └► a runner died, hangs, or has not got all of it within the deadline: it gets this version through the object
          store, the group is dissolved, and all of that is counted and said
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ragr1_actors.config import RunConfig
from ragr1_actors.errors import ConfigError, TransferError

if TYPE_CHECKING:  # pulls in torch
    from cluster.weight_group import Backend, Invitation

T = TypeVar("T")

logger = logging.getLogger(__name__)

NEW_SENDER = "the learner started anew meanwhile, and is in no weight group yet"
RECEIVING_ENGINES = ("transformers", "vllm")
"""The project's own that take part in broadcasts."""


class SendingLearner(Protocol):
    """What sends, a ``Learner``."""

    rank: int
    device: Any
    dtype: Any

    @property
    def is_tied(self) -> bool:
        """Whether ``lm_head.weight`` is the embedding."""
        ...

    @property
    def adapter_base(self) -> str:
        """What the engines merge adapters into; see ``Invitation.base``."""
        ...

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order of ``stream_weights``."""
        ...

    def stream_weights(self) -> Iterator[tuple[str, Any]]:
        """Every parameter; all ranks iterate together."""
        ...


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
        """Call a function with the learner of every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Receiver:
    """A runner's actor in one of its lives: ``Receiver("env runner 3, life 1", handle)``."""

    name: str
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


class Transport(Protocol):
    """The one interface of all transports."""

    num_fallbacks: int
    """Versions that some runner got by another way than this one."""

    def publish(self, version: int) -> float:
        """Make ``version`` the policy that every runner samples with, and return the seconds it took."""
        ...


def make_transport(config: RunConfig, source: WeightSource, sink: WeightSink) -> Transport:
    """Make the transport that ``env_runners.weight_transport`` names; see ``choose_transport``."""
    if choose_transport(config) == "object_store":
        return ObjectStoreTransport(source, sink)
    has_gpus = config.env_runners.num_gpus_per_env_runner > 0 and config.learners.num_gpus_per_learner > 0
    return BroadcastTransport(source, sink, "nccl" if has_gpus else "gloo")


def choose_transport(config: RunConfig) -> str:
    """Return what the recipe names; ``auto`` is ``broadcast`` where both sides have whole GPUs, else ``object_store``.

    The broadcast has been run with ``gloo`` on CPUs only, never over NCCL: where it fails, it says so and takes the
    object store. CUDA IPC, for learner and engine on one GPU, is not there, as nothing of it runs without a GPU; with
    fractions of a GPU, ``auto`` is ``object_store``.

    Raises:
        ConfigError: ``broadcast``, and the runners are in the driver.
    """
    runners, learners = config.env_runners, config.learners
    if runners.weight_transport == "broadcast" and not runners.num_env_runners:
        raise ConfigError(
            "got env_runners.weight_transport broadcast and num_env_runners 0; weights are handed over within the "
            "driver: set it to auto"
        )
    if runners.weight_transport != "auto":
        return runners.weight_transport
    are_actors = runners.num_env_runners > 0 and learners.num_learners > 0
    have_gpus = runners.num_gpus_per_env_runner >= 1 and learners.num_gpus_per_learner >= 1
    return "broadcast" if are_actors and have_gpus and runners.engine in RECEIVING_ENGINES else "object_store"


class ObjectStoreTransport:
    """By reference through the object store: the weights never pass through the driver."""

    num_fallbacks = 0

    def __init__(self, source: WeightSource, sink: WeightSink) -> None:
        """Between these two."""
        self._source = source
        self._sink = sink

    def publish(self, version: int) -> float:
        """See ``Transport.publish``."""
        started = time.perf_counter()
        self._sink.update_weights(self._source.weights_ref(), version)
        return time.perf_counter() - started


class BroadcastTransport:
    """By one broadcast to all runners that are there, drawn at the head of this file."""

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        backend: Backend,
        *,
        bucket_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Between these two; by default with ``weight_group``'s ``BUCKET_BYTES`` and ``TIMEOUT_S``."""
        from cluster import weight_group

        self._source = source
        self._sink = sink
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes or weight_group.BUCKET_BYTES
        self._timeout_s = timeout_s or weight_group.TIMEOUT_S
        self._members: list[str] = []
        self.num_fallbacks = 0
        self.num_groups = 0
        """Times a group was formed."""

    def publish(self, version: int) -> float:
        """See ``Transport.publish``."""
        started = time.perf_counter()
        self._sink.expect(version, self._source.weights_ref)
        receivers = self._sink.receivers
        missed = self._broadcast(receivers, version)
        if missed:
            self.num_fallbacks += 1
            name, reason = next(iter(missed.items()))
            logger.warning(
                "version %d goes to %d of %d env runners through the object store: %s: %s",
                *(version, len(missed), len(receivers), name, reason),
            )
            self._sink.update_weights(self._source.weights_ref(), version, list(missed))
        return time.perf_counter() - started

    def _broadcast(self, receivers: list[Receiver], version: int) -> dict[str, str]:
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
        reason = self._source.foreach_learner(_send)[0]
        missed = self._wait(calls)
        if missed or reason:
            self._dissolve_group()
        return {name: reason or why for name, why in missed.items()}

    @property
    def _sender_name(self) -> str:
        return f"learners, life {1 + self._source.num_restarts}, stage {self._source.num_builds}"

    def _form_group(self, receivers: list[Receiver]) -> str:
        """Have the learner and every worker join a new group; return what went wrong."""
        import ray

        self.num_groups += 1
        try:
            num_ranks = ray.get([r.handle.num_weight_ranks.remote() for r in receivers], timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            return _reason(error)
        listening = partial(_listen, 1 + sum(num_ranks), self._backend, self._bucket_bytes, self._timeout_s)
        invitation = self._source.foreach_learner(listening)[0]
        first_ranks = [1 + sum(num_ranks[:index]) for index in range(len(receivers))]
        calls = {
            receiver.handle.join_weight_group.remote(invitation, rank): receiver
            for receiver, rank in zip(receivers, first_ranks, strict=True)
        }
        reason = self._source.foreach_learner(_join)[0]
        missed = self._wait(calls)
        return reason or next((f"{name}: {why}" for name, why in missed.items()), "")

    def _dissolve_group(self) -> None:
        self._members = []
        self._source.foreach_learner(_leave)

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


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# -- what runs in the learners' processes, called with the learner of each ---------------------------------------------


class _Sender:
    """Rank 0's place in the group, kept from one version to the next."""

    store: Any = None
    invitation: Invitation | None = None
    group: Any = None

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self.store = self.invitation = None


_sender = _Sender()


def _listen(
    world_size: int, backend: Backend, bucket_bytes: int, timeout_s: float, learner: SendingLearner
) -> Invitation | None:
    """On rank 0: open a store for a new group, and return the invitation to it."""
    if learner.rank:
        return None
    import ray

    from cluster.weight_group import Invitation, WeightSpec, listen

    _sender.leave()
    host = ray.util.get_node_ip_address()
    _sender.store = listen(host)
    dtype = str(learner.dtype).removeprefix("torch.")
    _sender.invitation = Invitation(
        host,
        _sender.store.port,
        world_size,
        tuple(WeightSpec(name, shape, dtype) for name, shape in learner.weight_shapes().items()),
        learner.is_tied,
        backend,
        bucket_bytes,
        timeout_s,
        learner.adapter_base,
    )
    return _sender.invitation


def _join(learner: SendingLearner) -> str:
    """On rank 0: join, when all others are about to; return what went wrong."""
    if learner.rank:
        return ""
    from cluster.weight_group import WeightGroup

    if _sender.invitation is None:
        return NEW_SENDER
    try:
        _sender.group = WeightGroup(_sender.invitation, 0, learner.device, _sender.store)
    except TransferError as error:
        return str(error)
    return ""


def _send(learner: SendingLearner) -> str:
    """On every rank, as they gather the parameters together; rank 0 sends, and returns what went wrong."""
    if learner.rank:
        for _ in learner.stream_weights():
            pass
        return ""
    if _sender.group is None:
        for _ in learner.stream_weights():  # the other ranks gather
            pass
        return NEW_SENDER
    try:
        _sender.group.send(learner.stream_weights())
    except TransferError as error:
        _sender.leave()  # at once: the receivers need not wait for their own deadline
        return str(error)
    return ""


def _leave(learner: SendingLearner) -> None:
    """On rank 0: let go of the group."""
    if not learner.rank:
        _sender.leave()
