"""DeepResearcher (arXiv:2504.03160): a policy searches a web with several queries, browses pages, and answers.

A reader that is not trained pages through each page, and notes what helps; the policy sees the notes. The reward::

    -1          where a turn does not think and then act, or there is no answer
    token F1    of the answer elsewhere

``Recorded`` is a retriever around that of the web, which writes down what it says, or answers from that alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from envs.base import EnvContext
from envs.measures import token_f1
from envs.options import PassageOptions
from ragr1_actors import Completion, Passage, RewardContext, StepResult, StopReason, Task, TextEnv, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.types import MALFORMED, Message, Record, Sampling
from retrieval.base import HEADING, Page, PageRetriever
from retrieval.local import inner_retriever

FAULT, MAX_SECTIONS = -1.0, 8
"""Reward of a wrong format; sections of a page that the reader reads at most."""
_TURN = re.compile(r"\s*<think>.*?</think>\s*<(search|browse|answer)>(.*)</\1>\s*", re.DOTALL)
_ASK = (
    "Question: {question}\nSection:\n{section}\nWrite a note of what helps, or nothing; on the last line more or stop."
)


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
        told = "".join(f"\n{self._context.defuse(call.result)}" for call in calls) + "\n"
        return StepResult(observation=told, action=action, calls=tuple(calls), truncated=not self._turns_left)

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
        return note.strip(), last.strip().lower() == "more"


class Recorded:
    """A web that is written down. ``retrieval.options={inner: {type: ..}, file: FILE}``; without inner it replays."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read what the file has, and open the inner retriever."""
        self._file = Path(options["file"])
        lines = self._file.read_text("utf-8").splitlines() if self._file.exists() else []
        self._known: dict[str, Any] = dict(map(json.loads, lines))
        self._inner: Any = inner_retriever(options["inner"]) if "inner" in options else None

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return what each query finds, ``[len(queries)][<= k]``; ``RetrievalError`` if a replay does not know it."""
        return await self._recorded(
            [f"search {k} {query}" for query in queries], queries, lambda new: self._inner.search(new, k)
        )

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the pages; ``RetrievalError`` if a replay does not know one."""
        found = await self._recorded(
            [f"page {title}" for title in titles], titles, lambda new: self._inner.open_pages(new)
        )
        return [Page(hits) for hits in found]

    async def _recorded(self, keys: list[str], asked: list[str], ask: Any) -> list[list[Passage]]:
        new = {key: one for key, one in zip(keys, asked, strict=True) if key not in self._known}
        if new and self._inner is None:
            raise RetrievalError(
                f"{self._file} has no record of {next(iter(new))!r}; record it with an inner retriever"
            )
        for key, hits in zip(new, await ask(list(new.values())) if new else [], strict=True):
            self._known[key] = [[one.id, one.title, one.text, one.score] for one in hits]
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, self._known[key]], ensure_ascii=False) + "\n")
        return [[Passage(*fields) for fields in self._known[key]] for key in keys]
