r"""HTTP server: ``/retrieve`` over any retriever, so that other trainers can search the same index.

::

    POST /retrieve   Search-R1's protocol
    POST /mcp        the tool search for clients of MCP, if it was asked for
    GET  /healthz    200 if a search was answered within the last seconds, else 503
    GET  /metrics    Prometheus' text format

    {"queries": ["who?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, "score": 0.8}, ...]]}
    {"result": [[{"id": "7", "contents": "\"Riga\"\nRiga lies ..."}, ...]]}       if return_scores is false

Our answers also have ``title`` and ``text`` of each document, and the ``index_version``. The server listens on
loopback; other hosts need a bearer token. ``cluster/http.py`` has the guards of every server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Self

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ConfigDict, FailFast, Field
from pydantic_core import from_json, to_json

from cluster.http import HttpServer, Limits, RequestError, announce, refuse, run_until_signal
from ragr1_actors.core.disk.json_files import checked
from ragr1_actors.core.errors import ConfigError, RetrievalError, shortened
from ragr1_actors.core.images import data_url
from retrieval.base import Hits, Passage, Retriever
from retrieval.local import LocalRetriever
from retrieval.replicas.batching import PoolArguments, PooledRetriever

if TYPE_CHECKING:
    from retrieval.http.mcp_server import McpEndpoint

HEALTHY_S, UNHEALTHY_S = 5.0, 1.0
"""Seconds for which the result of a health probe is valid, good or bad; they bound the cost of ``/healthz``."""
PROBE_TIMEOUT_S = 10.0
DEFAULT_TOPK = 3
"""Passages per query for a request without ``topk``."""
MAX_TOPK = 1000
MAX_QUERIES = 512
MAX_QUERY_CHARS = 100_000
"""Limit of a query, in characters: more than 10,000 words. A long query is not an error, as encoders truncate it."""
MAX_REQUESTS = 1024
"""Limit of requests in flight. Search-R1's client sends one request per trajectory and does not retry."""
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of the duration histogram, in seconds."""
_MAX_QUOTED = 40
_EXAMPLE = 'expected {"queries": ["a question"], "topk": 3}'

logger = logging.getLogger(__name__)


class Question(BaseModel):
    """Body of a request. Unknown keys are ignored: Search-R1's clients send some to similar servers."""

    model_config = ConfigDict(strict=True)

    # FailFast, so that 8 MiB of wrong items do not become a million error objects.
    queries: Annotated[
        list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]], FailFast(), Field(max_length=MAX_QUERIES)
    ]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool | None = None


def parse_question(body: bytes) -> Question:
    """Read the body of a request.

    Raises:
        RequestError: 400 if the body is not JSON, 422 if a value in it is wrong or over a limit.
    """

    def refuse(key: str, value: Any, problem: str) -> RequestError:
        got = shortened(json.dumps(value), _MAX_QUOTED)  # ASCII only
        return RequestError(422, f"{key or 'the body'}: {problem}, got {got}; {_EXAMPLE}")

    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {error}; {_EXAMPLE}") from None
    return checked(Question, given, refuse)


def format_answer(found: Sequence[list[Passage]], *, return_scores: bool) -> bytes:
    """Return the body of the answer in UTF-8; raises ``ValueError`` if the retriever gave a score that is no number."""
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
    found = {"id": passage.id, "contents": contents, "title": passage.title, "text": passage.text}
    return found | ({"image": data_url(passage.image)} if passage.image is not None else {})


def _finite(score: float) -> float:
    if math.isfinite(score):
        return score
    raise ValueError(f"got the score {score}, expected a finite number")


class RetrievalServer(HttpServer):
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
        allowed_hosts: Collection[str] = (),
        limits: Limits | None = None,
        mcp: type[McpEndpoint] | None = None,
    ) -> None:
        """Check the host and the token; arguments and errors that are not here are those of ``HttpServer``.

        Args:
            retriever: answers the searches. A ``LocalRetriever`` is searched in a separate thread, in batches.
            mcp: class that answers clients of MCP too; it needs the SDK.
        """
        super().__init__(
            [
                web.post("/retrieve", self._retrieve),
                web.get("/healthz", self._healthz),
                web.get("/metrics", self._show_metrics),
                *([web.post("/mcp", self._answer_mcp)] if mcp else []),
            ],
            host=host,
            port=port,
            allowed_hosts=allowed_hosts,
            limits=limits,
            count=lambda path, status: self._num_answers.labels(path, status).inc(),
            token=token,
            open_paths=("/healthz",),
        )
        self._thread = SearchThread(retriever) if isinstance(retriever, LocalRetriever) else None
        # One replica, so that neither an index nor a model is used twice at the same time.
        # A batch that takes long goes on, and the next would wait behind it; /healthz tells whether it hangs.
        limits_of_pool = PoolArguments(timeout_s=math.inf, max_retries=1)
        pool = PooledRetriever({"thread": self._thread}, limits_of_pool) if self._thread else None
        self._retriever: Retriever = pool or retriever
        self._probing = asyncio.Lock()
        self._num_probes = 0
        self._problem, self._problem_valid_until = "", 0.0
        self._num_in_flight = 0
        self._registry = registry = CollectorRegistry()  # other servers of the process do not share it
        self._num_answers = Counter("ragr1_http_requests", "Requests answered.", ("path", "status"), registry=registry)
        self._num_queries = Counter("ragr1_retrieve_queries", "Queries answered.", registry=registry)
        self._duration = Histogram(
            "ragr1_retrieve_duration_seconds", "Time to answer a request.", buckets=_BOUNDS_S, registry=registry
        )
        in_flight = Gauge("ragr1_retrieve_requests_in_flight", "Requests being answered.", registry=registry)
        in_flight.set_function(lambda: self._num_in_flight)
        self._running = contextlib.AsyncExitStack()
        self._mcp = mcp(self._retriever) if mcp is not None else None

    async def __aenter__(self) -> Self:
        """Begin to listen; raises ``ConfigError`` if the host is another machine or the port is in use."""
        try:
            if self._mcp is not None:
                await self._running.enter_async_context(self._mcp.running())
            return await super().__aenter__()
        except ConfigError:
            await self._close()
            raise

    async def __aexit__(self, *error: object) -> None:
        """Answer the requests in flight, for a limited time, then stop."""
        await super().__aexit__(*error)
        await self._close()

    async def _close(self) -> None:
        await self._running.aclose()
        if self._thread is not None:
            self._thread.close()

    async def _retrieve(self, request: web.Request) -> web.Response:
        started = time.monotonic()
        with self._in_flight():
            question = parse_question(await self.read_body(request))
            body = format_answer(await self._search(question), return_scores=bool(question.return_scores))
        self._num_queries.inc(len(question.queries))
        self._duration.observe(time.monotonic() - started)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _answer_mcp(self, request: web.Request) -> web.Response:
        assert self._mcp is not None
        with self._in_flight():
            return await self._mcp.answer(request, await self.read_body(request))

    async def _search(self, question: Question) -> list[list[Passage]]:
        queries = question.queries
        if not queries:
            return []
        try:
            found = await self._retriever.search(queries, question.topk or DEFAULT_TOPK)
            if len(found) != len(queries):
                raise RetrievalError(f"got {len(found)} answers to {len(queries)} queries")
        except RetrievalError as error:
            logger.warning("a search failed: %s", error)
            raise RequestError(503, f"the search failed: {error}", {"Retry-After": "1"}) from None
        return found

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        if self._num_in_flight >= MAX_REQUESTS:
            raise RequestError(503, f"{MAX_REQUESTS} requests are in flight; ask again later", {"Retry-After": "1"})
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    async def _healthz(self, request: web.Request) -> web.Response:
        async with self._probing:  # concurrent requests share a probe
            if time.monotonic() >= self._problem_valid_until:
                self._problem = await self._probe()
                self._problem_valid_until = time.monotonic() + (UNHEALTHY_S if self._problem else HEALTHY_S)
        return refuse(503, self._problem) if self._problem else web.json_response({"status": "ok"})

    async def _probe(self) -> str:
        """Return why searches are not answered, or "" if they are."""
        self._num_probes += 1
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):  # a new query each time, so that no cache answers it
                await self._retriever.search([f"health probe {self._num_probes}"], 1)
        except RetrievalError as error:
            return f"a probe failed: {error}"
        except TimeoutError:
            return f"a probe was not answered within {PROBE_TIMEOUT_S:g} s"
        return ""

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


class SearchThread:
    """``Replica`` that searches a blocking retriever in one thread, so that the event loop stays free."""

    def __init__(self, retriever: LocalRetriever) -> None:
        """Take ``retriever``; nothing else may search it at the same time."""
        self._retriever = retriever
        self._version = retriever.version
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="search")

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
        """Search one batch in the thread; raises only ``RetrievalError``, for every cause."""
        search, loop = self._retriever.search_batch, asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, search, queries, k)
        except RetrievalError:
            raise
        except Exception as error:  # a boundary: the thread must go on, as the next batch may succeed
            logger.exception("a search failed")
            raise RetrievalError(f"{type(error).__name__}: {error}") from error
        return [Hits(passages, index_version=self._version) for passages in found]

    async def ping(self) -> None:
        """Return once the thread is idle."""
        await asyncio.get_running_loop().run_in_executor(self._threads, int)

    def close(self) -> None:
        """End the thread after its current batch."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def run_server(
    retriever: Retriever,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    allowed_hosts: Collection[str] = (),
    mcp: type[McpEndpoint] | None = None,
) -> None:
    """Serve as ``run_until_signal`` does; see ``RetrievalServer`` for arguments and errors."""
    server = RetrievalServer(retriever, host=host, port=port, token=token, allowed_hosts=allowed_hosts, mcp=mcp)
    run_until_signal(server, lambda url: announce(f"{url}{'/mcp' if mcp else '/retrieve'}"))
