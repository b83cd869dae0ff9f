"""HTTP shell of all servers of the project, so that all have the same guards.

::

    connection ──► room? headers in time? ──► Host, Origin, Content-Type ──► the server's own handler ──► answer in time

Every error is ``{"error": "one sentence"}``. Text of a request reaches neither the log nor, as a traceback, the
terminal. A browser that another site's page sends here is refused, since its ``Host`` or ``Origin`` is not ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from aiohttp import web
from aiohttp.typedefs import Handler

from ragr1_actors.core.credentials import is_token
from ragr1_actors.core.errors import ConfigError, shortened

CLIENT_CLOSED = 499
"""Status in metrics for a client that closed the connection; it is common, but not an HTTP status."""
OTHER_PATH = "other"
"""Name under which unknown paths are counted, since each label of a metric is a time series."""
_MAX_QUOTED = 80
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/@\s]+))(?::\d{1,5})?")
_FULL = b'{"error": "too many connections are open; ask again later"}'

logger = logging.getLogger(__name__)
_connections_logger = logging.getLogger(f"{__name__}.connections")
_connections_logger.setLevel(logging.CRITICAL)  # aiohttp logs a traceback per port scan; errors of handlers are logged


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the resources and times that one client can take of a server."""

    idle_s: float = 30.0
    """Seconds until the headers of a request are complete, from the connection's start or its last answer. Clients that
    keep connections close them earlier (aiohttp's after 15 s), so that none sends a request into a closing one."""
    body_s: float = 30.0
    """Seconds until a request's body is complete."""
    answer_s: float = 120.0
    """Seconds until the client has taken the answer."""
    body_bytes: int = 8 * 2**20
    connections: int = 2048
    """Number of open connections; at most half of the files that the process may open."""
    drain_s: float = 10.0
    """Seconds for the requests in flight when the server stops."""


class RequestError(Exception):
    """Refusal of a request with an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Refuse with ``status`` (4xx, or 503 for "later") and ``message``; ``headers`` go into the answer."""
        super().__init__(message)
        self.status = status
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": str(self)}


_NO_TOKEN = RequestError(401, "expected the header 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})


class HttpServer:
    """Listens while its ``async with`` block runs.

    ::

        async with HttpServer([web.get("/", show)], port=0) as server:
            print(server.url)          # http://127.0.0.1:40123
    """

    def __init__(
        self,
        routes: Collection[web.RouteDef],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Collection[str] = (),
        limits: Limits | None = None,
        headers: Mapping[str, str] | None = None,
        count: Callable[[str, int], None] | None = None,
        token: str | None = None,
        no_token: RequestError = _NO_TOKEN,
        open_paths: Collection[str] = (),
    ) -> None:
        """Serve ``routes``, whose handlers may raise ``RequestError``.

        Args:
            routes: such as ``web.post("/retrieve", retrieve)``. A POST is JSON; its handler calls ``read_body``.
            host: name or address of this machine.
            port: port number; 0 takes a free one.
            allowed_hosts: further names by which clients reach the server, such as the name of a proxy before it.
            limits: limits of connections, bodies and times.
            headers: headers of every answer.
            count: called with path and status of every answer.
            token: token that requests must send as ``Authorization: Bearer TOKEN``; empty asks for none, which needs a
                host that only this machine reaches; None leaves it to the handlers.
            no_token: refusal of a request without the token.
            open_paths: paths that need no token.

        Raises:
            ConfigError: other machines can reach the host and the token is empty, or it is not printable ASCII.
        """
        if token is not None:
            check_token(host, token)
        self._token, self._no_token, self._open_paths = token or "", no_token, open_paths
        self._host, self._port = host.strip("[]"), port
        self._limits = limits or Limits()
        self._headers = {**_HEADERS, **(headers or {})}
        self._count = count
        self._paths = sorted({route.path for route in routes})
        self._names = {name.lower() for name in (*allowed_hosts, self._host, "localhost")}
        self._is_ours = lru_cache(64)(self._names_this_server)  # clients repeat the header
        app = web.Application(middlewares=[self._answer], client_max_size=self._limits.body_bytes)
        app.add_routes(routes)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # stop the work for a client that closed the connection
            access_log=None,  # would write 1,000 lines per second
            logger=_connections_logger,
            auto_decompress=False,
            keepalive_timeout=self._limits.idle_s,  # it also runs from the connection's start
            shutdown_timeout=self._limits.drain_s,
        )
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Address at which the server listens, without a path."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def num_connections(self) -> int:
        """Number of open connections, idle or not."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    async def __aenter__(self) -> Self:
        """Begin to listen; raises ``ConfigError`` if the host is another machine or the port is in use."""
        await self._runner.setup()
        if not is_loopback(self._host):
            self._names |= {socket.gethostname().lower(), (await asyncio.to_thread(socket.getfqdn)).lower()}
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._connect, self._host, self._port, backlog=self._limits.connections
            )
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"cannot listen on port {self._port} of {self._host}: {why}; choose another port or address"
            ) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        """Answer the requests in flight, for at most ``drain_s``, and stop."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def read_body(self, request: web.Request) -> bytes:
        """Return the whole body of a request.

        Raises:
            RequestError: it is compressed, too large, too slow, or does not match its headers.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(415, "got a compressed body, expected plain application/json")
        if (request.content_length or 0) > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes)
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await request.read()
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        except web.RequestPayloadError:
            raise RequestError(400, "the body does not match its headers") from None

    def _connect(self) -> asyncio.BaseProtocol:
        """Return the protocol that serves a new connection."""
        assert self._runner.server is not None
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = (
            self._limits.connections if files == resource.RLIM_INFINITY else min(self._limits.connections, files // 2)
        )
        return self._runner.server() if self.num_connections < most else _Refusal()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into an answer, send the answer and count it."""
        status = CLIENT_CLOSED
        try:
            response = await self._answer_or_refuse(request, handler)
            response.headers.update(self._headers)
            status = response.status
        finally:
            if self._count is not None:
                self._count(request.path if request.path in self._paths else OTHER_PATH, status)
        if request.transport is None:  # the client left
            return response
        with taken_in_time(request, self._limits.answer_s):
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _answer_or_refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._guard(request)
            return await handler(request) if self._may_enter(request) else _answer_of(self._no_token)
        except RequestError as error:
            return _answer_of(error)
        except web.HTTPRequestEntityTooLarge:
            return refuse(413, f"the body is larger than {self._limits.body_bytes} bytes; send several requests")
        except web.HTTPMethodNotAllowed as error:
            return refuse(405, f"{request.path} does not take {request.method}", {"Allow": error.headers["Allow"]})
        except web.HTTPException as error:
            path = shortened(request.path, _MAX_QUOTED)
            return refuse(error.status, f"{path}: {error.reason}; expected one of {', '.join(self._paths)}")
        except Exception:  # a process boundary: one request must not stop the others
            logger.exception("a request failed")
            return refuse(500, "the server has a bug; its log has the details")

    def _guard(self, request: web.Request) -> None:
        """Refuse requests that a browser sends for another site's page, by a name that leads here or across origins."""
        host = request.headers.get("Host", "")  # aiohttp refuses two
        if not self._is_ours(host):
            got = shortened(ascii(host), _MAX_QUOTED)
            raise RequestError(403, f"got the host {got}, expected {self.url} or a name that this server was given")
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            raise RequestError(403, f"a page of {shortened(ascii(origin), _MAX_QUOTED)} may not use this server")
        is_known = request.match_info.http_exception is None  # else 404 or 405 follows
        if is_known and request.method == "POST" and request.content_type != "application/json":
            got = shortened(repr(request.content_type), _MAX_QUOTED)
            raise RequestError(415, f"got content of type {got}, expected application/json")

    def _may_enter(self, request: web.Request) -> bool:
        """Return whether a request sends the token, or needs none; a path that is not there is refused later."""
        if not self._token or request.path in self._open_paths or request.match_info.http_exception is not None:
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Compared in constant time, so that the time does not show how much of a guess is right
        is_same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token.encode())
        return is_same and scheme.lower() == "bearer"

    def _names_this_server(self, host: str) -> bool:
        """Return whether a ``Host`` header names this server; an address does: no owner of a domain directs it here."""
        if (match := _HOST.fullmatch(host)) is None:
            return False
        name = (match[1] or match[2]).lower().rstrip(".")
        return name in self._names or is_loopback(name) or (not is_loopback(self._host) and _is_address(name))


class _Refusal(asyncio.Protocol):
    """Refuses a connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Connection: close\r\nContent-Length: {len(_FULL)}\r\n\r\n"
        )
        transport.write(head.encode() + _FULL)
        transport.close()


@contextlib.contextmanager
def taken_in_time(request: web.Request, answer_s: float) -> Iterator[None]:
    """Cut the connection of a client that does not take within ``answer_s`` what the block sends."""
    assert request.transport is not None
    late = asyncio.get_running_loop().call_later(answer_s, request.transport.abort)
    try:
        yield
    finally:
        late.cancel()


def announce(url: str) -> None:
    """Write to standard error where a server answers."""
    sys.stderr.write(f"{url} answers; Ctrl-C stops it\n")
    sys.stderr.flush()


def run_until_signal(server: HttpServer, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in flight; a second signal ends the process at once.

    ``ready`` gets the address once the server listens. The process may open as many files as the system allows it to.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, ready))


async def _serve(server: HttpServer, ready: Callable[[str], None]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with server:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        ready(server.url)
        await stopped.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _answer_of(error: RequestError) -> web.Response:
    return web.json_response(error.body, status=error.status, headers=error.headers)


def refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the answer that refuses a request."""
    return web.json_response({"error": message}, status=status, headers=headers)


def check_token(host: str, token: str) -> None:
    """Raise ``ConfigError`` if other machines reach a host without a token, or if the token is not printable ASCII."""
    if not token and not is_loopback(host.strip("[]")):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no token was given; set an environment variable "
            "and name it with --token-env, or bind to 127.0.0.1"
        )
    if token and not is_token(token):
        raise ConfigError("the token holds spaces or odd characters, expected printable ASCII")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host: ``is_loopback("127.0.0.1")``, ``is_loopback("localhost")``."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
