"""The engine protocol: everything the rest of the system knows of a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from ragr1_actors.core.types import Completion, OnText, Sampling
from ragr1_actors.core.weight_transport import WakeTag

if TYPE_CHECKING:  # pulls in torch
    from cluster.weights.weight_stream import Invitation


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made with, beside the policy's folder and its tokenizer."""

    max_rows: int
    """Requests that run at once."""
    max_context_tokens: int
    dtype: str = "float32"
    device: str = "cpu"
    version: int = 0
    """Policy version of the weights in the folder."""
    sleeps: bool = False
    """Whether the engine has to give its device's memory to a learner between two batches: see ``ColocatedEngine``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own options, by its own names: ``{"tensor_parallel_size": 2}`` for vLLM."""


class Engine(Protocol):
    """One model that continues token ids. Many requests run at once; each is one coroutine."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue ``prompt_token_ids``.

        Args:
            prompt_token_ids: the whole context; what it shares with the last call of the same ``request_id`` is not
                computed again.
            sampling: temperature, stop strings, seed and the number of new tokens.
            request_id: one trajectory.
            on_text: called with the turn's whole text so far whenever it has grown; what it does must be quick.

        Raises:
            EngineError: the engine cannot answer this request.
            EngineDeadError: the engine will not answer any more; its runner is to be replaced.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget the trajectory ``request_id``; its cache may be reused."""
        ...

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in. Requests under way go on with the new ones over a recomputed cache.

        Args:
            weights: every parameter by its Hugging Face name, ``lm_head.weight`` included where it is tied. For the
                engines in ``MERGING_ENGINES``, with ``learners.lora``: adapters, and under ``BASE_KEY`` what they are
                merged into, see ``engines/adapters.py``.
            version: recorded with every token sampled from now on.
        """
        ...

    async def check(self) -> None:
        """Return if the engine is alive. Quick, however much it has to do.

        Raises:
            EngineDeadError: it is not.
        """
        ...

    async def close(self) -> None:
        """Free the model."""
        ...


@runtime_checkable
class ReceivingEngine(Protocol):
    """What an engine has besides, where ``env_runners.weight_transport`` is to be ``broadcast`` or ``ipc``."""

    @property
    def num_weight_ranks(self) -> int:
        """How many processes of this engine hold weights: each is a rank of the group."""
        ...

    async def join_weight_group(self, invitation: Invitation, first_rank: int) -> None:
        """Join as ``first_rank`` and those behind it, and leave the group before.

        Raises:
            TransferError: the group did not come about.
        """
        ...

    async def receive_weights(self, version: int) -> None:
        """Take over what is sent to the group next; otherwise ``Engine.update_weights``.

        Raises:
            TransferError: not everything arrived. Until ``update_weights`` brings all of it, the engine goes on with
                the weights it had, or with none where they are being overwritten: its requests wait.
        """
        ...


@runtime_checkable
class ColocatedEngine(ReceivingEngine, Protocol):
    """What an engine has besides, where it is to sit on one device with a learner: ``weight_transport`` ``ipc``."""

    async def sleep(self) -> None:
        """Give the device's memory back, weights and cache. Requests under way, and new ones, stand still."""
        ...

    async def wake_up(self, tag: WakeTag) -> None:
        """Take memory again: for ``weights``, which are to be received then, and afterwards for the ``kv_cache``.

        With the cache the requests go on; what they had in it is computed anew. An engine that is awake stays as it is.
        """
        ...
