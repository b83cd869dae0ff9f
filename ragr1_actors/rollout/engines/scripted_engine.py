"""An engine that plays scripts: for demonstrations, and for tests and benchmarks that must know every turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ragr1_actors.core.errors import EngineError
from ragr1_actors.core.types import Completion, EncodeFn, FinishReason, OnText, Sampling


class ScriptedEngine:
    """Returns ``script[0]`` as the first turn of a request, ``script[1]`` as the second, and so on. Log-probs are 0."""

    def __init__(
        self,
        scripts: Mapping[str, Sequence[str]],
        encode: EncodeFn,
        version: int = 0,
        *,
        token_latency_s: float = 0.0,
    ) -> None:
        """Play these scripts.

        Args:
            scripts: turns by request id.
            encode: the policy's tokenizer.
            version: policy version that is reported for every token.
            token_latency_s: seconds per token, such as 0.02. With 0, a turn's text comes all at once.
        """
        self._scripts = scripts
        self._encode = encode
        self._version = version
        self._token_latency_s = token_latency_s
        self._next_turn: dict[str, int] = {}

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Return the next scripted turn of ``request_id``, cut at ``max_new_tokens``.

        While only a part of its tokens is played, the text is the same part of its characters.
        """
        turn = self._next_turn.get(request_id, 0)
        script = self._scripts.get(request_id, ())
        if turn >= len(script):
            raise EngineError(f"got turn {turn + 1} of {request_id!r}, expected at most {len(script)}: its script ends")
        self._next_turn[request_id] = turn + 1
        token_ids = self._encode(script[turn])
        num_all, num_new = len(token_ids), min(len(token_ids), sampling.max_new_tokens)
        text = script[turn] if num_new == num_all else script[turn][: len(script[turn]) * num_new // num_all]
        if self._token_latency_s:
            for num_played in range(1, num_new + 1):
                await asyncio.sleep(self._token_latency_s)
                if on_text is not None:
                    on_text(script[turn][: len(script[turn]) * num_played // num_all])
        elif on_text is not None:
            on_text(text)
        finish = FinishReason.STOP if num_new == num_all else FinishReason.LENGTH
        return Completion(token_ids[:num_new], [0.0] * num_new, [self._version] * num_new, text, finish)

    def release(self, request_id: str) -> None:
        """Forget ``request_id``; it starts again with its first turn."""
        self._next_turn.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Set the version; there are no weights."""
        self._version = version

    async def check(self) -> None:
        """Nothing to check: there is no process or model."""

    async def close(self) -> None:
        """Nothing to free."""
