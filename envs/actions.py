r"""The tag grammar of a search turn: pure functions from a completion's text to an action.

A turn is the policy's reasoning followed by exactly one action::

    <think> two people, two birth years</think><search> Ana Bell
     Bo Cole</search>

    <think> 1931 is before 1950</think><answer> Ana Bell</answer>

The first ``<search>`` or ``<answer>`` outside ``<think>`` is the action. Text behind its closing tag is not read. A
``<think>`` that is never closed reaches to the end of the turn: the tags in it are text. Everything here takes time
linear in the text.

``environment.query_format`` says how queries are written inside ``<search>``::

    lines    Ana Bell\n Bo Cole            the default: no character of a query has a second meaning
    comma    Ana Bell, Bo Cole             RAG-R1-mq's checkpoints; a comma inside a query splits it
    json     ["Ana Bell", "Bo Cole"]
    single   Martin Luther King, Jr.       Search-R1's and RAG-R1-sq's: all of it is one query
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from envs.base import Action, Answer, Malformed, Search
from ragr1_actors.core.config import QueryFormat

STOP_TAGS = ("</search>", "</answer>")
THINK = "<think>"
_OPENING = re.compile(r"<(think|search|answer)>")
ANY_TAG = re.compile(r"</?(?:think|search|information|answer)>")
_END_OF_THINK = re.compile("</think>")
_LONGEST_TAG = len("</search>")  # of those that are looked for
_END_OF_QUERY: dict[QueryFormat, re.Pattern[str]] = {
    "lines": re.compile(r"\n|</search>"),
    "comma": re.compile(r",|</search>"),
    "single": re.compile("</search>"),
}
_BLANKS = re.compile(r"\s*+")
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
# Control characters and halves of surrogate pairs: JSON can write both, and neither can be searched or encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def parse_action(completion: str, query_format: QueryFormat = "lines") -> Action:
    """Return the first action outside ``<think>``; its queries are not cleaned yet.

    ``parse_action("<think> a <search>b</search></think><answer> Riga</answer>") == Answer("Riga")``
    """
    opening = _OPENING.match(completion, skip_thoughts(completion))
    if opening is None:
        return Malformed("no <search>...</search> or <answer>...</answer> in the turn")
    tag = opening[1]
    end = completion.find(f"</{tag}>", opening.end())
    if end < 0:
        return Malformed(f"<{tag}> is never closed")
    return _read_body(tag, completion[opening.end() : end].strip(), query_format)


def open_thought(turn: str) -> str:
    """Return ``<think>`` if a turn ends inside a thought, else an empty text.

    ``open_thought("<think> I can write <search> a </search>") == THINK``
    """
    position = skip_thoughts(turn)
    return THINK if turn.startswith(THINK, position) else ""


def skip_thoughts(turn: str) -> int:
    """Return where the first ``<search>``, ``<answer>`` or unclosed ``<think>`` begins, else the end of all thoughts.

    ``skip_thoughts("<think> a</think> Riga") == len("<think> a</think>")``
    """
    position = 0
    while (opening := _OPENING.search(turn, position)) is not None:
        end = turn.find("</think>", opening.end()) if opening[0] == THINK else -1
        if end < 0:
            return opening.start()
        position = end + len("</think>")
    return position


def _read_body(tag: str, body: str, query_format: QueryFormat) -> Action:
    if not body:
        return Malformed(f"<{tag}> is empty")
    inner = ANY_TAG.search(body)
    if inner is not None:
        return Malformed(f"{inner[0]} inside <{tag}>")
    if tag == "answer":
        return Answer(body)
    match query_format:
        case "lines":
            return Search(tuple(body.split("\n")))
        case "comma":
            return Search(tuple(body.split(",")))
        case "json":
            return _read_json(body)
        case "single":
            return Search((body,))


def _read_json(body: str) -> Search | Malformed:
    try:
        queries = json.loads(body)
    except (ValueError, RecursionError) as error:  # ten thousand brackets
        return Malformed(f"<search> holds no JSON: {error}")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        return Malformed("<search> holds JSON that is not a list of strings")
    return Search(tuple(queries)) if queries else Malformed("<search> holds an empty list")


def format_queries(queries: Sequence[str], query_format: QueryFormat = "lines") -> str:
    r"""Write the text inside ``<search>``: ``format_queries([" Ana", " Bo"], "comma") == " Ana, Bo"``.

    The inverse of ``parse_action``. A space replaces what the format cannot express inside a query: a line break in
    ``lines``, a comma in ``comma``, a tag in any.

    Raises:
        ValueError: there is no query, or more than one in ``single``.
    """
    if not queries or (query_format == "single" and len(queries) > 1):
        expected = "exactly one" if query_format == "single" else "at least one"
        raise ValueError(f"got {len(queries)} queries in the format {query_format!r}, expected {expected}")
    texts = [ANY_TAG.sub(" ", query) for query in queries]
    match query_format:
        case "lines":
            return "\n".join(text.replace("\n", " ") for text in texts)
        case "comma":
            return ",".join(text.replace(",", " ") for text in texts)
        case "json":
            return json.dumps(texts, ensure_ascii=False)
        case "single":
            return texts[0]


class QueryCleaner:
    """Keeps the distinct queries of one turn, up to a limit, and counts what is dropped."""

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` queries."""
        self.queries: list[str] = []
        self.num_duplicate = self.num_empty = self.num_over_limit = 0
        self._limit = limit
        self._seen: set[str] = set()

    def add(self, query: str) -> bool:
        """Squeeze white space and control characters; keep the query if it is not empty, new, and within the limit."""
        squeezed = " ".join(_UNPRINTABLE.sub(" ", query).split())
        key = squeezed.casefold()
        if not squeezed:
            self.num_empty += 1
        elif key in self._seen:
            self.num_duplicate += 1
        elif len(self.queries) == self._limit:
            self._seen.add(key)
            self.num_over_limit += 1
        else:
            self._seen.add(key)
            self.queries.append(squeezed)
            return True
        return False


def clean_queries(queries: Sequence[str], limit: int) -> QueryCleaner:
    """Return what is kept of the queries of a turn, with the counts of what is dropped.

    ``clean_queries(["Ana Bell", " Bo  Cole", "ana bell", ""], 3).queries == ["Ana Bell", "Bo Cole"]``
    """
    cleaner = QueryCleaner(limit)
    for query in queries:
        cleaner.add(query)
    return cleaner


class QueryStream:
    r"""Reads the queries of a turn that is still being sampled, each as soon as it is complete.

    ``feed("<search>Ana")`` is ``[]``, then ``feed("<search>Ana Bell\nBo")`` is ``["Ana Bell"]``, and
    ``feed("<search>Ana Bell\nBo Cole</search>")`` is ``["Bo Cole"]``: together what ``parse_action`` reads of it all.

    A hint only: the turn may still become malformed. No text is read twice.
    """

    def __init__(self, query_format: QueryFormat) -> None:
        """Start in front of a turn."""
        self._end_of_query = _END_OF_QUERY.get(query_format)  # None for JSON
        self._marks = '["'  # of JSON: what comes before the next string; empty inside one
        self._state = "outside"  # or think, search, answer, done
        self._position = 0  # the text before it has been read
        self._start = 0  # of the query that is being read

    def feed(self, partial: str) -> list[str]:
        """Take the turn's whole text so far and return the queries that ended since the last call, not cleaned."""
        found: list[str] = []
        while self._read_on(partial, found):
            pass
        return found

    def _read_on(self, text: str, found: list[str]) -> bool:
        """Read up to the next place that matters; False where the text ends before it, or no query can come."""
        match self._state:
            case "outside":
                opening = self._find(_OPENING, text)
                if opening is not None:
                    self._state, self._start = opening[1], opening.end()
                return opening is not None
            case "think":
                closing = self._find(_END_OF_THINK, text)
                if closing is not None:
                    self._state = "outside"
                return closing is not None
            case "search":
                end = self._end_of_query
                return self._read_string(text, found) if end is None else self._read_query(end, text, found)
            case _:  # inside <answer>, or behind the last query
                return False

    def _find(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        match = pattern.search(text, self._position)
        # where there is none, the text may end with the beginning of one
        self._position = match.end() if match else max(self._position, len(text) - _LONGEST_TAG + 1)
        return match

    def _read_query(self, end_of_query: re.Pattern[str], text: str, found: list[str]) -> bool:
        end = self._find(end_of_query, text)
        if end is None:
            return False
        found.append(text[self._start : end.start()])
        self._start = end.end()
        if end[0] == "</search>":
            self._state = "done"
        return True

    def _read_string(self, text: str, found: list[str]) -> bool:
        """Read up to the next mark, or to the end of a string."""
        unread = _BLANKS if self._marks else _IN_STRING
        self._position = unread.match(text, self._position).end()  # type: ignore[union-attr]  # both match nothing, too
        if self._position == len(text):
            return False
        if not text.startswith(self._marks[:1] or '"', self._position):  # no list of strings, or half an escape
            self._state = "done" if self._marks else self._state
            return False
        self._position += 1
        if self._marks:
            self._start, self._marks = self._position - 1, self._marks[1:]
            return True
        self._marks = ',"'
        try:
            found.append(json.loads(text[self._start : self._position]))
        except ValueError:
            self._state = "done"
        return True
