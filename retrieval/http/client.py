"""HTTP for retrievers: sends requests, limits their rate and retries them. No error message contains a secret.

``HttpRetriever`` and ``WebRetriever`` send everything through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import hashlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

import aiohttp
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter
from yarl import URL

from ragr1_actors.core.config import Section
from ragr1_actors.core.errors import ConfigError, RetrievalError, first_problem, nearest, shortened
from retrieval.fleet.batching import normalise

MAX_ANSWER_BYTES = 64 * 2**20
"""A longer answer is not a list of passages."""
_MAX_QUOTED = 200
"""Characters of a server's answer in an error message."""
_BUSY = {429, 503}
_TEMPORARY = {408, 425, 429}
"""The only statuses from 300 to 499 that a second attempt may change."""
_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=10, jitter=0.1)
_CLOSING_TASKS: set[asyncio.Task[None]] = set()
"""Keeps the tasks of ``_close_at_end`` alive: an event loop holds only weak references to its tasks."""

S = TypeVar("S", bound=Section)
T = TypeVar("T")


def clean_query(query: str) -> str:
    """Return the query with single spaces and without what servers refuse: control characters and surrogates."""
    return normalise(_UNSENDABLE.sub(" ", query))


def text_id(title: str, text: str) -> str:
    """Return the id of a passage that came without one; it is the same in every process."""
    return hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]


def parse_section(section: type[S], options: Mapping[str, Any], retriever_type: str) -> S:
    """Check the recipe's ``retrieval.options``; raises ``ConfigError`` if one is unknown, missing or wrong."""
    for name in options:
        if name not in section.model_fields:
            near = nearest(str(name), section.model_fields)
            raise ConfigError(f"unknown option {name!r} of retrieval.type={retriever_type}{near}")
    try:
        return section.model_validate(dict(options))
    except ValidationError as error:
        name, _, problem = first_problem(error)
        raise ConfigError(f"retrieval.options.{name} of retrieval.type={retriever_type}: {problem}") from None


def check_url(url: str) -> URL:
    """Return the parsed address of a server.

    Raises:
        ConfigError: it is not an ``http://`` or ``https://`` address, or it contains a name or a password.
    """
    try:
        parsed = URL(url)
        host = parsed.host
    except ValueError:
        parsed, host = URL(), None
    if parsed.scheme not in ("http", "https") or not host:
        raise ConfigError(f"retrieval.options.url: got {url!r}, expected an address such as http://10.0.0.2:8000")
    if parsed.user or parsed.password:
        raise ConfigError("retrieval.options.url: it holds a name or a password; put secrets into the environment")
    return parsed


def read_secret(option: str, variable: str) -> str:
    """Return the value of the environment variable that ``option`` names, or "" if ``variable`` is empty.

    Raises:
        ConfigError: the variable is not set, or an HTTP header cannot hold its value.
    """
    if not variable:
        return ""
    secret = os.environ.get(variable, "")
    if not secret:
        raise ConfigError(f"retrieval.options.{option}: the environment variable {variable!r} is not set; export it")
    if not is_token(secret):
        raise ConfigError(f"the environment variable {variable!r} holds spaces or odd characters, expected a token")
    return secret


def is_token(secret: str) -> bool:
    """Return whether an HTTP header can hold the secret: printable ASCII without spaces."""
    return secret.isascii() and secret.isprintable() and " " not in secret


class TryAgainError(RetrievalError):
    """A request failed, and a second attempt may succeed. ``busy_s``: the pause that a busy server asks for."""

    busy_s: float | None = None

    @classmethod
    def busy(cls, problem: str, pause_s: float | None) -> TryAgainError:
        """Return the error of a server that answered 429 or 503, with its ``Retry-After`` in seconds."""
        error = cls(problem)
        error.busy_s = pause_s or 0.0
        return error


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    longest_pause_s: float,
    before_pause: Callable[[TryAgainError, float], None] | None = None,
) -> T:
    """Call ``attempt`` until it raises no ``TryAgainError``.

    Pauses double from 0.1 to 10 s, are at least as long as the server asks, and at most ``longest_pause_s``.
    ``before_pause`` receives the error and the seconds until the next attempt.

    Raises:
        TryAgainError: of the last attempt.
    """

    async def call() -> T:  # tenacity awaits the result only of what is an ``async def``, not of a lambda
        return await attempt()

    def error_of(state: RetryCallState) -> TryAgainError:
        error = state.outcome.exception() if state.outcome else None
        assert isinstance(error, TryAgainError)
        return error

    def pause_s(state: RetryCallState) -> float:
        return min(max(_BACKOFF(state), error_of(state).busy_s or 0.0), longest_pause_s)

    def report(state: RetryCallState) -> None:
        if before_pause is not None:
            before_pause(error_of(state), state.upcoming_sleep)

    retrying = AsyncRetrying(
        stop=stop_after_attempt(attempts),
        wait=pause_s,
        retry=retry_if_exception_type(TryAgainError),
        before_sleep=report,
        reraise=True,
    )
    return await retrying(call)


class RateLimit:
    """Lets the concurrent callers of one process pass at even intervals.

    ``aiolimiter`` has no ``hold``: see docs/decisions/http-libraries.md.
    """

    def __init__(self, rate_per_s: float) -> None:
        """Let ``rate_per_s`` callers pass per second; 0 is no limit."""
        self._interval_s = 1.0 / rate_per_s if rate_per_s else 0.0
        self._next = 0.0
        self._held_until = 0.0

    async def wait(self) -> None:
        """Return when it is the caller's turn. A cancelled caller leaves its turn unused."""
        while True:
            turn = max(time.monotonic(), self._next, self._held_until)
            self._next = turn + self._interval_s
            await asyncio.sleep(turn - time.monotonic())
            if turn >= self._held_until:  # otherwise a hold began during the sleep
                return

    def hold(self, seconds: float) -> None:
        """Let no caller pass for so long, including those that wait already."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer of a server."""

    server: str
    """Its address without parameters, for error messages."""
    status: int
    body: bytes
    retry_after_s: float | None
    """The pause that the server asks for."""

    @property
    def is_busy(self) -> bool:
        """Whether the server asks for a later attempt."""
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        """Whether a second attempt is useless: the request, the address or the token is wrong."""
        return 300 <= self.status < 500 and self.status not in _TEMPORARY


class HttpClient:
    """Sends requests from the running event loop, one keep-alive session per loop. Callers set the timeout."""

    def __init__(self, *, max_connections: int, secret: str = "") -> None:
        """Create a client without a connection. Every message has ``***`` in place of the secret.

        With ``max_connections`` requests in flight, further requests wait.
        """
        self._max_connections = max_connections
        in_address = URL("http://x").with_query(x=secret).raw_query_string.removeprefix("x=")
        known = {secret, quote(secret, safe=""), quote_plus(secret), in_address} - {""}
        self._secrets = sorted(known, key=len, reverse=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def redact(self, text: str) -> str:
        """Return the text with ``***`` for the secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def send(
        self, method: str, url: URL, *, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send one request with ``body`` as JSON and return the whole answer, with any status.

        Redirections are not followed: the headers may contain a key for this server only.

        Raises:
            RetrievalError: no answer came, or one that is too large.
        """
        session = await self._session_here()
        server = self.redact(str(url.with_query(None).with_fragment(None)))
        headers = {"Accept": "application/json", **(headers or {})}
        content: bytes | None = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, ensure_ascii=False).encode()
        try:
            async with session.request(method, url, data=content, headers=headers, allow_redirects=False) as response:
                pause_s = _parse_retry_after(response.headers.get("Retry-After", ""))
                return HttpAnswer(server, response.status, await _read_body(response, server), pause_s)
        except (aiohttp.ClientError, OSError) as error:
            words = " ".join(str(error).split())
            problem = f"{type(error).__name__}: {words}" if words else type(error).__name__
            # ``from None``: the cause may contain the whole address, with the key.
            raise RetrievalError(f"{server}: {self.redact(problem)}") from None

    def read_json(self, answer: HttpAnswer) -> Any:
        """Return the decoded body. Raises ``RetrievalError``: it is not JSON."""
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            raise RetrievalError(f"{answer.server}: expected JSON, got {self._quote(answer.body)}") from None

    def describe(self, answer: HttpAnswer) -> str:
        """Return one sentence on an answer with an error status, with the server's own message."""
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(answer.body)
        if isinstance(message, dict):
            message = next((message[name] for name in ("error", "detail", "message") if message.get(name)), None)
        text = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") if message else answer.body
        return f"{answer.server} answered {answer.status}: {self._quote(text)}"

    def _quote(self, body: bytes) -> str:
        # Redacted before it is cut: half a secret would not be found.
        text = self.redact(clean_query(body[: 2**16].decode("utf-8", "replace")))
        return shortened(text, _MAX_QUOTED) or "nothing"

    async def _session_here(self) -> aiohttp.ClientSession:
        """Return the session of the running loop. The session of an earlier loop is closed already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            closing = loop.create_task(_close_at_end(self._session))
            _CLOSING_TASKS.add(closing)
            closing.add_done_callback(_CLOSING_TASKS.discard)
            await asyncio.sleep(0)  # a task that is cancelled before it starts does not run its ``finally``
        return self._session


async def _close_at_end(session: aiohttp.ClientSession) -> None:
    """Close the session when the loop ends: ``asyncio.run`` then cancels all tasks."""
    try:
        await asyncio.Event().wait()
    finally:
        await session.close()


async def _read_body(response: aiohttp.ClientResponse, server: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise RetrievalError(f"{server}: the answer is larger than {MAX_ANSWER_BYTES // 2**20} MiB")
    return bytes(body)


def _parse_retry_after(value: str) -> float | None:
    """Return the seconds from now of a ``Retry-After`` header, which holds seconds or a date."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(value)), 1e9)  # in this order NaN becomes 0
    with contextlib.suppress(ValueError):
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    return None
