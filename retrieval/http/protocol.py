r"""The messages of ``/retrieve``, Search-R1's protocol: checks requests, writes answers and reads answers.

::

    {"queries": ["who?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, "score": 0.8}, ...]]}
    {"result": [[{"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, ...]]}       if return_scores is false

Our answers also give ``title`` and ``text`` of each document, and the ``index_version``.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from pydantic_core import from_json, to_json

from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.text import first_problem, shortened
from retrieval.base import Hits, Passage
from retrieval.corpora.text import valid_unicode
from retrieval.http.client import text_id

_MAX_QUOTED = 40
_EXAMPLE = 'expected {"queries": ["a question"], "topk": 3}'


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may ask for, and how many requests the server answers at the same time."""

    default_topk: int = 3
    """Passages per query for a request without ``topk``."""
    max_topk: int = 1000
    max_queries: int = 512
    max_query_chars: int = 100_000
    """More than 10,000 words. An encoder truncates a long query, so a long query is not an error."""
    max_body_bytes: int = 8 * 2**20
    max_requests: int = 1024
    """Requests in flight. Search-R1's client sends one request per trajectory and does not retry."""
    body_timeout_s: float = 30.0
    """Time for the whole body of a request to arrive."""


class Question(BaseModel):
    """The body of a request. Unknown keys are ignored: Search-R1's clients send some to similar servers."""

    model_config = ConfigDict(strict=True)

    # FailFast: 8 MiB of wrong items must not become a million error objects.
    queries: Annotated[list[str], FailFast()]
    topk: int | None = None
    return_scores: bool | None = None


class RequestError(Exception):
    """A request that the server refuses with an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Refuse with ``status`` (4xx, or 503 for "later") and ``message``; ``headers`` go into the answer."""
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def parse_question(body: bytes, limits: Limits) -> Question:
    """Read the body of a request.

    Raises:
        RequestError: 400 if the body is not JSON, 422 if a value in it is wrong or over a limit.
    """
    try:
        question = Question.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        key, value, problem = first_problem(error)
        if key not in ("", "queries") or not isinstance(value, dict):
            problem += f", got {_describe(value)}"
        raise RequestError(422, f"{key or 'the body'}: {problem}; {_EXAMPLE}") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {error}; {_EXAMPLE}") from None
    if question.topk is not None and not 1 <= question.topk <= limits.max_topk:
        got = _describe(question.topk)
        raise RequestError(422, f"got {got} for 'topk', expected a whole number from 1 to {limits.max_topk}")
    num_queries = len(question.queries)
    if num_queries > limits.max_queries:
        raise RequestError(422, f"got {num_queries} queries, expected at most {limits.max_queries}; send more requests")
    for number, query in enumerate(question.queries):
        if len(query) > limits.max_query_chars:
            expected = f"expected at most {limits.max_query_chars}"
            raise RequestError(422, f"query {number} has {len(query)} characters, {expected}; shorten it")
    return question


def format_answer(found: Sequence[list[Passage]], *, return_scores: bool) -> bytes:
    """Return the body of the answer: UTF-8, in the shape that Search-R1's clients read.

    Raises:
        ValueError: a score is not a finite number, which is an error of the retriever.
    """
    result: list[list[Any]] = [
        [
            {"document": _document(passage), "score": _finite(passage.score)} if return_scores else _document(passage)
            for passage in passages
        ]
        for passages in found
    ]
    answer: dict[str, Any] = {"result": result}
    versions = {passages.index_version for passages in found if isinstance(passages, Hits)} - {""}
    if len(versions) == 1:
        answer["index_version"] = versions.pop()
    return to_json(answer)


def _document(passage: Passage) -> dict[str, str]:
    title = " ".join(passage.title.splitlines())  # clients read the first line of ``contents`` as the title
    contents = f'"{title}"\n{passage.text}'
    return {"id": passage.id, "contents": contents, "title": passage.title, "text": passage.text}


def _finite(score: float) -> float:
    if math.isfinite(score):
        return score
    raise ValueError(f"got the score {score}, expected a finite number")


def _describe(value: Any) -> str:
    """Describe a value in a few words: it may be as large as the body."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**_MAX_QUOTED:
        return "a huge number"
    return shortened(json.dumps(value), _MAX_QUOTED)  # ASCII only


def parse_answer(answer: Any, server: str, num_queries: int, k: int, version: str) -> list[Hits]:
    """Read the JSON of an answer of our server or of another one: ``[num_queries][<= k]``.

    Args:
        answer: the decoded JSON. Some servers return more than ``k`` passages per query; the rest is dropped.
        server: its address, for error messages.
        num_queries: in the request.
        k: passages per query in the request.
        version: of the index, if the server does not report one.

    Raises:
        RetrievalError: the answer has another shape.
    """
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or not all(isinstance(found, list) for found in lists):
        raise RetrievalError(f'{server}: expected {{"result": [[...], ...]}}, a list of passages per query')
    if len(lists) != num_queries:
        raise RetrievalError(f"{server}: got {len(lists)} lists of passages for {num_queries} queries")
    reported = answer.get("index_version")
    version = valid_unicode(reported) if isinstance(reported, str) and reported else version
    return [Hits((_parse_passage(item, server) for item in found[:k]), index_version=version) for found in lists]


def _parse_passage(item: Any, server: str) -> Passage:
    """Read ``{"document": {...}, "score": x}`` or only the document: Search-R1 omits the scores in two ways."""
    scored = item if isinstance(item, dict) and "document" in item else {"document": item}
    document, score = scored["document"], scored.get("score")
    if not isinstance(document, dict):
        raise RetrievalError(f"{server}: got a {type(document).__name__} for a passage, expected an object")
    title, text = _parse_text(document, server)
    identity = document.get("id")
    if not isinstance(identity, str | int):
        identity = text_id(title, text)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return Passage(valid_unicode(str(identity)), title, text, _finite(0.0 if score is None else float(score)))
    raise RetrievalError(f"{server}: got a passage with a score that is not a finite number")


def _parse_text(document: dict[str, Any], server: str) -> tuple[str, str]:
    r"""Return title and text from their own keys or from ``"Title"\ntext`` in ``contents``."""
    title, text, contents = document.get("title"), document.get("text"), document.get("contents")
    if not isinstance(text, str):
        if not isinstance(contents, str):
            raise RetrievalError(f"{server}: got a passage with neither 'text' nor 'contents'")
        first, newline, rest = contents.partition("\n")
        text = rest if newline else contents
        if newline:
            title = first.strip().removeprefix('"').removesuffix('"')
    return valid_unicode(title) if isinstance(title, str) else "", valid_unicode(text)
