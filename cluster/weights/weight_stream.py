"""A stream of weights: from one sender to its receivers, in buckets. What all ways of sending them have in common.

::

    sender                                               receivers
    parameter, parameter ... ──► bucket ──transfer──► bucket ──► parameter, parameter ...
                                  two, of ``bucket_bytes`` each, on either side

Names, shapes and dtypes are said once, in the ``Invitation``; from then on only bytes travel, in that order. A receiver
holds its two buckets and the parameter that is not whole yet, and no more.

``WeightGroup`` broadcasts the buckets, to any number of receivers; ``WeightPair`` has both sides open the same ones.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, Self

import torch

from ragr1_actors.core.errors import TransferError

BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
"""For all to join, and for one bucket to get through."""
NO_GROUP = "the engine is in no weight group: its runner is new, or the group did not come about"
_POLL_S = 0.0005

Backend = Literal["nccl", "gloo", "ipc"]
Weights = list[tuple[str, torch.Tensor]]
Handle = tuple[int | str, ...]
"""Of memory that another process may open: numbers, and bytes in hexadecimal."""


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

    address: str
    """Of the host where rank 0 has its ``TCPStore``; with ``ipc``, the path of rank 0's socket."""
    port: int
    """Of the ``TCPStore``; with ``ipc`` 0."""
    world_size: int
    layout: tuple[WeightSpec, ...]
    """In the order of sending."""
    tied: bool
    """Whether ``lm_head.weight`` is ``model.embed_tokens.weight``: it is sent once, and received under both names."""
    backend: Backend = "gloo"
    bucket_bytes: int = BUCKET_BYTES
    timeout_s: float = TIMEOUT_S
    handles: tuple[Handle, ...] = ()
    """Of rank 0's two buckets, with ``ipc``."""
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
        handles = (tuple(handle) for handle in fields.pop("handles"))
        return cls(layout=tuple(layout), handles=tuple(handles), **fields)

    @property
    def bucket_sizes(self) -> list[int]:  # [num_buckets]
        """Bytes of each bucket; all but the last are full."""
        num_bytes = sum(spec.num_bytes for spec in self.layout)
        return [min(self.bucket_bytes, num_bytes - start) for start in range(0, num_bytes, self.bucket_bytes)]


class Pending(ABC):
    """A bucket under way."""

    def __init__(self, bucket: torch.Tensor, timeout_s: float) -> None:
        """``bucket`` is to get through within ``timeout_s``."""
        self.bucket = bucket
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @abstractmethod
    def is_through(self) -> bool:
        """Whether it got through. Does not wait.

        Raises:
            TransferError: it is lost.
        """

    def is_done(self) -> bool:
        """``is_through``, and whether there is still time.

        Raises:
            TransferError: it is lost or overdue.
        """
        if self.is_through():
            return True
        if time.monotonic() > self._deadline:
            raise TransferError(f"a bucket of weights did not get through in {self._timeout_s:g} s")
        return False

    def wait(self) -> None:
        """Return once it is done."""
        while not self.is_done():
            time.sleep(_POLL_S)


class WeightStream(ABC):
    """A rank's place among the sender and its receivers. A subclass says how a bucket gets from one to the others."""

    def __init__(self, invitation: Invitation, device: torch.device) -> None:
        """Take part in what ``invitation`` describes, with weights on ``device``."""
        self.invitation = invitation
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._inbox: _Inbox | None = None

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

    def empty(self, spec: WeightSpec) -> torch.Tensor:
        """A parameter to be filled, where the weights are."""
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=self._device)

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears of it, at the latest when its deadline is over."""
        self._inbox = None

    # -- for the two boxes -----------------------------------------------------------------------------------------

    @abstractmethod
    def buckets(self) -> list[torch.Tensor]:
        """The two buckets of this side, flat and of bytes."""

    @abstractmethod
    def transfer(self, bucket: torch.Tensor) -> Pending:
        """Start to send what is in a bucket, or to receive into one."""

    def release(self) -> None:  # noqa: B027
        """What was received first is out of its bucket."""


class _Outbox:
    """Fills one bucket while the other is under way."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._filling, self._free = stream.buckets()  # the receivers begin with the first as well
        self._num_filled = 0
        self._pending: Pending | None = None

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
        self._pending = self._stream.transfer(self._filling[: self._num_filled])
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

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._sizes = stream.invitation.bucket_sizes
        self._specs = iter(stream.invitation.layout)
        self._num_started = 0
        self._pending: list[Pending] = []
        self._parameter: tuple[WeightSpec, torch.Tensor, int] | None = (
            None  # the one that is not whole, its bytes so far
        )
        for bucket in stream.buckets():
            self._start(bucket)

    @property
    def is_complete(self) -> bool:
        return not self._pending

    def _start(self, bucket: torch.Tensor) -> None:
        if self._num_started < len(self._sizes):
            self._pending.append(self._stream.transfer(bucket[: self._sizes[self._num_started]]))
            self._num_started += 1

    def take(self) -> Weights:
        if not self._pending or not self._pending[0].is_done():
            return []
        bucket = self._pending.pop(0).bucket
        weights = list(self._cut(bucket))
        self._stream.release()
        self._start(bucket)
        return weights

    def _cut(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that end in these bytes."""
        while True:
            if self._parameter is None:
                spec = next(self._specs, None) if len(data) else None
                if spec is None:
                    return
                self._parameter = (spec, self._stream.empty(spec), 0)
            spec, tensor, start = self._parameter
            piece = data[: spec.num_bytes - start]
            tensor.view(-1).view(torch.uint8)[start : start + len(piece)].copy_(piece)
            data = data[len(piece) :]
            if start + len(piece) < spec.num_bytes:
                self._parameter = (spec, tensor, start + len(piece))
                return
            self._parameter = None
            yield spec.name, tensor


def join(invitation: Invitation, rank: int, device: torch.device) -> WeightStream:
    """Join as the receiver ``rank``, with weights on ``device``; return once everybody has.

    Raises:
        TransferError: it did not come about within the deadline.
    """
    if invitation.backend == "ipc":
        from cluster.weights.weight_pair import WeightPair

        return WeightPair.receiver(invitation, device)
    from cluster.weights.weight_group import WeightGroup

    return WeightGroup(invitation, rank, device)


def first_sentence(error: Exception) -> str:
    """Of torch's long ones."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
