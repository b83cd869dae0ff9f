"""AnswerCache: what the queries that came last have found. Nothing is stale: a changed index has another version."""

from __future__ import annotations

from collections import OrderedDict

from retrieval.base import Hits


def normalise(query: str) -> str:
    r"""Return the query with single spaces: ``" Ana\n Bell "`` and ``"Ana Bell"`` are the same question.

    Nothing else is folded, since an encoder may tell upper from lower case.
    """
    return " ".join(query.split())


class AnswerCache:
    """The ``max_queries`` answers used last, by normalised query and ``k``, all of one index version."""

    def __init__(self, max_queries: int) -> None:
        """Remember up to ``max_queries`` answers; 0 remembers nothing."""
        self._max_queries = max_queries
        self._answers: OrderedDict[tuple[str, int], Hits] = OrderedDict()
        self._version = ""

    def __len__(self) -> int:
        """Return the number of answers held."""
        return len(self._answers)

    def get(self, query: str, k: int) -> Hits | None:
        """Return what the query found, or None."""
        found = self._answers.get((query, k))
        if found is not None:
            self._answers.move_to_end((query, k))
        return found

    def put(self, query: str, k: int, found: Hits) -> None:
        """Remember an answer. One of another index version makes all that was remembered worthless."""
        if not self._max_queries:
            return
        if found.index_version != self._version:
            self._answers.clear()
            self._version = found.index_version
        self._answers[query, k] = found
        if len(self._answers) > self._max_queries:
            self._answers.popitem(last=False)
