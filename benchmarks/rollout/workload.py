"""The workload of the rollout benchmark, drawn from one stated distribution.

* turns of a trajectory: 2, 3 or 4, equally likely; all but the last search, three queries each
* tokens of a turn: log-normal, median 60, sigma 0.6, clipped to 10-200
* latency of a search (the queries of one call together): log-normal, median 0.1 s, sigma 0.5
* prompt: about 110 tokens; observation: about 100 tokens

Every draw is a function of the seed and of a name (of a trajectory, a turn, a query), so that both sides of a
comparison, and every actor of a fleet, draw the same without a message.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ragr1_actors.core.types import Task
from retrieval.base import Passage

SEED = 20250707
MIN_TURNS, MAX_TURNS = 2, 4
TURN_TOKENS_MEDIAN, TURN_TOKENS_SIGMA = 60, 0.6
MIN_TURN_TOKENS, MAX_TURN_TOKENS = 10, 200
SEARCH_MEDIAN_S, SEARCH_SIGMA = 0.1, 0.5
NUM_QUERIES = 3
NUM_QUESTION_WORDS = 100
NUM_PASSAGE_WORDS = 14
VOCAB_SIZE = 8192
NUM_WORDS = 7900
"""Few enough that each is a token of the policy's vocabulary, beside the bytes and the tags."""
DESCRIPTION = (
    f"seed {SEED}; {MIN_TURNS}-{MAX_TURNS} turns of log-normal({TURN_TOKENS_MEDIAN}, {TURN_TOKENS_SIGMA}) tokens in "
    f"{MIN_TURN_TOKENS}-{MAX_TURN_TOKENS}, a search of log-normal({SEARCH_MEDIAN_S} s, {SEARCH_SIGMA}) between two"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one trajectory does: ``Plan("bench/7", (48, 91, 33))`` searches twice and then answers."""

    name: str
    turn_tokens: tuple[int, ...]  # [num_turns]

    @property
    def num_searches(self) -> int:
        return len(self.turn_tokens) - 1

    def queries(self, turn: int, count: int = NUM_QUERIES) -> tuple[str, ...]:
        """What turn ``turn`` asks: two words per query."""
        draw = _draw("queries", self.name, str(turn))
        return tuple(" ".join(draw.sample(words(), 2)) for _ in range(count))


def plan(name: str, turn_tokens_median: float = TURN_TOKENS_MEDIAN) -> Plan:
    """Draw the trajectory ``name``."""
    draw = _draw("plan", name)
    num_turns = draw.randint(MIN_TURNS, MAX_TURNS)
    tokens = (round(draw.lognormvariate(math.log(turn_tokens_median), TURN_TOKENS_SIGMA)) for _ in range(num_turns))
    return Plan(name, tuple(min(MAX_TURN_TOKENS, max(MIN_TURN_TOKENS, count)) for count in tokens))


def task(name: str) -> Task:
    """The task ``name``, with a question of about as many tokens as a real prompt has."""
    return Task(name, " ".join(_draw("question", name).choices(words(), k=NUM_QUESTION_WORDS)), ("none",))


def search_latency_s(queries: list[str] | tuple[str, ...]) -> float:
    """How long the search for ``queries``, one call, takes."""
    return _draw("latency", queries[0]).lognormvariate(math.log(SEARCH_MEDIAN_S), SEARCH_SIGMA)


def passages(query: str, k: int) -> list[Passage]:
    """What is found, always the same for a query."""
    draw = _draw("passages", query)
    found = []
    for rank in range(k):
        title, *text = draw.choices(words(), k=1 + NUM_PASSAGE_WORDS)
        found.append(Passage(f"{query}/{rank}", title, " ".join(text), 1.0 / (1 + rank)))
    return found


class SlowRetriever:
    """A retriever of any width whose searches take as long as was drawn. Keeps when each began and ended."""

    def __init__(self) -> None:
        self.searches: list[tuple[float, float]] = []
        """``time.perf_counter()`` at both ends of each."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        started = time.perf_counter()
        await asyncio.sleep(search_latency_s(queries))
        self.searches.append((started, time.perf_counter()))
        return [passages(query, k) for query in queries]


def make_policy(directory: Path) -> None:
    """Write a random policy of about 25 million parameters (100 MB): the model is the cost, not the Python around it.

    vLLM's CPU build wants heads of 32 or more; these have 64.
    """
    from ragr1_actors.planning.tiny_policy import make_tiny_policy

    make_tiny_policy(
        directory,
        [" " + " ".join(words())],
        seed=SEED,
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        max_position_embeddings=2048,
    )


@cache
def words() -> list[str]:
    """The words that all texts are made of, each one token with the blank before it."""
    draw = _draw("words")
    letters = "abcdefghijklmnopqrstuvwxyz"
    found: dict[str, None] = {}
    while len(found) < NUM_WORDS:
        found["".join(draw.choices(letters, k=6))] = None
    return list(found)


def _draw(*names: str) -> random.Random:
    return random.Random("/".join((str(SEED), *names)))
