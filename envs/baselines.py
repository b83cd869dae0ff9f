"""What a policy that searches is compared with: a direct answer, and standard RAG, one search with the question.

Both are one turn with the same policy, the same retriever and the same scores as ``SearchEnv``::

    direct   prompt with the question ──► answer
    rag      question ──► search ──► prompt with the passages and the question ──► answer

A third baseline, one query per turn, is ``SearchEnv`` with ``max_queries_per_turn=1`` and ``query_format=single``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from envs.actions import ANY_TAG, THINK, clean_queries, open_thought, skip_thoughts
from envs.base import REWARDS, Action, Answer, EnvContext, Malformed, RewardFn, StepResult, TextEnv
from envs.observations import format_observation
from envs.search import retrieval_record
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import Message, RetrievalRecord, Task
from retrieval.base import Passage

DIRECT_PROMPT = (
    "Answer the question below from what you know; nothing can be looked up. You may reason inside <think> and "
    "</think>. Then write only the short answer inside <answer> and </answer>.\nQuestion: {question}"
)
RAG_PROMPT = (
    "Answer the question below. A search for it found the documents inside <information> and </information>; nothing "
    "more can be looked up. You may reason inside <think> and </think>. Then write only the short answer inside "
    "<answer> and </answer>.\n{passages}\nQuestion: {question}"
)


class DirectEnv(TextEnv):
    """One turn without a search. The prompt is ``environment.prompt``, such as ``DIRECT_PROMPT``."""

    stop = ("</answer>",)

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Bind the recipe's ``environment`` section; the retriever of the context is not used."""
        self._settings, self._context = settings, context
        self._reward: RewardFn = load_object(settings.reward, REWARDS)
        self._task: Task | None = None
        self._retrievals: tuple[RetrievalRecord, ...] = ()

    async def reset(self, task: Task) -> list[Message]:
        """Return one user message: the prompt with the question in it."""
        self._task = task
        return [Message("user", self._settings.prompt.replace("{question}", task.question))]

    def parse(self, completion: str) -> Action:
        """Return the text inside the first ``<answer>`` outside thoughts; without the tag, all text behind them.

        A model that was never trained on the tags may leave them out, and answers all the same.
        """
        text = completion[skip_thoughts(completion) :]
        if text.startswith(THINK):
            return Malformed("<think> is never closed")
        _, opening, rest = text.partition("<answer>")
        body, closing, _ = rest.partition("</answer>")
        if opening and not closing:
            return Malformed("<answer> is never closed")
        answer = (body if opening else text).strip()
        if not answer:
            return Malformed("the turn has no answer")
        inner = ANY_TAG.search(answer)
        return Malformed(f"{inner[0]} inside the answer") if inner else Answer(answer)

    def left_open(self, text: str) -> str:
        """Return ``<think>`` inside a thought: the tags in it are text."""
        return open_thought(text)

    async def step(self, queries: list[str]) -> StepResult:
        """End the trajectory: ``parse`` returns no search."""
        return StepResult(truncated=True, retrievals=self._retrievals)

    async def submit(self, answer: str) -> StepResult:
        """End the trajectory with its reward, and with the search that came before the turn, if there was one."""
        assert self._task is not None, "submit() before reset()"
        return StepResult(reward=self._reward(self._task, answer), terminated=True, retrievals=self._retrievals)

    async def malformed(self, reason: str) -> StepResult:
        """End the trajectory without a reward."""
        return StepResult(truncated=True, retrievals=self._retrievals, info={"malformed": 1.0})


class RagEnv(DirectEnv):
    """Standard RAG: one search with the question, its passages in the prompt, one turn to answer.

    The passages replace ``{passages}`` in the prompt, or else follow the prompt. They have
    ``environment.observation_format`` and keep the token budgets of observations.
    """

    async def reset(self, task: Task) -> list[Message]:
        """Search, and return one user message. Raises ``RetrievalError`` if no replica answers."""
        (message,) = await super().reset(task)
        settings = self._settings
        queries = clean_queries([task.question], 1).queries
        asked_s = asyncio.get_running_loop().time()
        found = await self._context.retriever.search(queries, settings.top_k) if queries else []
        waited_s = asyncio.get_running_loop().time() - asked_s
        self._retrievals = tuple(
            retrieval_record(query, settings.top_k, passages, latency_s=waited_s, waited_s=waited_s)
            for query, passages in zip(queries, found, strict=True)
        )
        passages = format_observation(
            queries,
            found,
            self._context.encode,
            max_tokens_per_query=settings.max_observation_tokens_per_query,
            max_tokens=settings.max_observation_tokens,
            observation_format=settings.observation_format,
            defuse=self._context.defuse,
        ).strip()
        before, place, behind = settings.prompt.partition("{passages}")
        if not place:
            return [Message("user", f"{message.content}\n{passages}")]
        # the question is put in last, into both parts: neither it nor a passage may be read as a field
        parts = (part.replace("{question}", task.question) for part in (before, behind))
        return [Message("user", passages.join(parts))]


class NoRetriever:
    """A ``Retriever`` that finds nothing, for environments that never search: no index is built or loaded."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Take no option."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return no passage for each query."""
        return [[] for _ in queries]
