r"""The HTTP server: ``/retrieve`` over any retriever, so that other trainers can search the same index.

::

    POST /retrieve   Search-R1's protocol
    GET  /healthz    200 if a search was answered within the last seconds, else 503
    GET  /metrics    Prometheus' text format

    {"queries": ["who?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, "score": 0.8}, ...]]}
    {"result": [[{"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, ...]]}       if return_scores is false

Our answers also give ``title`` and ``text`` of each document, and the ``index_version``.
Every error is ``{"error": "one sentence"}``. The server listens on loopback; other hosts need a bearer token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from pydantic_core import from_json, to_json

from ragr1_actors.core.errors import ConfigError, RetrievalError, first_problem, shortened
from retrieval.base import BatchRetriever, Hits, Passage, Retriever
from retrieval.fleet.batching import PooledRetriever, PoolSettings
from retrieval.http.client import is_token
from retrieval.local import LocalRetriever

HEALTHY_S, UNHEALTHY_S = 5.0, 1.0
"""How long the result of a health probe is valid; it bounds the cost of ``/healthz``."""
PROBE_TIMEOUT_S = 10.0
DRAIN_S = 10.0
"""Time for the requests in flight when the server stops."""
_PATHS = {"/retrieve", "/healthz", "/metrics"}
_CLIENT_CLOSED = 499
"""Not an HTTP status, but the usual one in metrics for a client that closed the connection."""
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of the duration histogram."""
_MAX_QUOTED = 40
_EXAMPLE = 'expected {"queries": ["a question"], "topk": 3}'

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.setLevel(logging.CRITICAL)  # aiohttp logs a traceback per port scan; errors of handlers are logged here

T = TypeVar("T")


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


def _parse_question(body: bytes, limits: Limits) -> Question:
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


def _format_answer(found: Sequence[list[Passage]], *, return_scores: bool) -> bytes:
    """Return the body of the answer in UTF-8; raises ``ValueError`` if a score is not finite: the retriever's error."""
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
        """Check the host and the token.

        Args:
            retriever: answers the searches. A ``LocalRetriever`` is searched in a separate thread, in batches.
            host: a name or address of this machine.
            port: 0 takes a free one.
            token: that requests must send as ``Authorization: Bearer TOKEN``; empty asks for none.

        Raises:
            ConfigError: other machines can reach the host and there is no token, or the token is not printable ASCII.
        """
        self._host = host.strip("[]")
        if not token and not _is_loopback(self._host):
            raise ConfigError(
                f"host {host!r} can be reached from other machines and no token was given; set an environment variable "
                "and name it with --token-env, or bind to 127.0.0.1"
            )
        if token and not is_token(token):
            raise ConfigError("the token holds spaces or odd characters, expected printable ASCII")
        self._port = port
        self._token = token.encode()
        self._limits = limits or Limits()
        self._background = BackgroundRetriever(retriever) if isinstance(retriever, LocalRetriever) else None
        self._retriever: Retriever = self._background or retriever
        self._health = _Health(self._retriever)
        self._num_in_flight = 0
        self._metrics = _Metrics(lambda: self._num_in_flight)
        app = web.Application(middlewares=[self._answer], client_max_size=self._limits.max_body_bytes)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # stop the search of a client that closed the connection
            access_log=None,  # would write 1,000 lines per second
            logger=_http_logger,
            auto_decompress=False,
            shutdown_timeout=DRAIN_S,
        )

    @property
    def url(self) -> str:
        """The address it listens on, without a path."""
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Start to listen; raises ``ConfigError`` if the host is of another machine or the port is in use."""
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
        """Answer the requests in flight, for at most ``DRAIN_S``, and stop."""
        await self._close()

    async def _close(self) -> None:
        await self._runner.cleanup()
        if self._background is not None:
            self._background.close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into an answer, and count the answer."""
        status = _CLIENT_CLOSED
        try:
            response = await self._answer_or_refuse(request, handler)
            status = response.status
            return response
        finally:
            # each label value is a time series for ever, so unknown paths share one
            path = request.path if request.path in _PATHS else "other"
            self._metrics.requests.labels(path, status).inc()

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
            return _refuse(405, f"{request.path} does not take {request.method}", {"Allow": error.headers["Allow"]})
        except web.HTTPException as error:
            known = ", ".join(sorted(_PATHS))
            return _refuse(error.status, f"{request.path[:80]}: {error.reason}; expected one of {known}")
        except Exception:  # a boundary of the process: one request must not stop the others
            logger.exception("a request failed")
            return _refuse(500, "the server or its retriever has a bug; the log of the server has the details")

    async def _retrieve(self, request: web.Request) -> web.Response:
        started = time.monotonic()
        self._authorise(request)
        with self._in_flight():
            question = _parse_question(await self._read(request), self._limits)
            body = _format_answer(await self._search(question), return_scores=bool(question.return_scores))
        self._metrics.queries.inc(len(question.queries))
        self._metrics.duration.observe(time.monotonic() - started)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _search(self, question: Question) -> list[list[Passage]]:
        queries = question.queries
        if not queries:
            return []
        found = await self._retriever.search(queries, question.topk or self._limits.default_topk)
        if len(found) != len(queries):
            raise RetrievalError(f"got {len(found)} answers to {len(queries)} queries")
        return found

    async def _read(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise RequestError(415, f"got content of type {request.content_type[:80]!r}, expected application/json")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(415, "got a compressed body, expected plain application/json")
        if (request.content_length or 0) > self._limits.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.max_body_bytes)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
        except web.RequestPayloadError:
            raise RequestError(400, "the body does not match its headers") from None

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        limit = self._limits.max_requests
        if self._num_in_flight >= limit:
            raise RequestError(503, f"{limit} requests are in flight; ask again later", {"Retry-After": "1"})
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    async def _healthz(self, request: web.Request) -> web.Response:
        problem = await self._health.check()
        return _refuse(503, problem) if problem else web.json_response({"status": "ok"})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        self._authorise(request)
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _authorise(self, request: web.Request) -> None:
        if not self._token:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        # compared in constant time: the time must not show how much of a guess is right
        if not hmac.compare_digest(given, self._token) or scheme.lower() != "bearer":
            raise RequestError(401, "expected the header 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})


class BackgroundRetriever:
    """Searches a blocking retriever in one thread, so that the event loop stays free, and in batches.

    It is the only replica of its pool: neither an index nor a model is needed twice at the same time.
    """

    def __init__(self, retriever: BatchRetriever) -> None:
        """Search ``retriever``, which blocks, and which nothing else may use at the same time."""
        self._retriever = retriever
        self._version = str(retriever.info().get("version", ""))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._pool = PooledRetriever({"thread": self}, PoolSettings(max_retries=1))

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Search as ``Retriever.search`` does; each answer is a ``Hits``. Raises ``ValueError`` if ``k`` is under 1."""
        return await self._pool.search(queries, k)

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
        """Search one batch in the thread, for the pool; raises only ``RetrievalError``, for every cause."""
        try:
            found = await self._call(lambda: self._retriever.search_batch(queries, k))
        except RetrievalError:
            raise
        except Exception as error:  # a boundary: the thread must go on, the next batch may be a better one
            logger.exception("a search failed")
            raise RetrievalError(f"{type(error).__name__}: {error}") from error
        return [Hits(passages, index_version=self._version) for passages in found]

    async def ping(self) -> None:
        """Return once the thread is idle, for the pool."""
        await self._call(lambda: None)

    def close(self) -> None:
        """End the thread after its current batch."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Health:
    """Whether searches are answered. Every probe is a new query, so that no cache answers it."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._lock = asyncio.Lock()
        self._num_probes = 0
        self._problem = ""
        self._valid_until = 0.0

    async def check(self) -> str:
        """Return the problem, or "" if there is none."""
        async with self._lock:  # concurrent requests share a probe
            if time.monotonic() >= self._valid_until:
                self._problem = await self._probe()
                self._valid_until = time.monotonic() + (UNHEALTHY_S if self._problem else HEALTHY_S)
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


class _Metrics:
    """What one server counts since its start, in a registry that other servers of the process do not share."""

    def __init__(self, num_in_flight: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("ragr1_http_requests", "Requests answered.", ("path", "status"), registry=registry)
        self.queries = Counter("ragr1_retrieve_queries", "Queries answered.", registry=registry)
        self.duration = Histogram(
            "ragr1_retrieve_duration_seconds", "Time to answer a request.", buckets=_BOUNDS_S, registry=registry
        )
        in_flight = Gauge("ragr1_retrieve_requests_in_flight", "Requests being answered.", registry=registry)
        in_flight.set_function(num_in_flight)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def run_server(retriever: Retriever, *, host: str = "127.0.0.1", port: int = 8000, token: str = "") -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in flight. Writes the address to standard error.

    A second signal ends the process at once. Arguments and errors are those of ``RetrievalServer``.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(RetrievalServer(retriever, host=host, port=port, token=token)))


async def _serve(server: RetrievalServer) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop() -> None:
        stopped.set()
        for number, handler in previous.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, handler or signal.SIG_DFL)  # None: no Python code set it

    async with server:
        for number in previous:
            loop.add_signal_handler(number, stop)
        try:
            sys.stderr.write(f"{server.url}/retrieve answers; Ctrl-C stops it\n")
            sys.stderr.flush()
            await stopped.wait()
        finally:
            stop()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps({"error": message}, ensure_ascii=False).encode("utf-8", "replace")
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=headers)
