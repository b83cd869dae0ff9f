"""A trajectory's place in the transformers engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ragr1_actors.core.types import Completion, OnText, Sampling
from ragr1_actors.rollout.engines.turn_text import TurnText


@dataclass(slots=True)
class Session:
    """One trajectory, from its first turn until it is released."""

    request_id: str
    row: int
    """Of the cache; -1 for none."""
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Tokens whose keys and values are in the cache."""
    sampling: Sampling = field(default_factory=lambda: Sampling(0))
    num_prompt: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    future: asyncio.Future[Completion] | None = None
    """Of the turn that is being generated."""
    on_text: OnText | None = None
    turn_text: TurnText | None = None
    """Where ``on_text`` wants it."""

    @property
    def seed(self) -> int:
        """Of the sampling; an unseeded request still needs a number, and its own name is as good as any."""
        seed = self.sampling.seed
        return (hash(self.request_id) if seed is None else seed) & 0xFFFFFFFFFFFFFFFF

    def tell(self) -> None:
        """Show a request its text so far."""
        if self.on_text is None or self.turn_text is None or self.future is None or self.future.done():
            return
        try:
            if self.turn_text.grow(self.tokens[self.num_prompt :]):
                self.on_text(self.turn_text.text)
        except Exception as error:  # the caller's own code: it ends its own request and no other
            self.future.set_exception(error)
            self.future = None
