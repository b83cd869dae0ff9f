"""DeepResearcher (arXiv:2504.03160): a policy searches a web with several queries, browses pages, and answers.

A reader that is not trained pages through each page, and notes what helps; the policy sees the notes. The reward::

    -1          where a turn does not think and then act, or there is no answer
    token F1    of the answer elsewhere

``retrieval.type=web`` searches and opens pages by an API, writes down what it says (``mode: record``), and answers from
that alone (``mode: replay``). The toy's web is made up.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from envs.base import EnvContext
from envs.measures import token_f1
from envs.observations import cut_text
from envs.options import PassageOptions
from envs.sources import WorldSource
from ragr1_actors import Completion, Passage, RewardContext, StepResult, StopReason, Task, TextEnv, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message, Record, Sampling
from ragr1_actors.recipes.worlds.titles import TitleRetriever
from retrieval.base import HEADING, Page, PageRetriever

FAULT, MAX_SECTIONS = -1.0, 8  # reward of a wrong format; sections of a page that the reader reads at most
_TURN = re.compile(r"\s*<think>.*?</think>\s*<(search|browse|answer)>(.*)</\1>\s*", re.DOTALL)
_ASK = "Question: {question}\nSection:\n{section}\nWrite a note of what helps, or nothing; last line: more or stop."


async def f1_or_fault(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the reward above."""
    is_valid = trajectory.stop_reason is StopReason.ANSWERED and trajectory.is_well_formed
    return token_f1(trajectory.answer, trajectory.task.golden_answers) if is_valid else FAULT


class ResearchOptions(PassageOptions):
    """``environment.options``."""

    can_browse: bool = True
    """Whether pages can be read; false is for comparison."""


class ResearchEnv(TextEnv):
    """Search, browse, answer. With ``environment.models: {reader: ..}`` that model reads, else a rule."""

    options_class = ResearchOptions
    stop = ("</search>", "</browse>", "</answer>")
    measures: ClassVar = {"browsed": lambda ended: float(sum(call.tool == "browse" for call in ended.calls))}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and the web."""
        self._settings, self._context, self._turns_left = settings, context, settings.max_turns
        self._options = ResearchOptions.read(settings.options, "environment.options")

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt."""
        self._task = task
        return [Message("user", self._settings.prompt.replace("{question}", task.question))]

    async def act(self, turn: Completion) -> StepResult:
        """Search, browse or answer."""
        self._turns_left -= 1
        written = _TURN.fullmatch(turn.text)
        action, body = (written[1], written[2]) if written else ("", "")
        asked = [line.strip() for line in body.splitlines() if line.strip()][: self._options.max_queries_per_turn]
        if not asked:
            return StepResult(action=MALFORMED, truncated=not self._turns_left)
        if action == "answer":
            return StepResult(terminated=True, action=action, answer=body.strip())
        calls = await (self._search(asked) if action == "search" else self._browse(asked))
        told = "".join(f"\n{self._cut(call.result, self._options.max_observation_tokens_per_query)}" for call in calls)
        told = self._cut(told, self._options.max_observation_tokens) + "\n"
        return StepResult(observation=told, action=action, calls=tuple(calls), truncated=not self._turns_left)

    def _cut(self, text: str, max_tokens: int) -> str:
        return cut_text(self._context.defuse(text), max_tokens, lambda part: len(self._context.encode(part)))

    async def _search(self, queries: list[str]) -> list[ToolCall]:
        k = self._options.top_k
        found = await self._context.retriever.search(queries, k)
        texts = ["\n".join(f"{one.title}: {one.text}" for one in hits) for hits in found]
        return [
            ToolCall("search", {"query": query, "k": k}, text, tuple(hits))
            for query, text, hits in zip(queries, texts, found, strict=True)
        ]

    async def _browse(self, titles: list[str]) -> list[ToolCall]:
        web = self._context.retriever
        pages = await web.open_pages(titles) if self._options.can_browse and isinstance(web, PageRetriever) else []
        notes = await asyncio.gather(*map(self._read, pages)) if pages else [""] * len(titles)
        return [ToolCall("browse", {"title": title}, note) for title, note in zip(titles, notes, strict=True)]

    async def _read(self, page: Page) -> str:
        notes = []
        for section in page[:MAX_SECTIONS]:
            note, goes_on = await self._note(section)
            notes.append(note)
            if not goes_on:
                break
        return "\n".join(note for note in notes if note)

    async def _note(self, section: Record) -> tuple[str, bool]:
        """Return a note, and whether to read on."""
        if "reader" not in self._context.models:
            helps = section.title.partition(HEADING)[0] in section.text
            return (section.text, False) if helps else ("", True)
        asked = _ASK.replace("{question}", self._task.question).replace("{section}", section.text)
        said = await self._context.models["reader"].chat([Message("user", asked)], Sampling(256, temperature=0.0))
        note, _, last = said.rstrip().rpartition("\n")
        verdict = last.strip(" .*").lower()
        return (note if verdict in ("more", "stop") else said).strip(), verdict == "more"


class ToyWeb(TitleRetriever):
    """A made-up web over the generated world: its snippets lack the facts, which are on the pages."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return titles with snippets, ``[len(queries)][<= k]``."""
        return [[replace(one, text="a page") for one in hits] for hits in await super().search(queries, k)]

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the sections of each page: an introduction, the fact, and what else there is; none without a page."""
        found = zip(titles, await super().search(titles, 1), strict=True)
        return [Page(one for hit in hits if hit.title == title for one in _sections(hit)) for title, hits in found]


def _sections(passage: Passage) -> list[Passage]:
    texts = {"Introduction": "This page has a fact.", "Fact": passage.text, "More": "There is no more."}
    return [Passage(f"{passage.id}/{name}", f"{passage.title}{HEADING}{name}", text) for name, text in texts.items()]


class WebWorld(WorldSource):
    """Questions of the world, with demonstrations that search and browse, or guess."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt that searches for its first page, and browses where the world's would search."""
        *searches, answer = super().demonstrate(task, rng)
        return [*searches[:1], *(turn.replace("search>", "browse>") for turn in searches), answer]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of the snippets and of the turns that browse too."""
        yield from super().texts(tasks)
        yield from ["<browse></browse> : a page"] * 100
