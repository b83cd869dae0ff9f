"""What scripted policies do: attempts at tasks, drawn from a distribution here or from a run's trajectories."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.actions import format_queries
from envs.base import search_options
from envs.options import QueryFormat
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Message, Task
from ragr1_actors.planning.plan import TOKENS_PER_QUERY, TOKENS_PER_TURN

PASSAGE_TOKENS = 150
"""A passage of 100 words with its title."""
FRAME_TOKENS = 40
"""What an observation has for each query beside the passages: the query, titles, tags."""
TURN_SIGMA = 0.6
"""Of the logarithm of a turn's tokens: the longest of a hundred turns is about five times the mean."""
SHARE_RIGHT = 0.5
"""Of the answers, where no run says more."""
CHARACTERS_PER_TOKEN = 4
CACHED = "cached"
"""How a query begins that the caller's cache answers."""
_RIGHT, _WRONG = "right", "wrong"


@dataclass(frozen=True, slots=True)
class TurnShape:
    """One turn. The last of an attempt answers; one before it searches, or is malformed if it has no queries."""

    num_tokens: int
    num_queries: int = 0
    num_cached: int = 0
    """Of the queries, those that the cache of the searching process answers."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The turns of a trajectory, at least one, and whether its answer is right."""

    turns: tuple[TurnShape, ...]
    is_right: bool


class Workload(Protocol):
    """Where attempts come from."""

    passage_tokens: float
    """Of what one query brings back, all its passages together."""

    def attempts(self, rng: random.Random, count: int) -> Sequence[Attempt]:
        """Return the attempts of a group."""
        ...


class DrawnWorkload:
    """Attempts as ``ragr1 plan`` takes them, spread around its means.

    Turns: as many of each number up to ``max_turns``. Tokens of a turn: log-normal around the plan's mean. Queries: all
    that a turn may have.
    """

    def __init__(self, config: RunConfig) -> None:
        """Draw for a recipe."""
        environment = config.environment
        options = search_options(environment)
        self._max_turns, self._num_queries = environment.max_turns, options.max_queries_per_turn
        self._max_tokens = config.env_runners.max_new_tokens_per_turn
        self._mu = math.log(min(TOKENS_PER_TURN, self._max_tokens)) - TURN_SIGMA**2 / 2
        share = options.max_observation_tokens // self._num_queries
        room = min(options.max_observation_tokens_per_query, share) - FRAME_TOKENS  # as full as it is without a cut
        self.passage_tokens = float(max(1, min(options.top_k * PASSAGE_TOKENS, room)))

    def attempts(self, rng: random.Random, count: int) -> Sequence[Attempt]:
        """Return independent attempts."""
        return [self._attempt(rng) for _ in range(count)]

    def _attempt(self, rng: random.Random) -> Attempt:
        num_turns = rng.randint(1, self._max_turns)
        lengths = [
            max(1, min(self._max_tokens, round(rng.lognormvariate(self._mu, TURN_SIGMA)))) for _ in range(num_turns)
        ]
        searches = [TurnShape(length, self._num_queries) for length in lengths[:-1]]
        return Attempt((*searches, TurnShape(lengths[-1])), rng.random() < SHARE_RIGHT)


class CountingTokenizer:
    """A tokenizer of texts whose contents do not matter: a token is four characters."""

    def encode(self, text: str) -> list[int]:
        """Return as many ids as the text has tokens."""
        return [0] * -(-len(text) // CHARACTERS_PER_TOKEN)

    def defuse(self, text: str) -> str:
        """Return the text: it has no tokens of a template."""
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of all messages."""
        return self.encode("".join(message.content for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return no text: that of the ids is not kept."""
        return ""

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        """Return that a turn begins with nothing."""
        return ""


def made_up_task(number: int) -> Task:
    """Return a task for the scripted policies: ``Task("simulated/7", "Question 7?", ("right",))``."""
    return Task(f"simulated/{number}", f"Question {number}?", (_RIGHT,))


def answer_text(*, is_right: bool) -> str:
    """Return the text of a last turn."""
    return f"<answer> {_RIGHT if is_right else _WRONG}</answer>"


def search_text(turn: TurnShape, name: str, query_format: QueryFormat) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a turn that searches, and where its queries but the last end: ``(tokens, characters)``.

    ``name`` makes its queries distinct. A query has the plan's number of tokens, or its share of the turn.
    """
    num_queries = 1 if query_format == "single" else turn.num_queries
    queries = [f"{CACHED if i < turn.num_cached else 'query'} {name} {i}" for i in range(num_queries)]
    each = min(TOKENS_PER_QUERY, turn.num_tokens // num_queries)
    text = f"<search>{format_queries(queries, query_format)}</search>"
    return text, [(turn.num_tokens - each * (num_queries - i), text.index(queries[i])) for i in range(1, num_queries)]
