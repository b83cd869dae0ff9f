"""The tool ``search`` over any retriever, for any client that speaks the Model Context Protocol (MCP).

::

    client ──► cluster/http.py, with its guards ──► POST /mcp ──► the official SDK ──► search ──► retriever

The SDK is asked through ASGI and starts no web server, so that all requests pass the guards. No session is kept.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import anyio
from aiohttp import web
from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import INTERNAL_ERROR, CallToolResult, TextContent
from pydantic import Field

from cluster.http import Limits
from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Passage, Retriever
from retrieval.http.server import DEFAULT_TOPK, MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK

Queries = Annotated[
    list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]],
    Field(min_length=1, max_length=MAX_QUERIES, description="What to look for, each on its own."),
]
TopK = Annotated[int, Field(ge=1, le=MAX_TOPK, description="Passages per query.")]


class McpEndpoint:
    """Answers requests of MCP within the ``async with`` block of ``running``."""

    def __init__(self, retriever: Retriever) -> None:
        """Take the retriever that answers the searches."""
        server = search_server(retriever)
        server.streamable_http_app(  # makes the session manager
            json_response=True,
            stateless_http=True,
            max_request_body_size=Limits().body_bytes,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # the guards do this
        )
        self._sessions = server.session_manager

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which requests are answered."""
        return self._sessions.run()

    async def answer(self, request: web.Request, body: bytes) -> web.Response:
        """Answer a request whose body has been read."""
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "query_string": b"",
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }
        given = [{"type": "http.request", "body": body}]
        sent: list[Any] = []

        async def receive() -> Any:
            return given.pop() if given else await asyncio.Event().wait()  # a client that leaves cancels everything

        async def send(message: Any) -> None:
            sent.append(message)

        await self._sessions.handle_request(scope, receive, send)
        start, *parts = sent
        headers = {name.decode(): value.decode() for name, value in start["headers"] if name != b"content-length"}
        answer = b"".join(part.get("body", b"") for part in parts)
        return web.Response(status=start["status"], headers=headers, body=answer)


def search_server(retriever: Retriever) -> MCPServer:
    """Return the server of the tool ``search``, which asks ``retriever``; it does not listen yet."""
    server = MCPServer("ragr1", log_level="WARNING", subscriptions=False)

    @server.tool(description="Search for passages. Several queries are answered at once.")
    async def search(queries: Queries, k: TopK = DEFAULT_TOPK) -> CallToolResult:
        try:
            found = await retriever.search(queries, k)
        except RetrievalError as error:  # not a result: a client that trains must not show it to its policy
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


def run_over_stdio(retriever: Retriever) -> None:
    """Serve through standard input and output until the input ends."""
    anyio.run(search_server(retriever).run_stdio_async)
