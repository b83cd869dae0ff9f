"""The MCP server: the tool ``search`` over any retriever, for each client that speaks the Model Context Protocol.

::

    client ──► token? ──► Host, Origin, Content-Type, size ──► /mcp: tools/list, tools/call search ──► retriever

It is the one server outside ``cluster/http.py``: the official SDK brings Starlette and uvicorn. The SDK's own settings
check the headers; a token guards all hosts but loopback, as it does ``/retrieve``. No session is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Collection
from typing import Annotated, Any, Self

import anyio
import psutil
import uvicorn
from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import INTERNAL_ERROR, CallToolResult, TextContent
from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.http import Limits, is_loopback, run_until_signal
from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Passage, Retriever
from retrieval.http.server import (
    DEFAULT_TOPK,
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    MAX_TOPK,
    Searching,
    check_token,
    is_authorised,
)

PATH = "/mcp"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Queries = Annotated[
    list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]],
    Field(min_length=1, max_length=MAX_QUERIES, description="What to look for, each on its own."),
]
TopK = Annotated[int, Field(ge=1, le=MAX_TOPK, description="Passages per query.")]


def search_server(retriever: Retriever) -> MCPServer:
    """Return the server of the tool ``search``, which asks ``retriever``; it listens nowhere yet."""
    server = MCPServer("ragr1", log_level="WARNING")

    @server.tool(description="Search for passages. Several queries are answered at once.")
    async def search(queries: Queries, k: TopK = DEFAULT_TOPK) -> CallToolResult:
        try:
            found = await retriever.search(queries, k)
        except RetrievalError as error:  # no result: a client that trains must not show it to its policy
            raise MCPError(INTERNAL_ERROR, f"the search failed: {error}") from error
        text = "\n\n".join(map(_as_text, queries, found))
        structured = {"result": [[_as_json(passage) for passage in passages] for passages in found]}
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=structured)

    return server


def _as_text(query: str, passages: list[Passage]) -> str:
    lines = [f"({number}) {passage.title}: {passage.text}" for number, passage in enumerate(passages, start=1)]
    return "\n".join([f"Query: {query}", *(lines or ["Nothing was found."])])


def _as_json(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": passage.score}


class McpHttpServer:
    """Listens while its ``async with`` block runs; Streamable HTTP at ``url``."""

    def __init__(
        self,
        retriever: Retriever,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str = "",
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Take the arguments of ``RetrievalServer``; raises its errors."""
        self._host, self._port, self._token = host.strip("[]"), port, check_token(host, token)
        self._names = [*_LOOPBACK, *allowed_hosts]
        if not is_loopback(self._host):
            own = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
            own |= {self._host, socket.gethostname()}
            self._names += sorted(f"[{name}]" if ":" in name else name for name in own)
        self._searching = Searching(retriever)
        self.url = ""
        """The address that clients are given, once it listens."""

    async def __aenter__(self) -> Self:
        """Start to listen; raises ``ConfigError`` if the host is of another machine or the port is in use."""
        listener = self._listen()
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
        names = [name + end for name in self._names for end in ("", ":*")]
        security = TransportSecuritySettings(allowed_hosts=names, allowed_origins=[f"http://{name}" for name in names])
        app = search_server(self._searching.retriever).streamable_http_app(
            streamable_http_path=PATH, json_response=True, stateless_http=True, transport_security=security
        )
        limits = Limits()
        config = uvicorn.Config(
            self._guarded(app),
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=int(limits.drain_s),
        )
        self._uvicorn = _Uvicorn(config)
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Answer the requests in flight, for a limited time, and stop."""
        self._uvicorn.should_exit = True
        await self._serving
        self._searching.close()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            return socket.create_server((self._host, self._port), family=family, backlog=Limits().connections)
        except (OSError, OverflowError) as error:
            self._searching.close()
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"cannot listen on port {self._port} of {self._host}: {why}; choose another port or address"
            ) from None

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope.get("headers", ())).get(b"authorization", b"")
            if scope["type"] == "http" and not is_authorised(given.decode("latin-1"), self._token):
                said = {"error": "expected the header 'Authorization: Bearer TOKEN'"}
                await JSONResponse(said, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded


class _Uvicorn(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Leave the signals to ``run_until_signal``."""
        return contextlib.nullcontext()


def run_mcp_server(
    retriever: Retriever,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    allowed_hosts: Collection[str] = (),
    over_stdio: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, as ``run_server``; or over standard input and output, until that input ends."""
    if over_stdio:
        searching = Searching(retriever)
        try:
            anyio.run(search_server(searching.retriever).run_stdio_async)
        finally:
            searching.close()
        return
    server = McpHttpServer(retriever, host=host, port=port, token=token, allowed_hosts=allowed_hosts)

    def say() -> None:
        sys.stderr.write(f"{server.url} answers; Ctrl-C stops it\n")
        sys.stderr.flush()

    run_until_signal(server, say)
