"""The tools ``open_page`` and ``read_section``: a page and its sections, by title."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import ClassVar

from envs.grammars.calls import ToolSchema
from envs.observations import MAX_TOKEN_CHARS, cut_text
from envs.tools.base import Arguments, Tool, ToolResult
from ragr1_actors.core.errors import shortened
from ragr1_actors.core.types import DefuseFn, EncodeFn, ToolCall
from retrieval.base import HEADING, OPEN_PAGE, Page, PageRetriever, page_title

_MAX_NAMES = 20


def _schema(name: str, description: str, **arguments: str) -> ToolSchema:
    """Return the schema of a tool whose arguments are texts."""
    properties = {argument: {"type": "string", "description": words} for argument, words in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


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
