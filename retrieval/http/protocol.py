r"""What goes in and out of ``/retrieve``: the protocol of Search-R1's retrieval server, with every input checked. Pure.

::

    {"queries": ["who?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, "score": 0.8}, ...]]}
    {"result": [[{"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, ...]]}       where return_scores is false

Beyond it a document has its ``title`` and ``text`` apart, and the answer an ``index_version``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from retrieval.base import Hits, Passage

_MAX_QUOTED = 40


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may ask, and how many may ask at a time."""

    default_topk: int = 3
    """Passages a query, where the request does not say."""
    max_topk: int = 1000
    max_queries: int = 512
    max_query_chars: int = 100_000
    """More than 10,000 words: an encoder reads the beginning of a long query, so it is no error."""
    max_body_bytes: int = 8 * 2**20
    max_requests: int = 1024
    """In flight; Search-R1's client sends one for each trajectory, and does not ask again."""
    body_timeout_s: float = 30.0
    """For a request to come in whole."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request that has been checked."""

    queries: list[str]
    topk: int
    return_scores: bool


class RequestError(Exception):
    """A request that cannot be answered: an HTTP status, and one sentence."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Refuse with a status.

        Args:
            status: 4xx, or 503 for later.
            message: what was got, and what was expected.
            headers: of the answer.
        """
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def parse_question(body: bytes, limits: Limits) -> Question:
    """Read the body of a request.

    Keys that are not known are left alone: Search-R1's clients send some to other servers of the kind.

    Raises:
        RequestError: 400 where it is no JSON, 422 where something is wrong in it.
    """
    try:
        request = json.loads(body.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply, expected {'queries': [...], 'topk': 3}") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise RequestError(422, f"got {_kind(request)} for the body, expected an object with 'queries'")
    scores = request.get("return_scores")
    if scores is not None and not isinstance(scores, bool):
        raise RequestError(422, f"got {_kind(scores)} for 'return_scores', expected true or false")
    return Question(_parse_queries(request, limits), _parse_topk(request.get("topk"), limits), bool(scores))


def _parse_queries(request: dict[str, Any], limits: Limits) -> list[str]:
    if "queries" not in request:
        raise RequestError(422, "got no 'queries', expected a list of strings")
    queries = request["queries"]
    if not isinstance(queries, list):
        raise RequestError(422, f"got {_kind(queries)} for 'queries', expected a list of strings")
    if len(queries) > limits.max_queries:
        raise RequestError(
            422, f"got {len(queries)} queries, expected at most {limits.max_queries}; send several requests"
        )
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise RequestError(422, f"got {_kind(query)} for query {number}, expected a string")
        if len(query) > limits.max_query_chars:
            raise RequestError(
                422, f"query {number} has {len(query)} characters, expected at most {limits.max_query_chars}"
            )
        try:
            query.encode()
        except UnicodeEncodeError:
            raise RequestError(422, f"query {number} is not valid Unicode: it has half a surrogate pair") from None
    return queries


def _parse_topk(topk: Any, limits: Limits) -> int:
    if topk is None:
        return limits.default_topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= limits.max_topk:
        raise RequestError(422, f"got {_kind(topk)} for 'topk', expected a whole number from 1 to {limits.max_topk}")
    return topk


def format_answer(question: Question, found: Sequence[list[Passage]]) -> bytes:
    """Return the body of the answer: UTF-8, and exactly what Search-R1's clients read."""
    result: list[list[Any]] = [
        [
            {"document": _document(passage), "score": passage.score} if question.return_scores else _document(passage)
            for passage in passages
        ]
        for passages in found
    ]
    answer: dict[str, Any] = {"result": result}
    versions = {passages.index_version for passages in found if isinstance(passages, Hits)} - {""}
    if len(versions) == 1:
        answer["index_version"] = versions.pop()
    return json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()


def _document(passage: Passage) -> dict[str, str]:
    title = " ".join(passage.title.splitlines())  # clients take the first line of the contents for the title
    return {
        "id": passage.id,
        "contents": f'"{title}"\n{passage.text}',
        "title": passage.title,
        "text": passage.text,
    }


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _kind(value: Any) -> str:
    """Return a value in a few words: it may be as large as the body."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**_MAX_QUOTED:
        return "a huge number"
    text = json.dumps(value)  # ASCII, whatever it holds
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
