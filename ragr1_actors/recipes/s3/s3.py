"""s3 (arXiv:2505.14146): a searcher is rewarded by what its documents add to the answers of a frozen generator.

::

    reward = Acc(G(question, kept), gold) - Acc(G(question, naive), gold)        "gain beyond RAG"

``naive`` are the first documents that the question itself finds, ``kept`` those that the searcher has chosen. Each turn
chooses from the documents shown last, and then searches again or is done::

    Where was the director of Silent River born?
    [1] Silent River was filmed by Ana Bell ..   [2] ..   [3] ..
    <keep>[1]</keep><query> Ana Bell</query>                          what the query finds is shown next
    <keep>[1]</keep><done></done>                                     the generator answers

With ``environment.models: {generator: ..}`` the generator is that model. Without one it is a rule: a reader that
answers right if it has all of the evidence, and else says nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar

from envs.base import EnvContext
from envs.measures import exact_match
from envs.options import TopKOptions
from envs.sources import WorldSource
from ragr1_actors import Completion, Record, StepResult, Task, TextEnv, ToolCall
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message, Sampling
from ragr1_actors.recipes.worlds.evidence import evidence_in

STOPS_EARLY, KEEPS_NOTHING = 0.6, 0.3
"""Shares of the demonstrations that are done a search too early, and of their turns that keep nothing."""
_TURN = re.compile(r"\s*<keep>\[([\d,\s]*)\]</keep>\s*(?:<query>(.+?)</query>|<done></done>)\s*", re.DOTALL)
_ANSWER = "Answer in as few words as possible.\n{documents}\nQuestion: {question}"


class SearcherEnv(TextEnv):
    """The search-and-select loop; the generator's answer is that of the trajectory."""

    options_class = TopKOptions
    stop = ("</query>", "</done>")
    measures: ClassVar = {
        "naive": lambda ended: ended.metrics.get("naive_accuracy", 0.0),
        "gain": lambda ended: ended.turns[-1].reward if ended.turns else 0.0,
    }

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt, the retriever and the generator."""
        self._settings, self._context = settings, context
        self._options = TopKOptions.read(settings.options, "environment.options")
        self._turns_left = settings.max_turns
        self._kept: dict[str, Record] = {}

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt, with what the question finds."""
        self._task = task
        self._naive = self._shown = await self._search(task.question)
        return [Message("user", f"{self._settings.prompt.replace('{question}', task.question)}{self._list()}")]

    async def _search(self, query: str) -> list[Record]:
        (found,) = await self._context.retriever.search([query], self._options.top_k)
        return list(found)

    def _list(self) -> str:
        shown = enumerate(self._shown, 1)
        return "".join(f"\n[{label}] {self._context.defuse(one.text)}" for label, one in shown) + "\n"

    async def act(self, turn: Completion) -> StepResult:
        """Keep documents, and search again or let the generator answer."""
        self._turns_left -= 1
        written = _TURN.fullmatch(turn.text)
        labels = {int(label) for label in re.findall(r"\d+", written[1])} if written else set[int]()
        chosen = [one for label, one in enumerate(self._shown, 1) if label in labels]
        self._kept |= {one.id: one for one in chosen}
        calls = (ToolCall("keep", {"labels": sorted(labels)}, records=tuple(chosen)),)
        query = (written[2] or "").strip() if written else ""
        if not query or not self._turns_left:
            return await self._end(calls, action="done" if written else MALFORMED)
        self._shown = await self._search(query)
        search = ToolCall("search", {"query": query, "k": self._options.top_k}, records=tuple(self._shown))
        return StepResult(observation=self._list(), action="search", calls=(*calls, search))

    async def _end(self, calls: tuple[ToolCall, ...], action: str) -> StepResult:
        answer, naive = [await self._answer(records) for records in (list(self._kept.values()), self._naive)]
        right, naive_right = (exact_match(one, self._task.golden_answers) for one in (answer, naive))
        metrics = {"naive_accuracy": naive_right}
        return StepResult(
            terminated=True, action=action, answer=answer, calls=calls, reward=right - naive_right, metrics=metrics
        )

    async def _answer(self, records: Sequence[Record]) -> str:
        if "generator" in self._context.models:
            documents = "\n".join(record.text for record in records)
            asked = _ANSWER.replace("{question}", self._task.question).replace("{documents}", documents)
            return await self._context.models["generator"].chat([Message("user", asked)], Sampling(64, temperature=0.0))
        has_all = evidence_in(self._task, records) == set(self._task.supporting_ids)
        return self._task.golden_answers[0] if has_all else ""


class SearcherWorld(WorldSource):
    """The generated world, with demonstrations of a searcher that often keeps or searches too little."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a query for each thing of the plan, and what is kept of each: the first document."""
        names = [name for asked in task.plan for name in asked]
        if len(names) > 1 and rng.random() < STOPS_EARLY:
            names.pop()
        kept = ["" if rng.random() < KEEPS_NOTHING else "1" for _ in names]
        turns = [f"<query> {name}</query>" for name in names] + ["<done></done>"]
        return [f"<keep>[{label}]</keep>{then}" for label, then in zip(["", *kept], turns, strict=True)]
