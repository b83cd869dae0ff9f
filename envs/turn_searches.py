"""Searches of one turn: each begins once its query is complete, and all are awaited when the turn ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from envs.grammars.tags import QueryCleaner
from ragr1_actors.core.types import ToolCall
from retrieval.base import SEARCH, Hits, Passage, Retriever


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages of one query, and the time when they arrived."""

    passages: list[Passage]
    latency_s: float
    found_at: float
    """Time of arrival in seconds by the clock of the event loop."""

    def call(self, query: str, k: int, turn_ended: float) -> ToolCall:
        """Return the record of the query for the trajectory; the turn ended at ``turn_ended`` by the same clock."""
        waited_s = min(self.latency_s, max(0.0, self.found_at - turn_ended))
        return search_call(query, k, self.passages, latency_s=self.latency_s, waited_s=waited_s)


def search_call(query: str, k: int, found: Sequence[Passage], *, latency_s: float, waited_s: float) -> ToolCall:
    """Return the record of a query that found ``found``, at most ``k`` passages, best first."""
    return ToolCall(
        tool=SEARCH,
        arguments={"query": query, "k": k},
        records=tuple(found),
        latency_s=latency_s,
        waited_s=waited_s,
        is_cached=found.is_cached if isinstance(found, Hits) else False,
        version=found.index_version if isinstance(found, Hits) else "",
    )


def search_metrics(calls: Sequence[ToolCall]) -> dict[str, float]:
    """Return the counts and times of the searches of one turn, which run at the same time."""
    return {
        "cached_queries": float(sum(call.is_cached for call in calls)),
        "time/retrieval_s": sum(call.latency_s for call in calls),
        "time/retrieval_waited_s": max(call.waited_s for call in calls),
    }


class TurnSearches:
    """The searches of one turn, started early or when it ends."""

    def __init__(self, retriever: Retriever, top_k: int, max_queries: int) -> None:
        """Take the retriever; at most ``max_queries`` searches begin early."""
        self._retriever, self._top_k = retriever, top_k
        self._cleaner = QueryCleaner(max_queries)
        self._tasks: dict[str, asyncio.Task[dict[str, SearchResult]]] = {}  # by query; queries asked together share one

    def begin(self, query: str) -> None:
        """Start the search of a query, as the turn wrote it, unless it is empty, has begun, or is over the limit."""
        if self._cleaner.add(query):
            self._begin(self._cleaner.queries[-1:])

    async def answer(self, queries: Sequence[str]) -> list[SearchResult]:
        """Return the result of each query; queries whose search has not begun are searched in one call."""
        for query in self._tasks.keys() - set(queries):
            self._tasks.pop(query).cancel()
        late = [query for query in queries if query not in self._tasks]
        if late:
            self._begin(late)
        found: dict[str, SearchResult] = {}
        for results in await asyncio.gather(*dict.fromkeys(self._tasks.values())):
            found |= results
        return [found[query] for query in queries]

    def cancel(self) -> None:
        """Cancel the searches that are still running."""
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, queries: list[str]) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._search(queries, loop.time()))
        task.add_done_callback(_note_failure)
        self._tasks |= dict.fromkeys(queries, task)

    async def _search(self, queries: list[str], asked_at: float) -> dict[str, SearchResult]:
        results = await self._retriever.search(queries, self._top_k)
        found_at = asyncio.get_running_loop().time()
        return {
            query: SearchResult(passages, found_at - asked_at, found_at)
            for query, passages in zip(queries, results, strict=True)
        }


def _note_failure(task: asyncio.Task[dict[str, SearchResult]]) -> None:
    """Retrieve the exception of a search whose result is not needed, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
