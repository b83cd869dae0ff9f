r"""The tag grammar of a search turn: pure functions from a completion's text to an action.

A turn is the policy's reasoning followed by exactly one action::

    <think> two people, two birth years</think><search> Ana Bell
     Bo Cole</search>

    <think> 1931 is before 1950</think><answer> Ana Bell</answer>

The first ``<search>`` or ``<answer>`` outside ``<think>`` is the action. Text behind its closing tag is not read. A
``<think>`` that is never closed reaches to the end of the turn: the tags in it are text. Everything here takes time
linear in the text.

``environment.options.query_format`` says how queries are written inside ``<search>``::

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

from envs.options import QueryFormat


@dataclass(frozen=True, slots=True)
class Search:
    """The policy searches: ``Search(("Ana Bell", "Bo Cole"))``."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy answers: ``Answer("Riga")``."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The turn holds no action that the environment understands."""

    reason: str


Action = Search | Answer | Malformed

STOP_TAGS = ("</search>", "</answer>")
THINK = "<think>"
_OPENING = re.compile(r"<(think|search|answer)>")
ANY_TAG = re.compile(r"</?(?:think|search|information|answer)>")
_END_OF_THINK = re.compile("</think>")
_LONGEST_TAG = len("</search>")  # the longest tag that is searched for
_BLANKS = re.compile(r"\s*+")
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)


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


def read_answer(completion: str) -> Answer | Malformed:
    """Return the text inside the first ``<answer>`` outside thoughts; without the tag, all text behind them.

    It is for turns that can only answer: a model that was never trained on the tags may leave them out.
    """
    text = completion[skip_thoughts(completion) :]
    if text.startswith(THINK):
        return Malformed("<think> is never closed")
    _, opening, rest = text.partition("<answer>")
    body, closing, _ = rest.partition("</answer>")
    if opening and not closing:
        return Malformed("<answer> is never closed")
    answer = (body if opening else text).strip()
    if not answer:
        return Malformed("the turn has no answer")
    inner = ANY_TAG.search(answer)
    return Malformed(f"{inner[0]} inside the answer") if inner else Answer(answer)


def open_thought(turn: str) -> str:
    """Return ``<think>`` if a turn ends inside a thought, else an empty text.

    ``open_thought("<think> I can write <search> a </search>") == THINK``
    """
    position = skip_thoughts(turn)
    return THINK if turn.startswith(THINK, position) else ""


def skip_thoughts(turn: str, position: int = 0) -> int:
    """Return where the first ``<search>``, ``<answer>`` or unclosed ``<think>`` begins, else the end of all thoughts.

    ``skip_thoughts("<think> a</think> Riga") == len("<think> a</think>")``; what is before ``position`` does not count.
    """
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
    found = FORMATS[query_format].split(body)
    return Malformed(f"<search> holds {found}") if isinstance(found, str) else Search(tuple(found))


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
    return FORMATS[query_format].join([ANY_TAG.sub(" ", query) for query in queries])


class QueryStream:
    r"""Reads the queries of a turn that is still being sampled, each as soon as it is complete.

    ``feed("<search>Ana")`` is ``[]``, then ``feed("<search>Ana Bell\nBo")`` is ``["Ana Bell"]``, and
    ``feed("<search>Ana Bell\nBo Cole</search>")`` is ``["Bo Cole"]``: together what ``parse_action`` reads of it all.

    The queries are a hint: the turn may still become malformed. No text is read twice.
    """

    def __init__(self, query_format: QueryFormat) -> None:
        """Start before the first character of a turn."""
        self._format = FORMATS[query_format]
        self._state = "outside"  # one of outside, think, search, answer
        self._position = 0  # the text before it has been read
        self._queries: _SeparatedScanner | _StringScanner | None = None  # scanner of the search that is being read

    def feed(self, partial: str) -> list[str]:
        """Take the turn's whole text so far and return the queries that ended since the last call, not cleaned."""
        while self._state in ("outside", "think"):
            pattern = _OPENING if self._state == "outside" else _END_OF_THINK
            found = pattern.search(partial, self._position)
            # without such a mark, the text may end with the beginning of one
            self._position = found.end() if found else max(self._position, len(partial) - _LONGEST_TAG + 1)
            if found is None:
                return []
            self._state = found[1] if self._state == "outside" else "outside"
            if self._state == "search":
                self._queries = self._format.scanner(self._position)
        return [] if self._queries is None else self._queries.read_on(partial)


# -- formats of the queries inside <search> ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Separated:
    """Queries with a separator between them; without a separator the whole text is one query."""

    separator: str
    in_words: str
    """Description of the format for the prompt."""

    def split(self, body: str) -> list[str] | str:
        """Return the queries of a whole search, or a text that says what is wrong with it."""
        return body.split(self.separator) if self.separator else [body]

    def join(self, queries: Sequence[str]) -> str:
        """Write the queries; a separator inside a query becomes a space."""
        return self.separator.join(query.replace(self.separator, " ") if self.separator else query for query in queries)

    def scanner(self, start: int) -> _SeparatedScanner:
        """Return a scanner that reads the queries of a text from ``start`` on, each once it is complete."""
        return _SeparatedScanner("|".join(filter(None, (re.escape(self.separator), "</search>"))), start)


class _SeparatedScanner:
    def __init__(self, end_of_query: str, start: int) -> None:
        self._end_of_query = re.compile(end_of_query)
        self._start = self._position = start
        self._is_done = False

    def read_on(self, text: str) -> list[str]:
        found: list[str] = []
        while not self._is_done and (end := self._end_of_query.search(text, self._position)):
            found.append(text[self._start : end.start()])
            self._start = self._position = end.end()
            self._is_done = end[0] == "</search>"
        self._position = max(self._position, len(text) - _LONGEST_TAG + 1)
        return found


@dataclass(frozen=True, slots=True)
class JsonList:
    """Queries as a JSON list of strings."""

    in_words: str = "as a JSON list of strings"

    def split(self, body: str) -> list[str] | str:
        """Return the queries of a whole search, or a text that says what is wrong with it."""
        try:
            queries = json.loads(body)
        except (ValueError, RecursionError) as error:  # ten thousand brackets
            return f"no JSON: {error}"
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return "JSON that is not a list of strings"
        return queries or "an empty list"

    def join(self, queries: Sequence[str]) -> str:
        """Write the queries as a JSON list."""
        return json.dumps(queries, ensure_ascii=False)

    def scanner(self, start: int) -> _StringScanner:
        """Return a scanner that reads the strings of a text from ``start`` on."""
        return _StringScanner(start)


class _StringScanner:
    def __init__(self, start: int) -> None:
        self._position = self._start = start
        self._marks = '["'  # characters before the next string; empty inside a string
        self._is_done = False

    def read_on(self, text: str) -> list[str]:
        found: list[str] = []
        while not self._is_done and self._read_mark(text, found):
            pass
        return found

    def _read_mark(self, text: str, found: list[str]) -> bool:
        """Read up to the next mark, or to the end of a string; return False if the text ends before it."""
        unread = _BLANKS if self._marks else _IN_STRING
        self._position = unread.match(text, self._position).end()  # type: ignore[union-attr]  # both match nothing, too
        if self._position == len(text):
            return False
        if not text.startswith(self._marks[:1] or '"', self._position):  # not a list of strings, or half an escape
            self._is_done = bool(self._marks)
            return False
        self._position += 1
        if self._marks:
            self._start, self._marks = self._position - 1, self._marks[1:]
            return True
        self._marks = ',"'
        try:
            found.append(json.loads(text[self._start : self._position]))
        except ValueError:
            self._is_done = True
        return True


FORMATS: dict[QueryFormat, Separated | JsonList] = {
    "lines": Separated("\n", "one a line"),
    "comma": Separated(",", "separated by commas"),
    "json": JsonList(),
    "single": Separated("", "as plain text"),
}
"""Formats by the value of ``environment.options.query_format``."""
