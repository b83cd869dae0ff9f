"""A weight group: one sender and many receivers, as a process group of its own. It broadcasts the buckets.

The group is made over a ``TCPStore`` of rank 0's, beside ``torch.distributed``'s default groups, which DeepSpeed and
vLLM have for themselves. Its backend is ``nccl`` where both sides have GPUs and ``gloo`` elsewhere; nothing else
differs. Rank 0 is the learner, ranks 1 ... are all the workers of all the engines.

Why not vLLM's own transfer over NCCL (``vllm.distributed.weight_transfer``, of vLLM 0.32): its communicator
has no timeout, so that the death of a worker leaves the learner in a broadcast for ever; the learner would have to
import vLLM; it has no CPU backend, so that nothing of it could be tested without GPUs; and it serves no other engine.

**Only gloo has been run.** What is special to NCCL: joining happens in a thread that is left behind when it does not
come to an end, since NCCL makes its communicator in a call that no timeout reaches; and NCCL's own watchdog, which ends
the process, is told to wait far longer than the deadline here.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore, Work

from cluster.weights.weight_stream import TIMEOUT_S, Invitation, Pending, WeightStream, first_sentence
from ragr1_actors.core.errors import TransferError

_WATCHDOG_FACTOR = 60


class WeightGroup(WeightStream):
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
        super().__init__(invitation, device)
        self._buckets_on = self._device if invitation.backend == "nccl" else torch.device("cpu")
        self._group: Any = _bounded(lambda: self._join(rank, store), invitation.timeout_s)

    def _join(self, rank: int, store: Store | None) -> Any:
        invitation = self.invitation
        timeout = timedelta(seconds=invitation.timeout_s)
        if self._buckets_on.type == "cuda":
            torch.cuda.set_device(self._buckets_on)
        if store is None:
            store = TCPStore(invitation.address, invitation.port, is_master=False, timeout=timeout)
        group = _process_group(invitation, rank, store)
        group.broadcast(torch.zeros(1, device=self._buckets_on), 0).wait()  # NCCL connects only now
        return group

    def close(self) -> None:
        """See ``WeightStream.close``."""
        super().close()
        self._group.abort()
        self._group = None

    def buckets(self) -> list[torch.Tensor]:
        """Two new ones."""
        size = max(self.invitation.bucket_sizes, default=0)
        return [torch.empty(size, dtype=torch.uint8, device=self._buckets_on) for _ in range(2)]

    def transfer(self, bucket: torch.Tensor) -> Pending:
        """Broadcast it."""
        try:
            work: Work = self._group.broadcast(bucket, 0)
        except RuntimeError as error:
            raise TransferError(f"a bucket of weights was not sent: {first_sentence(error)}") from error
        return _Broadcast(work, bucket, self.invitation.timeout_s)


class _Broadcast(Pending):
    def __init__(self, work: Work, bucket: torch.Tensor, timeout_s: float) -> None:
        super().__init__(bucket, timeout_s)
        self._work = work

    def is_through(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # at once; on a GPU, what follows is computed after the transfer
        except RuntimeError as error:
            raise TransferError(f"a bucket of weights was lost: {first_sentence(error)}") from error
        return True


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
        probe.connect((invitation.address, invitation.port))  # sends nothing
        return str(probe.getsockname()[0])


def _bounded(work: Callable[[], Any], timeout_s: float) -> Any:
    """Return what ``work`` returns, or give it up: a thread cannot be ended, but it can be left behind."""
    results: list[Any] = []
    reasons: list[str] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:  # torch's own are of this class
            reasons.append(first_sentence(error))

    thread = threading.Thread(target=run, name="join weight group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if reasons:
        raise TransferError(f"no weight group: {reasons[0]}")
    if not results:
        raise TransferError(f"no weight group in {timeout_s:g} s; some rank did not join")
    return results[0]
