"""One sender and many receivers of weights: a process group of its own, and the bytes that go through it.

::

    rank 0, the learner                                  ranks 1 ..., every worker of every engine
    parameter, parameter ... ──► bucket ──broadcast──► bucket ──► parameter, parameter ...
                                  two, of ``bucket_bytes`` each, on either side

Names, shapes and dtypes are said once, in the ``Invitation``; from then on only bytes travel, in that order. A receiver
holds its two buckets and the parameter that is not whole yet, and no more.

The group is made over a ``TCPStore`` of rank 0's, beside ``torch.distributed``'s default groups, which DeepSpeed and
vLLM have for themselves. Its backend is ``nccl`` where both sides have GPUs and ``gloo`` elsewhere; nothing else
differs. Why not vLLM's own transfer over NCCL (``vllm.distributed.weight_transfer``, of vLLM 0.32): its communicator
has no timeout, so that the death of a worker leaves the learner in a broadcast for ever; the learner would have to
import vLLM; it has no CPU backend, so that nothing of it could be tested without GPUs; and it serves no other engine.

**Only gloo has been run.** What is special to NCCL: joining happens in a thread that is left behind when it does not
come to an end, since NCCL makes its communicator in a call that no timeout reaches; and NCCL's own watchdog, which ends
the process, is told to wait far longer than the deadline here.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore, Work

from ragr1_actors.errors import TransferError

BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
"""For all to join, and for one bucket to get through."""
NO_GROUP = "the engine is in no weight group: its runner is new, or the group did not come about"
_POLL_S = 0.0005
_WATCHDOG_FACTOR = 60

Backend = Literal["nccl", "gloo"]
Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter: ``WeightSpec("model.norm.weight", (3584,), "bfloat16")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the tensor."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype), self
        return dtype

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a rank must know to join, and to make parameters of the bytes."""

    host: str
    port: int
    """Of rank 0's ``TCPStore``."""
    world_size: int
    layout: tuple[WeightSpec, ...]
    """In the order of sending."""
    tied: bool
    """Whether ``lm_head.weight`` is ``model.embed_tokens.weight``: it is sent once, and received under both names."""
    backend: Backend = "gloo"
    bucket_bytes: int = BUCKET_BYTES
    timeout_s: float = TIMEOUT_S
    base: str = ""
    """Where what is sent are adapters: what they are merged into, an ``AdapterBase`` as JSON."""

    def to_json(self) -> str:
        """For vLLM, whose calls carry no classes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read ``to_json``."""
        fields = json.loads(text)
        layout = (WeightSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in fields.pop("layout"))
        return cls(layout=tuple(layout), **fields)

    @property
    def bucket_sizes(self) -> list[int]:  # [num_buckets]
        """Bytes of each bucket; all but the last are full."""
        num_bytes = sum(spec.num_bytes for spec in self.layout)
        return [min(self.bucket_bytes, num_bytes - start) for start in range(0, num_bytes, self.bucket_bytes)]


class WeightGroup:
    """A rank's place in the group."""

    def __init__(self, invitation: Invitation, rank: int, device: torch.device, store: Store | None = None) -> None:
        """Join; return once every rank has.

        Args:
            invitation: the same for every rank.
            rank: 0 sends.
            device: of the weights; with ``gloo``, buckets are on the CPU wherever those are.
            store: the ``TCPStore`` that rank 0 listens with.

        Raises:
            TransferError: some rank did not come in ``timeout_s``.
        """
        self.invitation = invitation
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._buckets_on = device if invitation.backend == "nccl" else torch.device("cpu")
        self._group: Any = _bounded(lambda: self._join(rank, store), invitation.timeout_s)
        self._inbox: _Inbox | None = None

    def _join(self, rank: int, store: Store | None) -> Any:
        invitation = self.invitation
        timeout = timedelta(seconds=invitation.timeout_s)
        if self._buckets_on.type == "cuda":
            torch.cuda.set_device(self._buckets_on)
        if store is None:
            store = TCPStore(invitation.host, invitation.port, is_master=False, timeout=timeout)
        group = _process_group(invitation, rank, store)
        group.broadcast(torch.zeros(1, device=self._buckets_on), 0).wait()  # NCCL connects only now
        return group

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the parameters, in the order of the layout. ``weights`` is iterated to its end whatever happens.

        The iteration may be one that other processes go through in step, which a rank that left it would hold up.

        Raises:
            TransferError: a bucket did not get through, or the parameters are not those of the layout.
        """
        outbox = _Outbox(self)
        expected = iter(self.invitation.layout)
        failure = ""  # the error itself would hold on to the buckets, and they to the connections
        for name, tensor in weights:
            if failure:
                continue
            spec = next(expected, None)
            found = WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            try:
                if spec != found:
                    raise TransferError(f"got the parameter {found}, expected {spec}")
                outbox.put(tensor.contiguous().view(-1).view(torch.uint8))
            except TransferError as error:
                failure = str(error)
        if failure:
            raise TransferError(failure)
        if (missing := next(expected, None)) is not None:
            raise TransferError(f"got no parameter {missing.name}, which was announced")
        outbox.finish()

    def begin(self) -> None:
        """Begin to receive: buckets arrive from now on, whether or not ``take`` is called."""
        self._inbox = _Inbox(self)

    def take(self) -> Weights:
        """Return the parameters that the next bucket completes, or nothing where it is not there yet. Does not wait.

        Raises:
            TransferError: the bucket is overdue, or the connection is gone.
        """
        assert self._inbox is not None, "take() before begin()"
        return self._with_tied(self._inbox.take())

    @property
    def is_complete(self) -> bool:
        """Whether everything has been taken."""
        return self._inbox is not None and self._inbox.is_complete

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, waiting for them; see ``take``."""
        self.begin()
        while not self.is_complete:
            arrived = self.take()
            yield from arrived
            if not arrived:
                time.sleep(_POLL_S)

    def _with_tied(self, weights: Weights) -> Weights:
        tied = [tensor for name, tensor in weights if name == "model.embed_tokens.weight" and self.invitation.tied]
        return weights + [("lm_head.weight", tensor) for tensor in tied]

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears of it, at the latest when its deadline is over."""
        self._inbox = None
        self._group.abort()
        self._group = None

    # -- for the two boxes -----------------------------------------------------------------------------------------

    def buckets(self) -> list[torch.Tensor]:
        """Two new buckets."""
        size = max(self.invitation.bucket_sizes, default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self._buckets_on) for _ in range(2)]

    def broadcast(self, bucket: torch.Tensor) -> Work:
        """Start to send or receive a bucket."""
        try:
            work: Work = self._group.broadcast(bucket, 0)
        except RuntimeError as error:
            raise TransferError(f"a bucket of weights was not sent: {_reason(error)}") from error
        return work

    def empty(self, spec: WeightSpec) -> torch.Tensor:
        """A parameter to be filled, where the weights are."""
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=self._device)


class _Pending:
    """A bucket under way."""

    def __init__(self, group: WeightGroup, bucket: torch.Tensor) -> None:
        self.bucket = bucket
        self._work = group.broadcast(bucket)
        self._timeout_s = group.invitation.timeout_s
        self._deadline = time.monotonic() + self._timeout_s

    def is_done(self) -> bool:
        if not self._work.is_completed():
            if time.monotonic() > self._deadline:
                raise TransferError(f"a bucket of weights did not get through in {self._timeout_s:g} s")
            return False
        try:
            self._work.wait()  # at once; on a GPU, what follows is computed after the transfer
        except RuntimeError as error:
            raise TransferError(f"a bucket of weights was lost: {_reason(error)}") from error
        return True

    def wait(self) -> None:
        while not self.is_done():
            time.sleep(_POLL_S)


class _Outbox:
    """Fills one bucket while the other is under way."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._free, self._filling = group.buckets()
        self._num_filled = 0
        self._pending: _Pending | None = None

    def put(self, data: torch.Tensor) -> None:
        """Append bytes, a flat ``uint8`` tensor."""
        while len(data):
            piece = data[: len(self._filling) - self._num_filled]
            self._filling[self._num_filled : self._num_filled + len(piece)].copy_(piece)
            self._num_filled += len(piece)
            data = data[len(piece) :]
            if self._num_filled == len(self._filling):
                self._flush()

    def _flush(self) -> None:
        self._wait()
        self._pending = _Pending(self._group, self._filling[: self._num_filled])
        self._free, self._filling = self._filling, self._free
        self._num_filled = 0

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def finish(self) -> None:
        """Send what is left, and wait for it."""
        if self._num_filled:
            self._flush()
        self._wait()


class _Inbox:
    """Empties one bucket while the other is under way."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._sizes = group.invitation.bucket_sizes
        self._specs = iter(group.invitation.layout)
        self._num_started = 0
        self._pending: list[_Pending] = []
        self._parameter: tuple[WeightSpec, torch.Tensor, int] | None = (
            None  # the one that is not whole, its bytes so far
        )
        for bucket in group.buckets():
            self._start(bucket)

    @property
    def is_complete(self) -> bool:
        return not self._pending

    def _start(self, bucket: torch.Tensor) -> None:
        if self._num_started < len(self._sizes):
            self._pending.append(_Pending(self._group, bucket[: self._sizes[self._num_started]]))
            self._num_started += 1

    def take(self) -> Weights:
        if not self._pending or not self._pending[0].is_done():
            return []
        bucket = self._pending.pop(0).bucket
        weights = list(self._cut(bucket))
        self._start(bucket)
        return weights

    def _cut(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that end in these bytes."""
        while True:
            if self._parameter is None:
                spec = next(self._specs, None) if len(data) else None
                if spec is None:
                    return
                self._parameter = (spec, self._group.empty(spec), 0)
            spec, tensor, start = self._parameter
            piece = data[: spec.num_bytes - start]
            tensor.view(-1).view(torch.uint8)[start : start + len(piece)].copy_(piece)
            data = data[len(piece) :]
            if start + len(piece) < spec.num_bytes:
                self._parameter = (spec, tensor, start + len(piece))
                return
            self._parameter = None
            yield spec.name, tensor


def listen(host: str) -> TCPStore:
    """Open the store that the ranks meet at, on a free port of this node, whose address is ``host``."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def _process_group(invitation: Invitation, rank: int, store: Store) -> Any:
    group = dist.ProcessGroup(store, rank, invitation.world_size)
    kind = dist.ProcessGroup.BackendType
    options: Any
    if invitation.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=invitation.timeout_s * _WATCHDOG_FACTOR)
        backend: Any = dist.ProcessGroupNCCL(store, rank, invitation.world_size, options)
        device, name = torch.device("cuda"), kind.NCCL
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=invitation.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(invitation))]
        backend = dist.ProcessGroupGloo(store, rank, invitation.world_size, options)
        device, name = torch.device("cpu"), kind.GLOO
    group._set_default_backend(name)
    backend._set_sequence_number_for_group()
    group._register_backend(device, name, backend)
    return group


def _own_address(invitation: Invitation) -> str:
    """This node's address on the way to rank 0: the name that a container has for itself may lead nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((invitation.host, invitation.port))  # sends nothing
        return str(probe.getsockname()[0])


def _bounded(work: Callable[[], Any], timeout_s: float) -> Any:
    """Return what ``work`` returns, or give it up: a thread cannot be ended, but it can be left behind."""
    results: list[Any] = []
    reasons: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:  # torch's own are of this class
            reasons.append(_reason(error))

    thread = threading.Thread(target=run, name="join weight group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if reasons:
        raise TransferError(f"no weight group: {reasons[0]}")
    if not results:
        raise TransferError(f"no weight group in {timeout_s:g} s; some rank did not join")
    return results[0]


def _reason(error: Exception) -> str:
    """The first sentence of torch's long ones."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
