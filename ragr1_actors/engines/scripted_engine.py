"""An engine that recites: demonstrations, and tests that need to know what the policy will say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ragr1_actors.errors import EngineError
from ragr1_actors.types import Completion, EncodeFn, FinishReason, Sampling


class ScriptedEngine:
    """Says ``script[0]`` in the first turn of a request, ``script[1]`` in the second, and so on.

    Log-probs are 0: a script is certain of itself.
    """

    def __init__(self, scripts: Mapping[str, Sequence[str]], encode: EncodeFn, version: int = 0) -> None:
        """Take a script for each request id."""
        self._scripts = scripts
        self._encode = encode
        self._version = version
        self._next_turn: dict[str, int] = {}

    async def generate(self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Return the next scripted turn of ``request_id``, cut at ``max_new_tokens``."""
        turn = self._next_turn.get(request_id, 0)
        script = self._scripts.get(request_id, ())
        if turn >= len(script):
            raise EngineError(f"the script of {request_id!r} has {len(script)} turns; turn {turn + 1} was asked for")
        self._next_turn[request_id] = turn + 1
        token_ids = self._encode(script[turn])
        finish = FinishReason.STOP if len(token_ids) <= sampling.max_new_tokens else FinishReason.LENGTH
        token_ids = token_ids[: sampling.max_new_tokens]
        return Completion(token_ids, [0.0] * len(token_ids), [self._version] * len(token_ids), script[turn], finish)

    def release(self, request_id: str) -> None:
        """Forget how far ``request_id`` has come."""
        self._next_turn.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Take the version; there are no weights."""
        self._version = version

    async def close(self) -> None:
        """Nothing to free."""
