"""Real HTTP servers on loopback that answer what a test wants."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def stub_server(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    """Answer every request with ``answer``; yields the URL. Ends at once, also with requests in flight."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """Run ``stub_server`` in another thread, for what has an event loop of its own."""
    loop = asyncio.new_event_loop()
    ready, urls = threading.Event(), []
    ended = asyncio.Event()

    async def serve() -> None:
        async with stub_server(answer) as url:
            urls.append(url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def always(body: Any, status: int = 200, **headers: str) -> Answer:
    """Answer with the same JSON, or text, every time."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if isinstance(body, str):
            return web.Response(text=body, status=status, headers=headers, content_type="text/html")
        return web.json_response(body, status=status, headers=headers)

    return answer


async def silent(request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def breaking(broken: asyncio.Event) -> Answer:
    """Break every connection in the middle of the answer, and set ``broken``."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"result": [[')
        assert request.transport is not None
        request.transport.abort()
        broken.set()
        return response

    return answer


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])
