"""A retriever over the generated world that needs no index: what a retriever of a method wraps in its toy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from envs.tasks.world import make_world
from retrieval.base import Passage


class TitleRetriever:
    """Finds the passages whose title has the words of a query: ``"Ana Bell"`` finds that of Ana Bell first."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take ``{"seed": 0}``, the seed of the world."""
        self._by_word: dict[str, list[Passage]] = {}
        for passage in make_world(int(options.get("seed", 0))).passages:
            for word in passage.title.lower().split():
                self._by_word.setdefault(word, []).append(passage)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the ``k`` passages with the most words in common, ``[len(queries)][<= k]``."""
        return [self._named(query)[:k] for query in queries]

    def _named(self, query: str) -> list[Passage]:
        found = Counter(one for word in set(query.lower().split()) for one in self._by_word.get(word, ()))
        return sorted(found, key=lambda one: (-found[one], len(one.title), one.title))


def short(query: str, found: Sequence[Passage]) -> str:
    """Summarise in place of a language model: the first passage without its own name and the words of its sentence.

    ``"Ana Bell was born in Riga in the year 1931."`` becomes ``"Riga 1931"``.
    """
    words = found[0].text.removeprefix(found[0].title).rstrip(".").split()
    return " ".join(word for word in words if word[0].isupper() or word.isdigit())
