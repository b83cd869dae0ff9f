"""Workload of scripted policies: attempts at tasks, drawn from a distribution here or from a run's trajectories."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.base import search_options
from envs.grammars.tags import format_queries
from envs.options import QueryFormat
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.types import Message, Task
from ragr1_actors.planning.plan import TOKENS_PER_QUERY, TOKENS_PER_TURN

PASSAGE_TOKENS = 150
"""Tokens of a passage of 100 words with its title."""
FRAME_TOKENS = 40
"""Tokens of an observation per query besides the passages: the query, titles, tags."""
TURN_SIGMA = 0.6
"""Standard deviation of the logarithm of a turn's tokens: the longest of 100 turns has about five times the mean."""
SHARE_RIGHT = 0.5
"""Share of right answers, if no run gives one."""
CHARACTERS_PER_TOKEN = 4
CACHED = "cached"
"""Beginning of a query that the caller's cache answers."""
_RIGHT, _WRONG = "right", "wrong"


@dataclass(frozen=True, slots=True)
class TurnShape:
    """Shape of a turn. The last turn of an attempt answers; an earlier one searches, or is malformed (no queries)."""

    num_tokens: int
    num_queries: int = 0
    num_cached: int = 0
    """Number of queries that the cache of the searching process answers."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Turns of a trajectory, at least one, and whether its answer is right."""

    turns: tuple[TurnShape, ...]
    is_right: bool


class Workload(Protocol):
    """Source of attempts."""

    passage_tokens: float
    """Number of tokens of all passages that one query finds."""

    def attempts(self, rng: random.Random, count: int) -> Sequence[Attempt]:
        """Return the attempts of a group."""


class DrawnWorkload:
    """Attempts with the means of ``ragr1 plan``, spread around them.

    The numbers of turns up to ``max_turns`` are equally frequent. Tokens of a turn are log-normal around the plan's
    mean. A turn has all queries that it may have.
    """

    def __init__(self, config: RunConfig) -> None:
        """Take the limits of a recipe."""
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
    """Tokenizer of texts whose contents do not matter: a token is four characters."""

    def encode(self, text: str) -> list[int]:
        """Return as many ids as the text has tokens."""
        return [0] * -(-len(text) // CHARACTERS_PER_TOKEN)

    def defuse(self, text: str) -> str:
        """Return the text unchanged: it has no tokens of a template."""
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of all messages."""
        return self.encode("".join(message.text for message in messages))

    def image_ids(self, image: Image) -> list[int]:
        """Return one id."""
        return [0]

    def place(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[PlacedImage]:
        """Return no place: nothing simulated has images."""
        return []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return an empty text, as the text of the ids is not kept."""
        return ""

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        """Return an empty text: no turn begins with text."""
        return ""


def made_up_task(number: int) -> Task:
    """Return a task for the scripted policies: ``Task("simulated/7", "Question 7?", ("right",))``."""
    return Task(f"simulated/{number}", f"Question {number}?", (_RIGHT,))


def answer_text(*, is_right: bool) -> str:
    """Return the text of a last turn."""
    return f"<answer> {_RIGHT if is_right else _WRONG}</answer>"


def search_text(turn: TurnShape, name: str, query_format: QueryFormat) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a turn that searches, and the ends of all queries but the last: ``(tokens, characters)``.

    ``name`` makes its queries distinct. A query has the plan's number of tokens, or its share of the turn.
    """
    num_queries = 1 if query_format == "single" else turn.num_queries
    queries = [f"{CACHED if i < turn.num_cached else 'query'} {name} {i}" for i in range(num_queries)]
    each = min(TOKENS_PER_QUERY, turn.num_tokens // num_queries)
    text = f"<search>{format_queries(queries, query_format)}</search>"
    return text, [(turn.num_tokens - each * (num_queries - i), text.index(queries[i])) for i in range(1, num_queries)]
