"""RetrieverActor: a replica of the retrieval fleet, the process around a ``LocalRetriever``."""

from __future__ import annotations

from typing import Any

from retrieval.base import Passage
from retrieval.encoder import set_encoder_threads
from retrieval.retriever import LocalRetriever

Row = tuple[str, str, str, float]
"""A passage on the wire; plain tuples pickle several times faster than dataclasses."""


class RetrieverActor:
    """What ``ray.remote`` makes an actor of. One call at a time: one search takes all of its threads."""

    def __init__(self, index_dir: str, num_threads: int) -> None:
        """Open the index and search once, so that the first caller finds everything loaded.

        Raises:
            DataError: no usable index in ``index_dir`` on this node.
        """
        set_encoder_threads(num_threads)
        self._retriever = LocalRetriever(index_dir, num_threads)
        self._retriever.search_batch(["warm up"], 1)

    def ping(self) -> None:
        """Answer; that this call runs at all says that the index is loaded and no search hangs."""

    def info(self) -> dict[str, Any]:
        """Return the index's manifest."""
        return self._retriever.info()

    def search_batch(self, queries: list[str], k: int) -> list[list[Row]]:
        """Search; see ``LocalRetriever.search_batch``."""
        return [
            [(passage.id, passage.title, passage.text, passage.score) for passage in passages]
            for passages in self._retriever.search_batch(queries, k)
        ]


def to_passages(rows: list[Row]) -> list[Passage]:
    """Undo what ``RetrieverActor.search_batch`` does to one query's passages."""
    return [Passage(*row) for row in rows]
