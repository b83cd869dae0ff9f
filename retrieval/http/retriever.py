"""HttpRetriever: client of any ``/retrieve`` server (ours, Search-R1's, RAG-R1's); also the HTTP of ``WebRetriever``.

::

    search(queries, k) ──► clean_query ──► PooledRetriever ──► HttpReplica, one per server ──► POST /retrieve

Cache, batches, routing and failover work as in the fleet: a server is one more kind of replica. No error message
contains a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import hashlib
import json
import logging
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, quote_plus

import aiohttp
from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential_jitter
from yarl import URL

from ragr1_actors.core.content import Image
from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError, shortened, valid_unicode
from ragr1_actors.core.images import read_data_url
from ragr1_actors.core.section import Section
from retrieval.base import Hits, Passage
from retrieval.corpora.text import normalise
from retrieval.replicas.batching import MAX_BATCH, PoolArguments, PooledRetriever, Refusal

BUSY_TRIES = 5
"""Number of requests to a busy server that has no second one beside it."""
LONGEST_PAUSE_S = 5.0
"""Longest pause between two requests to a busy server, in seconds."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Limit of an answer, in bytes: a longer one is not a list of passages."""
PROBE = "Where is Riga?"
"""Query that checks whether a service answers."""
_MAX_QUOTED = 200
"""Limit of the characters of a server's answer in an error message."""
_ABOUT_QUERIES = {400, 413, 422}
"""Statuses of refusals that a single query of the request may cause."""
_BUSY = {429, 503}
_TEMPORARY = {408, 425, 429}
"""Statuses from 300 to 499 for which a second attempt may succeed."""
_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_log = logging.getLogger(__name__)
_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=10, jitter=0.1)
_CLOSING_TASKS: set[asyncio.Task[None]] = set()
"""Running tasks of ``_close_at_end``, kept here because an event loop holds only weak references to its tasks."""


class HttpOptions(Section):
    """Options of ``retrieval.type=http``."""

    url: str | tuple[str, ...]
    """Address of one server, or of several with the same index. ``/retrieve`` is added to an address without a path."""
    token_env: str = ""
    """Name of the environment variable with the bearer token; empty: no token is sent."""
    max_queries_per_request: int = Field(256, ge=1)
    """Limit of the queries in one request; more are sent in several."""
    max_concurrent_requests: int = Field(8, ge=1)
    """Limit of concurrent requests of one searching process."""
    timeout_s: float = Field(30, gt=0)
    """Limit of one attempt at one server, and of the wait until any server is up."""
    max_retries: int = Field(2, ge=0)
    """Number of attempts after the first one."""
    cache_size: int = Field(16384, ge=0)
    """Number of queries whose answers each searching process keeps; 0 turns the cache off."""


class HttpRetriever:
    """Searches over HTTP. It pickles as its arguments: each process reads the token from its own environment."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options (see ``HttpOptions``); nothing is sent before the first search.

        Raises:
            ConfigError: an option is unknown or has a wrong value, or the token is missing.
        """
        self._arguments = (dict(options),)
        settings = HttpOptions.read(options, "retrieval.options")
        urls = (settings.url,) if isinstance(settings.url, str) else settings.url
        if not urls:
            raise ConfigError("retrieval.options.url: got an empty list, expected an address or a list of them")
        token = read_secret("retrieval.options.token_env", settings.token_env)
        client = HttpClient(max_connections=settings.max_concurrent_requests, secret=token)
        endpoints = list(dict.fromkeys(_endpoint(url) for url in urls))
        self._version = ",".join(str(url.with_query(None)) for url in endpoints)
        self._timeout_s = settings.timeout_s
        self._replicas = replicas = {
            str(url): HttpReplica(
                client,
                url,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                max_queries=settings.max_queries_per_request,
                version=self._version,
                is_alone=len(endpoints) == 1,
            )
            for url in endpoints
        }
        # a batch is one round of requests, so that ``timeout_s`` is the limit of each of them
        max_batch = min(MAX_BATCH, settings.max_queries_per_request * settings.max_concurrent_requests)
        pool = PoolArguments(settings.timeout_s, settings.max_retries, settings.cache_size, max_batch)
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

    async def probe(self) -> None:
        """Ask every server one query; see ``ProbedRetriever``. If another server answers, a dead one is only logged."""
        asked = await asyncio.gather(*[replica.problem(self._timeout_s) for replica in self._replicas.values()])
        problems = [problem for problem in asked if problem]
        if len(problems) == len(asked):
            raise RetrievalError("; ".join(problems))
        for problem in problems:
            _log.warning("a search server does not answer, and is asked again while the others search: %s", problem)

    async def wait_for_room(self) -> None:
        """Return once the servers have room for more queries; see ``Batcher.wait_for_room``."""
        await self._pool.batcher.wait_for_room()


@dataclass(frozen=True)
class HttpReplica:
    """``Replica`` with one server. A query that the server refuses is answered with a ``Refusal``."""

    client: HttpClient
    """Client that sends the requests; several replicas may share it."""
    url: URL
    headers: Mapping[str, str]
    max_queries: int
    """Limit of queries per request."""
    version: str
    """Version of the index if the server does not report one."""
    is_alone: bool
    """Whether there is no other server, which may be idle, or configured right."""

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        """Search, with as many requests as ``max_queries`` demands.

        Raises:
            RetrievalError: this server cannot answer now.
        """
        parts = [queries[start : start + self.max_queries] for start in range(0, len(queries), self.max_queries)]
        answers = await asyncio.gather(*[self._search(part, k) for part in parts])
        return [answer for part in answers for answer in part]

    async def problem(self, timeout_s: float) -> str:
        """Return why this server cannot search; empty if it can, also if it is only busy."""
        try:
            async with asyncio.timeout(timeout_s):
                (answer,) = await self.answer_batch([PROBE], 1)
        except TimeoutError:
            return f"{self.client.name_of(self.url)}: no answer within {timeout_s:g} s"
        except RetrievalError as error:
            return "" if is_busy(error) else str(error)
        return answer.reason if isinstance(answer, Refusal) else ""

    async def ping(self) -> None:
        """Return once the server answers a search, at least with a refusal; ``RetrievalError`` if it does not."""
        await asyncio.sleep(random.uniform(0, 0.1))  # processes that lost the server must not all ask at once
        try:
            await self._post(["ping"], 1)
        except StatusError as error:
            if not self._refuses(error):
                raise

    def _refuses(self, error: StatusError) -> bool:
        """Return whether no server would answer: another one may take the token or the path that this one does not."""
        return error.is_refusal and (self.is_alone or error.status in _ABOUT_QUERIES)

    async def _search(self, queries: list[str], k: int) -> list[Hits | Refusal]:
        retrying = retry(is_busy, attempts=BUSY_TRIES if self.is_alone else 1, longest_pause_s=LONGEST_PAUSE_S)
        try:
            content: bytes = await retrying(self._post, queries, k)
        except TooLargeError:
            if len(queries) == 1:
                raise
        except StatusError as error:
            if not self._refuses(error):
                raise
            if len(queries) == 1 or error.status not in _ABOUT_QUERIES:
                return [Refusal(str(error))] * len(queries)
        else:
            answer = self.client.read_json(content, self.url)
            return [*_parse_answer(answer, self.client.name_of(self.url), len(queries), k, self.version)]
        half = len(queries) // 2  # until only the wrong query is refused, or each answer is small enough
        return await self._search(queries[:half], k) + await self._search(queries[half:], k)

    async def _post(self, queries: list[str], k: int) -> bytes:
        body = {"queries": queries, "topk": k, "return_scores": True}
        return await self.client.send("POST", self.url, body=body, headers=self.headers)


def _endpoint(url: str) -> URL:
    parsed = check_url(url)
    return parsed.with_path("/retrieve", keep_query=True) if parsed.path in ("", "/") else parsed


def _parse_answer(answer: Any, server: str, num_queries: int, k: int, version: str) -> list[Hits]:
    """Read the decoded JSON of an answer from our server or another one: ``[num_queries][<= k]``.

    Some servers return more than ``k`` passages per query; the rest is dropped. ``version`` is the index version if the
    server does not report one.

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
    """Read ``{"document": {...}, "score": x}`` or only the document, since Search-R1 omits the scores in two ways."""
    scored = item if isinstance(item, dict) and "document" in item else {"document": item}
    document, score = scored["document"], scored.get("score")
    if not isinstance(document, dict):
        raise RetrievalError(f"{server}: got a {type(document).__name__} for a passage, expected an object")
    title, text = _parse_text(document, server)
    image = _parse_image(document.get("image"), server)
    identity = document.get("id")
    if not isinstance(identity, str | int):
        identity = text_id(title, text)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = 0.0 if score is None else float(score)
        if math.isfinite(number):
            return Passage(valid_unicode(str(identity)), title, text, number, image)
    raise RetrievalError(f"{server}: got a passage with a score that is not a finite number")


def _parse_image(found: Any, server: str) -> Image | None:
    """Return the picture of a passage; other servers may write something else under its name."""
    if not (isinstance(found, str) and found.startswith("data:image/")):
        return None
    try:
        return read_data_url(found, f"{server}: image")
    except DataError as error:
        raise RetrievalError(str(error)) from None


def _parse_text(document: dict[str, Any], server: str) -> tuple[str, str]:
    r"""Return title and text from the keys ``title`` and ``text``, or from ``"Title"\ntext`` in ``contents``."""
    title, text, contents = document.get("title"), document.get("text"), document.get("contents")
    if not isinstance(text, str):
        if not isinstance(contents, str):
            raise RetrievalError(f"{server}: got a passage with neither 'text' nor 'contents'")
        first, newline, rest = contents.partition("\n")
        text = rest if newline else contents
        if newline:
            title = first.strip().removeprefix('"').removesuffix('"')
    return valid_unicode(title) if isinstance(title, str) else "", valid_unicode(text)


class HttpClient:
    """Sends requests from the running event loop, one keep-alive session per loop. Callers set the timeout."""

    def __init__(self, *, max_connections: int, secret: str = "") -> None:
        """Create a client without a connection. Every message has ``***`` in place of the secret.

        While ``max_connections`` requests are in flight, further requests wait.
        """
        self._max_connections = max_connections
        in_address = URL("http://x").with_query(x=secret).raw_query_string.removeprefix("x=")
        known = {secret, quote(secret, safe=""), quote_plus(secret), in_address} - {""}
        self._secrets = sorted(known, key=len, reverse=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def redact(self, text: str) -> str:
        """Return the text with ``***`` in place of the secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def name_of(self, url: URL) -> str:
        """Return the address without its parameters, for error messages."""
        return self.redact(str(url.with_query(None).with_fragment(None)))

    async def send(self, method: str, url: URL, *, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
        """Send one request with ``body`` as JSON and return the whole answer.

        Redirections are not followed: the headers may contain a key for this server only.

        Raises:
            StatusError: the status is not 200; the message includes the server's message.
            RetrievalError: no answer came, or it is too large.
        """
        session = await self._session_here()
        server = self.name_of(url)
        headers = {"Accept": "application/json", **(headers or {})}
        try:
            async with session.request(method, url, json=body, headers=headers, allow_redirects=False) as response:
                content = await _read_body(response, server)
        except (aiohttp.ClientError, OSError) as error:
            words = " ".join(str(error).split())
            problem = f"{type(error).__name__}: {words}" if words else type(error).__name__
            # ``from None``, because the cause may contain the whole address, with the key.
            raise RetrievalError(f"{server}: {self.redact(problem)}") from None
        if response.status == 200:
            return content
        retry_after_s = _parse_retry_after(response.headers.get("Retry-After", ""))
        problem = f"{server} answered {response.status}: {self._quote_problem(content)}"
        if retry_after_s >= 1:
            problem += f"; the server asks for a pause of {retry_after_s:.0f} s"
        raise StatusError(problem, response.status, retry_after_s)

    def read_json(self, content: bytes, url: URL) -> Any:
        """Return the decoded answer of ``url``; raises ``RetrievalError`` if it is not JSON."""
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise RetrievalError(f"{self.name_of(url)}: expected JSON, got {self._quote(content)}") from None

    def _quote_problem(self, content: bytes) -> str:
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(content)
        if isinstance(message, dict):
            message = next((message[name] for name in ("error", "detail", "message") if message.get(name)), None)
        return self._quote(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") if message else content)

    def _quote(self, content: bytes) -> str:
        # Redacted before it is cut, since half a secret would not be found.
        text = self.redact(clean_query(content[: 2**16].decode("utf-8", "replace")))
        return shortened(text, _MAX_QUOTED) or "nothing"

    async def _session_here(self) -> aiohttp.ClientSession:
        """Return the session of the running loop. A session of an earlier loop is closed already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                json_serialize=partial(json.dumps, ensure_ascii=False),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            closing = loop.create_task(_close_at_end(self._session))
            _CLOSING_TASKS.add(closing)
            closing.add_done_callback(_CLOSING_TASKS.discard)
            await asyncio.sleep(0)  # a task that is cancelled before it starts does not run its ``finally``
        return self._session


async def _close_at_end(session: aiohttp.ClientSession) -> None:
    """Close the session when the loop ends, as ``asyncio.run`` then cancels all tasks."""
    try:
        await asyncio.Event().wait()
    finally:
        await session.close()


async def _read_body(response: aiohttp.ClientResponse, server: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise TooLargeError(f"{server}: the answer is larger than {MAX_ANSWER_BYTES // 2**20} MiB")
    return bytes(body)


def _parse_retry_after(value: str) -> float:
    """Return the seconds from now in a ``Retry-After`` header, which holds seconds or a date; 0 for any other value."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(value)), 1e9)  # in this order NaN becomes 0
    with contextlib.suppress(ValueError):
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return 0.0


class TooLargeError(RetrievalError):
    """Answer of a server that is not read, because it is too large."""


class StatusError(RetrievalError):
    """Error status in the answer of a server."""

    def __init__(self, problem: str, status: int, retry_after_s: float = 0.0) -> None:
        """Take message and status; ``retry_after_s`` is the pause that the server asks for, used if it is busy."""
        super().__init__(problem)
        self.status = status
        self.pause_s = retry_after_s if status in _BUSY else 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether a second attempt cannot succeed: the request, the address or the token is wrong."""
        return 300 <= self.status < 500 and self.status not in _TEMPORARY


def is_busy(error: BaseException | None) -> bool:
    """Return whether an error is a server's request to try later."""
    return isinstance(error, StatusError) and error.status in _BUSY


def retry(
    may_pass: Callable[[BaseException], bool],
    *,
    attempts: int,
    longest_pause_s: float,
    before_pause: Callable[[RetryCallState], None] | None = None,
) -> AsyncRetrying:
    """Return a retrying caller of async functions: it repeats after errors that ``may_pass``, and raises the last one.

    Pauses double from 0.1 to 10 s; they are at least as long as the server asks, and at most ``longest_pause_s``.
    """

    def pause_s(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.pause_s if isinstance(error, StatusError) else 0.0
        return min(max(_BACKOFF(state), asked_s), longest_pause_s)

    return AsyncRetrying(
        stop=stop_after_attempt(attempts),
        wait=pause_s,
        retry=retry_if_exception(may_pass),
        before_sleep=before_pause,
        reraise=True,
    )


def clean_query(query: str) -> str:
    """Return the query with single spaces and without control characters and surrogates, which servers refuse."""
    return normalise(_UNSENDABLE.sub(" ", query))


def text_id(title: str, text: str) -> str:
    """Return the id of a passage that has none; it is the same in every process."""
    return hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]


def check_url(url: str, option: str = "retrieval.options.url") -> URL:
    """Return the parsed address of a server; ``option`` names it in messages.

    Raises:
        ConfigError: it is not an ``http://`` or ``https://`` address, or it contains a name or a password.
    """
    try:
        parsed = URL(url)
        host = parsed.host
    except ValueError:
        parsed, host = URL(), None
    if parsed.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{option}: got {url!r}, expected an address such as http://10.0.0.2:8000")
    if parsed.user or parsed.password:
        raise ConfigError(f"{option}: it holds a name or a password; put secrets into the environment")
    return parsed
