"""The engine protocol: everything the rest of the system knows of a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ragr1_actors.types import Completion, OnText, Sampling


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
            EngineError: the engine cannot answer.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget the trajectory ``request_id``; its cache may be reused."""
        ...

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in. Requests under way go on with the new ones over a recomputed cache.

        Args:
            weights: every parameter by its Hugging Face name, ``lm_head.weight`` included where it is tied.
            version: recorded with every token sampled from now on.
        """
        ...

    async def close(self) -> None:
        """Free the model."""
        ...
