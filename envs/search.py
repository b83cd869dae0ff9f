"""SearchEnv: the environment of RAG-R1. The policy thinks, searches with up to a few queries at once, and answers.

Retrieval starts while the turn is still being sampled, for each query as soon as it is complete::

    tokens      <search> Ana Bell ⏎ Bo Cole ⏎ Cy Dow </search>│ step()
    "Ana Bell"                     ├──────── search ────────┤ │            waited_s = 0
    "Bo Cole"                               ├─────── search ──┼───┤        waited_s < latency_s
    "Cy Dow"                                                 ├┼─── search ─────┤
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from envs.actions import STOP_TAGS, QueryCleaner, QueryStream, clean_queries, open_thought, parse_action
from envs.base import REWARDS, Action, EnvContext, RewardFn, StepResult, TextEnv
from envs.observations import format_observation
from ragr1_actors.core.config import EnvironmentSettings, QueryFormat
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import Message, RetrievalRecord, Task
from retrieval.base import Hits, Passage, Retriever

LAST_TURN_NOTICE = "\nNo searches are left. Answer now.\n"
MALFORMED_NOTICE = "\nWrite either <search> queries</search> or <answer> answer</answer>.\n"
_FORMATS_IN_WORDS: dict[QueryFormat, str] = {
    "lines": "one a line",
    "comma": "separated by commas",
    "json": "as a JSON list of strings",
    "single": "as plain text",
}


def search_prompt(settings: EnvironmentSettings, task: Task) -> list[Message]:
    """Return one user message: the recipe's prompt with the question in it."""
    prompt = settings.prompt.replace("{max_queries}", str(settings.max_queries_per_turn))
    prompt = prompt.replace("{query_format}", _FORMATS_IN_WORDS[settings.query_format])
    return [Message("user", prompt.replace("{question}", task.question))]  # last: a question may hold braces


class SearchEnv(TextEnv):
    """Search with a list of queries, then answer. One instance is one trajectory.

    A subclass that parses another grammar than ``environment.query_format``, or retrieves in another way, should
    override ``peek`` too: a search that ``step`` does not need is cancelled, but was started for nothing.
    """

    stop = STOP_TAGS

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Bind the recipe's ``environment`` section and the runner's retriever and tokenizer."""
        self._settings = settings
        self._context = context
        self._reward: RewardFn = load_object(settings.reward, REWARDS)
        self._turns_left = settings.max_turns
        self._task: Task | None = None
        self._searches = _TurnSearches(settings, context.retriever)

    async def reset(self, task: Task) -> list[Message]:
        """Return ``search_prompt``."""
        self._task = task
        return search_prompt(self._settings, task)

    def parse(self, completion: str) -> Action:
        """Read the turn's one action."""
        return parse_action(completion, self._settings.query_format)

    def left_open(self, text: str) -> str:
        """Return ``<think>`` inside a thought: the tags in it are text."""
        return open_thought(text)

    def peek(self, partial: str) -> None:
        """Start a search for each query of this turn that is complete."""
        if self._turns_left > 1:  # on the last turn no search is answered
            self._searches.peek(partial)

    async def step(self, queries: list[str]) -> StepResult:
        """Clean the queries of one turn, answer them in parallel and lay the passages out."""
        searches = self._end_turn()
        try:
            return await self._search(queries, searches)
        finally:
            searches.cancel()

    async def _search(self, queries: list[str], searches: _TurnSearches) -> StepResult:
        ended = asyncio.get_running_loop().time()
        if self._turns_left == 0:
            return StepResult(truncated=True, info={"unanswered_search": 1.0})
        clean = clean_queries(queries, self._settings.max_queries_per_turn)
        info = {
            "duplicate_queries": float(clean.num_duplicate),
            "empty_queries": float(clean.num_empty),
            "queries_over_limit": float(clean.num_over_limit),
        }
        if not clean.queries:
            return StepResult(notice=MALFORMED_NOTICE + self._notice(), info={**info, "malformed": 1.0})
        results = await searches.answer(clean.queries)
        observation = format_observation(
            clean.queries,
            [result.passages for result in results],
            self._context.encode,
            max_tokens_per_query=self._settings.max_observation_tokens_per_query,
            max_tokens=self._settings.max_observation_tokens,
            observation_format=self._settings.observation_format,
            defuse=self._context.defuse,
        )
        records = tuple(
            result.record(query, self._settings.top_k, ended)
            for query, result in zip(clean.queries, results, strict=True)
        )
        info["cached_queries"] = float(sum(record.is_cached for record in records))
        info["time/retrieval_s"] = sum(record.latency_s for record in records)
        info["time/retrieval_waited_s"] = max(record.waited_s for record in records)
        return StepResult(observation=observation, notice=self._notice(), retrievals=records, info=info)

    async def submit(self, answer: str) -> StepResult:
        """End the trajectory with its reward."""
        assert self._task is not None, "submit() before reset()"
        self._end_turn().cancel()
        return StepResult(reward=self._reward(self._task, answer), terminated=True)

    async def malformed(self, reason: str) -> StepResult:
        """Tell the policy the format of a turn; the trajectory continues while turns are left."""
        self._end_turn().cancel()
        if self._turns_left == 0:
            return StepResult(truncated=True, info={"malformed": 1.0})
        return StepResult(notice=MALFORMED_NOTICE + self._notice(), info={"malformed": 1.0})

    def close(self) -> None:
        """Cancel the searches of a turn that never ended."""
        self._searches.cancel()

    def _end_turn(self) -> _TurnSearches:
        """Count the turn, prepare the next one and return the searches that this one started."""
        ended, self._searches = self._searches, _TurnSearches(self._settings, self._context.retriever)
        self._turns_left -= 1
        return ended

    def _notice(self) -> str:
        return LAST_TURN_NOTICE if self._turns_left == 1 else ""


@dataclass(frozen=True, slots=True)
class _Result:
    """The passages of one query, and when they arrived."""

    passages: list[Passage]
    latency_s: float
    found_at: float
    """By the clock of the event loop."""

    def record(self, query: str, k: int, turn_ended: float) -> RetrievalRecord:
        waited_s = min(self.latency_s, max(0.0, self.found_at - turn_ended))
        return retrieval_record(query, k, self.passages, latency_s=self.latency_s, waited_s=waited_s)


def retrieval_record(
    query: str, k: int, found: Sequence[Passage], *, latency_s: float, waited_s: float
) -> RetrievalRecord:
    """Return what a trajectory keeps of one query that found ``found``, at most ``k`` passages, best first."""
    return RetrievalRecord(
        query=query,
        k=k,
        passage_ids=tuple(passage.id for passage in found),
        scores=tuple(passage.score for passage in found),
        titles=tuple(passage.title for passage in found),
        texts=tuple(passage.text for passage in found),
        latency_s=latency_s,
        waited_s=waited_s,
        is_cached=found.is_cached if isinstance(found, Hits) else False,
        index_version=found.index_version if isinstance(found, Hits) else "",
    )


class _TurnSearches:
    """The searches of one turn, started early or in ``step``."""

    def __init__(self, settings: EnvironmentSettings, retriever: Retriever) -> None:
        self._retriever = retriever
        self._top_k = settings.top_k
        self._stream = QueryStream(settings.query_format)
        self._cleaner = QueryCleaner(settings.max_queries_per_turn)
        self._tasks: dict[str, asyncio.Task[dict[str, _Result]]] = {}  # by query; queries asked together share one

    def peek(self, partial: str) -> None:
        """Start a search for each query that was completed since the last call."""
        for raw in self._stream.feed(partial):
            if self._cleaner.add(raw):
                self._begin(self._cleaner.queries[-1:])

    async def answer(self, queries: Sequence[str]) -> list[_Result]:
        """Return the result of each query; those without a search yet are searched in one call."""
        for query in self._tasks.keys() - set(queries):
            self._tasks.pop(query).cancel()
        late = [query for query in queries if query not in self._tasks]
        if late:
            self._begin(late)
        found: dict[str, _Result] = {}
        for results in await asyncio.gather(*dict.fromkeys(self._tasks.values())):
            found |= results
        return [found[query] for query in queries]

    def cancel(self) -> None:
        """Cancel the searches that are still running."""
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, queries: list[str]) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._search(queries, loop.time()))
        task.add_done_callback(_note_failure)
        self._tasks |= dict.fromkeys(queries, task)

    async def _search(self, queries: list[str], asked_at: float) -> dict[str, _Result]:
        results = await self._retriever.search(queries, self._top_k)
        found_at = asyncio.get_running_loop().time()
        return {
            query: _Result(passages, found_at - asked_at, found_at)
            for query, passages in zip(queries, results, strict=True)
        }


def _note_failure(task: asyncio.Task[dict[str, _Result]]) -> None:
    """Retrieve the exception, so that asyncio does not report that of a search whose result is not needed."""
    if not task.cancelled():
        task.exception()
