"""The HTTP door: ``/retrieve`` over any retriever, so that other trainers can search the same fleet.

::

    POST /retrieve   Search-R1's protocol; see retrieve_protocol.py
    GET  /healthz    200 if a search was answered within the last seconds, else 503
    GET  /metrics    Prometheus' text format

Every error is ``{"error": "one sentence"}``. It binds to loopback; elsewhere it wants a bearer token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler

from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Passage, Retriever
from retrieval.http.background import BackgroundRetriever
from retrieval.http.protocol import Limits, Question, RequestError, format_answer, parse_question
from retrieval.http.server_metrics import CONTENT_TYPE, ServerMetrics
from retrieval.local import LocalRetriever

HEALTHY_S, UNHEALTHY_S = 5.0, 1.0
"""How long the outcome of a probe stands: bounds what asking for the health costs."""
PROBE_TIMEOUT_S = 10.0
DRAIN_S = 10.0
"""Requests in flight may take this long when the server is stopped."""
_PATHS = {"/retrieve", "/healthz", "/metrics"}
_CLIENT_CLOSED = 499
"""No status of HTTP's, but the usual one in metrics for a client that did not wait."""

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.setLevel(logging.CRITICAL)  # a traceback for every port scan; what handlers raise is logged here


class RetrievalServer:
    """Listens while its ``async with`` block runs.

    ::

        async with RetrievalServer(LocalRetriever("index"), port=0) as server:
            print(server.url)          # http://127.0.0.1:40123
    """

    def __init__(
        self,
        retriever: Retriever,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str = "",
        limits: Limits | None = None,
    ) -> None:
        """Check who may ask.

        Args:
            retriever: what answers. A ``LocalRetriever`` is searched in a thread of its own, in batches.
            host: a name or address of this machine.
            port: 0 takes a free one.
            token: that requests must bring as ``Authorization: Bearer TOKEN``; empty asks for none.
            limits: of one request, and of all.

        Raises:
            ConfigError: no token, but a host that others can reach.
        """
        self._host = host.strip("[]")
        if not token and not _is_loopback(self._host):
            raise ConfigError(
                f"host {host!r} can be reached from other machines and no token was given; set an environment variable "
                "and name it with --token-env, or bind to 127.0.0.1"
            )
        if token and (not token.isascii() or not token.isprintable() or " " in token):
            raise ConfigError("the token holds spaces or odd characters, expected printable ASCII")
        self._port = port
        self._token = token.encode()
        self._limits = limits or Limits()
        self._background = BackgroundRetriever(retriever) if isinstance(retriever, LocalRetriever) else None
        self._retriever: Retriever = self._background or retriever
        self._health = _Health(self._retriever)
        self._metrics = ServerMetrics()
        app = web.Application(middlewares=[self._answer], client_max_size=self._limits.max_body_bytes)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # what nobody waits for need not be searched
            access_log=None,  # 1,000 lines a second
            logger=_http_logger,
            auto_decompress=False,
            shutdown_timeout=DRAIN_S,
        )

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: the host is not this machine's, or the port is taken.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except (OSError, OverflowError) as error:
            await self._close()
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"cannot listen on port {self._port} of {self._host}: {why}; choose another --port or --host"
            ) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Answer what is in flight, for ``DRAIN_S`` at most, and stop."""
        await self._close()

    async def _close(self) -> None:
        await self._runner.cleanup()
        if self._background is not None:
            self._background.close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into an answer, and count."""
        status = _CLIENT_CLOSED
        try:
            response = await self._answer_or_refuse(request, handler)
            status = response.status
            return response
        finally:
            self._metrics.add_request(request.path if request.path in _PATHS else "other", status)

    async def _answer_or_refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return _refuse(error.status, str(error), error.headers)
        except RetrievalError as error:
            logger.warning("a search failed: %s", error)
            return _refuse(503, f"the search failed: {error}", {"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"the body is larger than {self._limits.max_body_bytes} bytes; send several requests")
        except web.HTTPMethodNotAllowed as error:
            return _refuse(405, f"{request.method} is not for {request.path}", {"Allow": error.headers["Allow"]})
        except web.HTTPException as error:
            return _refuse(error.status, f"{request.path[:80]}: {error.reason}; there is /retrieve, /healthz, /metrics")
        except Exception:  # the boundary of the process: one request must not take the others with it
            logger.exception("a request failed")
            return _refuse(500, "the server has a bug, or its retriever has; its log says more")

    async def _retrieve(self, request: web.Request) -> web.Response:
        started = time.monotonic()
        self._authorise(request)
        with self._in_flight():
            question = parse_question(await self._read(request), self._limits)
            body = format_answer(question, await self._search(question))
        self._metrics.add_search(len(question.queries), time.monotonic() - started)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _search(self, question: Question) -> list[list[Passage]]:
        if not question.queries:
            return []
        found = await self._retriever.search(question.queries, question.topk)
        if len(found) != len(question.queries):
            raise RetrievalError(f"got {len(found)} answers to {len(question.queries)} queries")
        return found

    async def _read(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise RequestError(415, f"got content of type {request.content_type[:80]!r}, expected application/json")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(415, "the body is compressed, expected application/json as it is")
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.max_body_bytes)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {self._limits.body_timeout_s:g} s") from None
        except web.RequestPayloadError:
            raise RequestError(400, "the body is not what its headers say") from None

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        if self._metrics.num_in_flight >= self._limits.max_requests:
            raise RequestError(
                503, f"{self._limits.max_requests} requests are in flight; ask again later", {"Retry-After": "1"}
            )
        self._metrics.num_in_flight += 1
        try:
            yield
        finally:
            self._metrics.num_in_flight -= 1

    async def _healthz(self, request: web.Request) -> web.Response:
        problem = await self._health.check()
        return _refuse(503, problem, {}) if problem else web.json_response({"status": "ok"})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        self._authorise(request)
        return web.Response(text=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    def _authorise(self, request: web.Request) -> None:
        if not self._token:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        # in constant time: how far a guess is right must not show
        if not hmac.compare_digest(given, self._token) or scheme.lower() != "bearer":
            raise RequestError(401, "expected the header 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})


class _Health:
    """Whether searches are answered, by a probe that no cache knows."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._lock = asyncio.Lock()
        self._num_probes = 0
        self._problem = ""
        self._stands_until = 0.0

    async def check(self) -> str:
        """Return what is wrong, empty if nothing is."""
        async with self._lock:  # those who ask together share a probe
            if time.monotonic() >= self._stands_until:
                self._problem = await self._probe()
                self._stands_until = time.monotonic() + (UNHEALTHY_S if self._problem else HEALTHY_S)
            return self._problem

    async def _probe(self) -> str:
        self._num_probes += 1
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._retriever.search([f"health probe {self._num_probes}"], 1)
        except RetrievalError as error:
            return f"a probe failed: {error}"
        except TimeoutError:
            return f"a probe was not answered within {PROBE_TIMEOUT_S:g} s"
        return ""


async def serve(
    retriever: Retriever,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    limits: Limits | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then answer what is in flight. A second signal ends the process as usual.

    Args:
        retriever: as for ``RetrievalServer``, like all that follow but the last.
        host: a name or address of this machine.
        port: 0 takes a free one.
        token: that requests must bring; empty asks for none.
        limits: of one request, and of all.
        on_start: told the URL once it listens.

    Raises:
        ConfigError: no token, but a host that others can reach; or a port that is taken.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop() -> None:
        stopped.set()
        for number, handler in previous.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, handler or signal.SIG_DFL)  # None: set by no Python code

    async with RetrievalServer(retriever, host=host, port=port, token=token, limits=limits) as server:
        for number in previous:
            loop.add_signal_handler(number, stop)
        try:
            if on_start is not None:
                on_start(server.url)
            await stopped.wait()
        finally:
            stop()


def run_server(
    retriever: Retriever, *, host: str = "127.0.0.1", port: int = 8000, token: str = "", limits: Limits | None = None
) -> None:
    """``serve`` for a process that does nothing else; says on standard error where it listens."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(retriever, host=host, port=port, token=token, limits=limits, on_start=_announce))


def _announce(url: str) -> None:
    sys.stderr.write(f"{url}/retrieve answers; Ctrl-C stops it\n")
    sys.stderr.flush()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps({"error": message}, ensure_ascii=False).encode("utf-8", "replace")
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=headers)
