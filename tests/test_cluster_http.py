"""The HTTP shell over real sockets: whom it answers, what it refuses, and how much of it a client can hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from http_stub import port_of
from waits import until

from cluster.http import HttpServer, Limits, RequestError

JSON = {"Content-Type": "application/json"}


class Door:
    """A server with a page, a service that returns what it gets, and one that never answers."""

    def __init__(self, **settings: Any) -> None:
        self.counted: list[tuple[str, int]] = []
        self.num_left = 0
        self.http = HttpServer(
            [
                web.get("/page", self.page),
                web.get("/large", self.large),
                web.get("/bug", self.bug),
                web.get("/later", self.later),
                web.get("/never", self.never),
                web.post("/echo", self.echo),
            ],
            count=lambda path, status: self.counted.append((path, status)),
            **settings,
        )

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(text="page")

    async def large(self, request: web.Request) -> web.Response:
        return web.Response(body=bytes(2**26))

    async def bug(self, request: web.Request) -> web.Response:
        raise KeyError("secret detail")

    async def later(self, request: web.Request) -> web.Response:
        raise RequestError(503, "ask later", {"Retry-After": "7"})

    async def never(self, request: web.Request) -> web.Response:
        try:
            await asyncio.Event().wait()
        finally:
            self.num_left += 1
        raise AssertionError

    async def echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.http.read_body(request))


@contextlib.asynccontextmanager
async def opened(door: Door) -> AsyncIterator[aiohttp.ClientSession]:
    async with door.http, aiohttp.ClientSession(base_url=door.http.url) as session:
        yield session


async def status_of(session: aiohttp.ClientSession, path: str, method: str = "GET", **headers: str) -> int:
    async with session.request(method, path, headers=headers) as response:
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        if response.status != 200:
            assert list(await response.json()) == ["error"]
        return response.status


@contextlib.asynccontextmanager
async def connection(door: Door) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(door.http.url))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:9", 200),  # through `ssh -L 9:127.0.0.1:PORT`
        ("LocalHost:80", 200),
        ("localhost.", 200),
        ("[::1]:8000", 200),
        ("proxy.example", 200),  # that the server was given
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:8000@evil.example", 403),
        ("10.0.0.2:8000", 403),
        ("", 403),
        ("[::1", 403),
        ("a\u00e9b", 403),
    ],
)
async def test_only_its_own_names_are_answered(host: str, expected: int) -> None:
    """A page of a name that the browser resolves to 127.0.0.1 would read the server's answers."""
    async with opened(Door(allowed_hosts=["Proxy.example"])) as session:
        for path in ("/page", "/later"):
            assert await status_of(session, path, Host=host) == (
                503 if path == "/later" and expected == 200 else expected
            )


async def test_a_server_for_other_machines_is_reached_by_addresses_and_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node7")
    monkeypatch.setattr("socket.getfqdn", lambda: "node7.cluster.example")
    async with opened(Door(host="0.0.0.0", allowed_hosts=["search.example"])) as session:
        for host in ("10.0.0.2:8000", "[fd00::1]", "node7:1", "NODE7.cluster.example", "search.example", "localhost"):
            assert await status_of(session, "/page", Host=host) == 200, host
        for host in ("evil.example", "node7.evil.example"):
            assert await status_of(session, "/page", Host=host) == 403, host


@pytest.mark.parametrize("head", ["1.1\r\n", "1.0\r\n", "1.1\r\nHost: localhost\r\nHost: evil.example\r\n"])
async def test_a_request_names_one_host(head: str) -> None:
    door = Door()
    async with door.http, connection(door) as (reader, writer):
        writer.write(f"GET /page HTTP/{head}\r\n".encode())
        assert (await reader.readline()).split()[1] in (b"400", b"403")


async def test_pages_of_other_origins_and_forms_are_refused() -> None:
    door = Door()
    async with opened(door) as session:
        host = f"localhost:{port_of(door.http.url)}"
        assert await status_of(session, "/echo", "POST", Host=host, Origin=f"http://{host}", **JSON) == 200
        for origin in ("null", "http://evil.example", "http://localhost:1", f"http://{host}.evil.example"):
            assert await status_of(session, "/echo", "POST", Host=host, Origin=origin, **JSON) == 403
            assert await status_of(session, "/page", Host=host, Origin=origin) == 403
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp"):
            assert await status_of(session, "/echo", "POST", **{"Content-Type": kind}) == 415
        assert await status_of(session, "/page", "OPTIONS", Origin="http://evil.example") == 403
        assert await status_of(session, "/page", "POST") == 405


async def test_errors_are_a_sentence_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(headers={"X-Mine": "1"})
    async with opened(door) as session:
        async with session.get("/later") as response:
            assert (response.headers["Retry-After"], response.headers["X-Mine"]) == ("7", "1")
        async with session.get("/bug") as response:
            assert response.status == 500 and "secret" not in await response.text()
        async with session.post("/page") as response:
            assert response.headers["Allow"] == "GET,HEAD"
        assert await status_of(session, "/" + "x" * 500) == 404
    assert door.counted == [("/later", 503), ("/bug", 500), ("/page", 405), ("other", 404)]
    assert "secret detail" in caplog.text  # for the person who runs the server


MALFORMED = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "orders to a terminal": b"GET /\x1b[31m\x1b]0;title\x07 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "orders in a header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x1b[2J\x00\r\n\r\n",
    "a long line": b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(500)) + b"\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length and chunks": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunks": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_leaves_no_trace(
    name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    door = Door()
    async with opened(door) as session:
        async with connection(door) as (reader, writer):
            writer.write(MALFORMED[name])
            answer = await reader.read()
            assert answer.split()[1] in (b"400", b"505"), answer
            assert b"Traceback" not in answer and b"\x1b" not in answer
        assert await status_of(session, "/page") == 200
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /page HTTP/1.1\r\nHost: local",
        b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\nGET /page HT",  # after an answer
    ],
)
async def test_a_connection_without_whole_headers_is_closed(sent: bytes) -> None:
    door = Door(limits=Limits(idle_s=0.2))
    async with door.http:
        for _ in range(5):
            async with connection(door) as (reader, writer):
                writer.write(sent)
                assert (await reader.read()).count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")  # read to its end


async def test_headers_that_come_byte_by_byte_do_not_keep_a_connection() -> None:
    door = Door(limits=Limits(idle_s=0.3))
    async with door.http, connection(door) as (reader, writer):
        writer.write(b"GET /page HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        dripping.cancel()


async def test_bodies_have_a_size_a_time_and_one_encoding() -> None:
    door = Door(limits=Limits(body_bytes=1000, body_s=0.2))
    async with opened(door) as session:
        async with session.post("/echo", data=b"x" * 1000, headers=JSON) as response:
            assert await response.read() == b"x" * 1000
        async with session.post("/echo", data=b"x" * 1001, headers=JSON) as response:
            assert response.status == 413
        async with session.post("/echo", data=b"x", headers=JSON | {"Content-Encoding": "gzip"}) as response:
            assert response.status == 415
        async with connection(door) as (reader, writer):
            writer.write(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 99\r\n\r\n{")
            assert b" 408 " in await reader.readline()


async def test_a_client_that_does_not_read_is_left() -> None:
    door = Door(limits=Limits(answer_s=0.2))
    async with door.http, connection(door) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: door.counted)
        await until(lambda: door.http.num_connections == 0)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < 2**26


async def test_connections_have_a_number_and_one_that_closes_makes_room() -> None:
    door = Door(limits=Limits(connections=2))
    async with opened(door) as session, connection(door), connection(door) as (_, writer):
        writer.write(b"GET /never HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with connection(door) as (refused, _):
            answer = await refused.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b'ask again later"}')
        writer.close()
        await until(lambda: door.num_left == 1 and door.http.num_connections == 1)  # its work has ended
        assert await status_of(session, "/page") == 200
    assert ("/never", 499) in door.counted


async def test_a_stop_waits_for_answers_and_not_for_ever() -> None:
    door = Door(limits=Limits(drain_s=0.2))
    async with contextlib.AsyncExitStack() as stack:
        async with door.http:
            _, writer = await stack.enter_async_context(connection(door))
            writer.write(b"GET /never HTTP/1.1\r\nHost: localhost\r\n\r\n")
            idle, _ = await stack.enter_async_context(connection(door))
            await until(lambda: door.http.num_connections == 2)
        assert await idle.read() == b""
    await until(lambda: door.num_left == 1)
