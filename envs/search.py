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
from dataclasses import replace

from envs.base import EnvContext, StepResult, TextEnv, check_result
from envs.grammars.tags import (
    FORMATS,
    STOP_TAGS,
    Action,
    Answer,
    Malformed,
    QueryStream,
    Search,
    clean_queries,
    open_thought,
    parse_action,
    read_answer,
)
from envs.observations import format_observation
from envs.options import SearchOptions
from envs.turn_searches import TurnSearches, search_call, search_metrics
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import named
from ragr1_actors.core.types import MALFORMED, Completion, Message, Task, ToolCall
from retrieval.base import Passage

LAST_TURN_NOTICE = "\nNo searches are left. Answer now.\n"
MALFORMED_NOTICE = "\nWrite either <search> queries</search> or <answer> answer</answer>.\n"


def search_prompt(prompt: str, options: SearchOptions, task: Task) -> list[Message]:
    """Return one user message: the recipe's ``prompt`` with the question in it."""
    prompt = prompt.replace("{max_queries}", str(options.max_queries_per_turn))
    prompt = prompt.replace("{query_format}", FORMATS[options.query_format].in_words)
    return [Message("user", prompt.replace("{question}", task.question))]  # last: a question may have braces


class SearchEnv(TextEnv):
    """Search with a list of queries, then answer. One instance is one trajectory.

    A subclass that parses another grammar than ``options.query_format``, or retrieves in another way, should
    override ``peek`` too: a search that ``step`` does not need is cancelled, but was started for nothing.
    """

    options_class: type[SearchOptions] = SearchOptions

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Take the recipe's ``environment`` section and the runner's retriever and tokenizer."""
        self._settings = settings
        self.options = self.options_class.read(settings.options, "environment.options")
        """Checked values of ``environment.options``."""
        self._context = context
        is_baseline = self.options.mode != "search"
        self._turns_left = 1 if is_baseline else settings.max_turns
        self.stop = STOP_TAGS[1:] if is_baseline else STOP_TAGS
        self._called_before: tuple[ToolCall, ...] = ()
        self._begin_turn()

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt of ``search_prompt``; in the mode ``rag`` it has passages."""
        if self.options.mode != "rag":
            return search_prompt(self._settings.prompt, self.options, task)
        passages = await self._search_question(task.question)
        before, place, behind = self._settings.prompt.partition("{passages}")
        parts = (before, behind) if place else (f"{before}\n", "")
        # the passages are put in last: neither the question nor a passage may be read as a field
        asked = [search_prompt(part, self.options, task)[0].content for part in parts]
        return [Message("user", passages.join(asked))]

    async def act(self, turn: Completion) -> StepResult:
        """Parse the turn's one action, then call ``step``, ``submit`` or ``malformed``."""
        match action := self.parse(turn.text):
            case Search(queries):
                return replace(check_result(await self.step(list(queries)), self.step), action="search")
            case Answer(text):
                return replace(check_result(await self.submit(text), self.submit), action="answer", answer=text)
            case Malformed(reason):
                return replace(check_result(await self.malformed(reason), self.malformed), action=MALFORMED)
        raise ConfigError(f"{named(self.parse)} returned {action!r}, expected Search, Answer or Malformed")

    def parse(self, completion: str) -> Action:
        """Return the turn's one action."""
        if self.options.mode == "search":
            return parse_action(completion, self.options.query_format)
        return read_answer(completion)

    def left_open(self, text: str) -> str:
        """Return ``<think>`` inside a thought, because the tags in a thought are text."""
        return open_thought(text)

    def peek(self, partial: str) -> None:
        """Start a search for each query of this turn that is complete."""
        if self._turns_left > 1:  # on the last turn no search is answered
            for query in self._stream.feed(partial):
                self._searches.begin(query)

    async def step(self, queries: list[str]) -> StepResult:
        """Clean the queries of one turn, answer them in parallel and lay the passages out."""
        searches = self._end_turn()
        try:
            return await self._search(queries, searches)
        finally:
            searches.cancel()

    async def _search(self, queries: list[str], searches: TurnSearches) -> StepResult:
        ended = asyncio.get_running_loop().time()
        if self._turns_left == 0:
            return StepResult(truncated=True, metrics={"unanswered_search": 1.0})
        clean = clean_queries(queries, self.options.max_queries_per_turn)
        metrics = {
            "duplicate_queries": float(clean.num_duplicate),
            "empty_queries": float(clean.num_empty),
            "queries_over_limit": float(clean.num_over_limit),
        }
        if not clean.queries:
            return StepResult(notice=MALFORMED_NOTICE + self._notice(), metrics={**metrics, "malformed": 1.0})
        results = await searches.answer(clean.queries)
        observation = self._laid_out(clean.queries, [result.passages for result in results])
        calls = tuple(
            result.call(query, self.options.top_k, ended) for query, result in zip(clean.queries, results, strict=True)
        )
        return StepResult(
            observation=observation, notice=self._notice(), calls=calls, metrics=metrics | search_metrics(calls)
        )

    async def _search_question(self, question: str) -> str:
        """Return the passages that the question finds, laid out as an observation, and keep their record."""
        queries, loop = clean_queries([question], 1).queries, asyncio.get_running_loop()
        asked_s = loop.time()
        found = await self._context.retriever.search(queries, self.options.top_k) if queries else []
        waited_s = loop.time() - asked_s
        self._called_before = tuple(
            search_call(query, self.options.top_k, passages, latency_s=waited_s, waited_s=waited_s)
            for query, passages in zip(queries, found, strict=True)
        )
        return self._laid_out(queries, found).strip()

    def _laid_out(self, queries: Sequence[str], found: Sequence[Sequence[Passage]]) -> str:
        return format_observation(
            queries,
            found,
            self._context.encode,
            max_tokens_per_query=self.options.max_observation_tokens_per_query,
            max_tokens=self.options.max_observation_tokens,
            observation_format=self.options.observation_format,
            defuse=self._context.defuse,
        )

    async def submit(self, answer: str) -> StepResult:
        """End the trajectory; its last call is the search before the turn, if there was one."""
        self._end_turn().cancel()
        return StepResult(terminated=True, calls=self._called_before)

    async def malformed(self, reason: str) -> StepResult:
        """Tell the policy the format of a turn; the trajectory continues while turns are left."""
        self._end_turn().cancel()
        if self._turns_left == 0:
            return StepResult(truncated=True, calls=self._called_before, metrics={"malformed": 1.0})
        return StepResult(notice=MALFORMED_NOTICE + self._notice(), metrics={"malformed": 1.0})

    def close(self) -> None:
        """Cancel the searches of a turn that did not end."""
        self._searches.cancel()

    def _begin_turn(self) -> None:
        options = self.options
        self._stream = QueryStream(options.query_format)
        self._searches = TurnSearches(self._context.retriever, options.top_k, options.max_queries_per_turn)

    def _end_turn(self) -> TurnSearches:
        """Count the turn, prepare the next one and return the searches that this one started."""
        ended = self._searches
        self._begin_turn()
        self._turns_left -= 1
        return ended

    def _notice(self) -> str:
        return LAST_TURN_NOTICE if self._turns_left == 1 else ""
