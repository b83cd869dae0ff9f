"""PooledRetriever: the retriever over replicas of any kind. Cache, coalescing, batches, routing and retries, no Ray.

::

    search(queries, k) ──► normalise ──► AnswerCache ──hit──► Hits(is_cached=True)
                                             │ miss
                                             └──► Batcher ──► a replica ──► Hits ──► AnswerCache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Hits, Passage
from retrieval.fleet.batching import Batcher, BatcherCounts, Replica
from retrieval.fleet.cache import AnswerCache, normalise


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool treats its replicas; keys of the recipe's ``retrieval`` section."""

    timeout_s: float = 30.0
    """Of one attempt at one replica, and of the wait for any to come up."""
    max_retries: int = 2
    """Attempts after the first one."""
    cache_size: int = 0
    """Answers remembered."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A replica's answer to a query that no replica can answer, such as one that is too long: retries are useless."""

    reason: str


class PooledRetriever:
    """Searches replicas that all hold the same evidence."""

    def __init__(
        self, replicas: Mapping[str, Replica[Hits | Refusal]], settings: PoolSettings, *, has_stages: bool = False
    ) -> None:
        """Search ``replicas``, by name: at least one. ``has_stages`` is ``Batcher``'s."""
        self.batcher: Batcher[Hits | Refusal] = Batcher(
            replicas, timeout_s=settings.timeout_s, max_retries=settings.max_retries, has_stages=has_stages
        )
        self._cache = AnswerCache(settings.cache_size)
        self.num_cached = 0
        """Queries answered from the cache so far."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, each a ``Hits`` of its own: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, or a replica refused a query; the message has the cause.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        clean = [normalise(query) for query in queries]
        asked = dict.fromkeys(clean)
        cached = {query: hits for query in asked if (hits := self._cache.get(query, k)) is not None}
        missing = [query for query in asked if query not in cached]
        found: dict[str, Hits] = {}
        if missing:
            refused: list[Refusal] = []
            for query, answer in zip(missing, await self.batcher.ask(missing, k), strict=True):
                if isinstance(answer, Refusal):
                    refused.append(answer)
                else:
                    found[query] = answer
                    self._cache.put(query, k, answer)
            if refused:
                raise RetrievalError(refused[0].reason)
        known = cached | found
        # those who ask the same must not share a list
        answers: list[list[Passage]] = [_copy(known[query], is_cached=query in cached) for query in clean]
        self.num_cached += sum(query in cached for query in clean)
        return answers

    async def wait_for_room(self) -> None:
        """Return once fewer queries wait than the replicas that are up should have before them."""
        await self.batcher.wait_for_room()

    def counts(self) -> BatcherCounts:
        """Return what has been asked beyond the cache."""
        return self.batcher.counts()


def _copy(found: Hits, *, is_cached: bool) -> Hits:
    return Hits(found, is_cached=is_cached, index_version=found.index_version)
