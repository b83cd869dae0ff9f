"""Scripted demonstrations over a world, for supervised fine-tuning before reinforcement learning.

A demonstration is a list of turns, written from the world's facts::

    <think> find Silent River</think><search> Silent River</search>
    <think> found Ana Bell</think><search> Ana Bell</search>
    <think> found Riga</think><answer> Riga</answer>

Scripts run in the trajectory loop, against the same retriever as a policy, so the policy learns from the observations
that it will get. Good and bad habits of searching are mixed, as in a small policy's first attempts. The demonstrations
teach the format, copying, reading and comparing. Reinforcement learning finds out which habit is rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from envs.grammars.calls import GRAMMARS, parse_turn
from envs.grammars.tags import Answer, Search, format_queries, parse_action, skip_thoughts
from envs.options import QueryFormat
from envs.search import LAST_TURN_NOTICE, MALFORMED_NOTICE
from envs.tasks.world import YEARS, EntityKind, World
from ragr1_actors.core.types import CallRequest, Message, Task
from retrieval.base import SEARCH


class Habit(StrEnum):
    """A way to work on a question."""

    GOOD = "good"
    """Search for the needed facts, then answer."""
    GUESS = "guess"
    """Answer at once, with a random answer of the right kind."""
    STOP_EARLY = "stop_early"
    """Leave the last hop out, and answer with the result of the hop before it."""
    FIRST_ONLY = "first_only"
    """Look up the first of the things to compare and answer with its year."""
    LATEST = "latest"
    """Look up all the things to compare and answer with the latest instead of the earliest."""
    NEEDLESS = "needless"
    """Search although the question holds its answer."""


DEFAULT_MIXTURE: Mapping[str, Mapping[Habit, float]] = {
    "one_hop": {Habit.GOOD: 0.85, Habit.GUESS: 0.15},
    "two_hop": {Habit.GOOD: 0.30, Habit.GUESS: 0.05, Habit.STOP_EARLY: 0.65},
    "three_hop": {Habit.GOOD: 0.30, Habit.GUESS: 0.05, Habit.STOP_EARLY: 0.65},
    "comparison_2": {Habit.GOOD: 0.70, Habit.GUESS: 0.05, Habit.FIRST_ONLY: 0.10, Habit.LATEST: 0.15},
    "comparison_3": {Habit.GOOD: 0.70, Habit.GUESS: 0.05, Habit.FIRST_ONLY: 0.10, Habit.LATEST: 0.15},
    "no_search": {Habit.GOOD: 0.80, Habit.NEEDLESS: 0.20},
}
"""Probability of each habit by the category of the task.

Most comparisons are good, because comparing is the hardest skill. ``FIRST_ONLY`` is right every second time: if sampled
comparisons are right less often, exact match rewards ``FIRST_ONLY`` instead.
"""

_FIND_ALL = {2: "find both", 3: "find all three"}
_ORDINALS = ("first", "second", "third")
_NUMBERS = {2: "two", 3: "three"}


@dataclass(frozen=True)
class Demonstrator:
    """Writes demonstrations for the tasks of one world."""

    world: World
    max_queries_per_turn: int = 3
    query_format: QueryFormat = "lines"
    """Format of the queries of a turn; ``single`` asks one query per turn, even if the limit is higher."""
    mixture: Mapping[str, Mapping[Habit, float]] = field(default_factory=lambda: DEFAULT_MIXTURE)

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the turns of one attempt at ``task``, its habit drawn from the mixture."""
        habits = self.mixture[task.category]
        (habit,) = rng.choices(list(habits), weights=list(habits.values()))
        return self.script(task, habit, rng)

    def script(self, task: Task, habit: Habit, rng: random.Random) -> list[str]:
        """Return the turns of one attempt at ``task`` that follows ``habit``."""
        if habit is Habit.GUESS:
            return [_answer("guess", self._guess(task, rng))]
        if task.category == "no_search":
            return self._no_search(task, habit)
        if task.category.startswith("comparison"):
            return self._comparison(task, habit)
        return self._chain(task, habit)

    def texts(self) -> Iterator[str]:
        """Yield turns and replies that hold every word a demonstration, or the environment's reply to it, can hold."""
        yield from (MALFORMED_NOTICE, LAST_TURN_NOTICE, "\nQuery: \n(1) (2) (3)")
        rng = random.Random(0)
        for task in self.world.train_tasks[:500]:  # names and dates are in the world's own texts
            for habit in self.mixture[task.category]:
                yield from self.script(task, habit, rng)

    def _chain(self, task: Task, habit: Habit) -> list[str]:
        names = [round_queries[0] for round_queries in task.plan]
        found = [*names[1:], task.golden_answers[0]]
        if habit is Habit.STOP_EARLY:
            names, found = names[:-1], found[: len(names) - 1]
        turns = [_search(f"find {names[0]}", names[:1], self.query_format)]
        turns += [_search(f"found {name}", [name], self.query_format) for name in names[1:]]
        return [*turns, _answer(f"found {found[-1]}", found[-1])]

    def _comparison(self, task: Task, habit: Habit) -> list[str]:
        names = list(task.plan[0])
        years = [str(self.world.entities[name].year) for name in names]
        if habit is Habit.FIRST_ONLY:
            return [_search("find one", names[:1], self.query_format), _answer(f"found {years[0]}", years[0])]
        rounds = _rounds(names, self.max_queries_per_turn, self.query_format)
        # the number of things is in the first thought: without it, a small policy confuses two and three
        thoughts = [_FIND_ALL[len(names)]]
        if len(rounds) > 1:
            thoughts = [f"find {ordinal} of {_NUMBERS[len(rounds)]}" for ordinal in _ORDINALS[: len(rounds)]]
        turns = [
            _search(thought, queries, self.query_format) for thought, queries in zip(thoughts, rounds, strict=True)
        ]
        order, picked = ("last", max(years)) if habit is Habit.LATEST else ("first", min(years))
        return [*turns, _answer(f"{' , '.join(years)} , {order} {picked}", picked)]

    def _no_search(self, task: Task, habit: Habit) -> list[str]:
        answer = task.golden_answers[0]
        last = _answer(f"given {answer}", answer)
        if habit is Habit.NEEDLESS:
            return [_search(f"find {answer}", [answer], self.query_format), last]
        return [last]

    def _guess(self, task: Task, rng: random.Random) -> str:
        """Return a random answer of the kind that the question asks for."""
        answer = task.golden_answers[0]
        if answer.isdigit():
            return str(rng.choice(YEARS))
        return rng.choice(self._alike[answer])

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        """Map each answer to all answers of its kind: people, films, companies, cities, countries."""
        entities = list(self.world.entities.values())
        of_kind = {kind: [e.name for e in entities if e.kind == kind] for kind in EntityKind}
        countries = sorted({e.place_or_maker for e in entities if e.kind is EntityKind.CITY})
        groups = (*of_kind.values(), countries)
        return {name: group for group in groups for name in group}


def _rounds(names: list[str], max_queries: int, query_format: QueryFormat) -> list[list[str]]:
    step = 1 if query_format == "single" else max_queries
    return [names[start : start + step] for start in range(0, len(names), step)]


def _search(thought: str, queries: Sequence[str], query_format: QueryFormat) -> str:
    # a space before every name, so that its tokens are the same everywhere
    body = format_queries([f" {query}" for query in queries], query_format)
    return f"<think> {thought}</think><search>{body}</search>"


def _answer(thought: str, answer: str) -> str:
    return f"<think> {thought}</think><answer> {answer}</answer>"


def evidence_demonstration(task: Task, max_queries: int, query_format: QueryFormat = "lines") -> list[str]:
    """Write a demonstration for a task of a file: search for its evidence, then give its answer.

    The queries come from ``task.plan``, round by round; without a plan they are ``task.supporting_ids``, which are
    titles here, or else the question itself.
    """
    planned = task.plan or (task.supporting_ids or (task.question,),)
    turns: list[str] = []
    for number, names in enumerate(planned):
        queries = [" ".join(name.split()) for name in names]
        thought = f"found {' , '.join(queries)}" if number else "find evidence"
        turns += [_search(thought, part, query_format) for part in _rounds(queries, max_queries, query_format)]
    return [*turns, _answer("found", task.golden_answers[0])]


def as_message(turn: str, query_format: QueryFormat) -> Message:
    """Return a turn that is written in tags as a message with a tool call, or with the bare answer.

    A turn with calls in the form of ``hermes`` becomes a message with these calls; any other turn becomes its text.
    """
    if (parsed := parse_turn(turn, GRAMMARS["hermes"])).calls:
        return Message("assistant", parsed.content, parsed.calls)
    match parse_action(turn, query_format):
        case Search(queries):
            request = CallRequest(SEARCH, {"queries": [query.strip() for query in queries]})
            return Message("assistant", turn[: skip_thoughts(turn)], (request,))
        case Answer(text):
            return Message("assistant", f"{turn[: skip_thoughts(turn)]} {text}")
    return Message("assistant", turn)
