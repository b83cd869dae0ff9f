"""Tools that bring evidence: ``search``, ``open_page`` and ``read_section``, and ``crop`` and ``zoom`` of images."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, ClassVar

from envs.base import EnvContext
from envs.grammars.calls import ToolSchema
from envs.observations import MAX_TOKEN_CHARS, cut_text
from envs.options import ToolOptions
from envs.search import QueryCleaner, SearchResult, TurnSearches, observed
from envs.tools.base import Arguments, FunctionTool, Tool, ToolResult
from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ToolError, shortened
from ragr1_actors.core.images import cropped, size_of
from ragr1_actors.core.types import DefuseFn, EncodeFn, ToolCall
from retrieval.base import HEADING, OPEN_PAGE, SEARCH, Page, PageRetriever, page_title

_NUMBER = {
    "type": "integer",
    "description": "Number of the image, from 1 on in the order of sight; the newest if left out.",
}
_MAX_FACTOR = 16
_MAX_NAMES = 20
_NONE_LEFT = "At most {limit} queries are answered in one turn, each once; these were more, or empty."


def _schema(
    name: str, description: str, optional: Mapping[str, Any] = MappingProxyType({}), **arguments: str | dict[str, Any]
) -> ToolSchema:
    """Return the schema of a tool; an argument with a description only is a text."""
    needed = {
        argument: {"type": "string", "description": one} if isinstance(one, str) else one
        for argument, one in arguments.items()
    }
    parameters = {"type": "object", "properties": {**needed, **optional}, "required": list(needed)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class SearchTool(Tool):
    """Finds passages. Queries that are empty, double or over the limit of a turn are dropped and counted."""

    schema = _schema(
        SEARCH,
        "Search for passages. Several queries are answered at once.",
        queries={
            "type": "array",
            "items": {"type": "string"},
            "description": "What to look for, each on its own.",
        },
    )

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

    def abandon(self) -> None:
        """Cancel the searches: neither their results nor their failures reach the next turn."""
        self._searches.cancel()
        self._searches = self._new_turn()

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
        return [self._result({query: found[query] for query in queries}, counts, ended_s) for queries, counts in asked]

    def _result(self, found: dict[str, SearchResult], counts: dict[str, float], ended_s: float) -> ToolResult:
        if not found:
            limit = self.options.max_queries_per_turn
            return ToolResult(_NONE_LEFT.format(limit=limit), (), is_error=True, metrics=counts)
        calls = tuple(one.call(query, self.options.top_k, ended_s) for query, one in found.items())
        return ToolResult(observed(found, self.context, self.options, is_tagged=False), calls, metrics=counts)

    def close(self) -> None:
        """Cancel the searches of a turn that did not end."""
        self._searches.cancel()


_Opened = tuple[Page, ToolCall]
"""Page, and the record of the call that opened it."""


class PageTool(Tool):
    """Opens pages with the environment's retriever: the pages of all calls of a turn together, each once."""

    needs = PageRetriever

    async def _open(self, titles: Sequence[str]) -> Mapping[str, _Opened]:
        distinct, loop = list(dict.fromkeys(titles)), asyncio.get_running_loop()
        started_s = loop.time()
        pages = await self.context.retriever.open_pages(distinct) if distinct else []  # type: ignore[attr-defined]  # needs
        latency_s = loop.time() - started_s
        return {
            title: (
                page,
                ToolCall(
                    OPEN_PAGE,
                    {"title": title},
                    "" if page else json.dumps(page.near, ensure_ascii=False),
                    tuple(page),
                    latency_s=latency_s,
                    waited_s=latency_s,
                    is_cached=page.is_cached,
                    version=page.index_version,
                ),
            )
            for title, page in zip(distinct, pages, strict=True)
        }

    def _read(self, page: Page) -> str:
        return page_text(page, self.context.encode, self.options.max_observation_tokens, self.context.defuse)

    def _missing(self, title: str, near: Sequence[str]) -> str:
        names = f" Titles that are like it: {'; '.join(near)}." if near else ""
        return self.context.defuse(f"There is no page titled {shortened(title, 200)}.{names}")


class OpenPageTool(PageTool):
    """Returns the passages of a page, as many as fit into ``max_observation_tokens``."""

    schema = _schema(OPEN_PAGE, "Open a page and read it from its beginning.", title="Its title, as a search shows it.")

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Open the pages of all calls."""
        titles = [call["title"].strip() for call in calls]
        opened = await self._open(titles)
        return [self._result(title, opened[title]) for title in titles]

    def _result(self, title: str, opened: _Opened) -> ToolResult:
        page, call = opened
        return ToolResult(self._read(page) if page else self._missing(title, page.near), (call,), is_error=not page)


class ReadSectionTool(PageTool):
    """Returns the passages of a section; the corpus must have headings."""

    schema = _schema(
        "read_section",
        "Read one section of a page.",
        title="The title of the page.",
        heading="The heading of the section.",
    )
    needs_headings: ClassVar[bool] = True

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Read the sections of all calls; for a missing section, name the sections of its page."""
        asked = [(call["title"].strip(), call["heading"].strip()) for call in calls]
        sections = await self._open([HEADING.join(one) for one in asked])
        pages = await self._open([one[0] for one in asked if not sections[HEADING.join(one)][0]])
        return [self._result(*one, sections[HEADING.join(one)], pages.get(one[0])) for one in asked]

    def _result(self, title: str, heading: str, section: _Opened, whole: _Opened | None) -> ToolResult:
        found, call = section
        if found or whole is None:
            return ToolResult(self._read(found), (call,))
        page, page_call = whole
        names = dict.fromkeys(passage.title.partition(HEADING)[2] for passage in page)
        shown = "; ".join([name for name in names if name][:_MAX_NAMES])
        text = f"There is no section {shortened(heading, 200)} in {title}. Its sections are: {shown or 'none'}."
        if not page:
            text = self._missing(title, page.near)
        return ToolResult(self.context.defuse(text), (call, page_call), is_error=True)


def page_text(page: Page, encode: EncodeFn, max_tokens: int, defuse: DefuseFn) -> str:
    r"""Return title and passages of a page that is not empty, in at most ``max_tokens`` tokens of ``encode``.

    Passages stay whole; only a first one that does not fit alone is cut. ``"Riga\nRiga lies in Latvia.\n§ History\n It
    was founded in 1201.\n(2 of 5 pieces are shown.)"``.
    """
    titles = {passage.title for passage in page}
    title = page_title(page[0].title) if len(titles) > 1 else page[0].title
    pieces: list[str] = []
    for name, passages in groupby(page, lambda passage: passage.title):
        first, *others = (passage.text for passage in passages)
        pieces += [first if name == title else f"{name.removeprefix(title).strip()}\n{first}", *others]
    head, pieces = defuse(title), list(map(defuse, pieces))

    def size(text: str) -> int:
        return len(encode(text))

    def shown(number: int) -> str:
        end = [f"({number} of {len(pieces)} pieces are shown.)"] if number < len(pieces) else []
        return "\n".join([head, *pieces[:number], *end])

    left, number = max_tokens - size(shown(0)), 0
    while number < len(pieces) and (left := left - size(f"\n{pieces[number]}")) >= 0:
        number += 1
    while number and size(shown(number)) > max_tokens:  # a joined text may have a few more tokens than its parts
        number -= 1
    if number:
        return shown(number)
    end = f"\n(The first of {len(pieces)} pieces is cut.)"
    room = max_tokens - size(end)
    return cut_text(f"{head}\n{pieces[0]}"[: room * MAX_TOKEN_CHARS], room, size) + end


class CropTool(FunctionTool):
    """Cuts a part out of an image, in all its pixels: a policy sees a large image reduced."""

    schema = _schema(
        "crop",
        "Look at a part of an image.",
        {"image": _NUMBER},
        box={
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "Left, top, right and bottom of the part, from 0 to 1.",
        },
    )

    def __init__(self, context: EnvContext, options: ToolOptions) -> None:
        """Look at the images that the trajectory has seen."""
        super().__init__(self._look, context, options, self.schema)

    def _look(self, image: float | None = None, **arguments: Any) -> Image:
        seen = self.context.seen
        number = len(seen) if image is None else int(image)
        if not 1 <= number <= len(seen):
            raise ToolError(f"There is no image {number}: {len(seen)} were seen.")
        try:
            return self.part(seen[number - 1], arguments)
        except ValueError as error:
            raise ToolError(str(error)) from error

    def part(self, image: Image, arguments: Arguments) -> Image:
        """Return the part; ``ValueError`` with a sentence for the policy if it is not in the image."""
        left, top, right, bottom = arguments["box"]
        return cropped(image, (left, top, right, bottom))


class ZoomTool(CropTool):
    """Enlarges the surroundings of a point of an image."""

    schema = _schema(
        "zoom",
        "Enlarge the surroundings of a point of an image.",
        {"image": _NUMBER},
        x={"type": "number", "description": "Place of the point from left, 0, to right, 1."},
        y={"type": "number", "description": "Place of the point from top, 0, to bottom, 1."},
        factor={"type": "number", "description": f"Factor by which it is enlarged, from 1 to {_MAX_FACTOR}."},
    )

    def part(self, image: Image, arguments: Arguments) -> Image:
        """Return the surroundings, in the size of the image."""
        x, y, factor = arguments["x"], arguments["y"], arguments["factor"]
        if not (0 <= x <= 1 and 0 <= y <= 1 and 1 <= factor <= _MAX_FACTOR):
            raise ValueError(
                f"The point {[x, y]} at the factor {factor} is not in the image: expected 0 <= x <= 1, 0 <= y <= 1 and "
                f"1 <= factor <= {_MAX_FACTOR}."
            )
        side = 1 / factor
        left, top = (min(max(0.0, place - side / 2), 1 - side) for place in (x, y))
        return cropped(image, (left, top, min(1.0, left + side), min(1.0, top + side)), min_side=min(size_of(image)))
