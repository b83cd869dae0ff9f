"""What runs in the learners' processes when weights are sent: functions that are called with the learner of each rank.

A rank that sends to nobody gathers the parameters with those that do: all ranks iterate together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ragr1_actors.core.errors import TransferError

if TYPE_CHECKING:  # pulls in torch
    from cluster.weights.weight_stream import Backend, Invitation

NEW_SENDER = "the learner started anew meanwhile, and is in no weight group yet"


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


class _Sender:
    """This rank's place in its weight group, kept from one version to the next."""

    listener: Any = None
    """A ``TCPStore`` or a ``PairListener``."""
    invitation: Invitation | None = None
    stream: Any = None

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
        elif self.invitation is not None and self.invitation.backend == "ipc":
            self.listener.close()
        self.stream = self.listener = self.invitation = None


_sender = _Sender()


def listen(
    world_sizes: Mapping[int, int], backend: Backend, bucket_bytes: int, timeout_s: float, learner: SendingLearner
) -> Invitation | str | None:
    """Begin a new weight group on the ranks that ``world_sizes`` names; return the invitation, or what went wrong."""
    _sender.leave()
    world_size = world_sizes.get(learner.rank)
    if world_size is None:
        return None
    import ray

    from cluster.weights import weight_group, weight_pair
    from cluster.weights.weight_stream import Invitation, WeightSpec

    dtype = str(learner.dtype).removeprefix("torch.")
    layout = tuple(WeightSpec(name, shape, dtype) for name, shape in learner.weight_shapes().items())
    host: str = ray.util.get_node_ip_address()
    invitation = Invitation(
        *(host, 0, world_size, layout, learner.is_tied, backend, bucket_bytes, timeout_s), base=learner.adapter_base
    )
    if backend == "ipc":
        try:
            _sender.listener = weight_pair.PairListener(invitation, learner.device)
        except TransferError as error:
            return str(error)
        _sender.invitation = _sender.listener.invitation
    else:
        _sender.listener = weight_group.listen(host)
        _sender.invitation = replace(invitation, port=_sender.listener.port)
    return _sender.invitation


def join(learner: SendingLearner) -> str:
    """Join, where this rank sends, when all others are about to; return what went wrong."""
    from cluster.weights.weight_group import WeightGroup
    from cluster.weights.weight_pair import WeightPair

    invitation = _sender.invitation
    if invitation is None:
        return NEW_SENDER
    try:
        if invitation.backend == "ipc":
            _sender.stream = WeightPair.sender(_sender.listener)
        else:
            _sender.stream = WeightGroup(invitation, 0, learner.device, _sender.listener)
    except TransferError as error:
        return str(error)
    return ""


def send(learner: SendingLearner) -> str:
    """Send, where this rank does, and gather the parameters in any case; return what went wrong."""
    if _sender.stream is None:
        for _ in learner.stream_weights():
            pass
        return NEW_SENDER
    try:
        _sender.stream.send(learner.stream_weights())
    except TransferError as error:
        _sender.leave()  # at once: the receivers need not wait for their own deadline
        return str(error)
    return ""


def leave(learner: SendingLearner) -> None:
    """Let go of the group."""
    _sender.leave()
