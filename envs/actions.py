r"""The tag grammar of a search turn: pure functions from a completion's text to an action.

A turn is the policy's reasoning followed by exactly one action::

    <think> two people, two birth years</think><search> Ana Bell
     Bo Cole</search>

    <think> 1931 is before 1950</think><answer> Ana Bell</answer>

The first ``<search>`` or ``<answer>`` outside ``<think>`` is the action, and nothing behind its closing tag is read.
Text between ``<think>`` and the next ``</think>`` is never an action, and a ``<think>`` that is never closed
reaches to the end of the turn. Everything here takes time linear in the length of any text.

How queries are written inside ``<search>`` is ``environment.query_format``::

    lines    Ana Bell\n Bo Cole            the default: no character of a query has a second meaning
    comma    Ana Bell, Bo Cole             RAG-R1-mq's checkpoints; a comma inside a query splits it
    json     ["Ana Bell", "Bo Cole"]
    single   Martin Luther King, Jr.       Search-R1's and RAG-R1-sq's: all of it is one query
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import Action, Answer, Malformed, Search
from ragr1_actors.core.config import QueryFormat

STOP_TAGS = ("</search>", "</answer>")
_OPENING = re.compile(r"<(think|search|answer)>")
_ANY_TAG = re.compile(r"</?(?:think|search|information|answer)>")
_END_OF_THINK = re.compile("</think>")
_LONGEST_TAG = len("</search>")  # of those that are looked for
_ENDS_OF_QUERY: dict[QueryFormat, re.Pattern[str]] = {
    "lines": re.compile(r"\n|</search>"),
    "comma": re.compile(r",|</search>"),
    "json": re.compile('"'),
    "single": re.compile("</search>"),
}
_SPACE, _SPACE_OR_COMMA = re.compile(r"\s*+"), re.compile(r"[\s,]*+")
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')
# Control characters and halves of surrogate pairs (JSON can write both) are nothing that can be searched or encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def parse_action(completion: str, query_format: QueryFormat = "lines") -> Action:
    """Read the first action that stands outside ``<think>``; its queries are not cleaned yet.

    ``parse_action("<think> a <search>b</search></think><answer> Riga</answer>") == Answer("Riga")``
    """
    position = 0
    while (opening := _OPENING.search(completion, position)) is not None:
        tag = opening[1]
        end = completion.find(f"</{tag}>", opening.end())
        if end < 0:
            return Malformed(f"<{tag}> is never closed")
        if tag != "think":
            return _read_body(tag, completion[opening.end() : end].strip(), query_format)
        position = end + len("</think>")
    return Malformed("no <search>...</search> or <answer>...</answer> in the turn")


def _read_body(tag: str, body: str, query_format: QueryFormat) -> Action:
    if not body:
        return Malformed(f"<{tag}> is empty")
    inner = _ANY_TAG.search(body)
    if inner is not None:
        return Malformed(f"{inner[0]} stands inside <{tag}>")
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
    except (ValueError, RecursionError) as error:  # ten thousand brackets are no list of queries either
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
    texts = [_ANY_TAG.sub(" ", query) for query in queries]
    match query_format:
        case "lines":
            return "\n".join(text.replace("\n", " ") for text in texts)
        case "comma":
            return ",".join(text.replace(",", " ") for text in texts)
        case "json":
            return json.dumps(texts, ensure_ascii=False)
        case "single":
            return texts[0]


@dataclass(frozen=True, slots=True)
class CleanQueries:
    """Queries of one turn after cleaning, with counts of what was cleaned away."""

    queries: tuple[str, ...]
    num_duplicate: int
    num_empty: int
    num_over_limit: int


def clean_queries(queries: Sequence[str], limit: int) -> CleanQueries:
    """Reduce the queries of one turn to at most ``limit`` distinct ones, and count what is dropped.

    ``clean_queries(["Ana Bell", " Bo  Cole", "ana bell", ""], 3).queries == ("Ana Bell", "Bo Cole")``: white space and
    control characters are squeezed; empty queries, duplicates (ignoring case) and those over the limit are dropped.
    """
    cleaner = QueryCleaner(limit)
    kept = [query for query in map(cleaner.add, queries) if query]
    return CleanQueries(tuple(kept), cleaner.num_duplicate, cleaner.num_empty, cleaner.num_over_limit)


class QueryCleaner:
    """``clean_queries`` one query at a time: for a whole turn and for one that is still being sampled alike."""

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` queries."""
        self.num_duplicate = self.num_empty = self.num_over_limit = 0
        self._limit = limit
        self._seen: set[str] = set()

    def add(self, query: str) -> str:
        """Return the query, squeezed; empty where it is not one, not new or over the limit."""
        squeezed = " ".join(_UNPRINTABLE.sub(" ", query).split())
        key = squeezed.casefold()
        if not squeezed:
            self.num_empty += 1
        elif key in self._seen:
            self.num_duplicate += 1
        else:
            self._seen.add(key)
            if len(self._seen) <= self._limit:
                return squeezed
            self.num_over_limit += 1
        return ""


class QueryStream:
    r"""Reads the queries of a turn that is still being sampled, each as soon as it is complete.

    ``feed("<search>Ana")`` is ``[]``, then ``feed("<search>Ana Bell\nBo")`` is ``["Ana Bell"]``, and
    ``feed("<search>Ana Bell\nBo Cole</search>")`` is ``["Bo Cole"]``: together what ``parse_action`` reads of it all.

    A hint only: the turn may still become malformed. Nothing is read twice, so a turn costs time linear in its text.
    """

    def __init__(self, query_format: QueryFormat) -> None:
        """Start in front of a turn."""
        self._is_json = query_format == "json"
        self._end_of_query = _ENDS_OF_QUERY[query_format]
        self._state = "outside"  # outside, think, search, list (of JSON), string (in it) or done
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
                return self._expect("[", "list", _SPACE, text) if self._is_json else self._read_query(text, found)
            case "list":
                return self._expect('"', "string", _SPACE_OR_COMMA, text)
            case "string":
                return self._read_string(text, found)
            case _:  # inside <answer>, or behind the last query
                return False

    def _find(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        match = pattern.search(text, self._position)
        # where there is none, the text may end with the beginning of one
        self._position = match.end() if match else max(self._position, len(text) - _LONGEST_TAG + 1)
        return match

    def _read_query(self, text: str, found: list[str]) -> bool:
        end = self._find(self._end_of_query, text)
        if end is None:
            return False
        found.append(text[self._start : end.start()])
        self._start = end.end()
        if end[0] == "</search>":
            self._state = "done"
        return True

    def _expect(self, character: str, state: str, skipped: re.Pattern[str], text: str) -> bool:
        skip = skipped.match(text, self._position)
        assert skip is not None, "the pattern matches the empty string too"
        self._position = skip.end()
        if self._position == len(text):
            return False
        self._start = self._position
        self._position += 1
        self._state = state if text[self._start] == character else "done"
        return True

    def _read_string(self, text: str, found: list[str]) -> bool:
        end = _QUOTE_OR_BACKSLASH.search(text, self._position)
        if end is None:
            self._position = len(text)
            return False
        if end[0] == "\\":
            is_whole = end.end() < len(text)
            self._position = end.end() + 1 if is_whole else end.start()
            return is_whole
        self._position = end.end()
        try:
            found.append(json.loads(text[self._start : self._position]))
            self._state = "list"
        except ValueError:
            self._state = "done"
        return True
