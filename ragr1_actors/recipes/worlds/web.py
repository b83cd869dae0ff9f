"""A made-up web over the generated world: its snippets lack the facts, which are on the pages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.sources import WorldSource
from envs.world import make_world
from ragr1_actors import Passage, Task
from ragr1_actors.recipes.worlds.titles import TitleRetriever
from retrieval.base import HEADING, Page

GUESSES = 0.5
"""Share of the demonstrations that answer after a search, without a look at a page."""


class ToyWeb:
    """Finds pages by their titles, and opens them: an introduction, the fact, and what else there is."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take the options of ``TitleRetriever``."""
        self._titles = TitleRetriever(options)
        self._by_title = {passage.title: passage for passage in make_world(int(options.get("seed", 0))).passages}

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return titles with snippets, ``[len(queries)][<= k]``."""
        found = await self._titles.search(queries, k)
        return [[Passage(one.id, one.title, "a page", one.score) for one in hits] for hits in found]

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the sections of each page, none where there is no page."""
        return [self._page(self._by_title.get(title)) for title in titles]

    def _page(self, passage: Passage | None) -> Page:
        if passage is None:
            return Page()
        texts = {"Introduction": "This page has a fact.", "Fact": passage.text, "More": "There is no more."}
        return Page(
            Passage(f"{passage.id}/{name}", f"{passage.title}{HEADING}{name}", text) for name, text in texts.items()
        )


class WebWorld(WorldSource):
    """Questions of the world, with demonstrations that search, and browse or guess."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt that opens the pages of the plan in turn, or answers after its first search."""
        names = [name for asked in task.plan for name in asked]
        turns = [f"<think> find {names[0]}</think><search> {names[0]}</search>"]
        if rng.random() < GUESSES:
            other = rng.choice(self.tasks("train")).golden_answers[0]
            return [*turns, f"<think> guess</think><answer> {other}</answer>"]
        turns += [f"<think> open {name}</think><browse> {name}</browse>" for name in names]
        answer = task.golden_answers[0]
        return [*turns, f"<think> found {answer}</think><answer> {answer}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of the pages and turns too."""
        yield from super().texts(tasks)
        yield from ["<browse></browse> open This page has a fact . There is no more : a page"] * 100
