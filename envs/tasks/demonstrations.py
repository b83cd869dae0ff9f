"""Demonstrations for supervised fine-tuning before reinforcement learning: scripts over a world, and a teacher's.

A demonstration is a list of turns, such as one that is written from the world's facts::

    <think> find Silent River</think><search> Silent River</search>
    <think> found Ana Bell</think><search> Ana Bell</search>
    <think> found Riga</think><answer> Riga</answer>

Scripts run in the trajectory loop, against the same retriever as a policy, so the policy learns from the observations
that it will get. Good and bad habits of searching are mixed, as in a small policy's first attempts. The demonstrations
teach the format, copying, reading and comparing. Reinforcement learning finds out which habit is rewarded.

A teacher is a larger model. Its file becomes turns of this project's grammar:

=====================  ===============================================================================
messages               ``{"messages": [{"role", "content"}, ...]}``; ``tool_calls`` and ShareGPT's
                       ``{"conversations": [{"from", "value"}, ...]}`` too
RAG-R1, LLaMA-Factory  ``{"instruction", "input", "output"}``; ``input`` holds the turns before ``output``
=====================  ===============================================================================

A file is a JSON list, or one object per line. The question is that of the key ``question``, or what follows "Question:"
in the first message of the user, or all of that message. Gold answers and supporting passages are those of a task file;
without gold answers the teacher's own counts. Other fields reach the environment as ``Task.meta``. What the teacher
retrieved is left out: its searches are asked again when the demonstration is played.
RAG-R1 cuts every trajectory into one record per turn; those that end with a search are the beginnings of another one.

Other tags are written as ours::

    <tool_call>{"name": "search", "arguments": {"query": "Ana Bell"}}</tool_call>      <search> Ana Bell</search>
    <|begin_of_query|> Ana Bell <|end_of_query|>                                       <search> Ana Bell </search>

For an environment that reads calls, the calls of a conversation stay calls, of any tool and with any arguments. They
are written in the form of ``hermes``, which ``as_message`` reads; the turn without a call is the answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from envs.grammars.calls import GRAMMARS, parse_turn, read_call
from envs.grammars.tags import Action, Answer, Search, format_queries, parse_action, read_answer, skip_thoughts
from envs.options import QueryFormat
from envs.search import LAST_TURN_NOTICE, MALFORMED_NOTICE
from envs.tasks.files import (
    ANSWER_KEYS,
    LoadedTasks,
    Record,
    TaskReport,
    make_task,
    meta_of,
    question_key,
    read_records,
    supporting_ids,
)
from envs.tasks.formats import plain_fields
from envs.tasks.world import YEARS, EntityKind, World
from ragr1_actors.core.disk.data_files import FaultCounts
from ragr1_actors.core.errors import DataError, shortened
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


_TAGS = {
    "<|begin_of_query|>": "<search>",
    "<|end_of_query|>": "</search>",
    "<|begin_of_documents|>": "<information>",
    "<|end_of_documents|>": "</information>",
    "<tool_response>": "<information>",
    "</tool_response>": "</information>",
    "<result>": "<information>",
    "</result>": "</information>",
}
"""Tags of R1-Searcher, Hermes and ReSearch, and ours."""
_TEACHER = ("assistant", "gpt")
_USER = ("user", "human")
_CALL = "function_call"
_READ_HERE = ("instruction", "input", "output", "messages", "conversations", "system", "tools")
"""Fields of a record that do not go to ``Task.meta``, besides the fields of a task file."""
# Each of these reads a text once: a file of other people may have one line of a gigabyte.
_QUESTION = re.compile(r"Question:[ \t]*+(.+?)(?=\n|</?(?:think|search|information|answer)>|\Z)")
_FIRST_TAG = re.compile(r"<(?:think|search|answer)>.*", re.DOTALL)
_END_OF_TURN = re.compile("</search>|</answer>")


def load_demonstrations(
    path: str | Path, query_format: QueryFormat = "lines", *, keeps_calls: bool = False
) -> tuple[LoadedTasks, Mapping[str, tuple[str, ...]]]:
    """Read a file of demonstrations that end with an answer: their tasks, and their turns by task id.

    Queries in ``<search>`` are read in ``query_format``; those of tool calls are written in it, unless ``keeps_calls``.

    Raises:
        DataError: as for a task file; or a record is not in one of the formats.
    """
    path = Path(path)
    tasks: list[Task] = []
    turns_of: dict[str, tuple[str, ...]] = {}
    seen: set[tuple[str, ...]] = set()
    faults = FaultCounts()
    num_records = 0
    for num_records, record in enumerate(read_records(path), start=1):
        question, turns, last = _read(record, query_format, keeps_calls=keeps_calls)
        gold = {key: record.fields[key] for key in ANSWER_KEYS if key in record.fields}
        if not isinstance(last, Answer):  # the beginning of another demonstration, or an unfinished one
            gold = {"answer": ""}
        elif not gold:
            gold = {"answer": last.text}
        plain = plain_fields(record.fields, record.where)
        evidence = supporting_ids(Record(plain, record.where))
        meta = {name: value for name, value in meta_of(plain).items() if name not in _READ_HERE}
        fields = {**meta, "question": question, **gold, "supporting_ids": list(evidence)}
        task = make_task(Record(fields, record.where), path.stem, num_records - 1, whole=False)
        place = record.where.removeprefix(f"{path}, ")
        identity = (question_key(task.question), *turns)
        if not identity[0]:
            faults.add("num_empty_questions", place)
        elif not task.golden_answers:
            faults.add("num_empty_answers", place)
        elif identity in seen:
            faults.add("num_duplicates", place)
        else:
            seen.add(identity)
            tasks.append(task)
            turns_of[task.task_id] = turns
    if not tasks:
        raise DataError(f"{path}: none of {num_records} demonstrations has a question, an answer and an end")
    report = TaskReport(path.name, num_records, len(tasks), shapes=(), places=faults.places, **faults.counts)
    return LoadedTasks(tuple(tasks), report), turns_of


def _read(
    record: Record, query_format: QueryFormat, *, keeps_calls: bool
) -> tuple[str, tuple[str, ...], Action | None]:
    """Return the question, the teacher's turns, and the action of the last one."""
    calling = _calling_turns(record) if keeps_calls and "output" not in record.fields else ()
    asked, written = _dialogue(record, query_format, only_asked=bool(calling))
    asked = _without_documents(_as_our_tags(asked, query_format, record.where, is_prompt=True))
    question = record.fields.get("question")
    if question is None:  # the last match: a prompt may have an example before it
        found = max(_QUESTION.finditer(asked), key=lambda match: match.start(), default=None)
        question, before = (found[1].rstrip(" \t"), asked[found.end() :]) if found else (asked, "")
    else:
        before = asked.partition(question)[2] if isinstance(question, str) and question else asked
    earlier = _FIRST_TAG.search(before)
    if calling:
        return question, calling, None if _called(calling[-1], record.where) else read_answer(calling[-1])
    text = _without_documents(_as_our_tags((earlier[0] if earlier else "") + written, query_format, record.where))
    turns = tuple(_tagged_turns(text))
    return question, turns, parse_action(turns[-1], query_format) if turns else None


def _tagged_turns(text: str) -> Iterator[str]:
    """Yield the turns of a text, each up to its action; a tag inside a thought is text."""
    begin, last = 0, text.rfind("</think>")  # behind which no thought is searched for: that would read the text again
    while (found := _END_OF_TURN.search(text, skip_thoughts(text, begin) if begin < last else begin)) is not None:
        yield text[begin : found.end()].strip()
        begin = found.end()


def _calling_turns(record: Record) -> tuple[str, ...]:
    """Return the teacher's turns with calls in the form of ``hermes``; empty if there are no calls."""
    turns: list[str] = []
    is_open = False  # whether the message before belongs to the same turn
    for message in _messages(record):
        text = _as_hermes(message, record.where)
        if text is not None:
            turns[-1:] = [f"{turns[-1]}\n{text}"] if is_open else [*turns[-1:], text]
        is_open = text is not None
    num_calling = sum(_called(turn, record.where) for turn in turns)  # the sum checks every turn
    return tuple(turns) if num_calling else ()


def _as_hermes(message: Mapping[str, Any], where: str) -> str | None:
    """Return the text that a message adds to a turn of the teacher; None if the teacher did not write it."""
    role, content = message.get("role", message.get("from")), _content(message, where)
    calls = [_parsed(content, where)] if role == _CALL else _calls(message, where)
    if role not in (*_TEACHER, _CALL):
        return None
    thought = _content({"content": message.get("reasoning_content")}, where)
    parts = [f"<think>\n{thought}\n</think>\n" if thought else "", content if role != _CALL else ""]
    parts.append(GRAMMARS["hermes"].write([_request(call, where) for call in calls]))
    return "\n".join(filter(None, parts))


def _called(turn: str, where: str) -> bool:
    parsed = parse_turn(turn, GRAMMARS["hermes"])
    if parsed.problem:
        raise DataError(f"{where}: got the turn {shortened(turn, 60)!r}: {parsed.problem}")
    return bool(parsed.calls)


def _request(call: Any, where: str) -> CallRequest:
    called = call.get("function", call) if isinstance(call, dict) else call
    if isinstance(called, dict) and isinstance(called.get("arguments"), str):  # OpenAI's messages hold JSON
        called = {**called, "arguments": _parsed(called["arguments"], where)}
    try:
        return read_call(called, "arguments")
    except ValueError as error:
        raise DataError(f"{where}: got the tool call {shortened(str(call), 60)}: {error}") from error


def _split_tags(text: str, tag: str) -> tuple[list[str], list[str]]:
    """Return the texts outside a tag, ``[n + 1]``, and inside, ``[n]``; a tag that is not closed is text."""
    outside, inside, position = [], [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start)) >= 0:
        outside.append(text[position:start])
        inside.append(text[start + len(opening) : end])
        position = end + len(closing)
    return [*outside, text[position:]], inside


def _without_documents(text: str) -> str:
    """Remove the retrieved documents and the white space around them."""
    first, *rest = _split_tags(text, "information")[0]
    if not rest:
        return text
    *between, last = rest
    return "".join([first.rstrip(), *(part.strip() for part in between), last.lstrip()])


def _dialogue(record: Record, query_format: QueryFormat, *, only_asked: bool) -> tuple[str, str]:
    """Return the first message of the user and, unless ``only_asked``, everything that the teacher wrote."""
    fields = record.fields
    if "output" in fields:
        parts = [fields.get("instruction", ""), fields.get("input", ""), fields["output"]]
        if all(isinstance(part, str) for part in parts):
            return f"{parts[0]}\n{parts[1]}", parts[2]
    asked, written = "", ""
    for message in _messages(record):
        role, content = message.get("role", message.get("from")), _content(message, record.where)
        if role in _USER and not asked:
            asked = content
        elif only_asked:
            continue
        elif role == _CALL:
            written += _searched(_parsed(content, record.where), query_format, record.where)
        elif role in _TEACHER:
            calls = _calls(message, record.where)
            searches = [_searched(call.get("function", call), query_format, record.where) for call in calls]
            written += content + "".join(searches)
    return asked, written


def _messages(record: Record) -> list[dict[str, Any]]:
    fields = record.fields
    messages = fields.get("messages", fields.get("conversations"))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(
            f"{record.where}: got {shortened(str(sorted(fields)), 60)}, expected messages [{{role, content}}, ...], or "
            "the texts instruction, input and output"
        )
    return messages


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content", message.get("value"))
    content = "" if content is None else content
    if not isinstance(content, str):
        raise DataError(f"{where}: got a message of {type(content).__name__}, expected text")
    return content


def _calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}: got tool_calls {shortened(str(calls), 60)}, expected objects")
    return calls


def _as_our_tags(text: str, query_format: QueryFormat, where: str, *, is_prompt: bool = False) -> str:
    for theirs, ours in _TAGS.items():
        text = text.replace(theirs, ours)

    (first, *rest), calls = _split_tags(text, "tool_call")
    written = [first]
    for call, after in zip(calls, rest, strict=True):
        if is_prompt and not _is_json(call):  # a prompt may say how a call is written
            written += (f"<tool_call>{call}</tool_call>", after)
        else:
            written += (_searched(_parsed(call, where), query_format, where), after)
    return "".join(written)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: got the tool call {shortened(text, 60)!r}, expected JSON ({error})") from error


def _searched(call: Any, query_format: QueryFormat, where: str) -> str:
    """Write a tool call with the argument ``query`` or ``queries`` in our tags."""
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if isinstance(arguments, str):  # OpenAI's messages hold the arguments as JSON
        arguments = _parsed(arguments, where)
    found = arguments.get("queries", arguments.get("query")) if isinstance(arguments, dict) else None
    queries = [found] if isinstance(found, str) else found
    if not isinstance(queries, list) or not queries or not all(isinstance(q, str) and q.strip() for q in queries):
        raise DataError(f"{where}: got a tool call with {shortened(str(arguments), 60)}, expected query or queries")
    try:
        return f"<search> {format_queries(queries, query_format)}</search>"
    except ValueError as error:
        raise DataError(f"{where}: {error}; choose another environment.options.query_format") from error
