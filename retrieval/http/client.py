"""HttpClient: HTTP for retrievers. One keep-alive session an event loop, bounded answers, no secret in any message."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

import aiohttp
from pydantic import ValidationError
from yarl import URL

from ragr1_actors.core.config import Section
from ragr1_actors.core.errors import ConfigError, RetrievalError
from ragr1_actors.core.text import first_problem, nearest
from retrieval.fleet.cache import normalise

MAX_ANSWER_BYTES = 64 * 2**20
"""A longer answer is no list of passages."""
_MAX_QUOTED = 200
"""Characters of a server's own words in a message."""
_BUSY = {429, 503}
_PASSING = {408, 425, 429}
"""The only statuses under 500 that say nothing about the question."""
_UNSENDABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_KEEPERS: set[asyncio.Task[None]] = set()
"""A loop refers to its tasks weakly; see ``_close_at_end``."""

S = TypeVar("S", bound=Section)


def clean_query(query: str) -> str:
    """Return the query with single spaces and without what no server takes: control characters, lone surrogates."""
    return normalise(_UNSENDABLE.sub(" ", query))


def text_id(title: str, text: str) -> str:
    """Return the id of a passage that came without one: the same in every process, for the same passage."""
    return hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]


def parse_section(section: type[S], options: Mapping[str, Any], retriever_type: str) -> S:
    """Check the recipe's ``retrieval.options`` for a retriever.

    Raises:
        ConfigError: an option that does not exist, is missing or does not fit; it has the name of the nearest.
    """
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
    """Return an address that requests can be sent to.

    Raises:
        ConfigError: no ``http://`` or ``https://`` address, or one with a name and a password in it.
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
    """Return the value of the environment variable that ``option`` names; empty where it names none.

    Raises:
        ConfigError: it is not set, or is nothing that an HTTP header can hold.
    """
    if not variable:
        return ""
    secret = os.environ.get(variable, "")
    if not secret:
        raise ConfigError(f"retrieval.options.{option}: the environment variable {variable!r} is not set; export it")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(f"the environment variable {variable!r} holds spaces or odd characters, expected a token")
    return secret


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a server said."""

    server: str
    """Its address, without parameters, for messages."""
    status: int
    body: bytes
    retry_after_s: float | None
    """How long it asks to be left alone."""

    @property
    def is_busy(self) -> bool:
        """Whether it asks to be asked again later."""
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        """Whether asking again is of no use: the question is wrong, or the address, or the token."""
        return 300 <= self.status < 500 and self.status not in _PASSING


class HttpClient:
    """Sends requests from whatever event loop is running. Has no timeout of its own: callers know how long to wait."""

    def __init__(self, *, max_connections: int, secret: str = "") -> None:
        """Connect to nothing yet.

        Args:
            max_connections: requests in flight; others wait for their turn.
            secret: never to be seen in a message.
        """
        self._max_connections = max_connections
        in_address = URL("http://x").with_query(x=secret).raw_query_string.removeprefix("x=")
        known = {secret, quote(secret, safe=""), quote_plus(secret), in_address} - {""}
        self._secrets = sorted(known, key=len, reverse=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def redact(self, text: str) -> str:
        """Return the text with the secret blotted out."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    async def send(
        self,
        method: str,
        url: URL,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Send one request, ``body`` as JSON, and return the whole answer, whatever its status.

        Redirections are not followed: the headers may hold a key that is for this server only.

        Raises:
            RetrievalError: there was no answer, or too much of it.
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
                return HttpAnswer(
                    server,
                    response.status,
                    await _read_body(response, server),
                    _parse_retry_after(response.headers.get("Retry-After", "")),
                )
        except (aiohttp.ClientError, OSError) as error:
            # Without its cause, which may hold the whole address.
            raise RetrievalError(f"{server}: {self.redact(_in_words(error))}") from None

    def read_json(self, answer: HttpAnswer) -> Any:
        """Return what the body says.

        Raises:
            RetrievalError: it is not JSON.
        """
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError):
            raise RetrievalError(f"{answer.server}: expected JSON, got {self._quote(answer.body)}") from None

    def describe(self, answer: HttpAnswer) -> str:
        """Return one sentence on an answer that is none, with the server's own words."""
        words: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            words = json.loads(answer.body)
        if isinstance(words, dict):
            words = next((words[name] for name in ("error", "detail", "message") if words.get(name)), None)
        text = json.dumps(words, ensure_ascii=False).encode("utf-8", "replace") if words else answer.body
        return f"{answer.server} answered {answer.status}: {self._quote(text)}"

    def _quote(self, body: bytes) -> str:
        # Redacted before it is cut: of half a secret nothing could be found.
        text = self.redact(clean_query(body[: 2**16].decode("utf-8", "replace")))
        return text[:_MAX_QUOTED] + "..." * (len(text) > _MAX_QUOTED) if text else "nothing"

    async def _session_here(self) -> aiohttp.ClientSession:
        """Return the session of the running loop. One of a loop that ended before is closed already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            keeper = loop.create_task(_close_at_end(self._session))
            _KEEPERS.add(keeper)
            keeper.add_done_callback(_KEEPERS.discard)
            await asyncio.sleep(0)  # a task that has not begun would be cancelled without its ``finally``
        return self._session


async def _close_at_end(session: aiohttp.ClientSession) -> None:
    """Close the session when the loop ends, which is when all its tasks are cancelled."""
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
    """Return seconds from now, of a header that holds seconds or a date."""
    try:
        return min(max(float(value), 0.0), 1e9)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _in_words(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
