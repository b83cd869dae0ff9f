"""The tool ``search``: several queries in one call, and all calls of a turn in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from envs.base import EnvContext
from envs.observations import format_observation
from envs.options import ToolOptions
from envs.search import QueryCleaner, SearchResult, TurnSearches
from envs.tools.base import Arguments, Tool, ToolResult
from ragr1_actors.core.content import joined
from retrieval.base import SEARCH

_NONE_LEFT = "At most {limit} queries are answered in one turn, each once; these were more, or empty."


class SearchTool(Tool):
    """Finds passages. Queries that are empty, double or over the limit of a turn are dropped and counted."""

    schema = {  # noqa: RUF012 - a constant
        "type": "function",
        "function": {
            "name": SEARCH,
            "description": "Search for passages. Several queries are answered at once.",
            "parameters": {
                "type": "object",
                "properties": {
                    "queries": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "What to look for, each on its own.",
                    }
                },
                "required": ["queries"],
            },
        },
    }

    def __init__(self, context: EnvContext, options: ToolOptions) -> None:
        """Take the environment's retriever for searches."""
        super().__init__(context, options)
        self._searches = self._new_turn()

    def _new_turn(self) -> TurnSearches:
        return TurnSearches(self.context.retriever, self.options.top_k, self.options.max_queries_per_turn)

    def begin(self, arguments: Arguments) -> None:
        """Start a search for each query."""
        for query in arguments["queries"]:
            self._searches.begin(query)

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Answer the queries of all calls in one search."""
        ended_s = asyncio.get_running_loop().time()
        searches, self._searches = self._searches, self._new_turn()
        cleaner = QueryCleaner(self.options.max_queries_per_turn)
        asked: list[tuple[list[str], dict[str, float]]] = []
        for call in calls:
            num_before, counts_before = len(cleaner.queries), cleaner.counts.copy()
            for query in call["queries"]:
                cleaner.add(query)
            counts = {name: value - counts_before[name] for name, value in cleaner.counts.items()}
            asked.append((cleaner.queries[num_before:], counts))
        try:
            found = await searches.answer(cleaner.queries)
        finally:
            searches.cancel()
        by_query = dict(zip(cleaner.queries, found, strict=True))
        return [
            self._result({query: by_query[query] for query in queries}, counts, ended_s) for queries, counts in asked
        ]

    def _result(self, found: dict[str, SearchResult], counts: dict[str, float], ended_s: float) -> ToolResult:
        if not found:
            limit = self.options.max_queries_per_turn
            return ToolResult(_NONE_LEFT.format(limit=limit), (), is_error=True, metrics=counts)
        text = format_observation(
            list(found),
            [one.passages for one in found.values()],
            self.context.encode,
            max_tokens_per_query=self.options.max_observation_tokens_per_query,
            max_tokens=self.options.max_observation_tokens,
            is_tagged=False,
            defuse=self.context.defuse,
        )
        calls = tuple(one.call(query, self.options.top_k, ended_s) for query, one in found.items())
        images = [(one.image,) for result in found.values() for one in result.passages if one.image is not None]
        return ToolResult(joined(text, *images), calls, metrics=counts)

    def close(self) -> None:
        """Cancel the searches of a turn that did not end."""
        self._searches.cancel()
