"""The retriever protocol: the one thing an environment knows of retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of the corpus: ``Passage("p17", "Riga", "Riga lies in Latvia.", 0.83)``."""

    id: str
    title: str
    text: str
    score: float = 0.0
    """Similarity to the query it was found with; higher is better."""


class Retriever(Protocol):
    """Anything that finds passages."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first: ``[len(queries)][<= k]``.

        Raises:
            RetrievalError: no replica answered.
        """
        ...
