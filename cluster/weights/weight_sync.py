"""Publishing a policy version: from the learners into the engine of every env runner, by one of three transports.

object store   Learner rank 0 puts all weights into Ray's object store, and the runners read them. Fits everywhere.
broadcast      The learner ranks send them to engines on other GPUs, by vLLM's ``nccl`` (``weight_sender``).
ipc            Learner rank i sends them to runner i, which takes turns with it on one GPU, by vLLM's ``ipc``.

Without GPUs, with the transformers engine and with adapters, broadcast and ipc send chunks through the object store in
the same handshake (``choose_backend``). A runner that dies or hangs, or whose engine refuses a part, gets this version
as a whole through the object store, and is counted. With ipc, who has the device::

    sampling      engines: weights, cache                          learners' states are in the hosts' memory
    make_room     engines sleep: weights and cache are dropped
    update, save                                                   what needs a state brings it back to the device
    publish       engines wake: weights ◄────── the transfer ───── learners, then offload_states
                  engines wake: cache; requests go on
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from cluster.weights.weight_sender import Delivery, Receiver, send
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.weight_transport import TransportName, WakeTag, choose_backend, choose_transport

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """What publishes, a ``LearnerGroup``; its methods are described there."""

    def weights_ref(self) -> Any: ...  # noqa: D102
    def foreach_learner(self, function: Callable[[Any], T]) -> list[T]: ...  # noqa: D102
    def offload_states(self) -> int: ...  # noqa: D102


class WeightSink(Protocol):
    """What takes the weights over, an ``EnvRunnerGroup``; its methods are described there."""

    @property
    def receivers(self) -> list[Receiver]: ...  # noqa: D102
    def expect(self, version: int, fetch: Callable[[], Any]) -> None: ...  # noqa: D102
    def update_weights(self, weights: Any, version: int, receivers: list[str] | None = None) -> None: ...  # noqa: D102
    def sleep(self) -> None: ...  # noqa: D102
    def wake_up(self, tag: WakeTag) -> None: ...  # noqa: D102


def make_weight_sync(config: RunConfig, source: Publisher, sink: WeightSink) -> WeightSync:
    """Make the one that ``env_runners.weight_transport`` names; see ``choose_transport``."""
    options = config.env_runners.engine_options
    num_workers = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
    return WeightSync(source, sink, choose_transport(config), backend=choose_backend(config), num_workers=num_workers)


class WeightSync:
    """Publishes from learners to env runners."""

    def __init__(self, source: Publisher, sink: WeightSink, transport: TransportName, **delivery: Any) -> None:
        """Publish from learners to env runners; with ``ipc``, the runners are awake and have version 0.

        ``delivery`` has the fields of ``Delivery`` other than version and receivers.
        """
        self.num_fallbacks = 0
        """Versions that some runner got through the object store instead."""
        self.shares_devices = transport == "ipc"
        """Whether learners and runners take turns on the same devices."""
        self._source = source
        self._sink = sink
        self._is_direct = transport != "object_store"
        self._delivery = delivery
        self._has_room = False
        self._version = 0
        if self.shares_devices:
            sink.expect(0, self._fetch)

    def publish(self, version: int) -> float:
        """Make ``version`` the policy that every runner samples with, and return the seconds it took."""
        started = time.perf_counter()
        if self._is_direct:
            self.make_room()
            self._version = version
            self._sink.expect(version, self._fetch)
            self._deliver(version)
        else:
            self._sink.update_weights(self._source.weights_ref(), version)
        return time.perf_counter() - started

    def make_room(self) -> None:
        """Have the runners leave the devices that they share with learners, until ``publish``."""
        if self.shares_devices and not self._has_room:
            self._sink.sleep()
            self._has_room = True

    @contextmanager
    def room(self) -> Iterator[None]:
        """``make_room`` for a while: at the end the runners go on with the version published last.

        Runners that slept before go on sleeping, until ``publish`` wakes them.
        """
        if not self.shares_devices or self._has_room:
            yield
            return
        self.make_room()
        yield
        self._deliver(self._version)  # the engines have dropped it

    def _deliver(self, version: int) -> None:
        if self.shares_devices:
            self._sink.wake_up("weights")
        self._send(version)
        if self.shares_devices:
            self._source.offload_states()
            self._sink.wake_up("kv_cache")
            self._has_room = False

    def _send(self, version: int) -> None:
        receivers = tuple(self._sink.receivers)
        if not receivers:
            return
        missed, *_ = self._source.foreach_learner(partial(send, Delivery(version, receivers, **self._delivery)))
        if missed:
            self.num_fallbacks += 1
            name, reason = next(iter(missed.items()))
            logger.warning(
                "version %d goes to %d of %d env runners through the object store: %s: %s",
                *(version, len(missed), len(receivers), name, reason),
            )
            self._sink.update_weights(self._source.weights_ref(), version, list(missed))

    def _fetch(self) -> Any:
        """Return the version published last, for a runner that comes back while the others work."""
        with self.room():
            return self._source.weights_ref()
