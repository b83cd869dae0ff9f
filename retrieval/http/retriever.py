"""HttpRetriever: the client of any ``/retrieve`` server: ours, Search-R1's, RAG-R1's.

::

    search(queries, k) ──► clean ──► AnswerCache ──miss──► Batcher ──► HttpReplica, one a server ──► POST /retrieve

Batches, coalescing, routing and retries are those of the fleet: a server is one more kind of replica.
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
from retrieval.fleet.batching import Batcher, BatcherCounts
from retrieval.fleet.cache import AnswerCache
from retrieval.http.client import (
    HttpAnswer,
    HttpClient,
    check_url,
    clean_query,
    parse_section,
    read_secret,
    text_id,
)

BUSY_TRIES = 5
"""Requests to the only server there is while it answers that it has too much to do."""
_ABOUT_QUERIES = {400, 413, 422}
"""Refusals for which a single query of a request may be to blame."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0


class HttpOptions(Section):
    """Options of ``retrieval.type=http``."""

    url: str | tuple[str, ...]
    """Of one server, or of several over the same index; ``/retrieve`` is added where there is no path."""
    token_env: str = ""
    """Name of the environment variable with the bearer token; empty sends none."""
    max_queries_per_request: int = Field(256, ge=1)
    max_concurrent_requests: int = Field(8, ge=1)
    """Of one searching process."""
    timeout_s: float = Field(30, gt=0)
    """Of one attempt at one server, and of the wait for any to come back."""
    max_retries: int = Field(2, ge=0)
    """Attempts after the first one."""
    cache_size: int = Field(16384, ge=0)
    """Queries of which each searching process remembers the answer; 0 is no cache."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """In place of an answer: asking again, here or elsewhere, is of no use."""

    reason: str


class HttpRetriever:
    """Searches over HTTP. Pickles as its arguments: the token is read where it is used."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options; nothing is sent before the first search.

        Args:
            options: see ``HttpOptions``.

        Raises:
            ConfigError: an option that does not exist or does not fit, or a token that is not there.
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
                busy_tries=1 if len(endpoints) > 1 else BUSY_TRIES,  # another one may have nothing to do
            )
            for url in endpoints
        }
        self._batcher: Batcher[Hits | Refusal] = Batcher(
            replicas, timeout_s=settings.timeout_s, max_retries=settings.max_retries
        )
        self._cache = AnswerCache(settings.cache_size)

    def __reduce__(self) -> tuple[type[HttpRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return HttpRetriever, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, each a ``Hits``; a query without a word finds nothing.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, or the server refused the query; the message says which.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        clean = [clean_query(query) for query in queries]
        answers = {"": Hits(index_version=self._version)}
        for query in clean:
            cached = self._cache.get(query, k)
            if cached is not None:
                answers[query] = cached
        missing = [query for query in dict.fromkeys(clean) if query not in answers]
        if missing:
            answers |= zip(missing, await self._ask(missing, k), strict=True)
        return [
            # those who ask the same must not share a list
            Hits(
                answers[query],
                is_cached=bool(query) and query not in missing,
                index_version=answers[query].index_version,
            )
            for query in clean
        ]

    async def wait_for_room(self) -> None:
        """Return once fewer queries wait than the servers should have before them."""
        await self._batcher.wait_for_room()

    def counts(self) -> BatcherCounts:
        """Return what has been asked of the servers, beyond the cache."""
        return self._batcher.counts()

    async def _ask(self, queries: list[str], k: int) -> list[Hits]:
        found: list[Hits] = []
        refused: list[Refusal] = []
        for query, answer in zip(queries, await self._batcher.ask(queries, k), strict=True):
            if isinstance(answer, Refusal):
                refused.append(answer)
            else:
                found.append(answer)
                self._cache.put(query, k, answer)
        if refused:
            raise RetrievalError(refused[0].reason)
        return found


class HttpReplica:
    """``Replica`` over one server. A query that the server refuses is answered with a ``Refusal``."""

    def __init__(
        self,
        client: HttpClient,
        url: URL,
        *,
        headers: Mapping[str, str],
        max_queries: int,
        version: str,
        busy_tries: int,
    ) -> None:
        """Ask the server at ``url``.

        Args:
            client: what sends; it may serve several replicas.
            url: of the endpoint.
            headers: of every request.
            max_queries: of one request.
            version: of the index, where the server does not say.
            busy_tries: requests while the server says that it is busy.
        """
        self._client = client
        self._url = url
        self._headers = headers
        self._max_queries = max_queries
        self._version = version
        self._busy_tries = busy_tries

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        """Ask, in as many requests as it takes.

        Raises:
            RetrievalError: this server cannot answer now.
        """
        parts = [queries[start : start + self._max_queries] for start in range(0, len(queries), self._max_queries)]
        answers = await asyncio.gather(*[self._ask(part, k) for part in parts])
        return [answer for part in answers for answer in part]

    async def ping(self) -> None:
        """Return once the server answers a search, with a refusal at least.

        Raises:
            RetrievalError: it does not.
        """
        await asyncio.sleep(random.uniform(0, _FIRST_PAUSE_S))  # else all processes would ask at once
        answer = await self._post(["ping"], 1)
        if answer.status != 200 and not answer.is_refusal:
            raise RetrievalError(self._client.describe(answer))

    async def _ask(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        answer = await self._post_patiently(queries, k)
        if answer.status == 200:
            return [*_read_hits(self._client.read_json(answer), answer.server, len(queries), k, self._version)]
        reason = self._client.describe(answer)
        if not answer.is_refusal:
            raise RetrievalError(reason)
        if answer.status in _ABOUT_QUERIES and len(queries) > 1:  # halve, until only the one to blame is refused
            half = len(queries) // 2
            return await self._ask(queries[:half], k) + await self._ask(queries[half:], k)
        return [Refusal(reason)] * len(queries)

    async def _post_patiently(self, queries: list[str], k: int) -> HttpAnswer:
        pause_s = _FIRST_PAUSE_S
        for _ in range(self._busy_tries - 1):
            answer = await self._post(queries, k)
            if not answer.is_busy:
                return answer
            wanted_s = answer.retry_after_s or 0.0
            await asyncio.sleep(min(max(pause_s * random.uniform(0.5, 1.0), wanted_s), _LAST_PAUSE_S))
            pause_s *= 2
        return await self._post(queries, k)

    async def _post(self, queries: list[str], k: int) -> HttpAnswer:
        body = {"queries": queries, "topk": k, "return_scores": True}
        return await self._client.send("POST", self._url, body=body, headers=self._headers)


def _endpoint(url: str) -> URL:
    parsed = check_url(url)
    return parsed.with_path("/retrieve") if parsed.path in ("", "/") else parsed


def _read_hits(answer: Any, server: str, num_queries: int, k: int, version: str) -> list[Hits]:
    """Return the passages of an answer, at most ``k`` a query: some servers give more than they were asked for."""
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or not all(isinstance(found, list) for found in lists):
        raise RetrievalError(f'{server}: expected {{"result": [[...], ...]}}, a list of passages for each query')
    if len(lists) != num_queries:
        raise RetrievalError(f"{server}: got {len(lists)} lists of passages for {num_queries} queries")
    named = answer.get("index_version")
    version = valid_unicode(named) if isinstance(named, str) and named else version
    return [Hits((_read_passage(item, server) for item in found[:k]), index_version=version) for found in lists]


def _read_passage(item: Any, server: str) -> Passage:
    """Read ``{"document": {...}, "score": x}`` or the document alone: Search-R1 leaves the scores out in two ways."""
    scored = item if isinstance(item, dict) and "document" in item else {"document": item}
    document, score = scored["document"], scored.get("score")
    if not isinstance(document, dict):
        raise RetrievalError(f"{server}: got a {type(document).__name__} for a passage, expected an object")
    title, text = _read_text(document, server)
    identity = document.get("id")
    if not isinstance(identity, str | int):
        identity = text_id(title, text)
    return Passage(valid_unicode(str(identity)), title, text, _read_score(score, server))


def _read_score(score: Any, server: str) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = 0.0 if score is None else float(score)
        if math.isfinite(number):
            return number
    raise RetrievalError(f"{server}: got a passage with a score that is no finite number")


def _read_text(document: dict[str, Any], server: str) -> tuple[str, str]:
    r"""Return title and text, where they stand apart or as ``"Title"\ntext`` in ``contents``."""
    title, text, contents = document.get("title"), document.get("text"), document.get("contents")
    if not isinstance(text, str):
        if not isinstance(contents, str):
            raise RetrievalError(f"{server}: got a passage with neither 'text' nor 'contents'")
        first, newline, rest = contents.partition("\n")
        text = rest if newline else contents
        if newline:
            title = first.strip().removeprefix('"').removesuffix('"')
    return valid_unicode(title) if isinstance(title, str) else "", valid_unicode(text)
