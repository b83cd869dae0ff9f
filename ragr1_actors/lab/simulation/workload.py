"""Workload of scripted policies: attempts at tasks, drawn from a distribution or recorded in a run, with its pace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from envs.base import search_options
from envs.grammars.tags import format_queries
from envs.options import QueryFormat
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.disk.folders import on_this_node, part_of
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.schema import TRAJECTORIES, read_trajectories
from ragr1_actors.core.types import Message, Task, TokenKind, Trajectory
from ragr1_actors.planning.pace import EnginePace, LearnerPace, Pace, SearchPace
from ragr1_actors.planning.plan import START_S, TOKENS_PER_QUERY, TOKENS_PER_TURN
from ragr1_actors.runs.run_directory import open_run_directory
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.runs.telemetry.metrics import is_iteration, read_metrics

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


NUM_ITERATIONS = 20
"""Number of iterations of a run that are read, the newest."""
NUM_REFITS = 10
_GENERATION, _ROWS, _SHARE = "time/generation_s", "time/generation_rows_s", "time/generation_share_s"


class RecordedWorkload:
    """Plays the groups of a run again, in a random order."""

    def __init__(self, groups: Sequence[Sequence[Attempt]], passage_tokens: float) -> None:
        """Draw from ``groups``; none of them is empty."""
        self._groups = groups
        self.passage_tokens = passage_tokens

    def attempts(self, rng: random.Random, count: int) -> Sequence[Attempt]:
        """Return the attempts of one group, some twice if it has fewer."""
        group = rng.choice(self._groups)
        return [group[index % len(group)] for index in range(count)]


Workload = DrawnWorkload | RecordedWorkload
"""Source of attempts."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Pace and attempts of a run."""

    config: RunConfig
    pace: Pace
    workload: RecordedWorkload
    num_iterations: int
    """Number of iterations from which they were read."""
    trajectories_per_s: float
    """Number of trajectories trained per second in them."""


def read_recording(run_dir: str | Path) -> Recording:
    """Read the newest ``NUM_ITERATIONS`` of a run in a directory or at a URI.

    Raises:
        RunDirectoryError: it is not a run directory.
        DataError: it has no iteration of RL with trajectories and times.
    """
    store = find_store(run_dir)
    config = open_run_directory(store)
    rows = [row for row in read_metrics(store.path) if is_iteration(row) and _GENERATION in row][-NUM_ITERATIONS:]
    kept: list[dict[str, Any]] = []
    groups: list[list[Trajectory]] = []
    names = [f"iteration_{int(row['iteration']):05d}.arrow" for row in rows]
    found = store.find(TRAJECTORIES)
    if found is not None:
        folder = Path(on_this_node(part_of(found, *names)))
        for row, name in zip(rows, names, strict=True):
            if (folder / name).is_file():
                kept.append(row)
                groups += [_finished(group.trajectories) for group in read_trajectories(folder / name)]
    groups = [group for group in groups if group]
    if not groups:
        raise DataError(
            f"{store} has no iteration of RL with {_GENERATION} and its trajectories; train with "
            "checkpointing.keep_trajectories=true, as is the default, by this version of the program"
        )
    trajectories = [trajectory for group in groups for trajectory in group]
    batch = config.training.train_batch_size * config.training.group_size
    workload = RecordedWorkload([[_attempt(t) for t in group] for group in groups], _passage_tokens(trajectories))
    return Recording(
        config=config,
        pace=Pace(_engine_pace(trajectories), _search_pace(kept, trajectories), _learner_pace(kept, batch)),
        workload=workload,
        num_iterations=len(kept),
        trajectories_per_s=batch * len(kept) / sum(row["time/iteration_s"] for row in kept),
    )


def _finished(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if not t.stop_reason.is_failure and t.turns and _GENERATION in t.metrics]


def _attempt(trajectory: Trajectory) -> Attempt:
    turns = tuple(
        TurnShape(turn.num_model_tokens, len(turn.calls), sum(call.is_cached for call in turn.calls))
        for turn in trajectory.turns
    )
    return Attempt(turns, is_right=trajectory.reward >= 0.5)


def _passage_tokens(trajectories: Sequence[Trajectory]) -> float:
    num_queries = sum(len(trajectory.calls) for trajectory in trajectories)
    num_tokens = sum(int((trajectory.kinds == TokenKind.OBSERVATION).sum()) for trajectory in trajectories)
    return num_tokens / max(1, num_queries)


def _engine_pace(trajectories: Sequence[Trajectory]) -> EnginePace:
    """Fit the seconds per token to the number of rows of the engine at that time. Prefill is in both.

    A row gets ``1 / step_s(rows)`` tokens per second. If the rows vary around their mean, it gets more than at the
    mean, to second order by the variance; that depends on the fit, which is therefore repeated.
    """
    sampled = [t for t in trajectories if t.num_model_tokens and t.metrics[_SHARE] > 0]
    lengths = [float(t.num_model_tokens) for t in sampled]
    each_s = [t.metrics[_GENERATION] / n for t, n in zip(sampled, lengths, strict=True)]
    rows = [t.metrics[_ROWS] / t.metrics[_GENERATION] for t in sampled]
    harmonic = [t.metrics[_GENERATION] / t.metrics[_SHARE] for t in sampled]
    variances = [max(0.0, mean * (mean - other)) for mean, other in zip(rows, harmonic, strict=True)]
    pace = EnginePace(*fit_line(rows, each_s, lengths))
    for _ in range(NUM_REFITS):
        gains = [1 + (pace.row_s / pace.step_s(n)) ** 2 * v for n, v in zip(rows, variances, strict=True)]
        base_s, row_s = fit_line(rows, [s * gain for s, gain in zip(each_s, gains, strict=True)], lengths)
        pace = EnginePace(base_s, row_s, start_s=START_S)
    return pace


def _search_pace(rows: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> SearchPace:
    """Fit the seconds per batch to its queries, from the counters of the actors; without actors take the latency.

    The time of the median query beyond the mean batch is overhead: of the calls, and of an engine in the process.
    """
    latencies = [call.latency_s for t in trajectories for call in t.calls if not call.is_cached]
    usual_s = median(latencies) if latencies else 0.0
    sizes, each_s, weights = [], [], []
    for before, after in pairwise(row for row in rows if row.get("retrieval/retriever_batch")):
        batches = _num_batches(after) - _num_batches(before)
        if batches > 0:
            sizes.append((after["retrieval/retriever_queries"] - before["retrieval/retriever_queries"]) / batches)
            each_s.append((after["retrieval/retriever_busy_s"] - before["retrieval/retriever_busy_s"]) / batches)
            weights.append(batches)
    if not weights:
        return SearchPace(partial(_line, usual_s, 0.0), start_s=START_S)
    base_s, query_s = fit_line(sizes, each_s, weights)
    size = sum(n * w for n, w in zip(sizes, weights, strict=True)) / sum(weights)
    overhead_s = max(0.0, usual_s - _line(base_s, query_s, size))
    return SearchPace(partial(_line, base_s, query_s), overhead_s, START_S)


def _num_batches(row: dict[str, Any]) -> float:
    return float(row["retrieval/retriever_queries"] / row["retrieval/retriever_batch"])


def _line(base_s: float, query_s: float, num_queries: float) -> float:
    return base_s + query_s * num_queries


def _learner_pace(rows: Sequence[dict[str, Any]], batch: int) -> LearnerPace:
    sample_s, learn_s, publish_s, iteration_s = (
        mean(row[f"time/{name}_s"] for row in rows) for name in ("sample", "learn", "publish", "iteration")
    )
    return LearnerPace(learn_s / batch, publish_s, max(0.0, iteration_s - sample_s - learn_s - publish_s))


def fit_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return ``(a, b)``, both at least 0, for which ``a + b * x`` is closest to ``y`` in weighted squares."""
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    common = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True))
    slope = max(0.0, common / spread) if spread > 0 else 0.0
    if y_mean - slope * x_mean >= 0:
        return y_mean - slope * x_mean, slope
    squares = sum(w * x * x for w, x in zip(weights, xs, strict=True))
    return 0.0, sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True)) / squares
