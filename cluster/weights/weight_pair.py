"""A weight pair: one sender and one receiver on one device, who have the same two buckets open.

::

    learner rank i                                             the worker of runner i's engine
    parameter, parameter ... ──► bucket ═══ one memory ═══ bucket ──► parameter, parameter ...
                                   │                          ▲
                                   └── a byte: it is full ────┤
                                   ▲                          │    a socket: whoever dies, the other hears of it at once
                                   └── a byte: it is empty ───┘

A bucket is memory that both processes open: on a GPU by torch's CUDA IPC handle, on a CPU as a file in shared memory,
which has no name any more once both have it. Nothing else differs. Handles are numbers and bytes, which are in the
``Invitation``: torch's own way of sending them would unpickle them; and its sharing strategy ``file_system`` keeps a
process beside the sender, without which a receiver that lets go is ended by torch. The folder of socket and files is
closed to other users.

A byte is sent when what was computed before is done, on a GPU too, so that neither side needs the other's streams.

**Only the shared memory of CPUs has been run, never CUDA IPC.**
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from cluster.weights.weight_stream import Handle, Invitation, Pending, WeightStream, first_sentence
from ragr1_actors.core.errors import TransferError

_BYTE = b"\1"
_SHARED_MEMORY = Path("/dev/shm")


class PairListener:
    """What the sender opens before the receiver is invited: two buckets, and the socket that both meet at."""

    def __init__(self, invitation: Invitation, device: torch.device) -> None:
        """Open them.

        Args:
            invitation: without what is known only now, ``address`` and ``handles``.
            device: of the weights, and so of the buckets.

        Raises:
            TransferError: this device's memory cannot be shared.
        """
        size = max(invitation.bucket_sizes, default=1)
        # a socket's path may have 107 characters
        folder = tempfile.mkdtemp(prefix="ragr1-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else "/tmp")
        self._folder = Path(folder)
        self.device = device
        try:
            shared = [_share(size, device, self._folder / f"bucket_{index}") for index in range(2)]
        except RuntimeError as error:
            shutil.rmtree(folder)
            raise TransferError(f"the memory of {device} cannot be shared: {first_sentence(error)}") from error
        self.buckets = [_bytes_of(storage) for storage, _ in shared]
        handles = tuple(handle for _, handle in shared)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._folder / "weights"))
        self._socket.listen(1)
        self.invitation = replace(invitation, address=str(self._folder / "weights"), handles=handles)

    def accept(self) -> socket.socket:
        """Return the connection to the receiver, once it has the buckets open.

        Raises:
            TransferError: it did not come within the deadline, or could not open them.
        """
        timeout_s = self.invitation.timeout_s
        self._socket.settimeout(timeout_s)
        connection = None
        try:
            connection, _ = self._socket.accept()
            connection.settimeout(timeout_s)
            if connection.recv(1):
                return connection
            reason = "the runner could not open the learner's buckets"
        except TimeoutError:
            reason = f"the runner did not join in {timeout_s:g} s"
        except OSError as error:
            reason = str(error)
        if connection is not None:
            connection.close()
        raise TransferError(f"no weight pair: {reason}")

    def close(self) -> None:
        """Nobody is waited for any more."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class WeightPair(WeightStream):
    """A rank's place in the pair."""

    def __init__(
        self,
        invitation: Invitation,
        device: torch.device,
        buckets: list[torch.Tensor],
        connection: socket.socket,
        *,
        receives: bool,
    ) -> None:
        """Over what ``sender`` or ``receiver`` has opened."""
        super().__init__(invitation, device)
        self._buckets = buckets
        self._connection = connection
        self._connection.setblocking(False)
        self._receives = receives

    @classmethod
    def sender(cls, listener: PairListener) -> Self:
        """Wait for the receiver.

        Raises:
            TransferError: see ``PairListener.accept``.
        """
        try:
            return cls(listener.invitation, listener.device, listener.buckets, listener.accept(), receives=False)
        finally:
            listener.close()

    @classmethod
    def receiver(cls, invitation: Invitation, device: torch.device) -> Self:
        """Open the sender's buckets.

        Raises:
            TransferError: the sender is gone or on another machine, or its memory cannot be opened.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(invitation.timeout_s)
        try:
            connection.connect(invitation.address)
            buckets = [_bytes_of(_open(handle, device)) for handle in invitation.handles]
            connection.sendall(_BYTE)
        except (OSError, RuntimeError) as error:
            connection.close()
            raise TransferError(f"no weight pair: {first_sentence(error)}") from error
        return cls(invitation, device, buckets, connection, receives=True)

    def close(self) -> None:
        """See ``WeightStream.close``."""
        super().close()
        self._connection.close()
        self._buckets = []
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # of the buckets, what the other side has closed as well

    def buckets(self) -> list[torch.Tensor]:
        """Those that both sides have open."""
        return self._buckets

    def transfer(self, bucket: torch.Tensor) -> Pending:
        """Say that it is full; the receiver waits to be told."""
        if not self._receives:
            self._tell()
        return _Answer(self._connection, bucket, self.invitation.timeout_s)

    def release(self) -> None:
        """Say that it is empty."""
        self._tell()

    def _tell(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        try:
            self._connection.sendall(_BYTE)
        except OSError as error:
            raise TransferError(f"a bucket of weights was lost: {error}") from error


class _Answer(Pending):
    """The other side's byte."""

    def __init__(self, connection: socket.socket, bucket: torch.Tensor, timeout_s: float) -> None:
        super().__init__(bucket, timeout_s)
        self._connection = connection

    def is_through(self) -> bool:
        try:
            answer = self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransferError(f"a bucket of weights was lost: {error}") from error
        if not answer:
            raise TransferError("a bucket of weights was lost: the other side is gone")
        return True


# -- memory that another process may open ------------------------------------------------------------------------------


def _share(num_bytes: int, device: torch.device, file: Path) -> tuple[torch.UntypedStorage, Handle]:
    """Return memory and a handle for one receiver; on a GPU, torch keeps the memory until that has let go."""
    storage: Any
    fields: tuple[Any, ...]
    if device.type == "cpu":
        storage = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=num_bytes)
        fields = (str(file).encode(), num_bytes)
    else:
        storage = torch.UntypedStorage(num_bytes, device=device)
        fields = storage._share_cuda_()
    return storage, tuple(field.hex() if isinstance(field, bytes) else field for field in fields)


def _open(handle: Handle, device: torch.device) -> torch.UntypedStorage:
    fields: list[Any] = [bytes.fromhex(field) if isinstance(field, str) else field for field in handle]
    storage_class: Any = torch.UntypedStorage
    opened: torch.UntypedStorage
    if device.type == "cpu":
        file, num_bytes = fields
        opened = storage_class.from_file(file.decode(), shared=True, nbytes=num_bytes)
        return opened
    fields[0] = torch.cuda.current_device() if device.index is None else device.index  # it may be another here
    torch.cuda.init()
    opened = storage_class._new_shared_cuda(*fields)
    return opened


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
