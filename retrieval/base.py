"""Protocols of retrievers, the passages that they return, and the retrievers that ``retrieval.type`` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from ragr1_actors.core.types import ChatModel, Record

Passage = Record
"""One passage of the corpus: ``Passage("p17", "Riga", "Riga lies in Latvia.", 0.83)``, and how similar it is."""
SEARCH = "search"
"""Tool whose calls in a trajectory are searches, with the arguments ``query`` and ``k``."""
RETRIEVE = "retrieve"
"""Tool of an agent's searches at the gateway, since the policy may call a tool ``search`` itself."""
OPEN_PAGE = "open_page"
"""Tool whose calls in a trajectory open pages, with the argument ``title``. If there is no such page, the result is a
JSON list of similar titles."""
HEADING = " § "
"""Separator of page and heading in the titles of a corpus with headings: ``"Riga § History"``."""


def page_title(title: str) -> str:
    """Return the title of a passage without its heading: ``page_title("Riga § History") == "Riga"``."""
    return title.partition(HEADING)[0]


class Hits(list[Passage]):
    """Passages that one query found, best first, and their source. A custom retriever may return plain lists."""

    def __init__(self, passages: Iterable[Passage] = (), *, is_cached: bool = False, index_version: str = "") -> None:
        """Hold passages, best first. ``index_version``: ``Manifest.version``, or another name for the source."""
        super().__init__(passages)
        self.is_cached = is_cached
        self.index_version = index_version


class Page(Hits):
    """All passages of one title, in the order of the corpus."""

    def __init__(
        self,
        passages: Iterable[Passage] = (),
        *,
        near: Iterable[str] = (),
        is_cached: bool = False,
        index_version: str = "",
    ) -> None:
        """Hold the passages; if there are none, ``near`` has titles that are similar to the requested one."""
        super().__init__(passages, is_cached=is_cached, index_version=index_version)
        self.near = tuple(near)


class Retriever(Protocol):
    """Object that finds passages."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first: ``[len(queries)][<= k]``.

        Raises:
            RetrievalError: no replica answered.
        """


@runtime_checkable
class PacedRetriever(Protocol):
    """Retriever that can report overload; env runners begin no trajectory while ``wait_for_room`` waits."""

    async def wait_for_room(self) -> None:
        """Return once fewer queries wait than the retriever holds."""


@runtime_checkable
class AskingRetriever(Protocol):
    """Retriever that asks language models, such as one that rewrites queries."""

    def use_models(self, models: Mapping[str, ChatModel]) -> None:
        """Take ``environment.models``, by name; each env runner calls it before the first search."""


@runtime_checkable
class PageRetriever(Protocol):
    """Retriever that also opens pages by their titles, for the tools ``open_page`` and ``read_section``."""

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the page of each title, ``[len(titles)]``; it is empty if there is none.

        A title matches the titles of passages exactly, or else without regard to case. ``"Riga"`` also matches its
        sections, such as ``"Riga § History"``.

        Raises:
            RetrievalError: no replica answered.
        """


@runtime_checkable
class ProbedRetriever(Protocol):
    """Retriever over a service that may not answer; a run asks it once, before anything is loaded."""

    async def probe(self) -> None:
        """Return if the service answers; raises ``RetrievalError`` with the address and the cause if it does not."""


class NoRetriever:
    """Finds nothing: for environments that do not search, and policies that answer from memory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take no options."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return no passage for each query."""
        return [[] for _ in queries]


RETRIEVERS = {
    "none": "retrieval.base:NoRetriever",
    "http": "retrieval.http.retriever:HttpRetriever",
    "web": "retrieval.http.web:WebRetriever",
    "replay": "retrieval.local:ReplayRetriever",
    "images": "retrieval.images:ImageRetriever",
}
"""Retrievers without an index, by ``retrieval.type``; made as ``SomeRetriever(options)`` with ``retrieval.options``."""

SHARED_KEYS = {"http": ("timeout_s", "max_retries", "cache_size"), "web": ("timeout_s", "max_retries")}
"""Keys of the recipe's ``retrieval.requests`` that a type takes as options, unless its options have them."""


def needs_index(retrieval_type: str) -> bool:
    """Return whether a type is a kind of index, which is built and served, and not a retriever without an index."""
    return retrieval_type not in RETRIEVERS and ":" not in retrieval_type
