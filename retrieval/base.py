"""The retriever protocols, the passages they return, and the retrievers that a recipe names by ``retrieval.type``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from ragr1_actors.core.types import ChatModel, Record

Passage = Record
"""One passage of the corpus: ``Passage("p17", "Riga", "Riga lies in Latvia.", 0.83)``, and how similar it is."""
SEARCH = "search"
"""The tool whose calls in a trajectory are searches, with the arguments ``query`` and ``k``."""
RETRIEVE = "retrieve"
"""The tool of an agent's searches at the gateway; the policy may call a tool ``search`` itself."""
OPEN_PAGE = "open_page"
"""The tool whose calls in a trajectory open pages, with the argument ``title``. Where there is no such page, the result
is a JSON list of titles that are like it."""
HEADING = " § "
"""What is between page and heading in the titles of a corpus with headings: ``"Riga § History"``."""


def page_title(title: str) -> str:
    """Return the title of a passage without its heading: ``page_title("Riga § History") == "Riga"``."""
    return title.partition(HEADING)[0]


class Hits(list[Passage]):
    """What one query found, best first, and where it came from. A custom retriever may return plain lists."""

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
        """Hold the passages; where there are none, ``near`` are titles that are like the one asked for."""
        super().__init__(passages, is_cached=is_cached, index_version=index_version)
        self.near = tuple(near)


class Retriever(Protocol):
    """Anything that finds passages."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first: ``[len(queries)][<= k]``.

        Raises:
            RetrievalError: no replica answered.
        """
        ...


@runtime_checkable
class PacedRetriever(Protocol):
    """A retriever that can say when it has too much to do; env runners begin no trajectory until it has not."""

    async def wait_for_room(self) -> None:
        """Return once fewer queries wait than the retriever holds."""
        ...


@runtime_checkable
class AskingRetriever(Protocol):
    """A retriever that asks language models, such as one that rewrites queries."""

    def use_models(self, models: Mapping[str, ChatModel]) -> None:
        """Take ``environment.models``, by name; called in each env runner before the first search."""
        ...


@runtime_checkable
class PageRetriever(Protocol):
    """A retriever that also opens pages by their titles, for the tools ``open_page`` and ``read_section``."""

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the page of each title, ``[len(titles)]``, an empty one where there is none.

        A title matches that of passages exactly, or else without regard to upper and lower case. ``"Riga"`` matches its
        sections, too, such as ``"Riga § History"``.

        Raises:
            RetrievalError: no replica answered.
        """
        ...


@runtime_checkable
class ProbedRetriever(Protocol):
    """A retriever over a service that may be away; a run asks it once, before anything is loaded."""

    async def probe(self) -> None:
        """Return if the service answers. Raises ``RetrievalError``: it does not; the message has address and cause."""
        ...


RETRIEVERS = {
    "http": "retrieval.http.retriever:HttpRetriever",
    "web": "retrieval.http.web:WebRetriever",
    "replay": "retrieval.local:ReplayRetriever",
}
"""Made as ``SomeRetriever(options)`` with the recipe's ``retrieval.options``, as a ``my_module:MyRetriever`` is."""

SHARED_KEYS = {"http": ("timeout_s", "max_retries", "cache_size"), "web": ("timeout_s", "max_retries")}
"""Keys of the recipe's ``retrieval.requests`` that a type takes among its options, where these do not name them."""


def needs_index(retrieval_type: str) -> bool:
    """Return whether this type is a kind of index, to be built and served, and not a retriever that needs no index."""
    return retrieval_type not in RETRIEVERS and ":" not in retrieval_type
