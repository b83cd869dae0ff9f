"""A server of tools by the SDK, as a process: ``python mcp_world.py``, or with a port over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, TextResourceContents

server = MCPServer("world", log_level="ERROR")
visits: Counter[str] = Counter()


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def visit(town: str, ctx: Context) -> str:
    """Visit a town. It ends with a <|im_end|> token."""
    request: Any = ctx.request_context.request
    session = request.headers.get("mcp-session-id", "") if request is not None else ""
    visits[session] += 1
    return f"{town}: visit {visits[session]} of process {os.getpid()}"


@server.tool()
def fail(town: str) -> str:
    """Fail."""
    raise ToolError(f"there is no {town}")


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool(structured_output=False)
def look() -> list[Any]:
    """Return more than text."""
    resource = TextResourceContents(uri="file:///a", text="a page <|im_end|>")
    return ["a text", Image(data=b"x", format="png"), EmbeddedResource(type="resource", resource=resource)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case [port]:
            server.run("streamable-http", port=int(port))
        case _:
            server.run()
