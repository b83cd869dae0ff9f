"""SearchEnv: the environment of RAG-R1. The policy thinks, searches with up to a few queries at once, and answers.

Retrieval starts while the turn is still being sampled, for each query as soon as it is complete::

    tokens      <search> Ana Bell ⏎ Bo Cole ⏎ Cy Dow </search>│ step()
    "Ana Bell"                     ├──────── search ────────┤ │            waited_s = 0
    "Bo Cole"                               ├─────── search ──┼───┤        waited_s < latency_s
    "Cy Dow"                                                 ├┼─── search ─────┤
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from envs.base import EnvContext, StepResult, TextEnv, check_result
from envs.grammars.tags import (
    FORMATS,
    STOP_TAGS,
    Action,
    Answer,
    Malformed,
    QueryStream,
    Search,
    open_thought,
    parse_action,
    read_answer,
)
from envs.observations import format_observation
from envs.options import ObservationFormat, PassageOptions, SearchOptions
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.content import Content, joined, text_of
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.process.driver_loop import note_error
from ragr1_actors.core.resolve import named
from ragr1_actors.core.types import MALFORMED, Completion, Message, Task, ToolCall
from retrieval.base import SEARCH, Hits, Passage, Retriever

LAST_TURN_NOTICE = "\nNo searches are left. Answer now.\n"
MALFORMED_NOTICE = "\nWrite either <search> queries</search> or <answer> answer</answer>.\n"
# Control characters and halves of surrogate pairs: JSON can write both, and neither can be searched or encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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
        passages = text_of(await self._search_question(task.question)).strip()
        before, place, behind = self._settings.prompt.partition("{passages}")
        parts = (before, behind) if place else (f"{before}\n", "")
        # the passages are put in last: neither the question nor a passage may be read as a field
        asked = [search_prompt(part, self.options, task)[0].text for part in parts]
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
        if not clean.queries:
            return StepResult(notice=MALFORMED_NOTICE + self._notice(), metrics={**clean.counts, "malformed": 1.0})
        found = await searches.answer(clean.queries)
        calls = tuple(result.call(query, self.options.top_k, ended) for query, result in found.items())
        return StepResult(
            observation=observed(found, self._context, self.options, self.options.observation_format),
            notice=self._notice(),
            calls=calls,
            metrics=clean.counts | search_metrics(calls),
        )

    async def _search_question(self, question: str) -> Content:
        """Return the passages that the question finds, laid out as an observation, and keep their record."""
        asked = asyncio.get_running_loop().time()
        found = await self._searches.answer(clean_queries([question], 1).queries)
        self._called_before = tuple(one.call(query, self.options.top_k, asked) for query, one in found.items())
        return observed(found, self._context, self.options, self.options.observation_format)

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


# -- searches of a turn ------------------------------------------------------------------------------------------------


class QueryCleaner:
    """Keeps the distinct queries of one turn, up to a limit, and counts what is dropped."""

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` queries."""
        self.queries: list[str] = []
        self.counts = {"duplicate_queries": 0.0, "empty_queries": 0.0, "queries_over_limit": 0.0}
        self._limit = limit
        self._seen: set[str] = set()

    def add(self, query: str) -> bool:
        """Squeeze white space and control characters; keep the query if it is not empty, new, and within the limit."""
        squeezed = " ".join(_UNPRINTABLE.sub(" ", query).split())
        key = squeezed.casefold()
        if not squeezed:
            self.counts["empty_queries"] += 1
        elif key in self._seen:
            self.counts["duplicate_queries"] += 1
        elif len(self.queries) == self._limit:
            self._seen.add(key)
            self.counts["queries_over_limit"] += 1
        else:
            self._seen.add(key)
            self.queries.append(squeezed)
            return True
        return False


def clean_queries(queries: Sequence[str], limit: int) -> QueryCleaner:
    """Return the kept queries of a turn, with the counts of the dropped ones.

    ``clean_queries(["Ana Bell", " Bo  Cole", "ana bell", ""], 3).queries == ["Ana Bell", "Bo Cole"]``
    """
    cleaner = QueryCleaner(limit)
    for query in queries:
        cleaner.add(query)
    return cleaner


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages of one query, and the time when they arrived."""

    passages: list[Passage]
    latency_s: float
    found_at: float
    """Time of arrival in seconds by the clock of the event loop."""

    def call(self, query: str, k: int, turn_ended: float) -> ToolCall:
        """Return the record of the query for the trajectory; the turn ended at ``turn_ended`` by the same clock."""
        found = self.passages
        return ToolCall(
            tool=SEARCH,
            arguments={"query": query, "k": k},
            records=tuple(found),
            latency_s=self.latency_s,
            waited_s=min(self.latency_s, max(0.0, self.found_at - turn_ended)),
            is_cached=found.is_cached if isinstance(found, Hits) else False,
            version=found.index_version if isinstance(found, Hits) else "",
        )


def observed(
    found: Mapping[str, SearchResult],
    context: EnvContext,
    options: PassageOptions,
    observation_format: ObservationFormat = "grouped",
    *,
    is_tagged: bool = True,
) -> Content:
    """Return the passages of each query, laid out by ``format_observation``, and their images after them."""
    text = format_observation(
        list(found),
        [one.passages for one in found.values()],
        context.encode,
        max_tokens_per_query=options.max_observation_tokens_per_query,
        max_tokens=options.max_observation_tokens,
        observation_format=observation_format,
        is_tagged=is_tagged,
        defuse=context.defuse,
    )
    images = [(one.image,) for result in found.values() for one in result.passages if one.image is not None]
    return joined(text, *images)


def search_metrics(calls: Sequence[ToolCall]) -> dict[str, float]:
    """Return the counts and times of the searches of one turn, which run at the same time."""
    return {
        "cached_queries": float(sum(call.is_cached for call in calls)),
        "time/retrieval_s": sum(call.latency_s for call in calls),
        "time/retrieval_waited_s": max(call.waited_s for call in calls),
    }


class TurnSearches:
    """The searches of one turn, started early or when it ends."""

    def __init__(self, retriever: Retriever, top_k: int, max_queries: int) -> None:
        """Take the retriever; at most ``max_queries`` searches begin early."""
        self._retriever, self._top_k = retriever, top_k
        self._cleaner = QueryCleaner(max_queries)
        self._tasks: dict[str, asyncio.Task[dict[str, SearchResult]]] = {}  # by query; queries asked together share one

    def begin(self, query: str) -> None:
        """Start the search of a query, as the turn wrote it, unless it is empty, has begun, or is over the limit."""
        if self._cleaner.add(query):
            self._begin(self._cleaner.queries[-1:])

    async def answer(self, queries: Sequence[str]) -> dict[str, SearchResult]:
        """Return the result of each query; queries whose search has not begun are searched in one call."""
        for query in self._tasks.keys() - set(queries):
            self._tasks.pop(query).cancel()
        late = [query for query in queries if query not in self._tasks]
        if late:
            self._begin(late)
        found: dict[str, SearchResult] = {}
        for results in await asyncio.gather(*dict.fromkeys(self._tasks.values())):
            found |= results
        return {query: found[query] for query in queries}

    def cancel(self) -> None:
        """Cancel the searches that are still running."""
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, queries: list[str]) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._search(queries, loop.time()))
        task.add_done_callback(note_error)
        self._tasks |= dict.fromkeys(queries, task)

    async def _search(self, queries: list[str], asked_at: float) -> dict[str, SearchResult]:
        results = await self._retriever.search(queries, self._top_k)
        found_at = asyncio.get_running_loop().time()
        return {
            query: SearchResult(passages, found_at - asked_at, found_at)
            for query, passages in zip(queries, results, strict=True)
        }
