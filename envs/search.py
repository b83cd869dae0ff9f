"""SearchEnv: the environment of RAG-R1. The policy thinks, searches with up to a few queries at once, and answers."""

from __future__ import annotations

import time

from envs.actions import STOP_TAGS, clean_queries, parse_action
from envs.base import Action, EnvContext, StepResult, TextEnv
from envs.rewards import REWARDS, RewardFn
from ragr1_actors.config import EnvironmentSettings
from ragr1_actors.plugins import load_object
from ragr1_actors.types import EncodeFn, Message, RetrievalRecord, Task
from retrieval.base import Passage

LAST_TURN_NOTICE = "\nNo searches are left. Answer now.\n"
MALFORMED_NOTICE = "\nWrite either <search> queries</search> or <answer> answer</answer>.\n"


class SearchEnv(TextEnv):
    """Search with a list of queries, then answer. One instance is one trajectory."""

    stop = STOP_TAGS

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Bind the recipe's ``environment`` section and the runner's retriever and tokenizer."""
        self._settings = settings
        self._context = context
        self._reward: RewardFn = load_object(settings.reward, REWARDS)
        self._turns_left = settings.max_turns
        self._task: Task | None = None

    async def reset(self, task: Task) -> list[Message]:
        """Return one user message: the recipe's prompt with the question in it."""
        self._task = task
        prompt = self._settings.prompt.replace("{question}", task.question)
        return [Message("user", prompt.replace("{max_queries}", str(self._settings.max_queries_per_turn)))]

    def parse(self, completion: str) -> Action:
        """Read the turn's one action."""
        return parse_action(completion, self._settings.query_separator)

    async def step(self, queries: list[str]) -> StepResult:
        """Clean the queries of one turn, answer them in parallel and lay the passages out."""
        self._turns_left -= 1
        if self._turns_left == 0:
            return StepResult(truncated=True, info={"unanswered_search": 1.0})
        clean = clean_queries(queries, self._settings.max_queries_per_turn)
        info = {
            "duplicate_queries": float(clean.num_duplicate),
            "empty_queries": float(clean.num_empty),
            "queries_over_limit": float(clean.num_over_limit),
        }
        if not clean.queries:
            return StepResult(notice=MALFORMED_NOTICE, info={**info, "malformed": 1.0})
        started = time.perf_counter()
        results = await self._context.retriever.search(list(clean.queries), self._settings.top_k)
        latency_s = time.perf_counter() - started
        observation = format_observation(
            clean.queries,
            results,
            self._context.encode,
            max_tokens_per_query=self._settings.max_observation_tokens_per_query,
            max_tokens=self._settings.max_observation_tokens,
        )
        records = tuple(
            RetrievalRecord(query, tuple(p.id for p in passages), tuple(p.score for p in passages), latency_s)
            for query, passages in zip(clean.queries, results, strict=True)
        )
        return StepResult(observation=observation, notice=self._notice(), retrievals=records, info=info)

    async def submit(self, answer: str) -> StepResult:
        """End the trajectory with its reward."""
        assert self._task is not None, "submit() before reset()"
        return StepResult(reward=self._reward(self._task, answer), terminated=True)

    async def malformed(self, reason: str) -> StepResult:
        """Tell the policy what a turn looks like and let it go on, while turns are left."""
        self._turns_left -= 1
        if self._turns_left == 0:
            return StepResult(truncated=True, info={"malformed": 1.0})
        return StepResult(notice=MALFORMED_NOTICE + self._notice(), info={"malformed": 1.0})

    def _notice(self) -> str:
        return LAST_TURN_NOTICE if self._turns_left == 1 else ""


def format_observation(
    queries: tuple[str, ...],
    results: list[list[Passage]],
    encode: EncodeFn,
    *,
    max_tokens_per_query: int,
    max_tokens: int,
) -> str:
    r"""Write the retrieved passages grouped by query, inside a tag that is always closed.

    ``"\n<information>\nQuery: Ana Bell\n(1) Ana Bell: Ana Bell was born in Riga.\n</information>\n"``

    Each query's block has at most ``max_tokens_per_query`` tokens and the whole at most ``max_tokens``; what is over is
    cut at the end of a block, between words, so that no character is ever broken.
    """
    whole = [_block(query, passages) for query, passages in zip(queries, results, strict=True)]
    observation = _wrap(whole)
    if len(encode(observation)) <= min(
        max_tokens_per_query, max_tokens
    ):  # nearly always, and one call of the tokenizer says so
        return observation
    budget = min(max_tokens_per_query, max_tokens // len(queries))
    while True:
        observation = _wrap([_cut(block, budget, encode) for block in whole])
        excess = len(encode(observation)) - max_tokens
        if excess <= 0 or budget == 0:
            return observation
        budget = max(0, budget - max(1, excess // len(queries)))


def _wrap(blocks: list[str]) -> str:
    return "\n<information>\n" + "\n".join(blocks) + "\n</information>\n"


def _block(query: str, passages: list[Passage]) -> str:
    lines = [f"({rank}) {p.title}: {_defuse(p.text)}" for rank, p in enumerate(passages, 1)]
    return "\n".join([f"Query: {query}", *lines])


def _defuse(text: str) -> str:
    """Passages may hold the protocol's own tags; inside an observation they lose their brackets."""
    for tag in ("think", "search", "information", "answer"):
        text = text.replace(f"<{tag}>", f"({tag})").replace(f"</{tag}>", f"(/{tag})")
    return text


def _cut(text: str, max_tokens: int, encode: EncodeFn) -> str:
    """Return the longest prefix of whole words of ``text`` that encodes to at most ``max_tokens`` tokens."""
    if len(encode(text)) <= max_tokens:
        return text
    ends = [i for i, char in enumerate(text) if char.isspace()]
    low, high = 0, len(ends)
    while low < high:  # ends[:low] fit
        middle = (low + high) // 2
        if len(encode(text[: ends[middle]])) <= max_tokens:
            low = middle + 1
        else:
            high = middle
    return text[: ends[low - 1]] if low else ""
