"""HttpRetriever: the client of any ``/retrieve`` server: ours, Search-R1's, RAG-R1's.

::

    search(queries, k) ──► clean_query ──► PooledRetriever ──► HttpReplica, one per server ──► POST /retrieve

Cache, batches, routing and failover are those of the fleet: a server is one more kind of replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from yarl import URL

from ragr1_actors.core.config import Section
from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.corpora.text import valid_unicode
from retrieval.fleet.batching import BatcherCounts, PooledRetriever, PoolSettings, Refusal
from retrieval.http.client import (
    HttpAnswer,
    HttpClient,
    TryAgainError,
    check_url,
    clean_query,
    parse_section,
    read_secret,
    retry,
    text_id,
)

BUSY_TRIES = 5
"""Requests to a server without a second one beside it, as long as it answers that it is busy."""
LONGEST_PAUSE_S = 5.0
"""Between two requests to a busy server."""
_ABOUT_QUERIES = {400, 413, 422}
"""Refusals that a single query of the request may cause."""


class HttpOptions(Section):
    """Options of ``retrieval.type=http``."""

    url: str | tuple[str, ...]
    """One server, or several with the same index. ``/retrieve`` is added to an address without a path."""
    token_env: str = ""
    """Name of the environment variable with the bearer token; empty sends none."""
    max_queries_per_request: int = Field(256, ge=1)
    max_concurrent_requests: int = Field(8, ge=1)
    """Per searching process."""
    timeout_s: float = Field(30, gt=0)
    """Per attempt at one server, and for the wait until any server is up."""
    max_retries: int = Field(2, ge=0)
    """Attempts after the first one."""
    cache_size: int = Field(16384, ge=0)
    """Queries whose answers each searching process keeps; 0 is no cache."""


class HttpRetriever:
    """Searches over HTTP. Pickles as its arguments: each process reads the token from its own environment."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options (see ``HttpOptions``); nothing is sent before the first search.

        Raises:
            ConfigError: an option is unknown or has a wrong value, or the token is missing.
        """
        self._arguments = (dict(options),)
        settings = parse_section(HttpOptions, options, "http")
        urls = (settings.url,) if isinstance(settings.url, str) else settings.url
        if not urls:
            raise ConfigError("retrieval.options.url: got an empty list, expected an address or a list of them")
        token = read_secret("token_env", settings.token_env)
        client = HttpClient(max_connections=settings.max_concurrent_requests, secret=token)
        endpoints = list(dict.fromkeys(_endpoint(url) for url in urls))
        self._version = ",".join(str(url.with_query(None)) for url in endpoints)
        replicas = {
            str(url): HttpReplica(
                client,
                url,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                max_queries=settings.max_queries_per_request,
                version=self._version,
                busy_tries=1 if len(endpoints) > 1 else BUSY_TRIES,  # another server may be idle
            )
            for url in endpoints
        }
        pool = PoolSettings(settings.timeout_s, settings.max_retries, settings.cache_size)
        self._pool = PooledRetriever(replicas, pool)

    def __reduce__(self) -> tuple[type[HttpRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return HttpRetriever, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages per query, each a ``Hits``; a query without a word finds nothing.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, or the server refused a query; the message has the cause.
        """
        clean = [clean_query(query) for query in queries]
        found = iter(await self._pool.search([query for query in clean if query], k))
        return [next(found) if query else Hits(index_version=self._version) for query in clean]

    async def wait_for_room(self) -> None:
        """Return once the servers have room for more queries; see ``PooledRetriever``."""
        await self._pool.wait_for_room()

    def counts(self) -> BatcherCounts:
        """Return how much was sent to the servers, without the cache's answers."""
        return self._pool.counts()


@dataclass(frozen=True)
class HttpReplica:
    """``Replica`` over one server. A query that the server refuses is answered with a ``Refusal``."""

    client: HttpClient
    """Sends the requests; several replicas may share it."""
    url: URL
    headers: Mapping[str, str]
    max_queries: int
    """Per request."""
    version: str
    """Version of the index, if the server does not report one."""
    busy_tries: int
    """Requests while the server answers that it is busy."""

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        """Search, with as many requests as the size of a request demands.

        Raises:
            RetrievalError: this server cannot answer now.
        """
        parts = [queries[start : start + self.max_queries] for start in range(0, len(queries), self.max_queries)]
        answers = await asyncio.gather(*[self._search(part, k) for part in parts])
        return [answer for part in answers for answer in part]

    async def ping(self) -> None:
        """Return once the server answers a search, at least with a refusal. Raises ``RetrievalError``: it does not."""
        await asyncio.sleep(random.uniform(0, 0.1))  # processes that lost the server must not all ask at once
        answer = await self._post(["ping"], 1)
        if answer.status != 200 and not answer.is_refusal:
            raise RetrievalError(self.client.describe(answer))

    async def _search(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        answer = await retry(lambda: self._post(queries, k), attempts=self.busy_tries, longest_pause_s=LONGEST_PAUSE_S)
        if answer.status == 200:
            content = self.client.read_json(answer)
            return [*_parse_answer(content, answer.server, len(queries), k, self.version)]
        reason = self.client.describe(answer)
        if not answer.is_refusal:
            raise RetrievalError(reason)
        if answer.status in _ABOUT_QUERIES and len(queries) > 1:  # halve, until only the wrong query is refused
            half = len(queries) // 2
            return await self._search(queries[:half], k) + await self._search(queries[half:], k)
        return [Refusal(reason)] * len(queries)

    async def _post(self, queries: list[str], k: int) -> HttpAnswer:
        body = {"queries": queries, "topk": k, "return_scores": True}
        answer = await self.client.send("POST", self.url, body=body, headers=self.headers)
        if answer.is_busy:
            raise TryAgainError.busy(self.client.describe(answer), answer.retry_after_s)
        return answer


def _endpoint(url: str) -> URL:
    parsed = check_url(url)
    return parsed.with_path("/retrieve") if parsed.path in ("", "/") else parsed


def _parse_answer(answer: Any, server: str, num_queries: int, k: int, version: str) -> list[Hits]:
    """Read the decoded JSON of an answer of our server or of another one: ``[num_queries][<= k]``.

    Some servers return more than ``k`` passages per query; the rest is dropped. ``version`` is that of the index, if
    the server does not report one.

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
        number = 0.0 if score is None else float(score)
        if math.isfinite(number):
            return Passage(valid_unicode(str(identity)), title, text, number)
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
