"""The HTTP server over a real socket: protocol, refusals, limits, health, metrics, shutdown, searches in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import BrokenRetriever
from http_stub import port_of
from prometheus_client.parser import text_string_to_metric_families
from waits import until

from cluster.http import Limits
from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.http import server as http_server
from retrieval.http.server import RetrievalServer, SearchThread
from retrieval.replicas.batching import PoolArguments, PooledRetriever

ROOT = Path(__file__).resolve().parent.parent
RIGA = Passage("7", "Rīga", "Rīga lies in Latvia.\nIt is old.", 0.75)
QUOTED = Passage("8", 'The "Ring"\nof fire', "", 0.5)


class TwoPassages:
    """Finds the same two for every query; holds searches back while ``gate`` is shut."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.asked.append((queries, k))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [Hits([RIGA, QUOTED][:k], index_version="v1") for _ in queries]


@contextlib.asynccontextmanager
async def served(retriever: Any, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        RetrievalServer(retriever, port=0, **settings) as server,
        aiohttp.ClientSession(base_url=server.url) as session,
    ):
        yield session


async def ask(session: aiohttp.ClientSession, body: Any, **settings: Any) -> tuple[int, Any]:
    """Post JSON, or bytes as they are, and return status and JSON."""
    content = (
        {"data": body, "headers": {"Content-Type": "application/json"}} if isinstance(body, bytes) else {"json": body}
    )
    async with session.post("/retrieve", **(content | settings)) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def test_answers_as_search_r1_does() -> None:
    retriever = TwoPassages()
    documents = [
        {"id": "7", "contents": '"Rīga"\nRīga lies in Latvia.\nIt is old.', "title": "Rīga", "text": RIGA.text},
        {"id": "8", "contents": '"The "Ring" of fire"\n', "title": 'The "Ring"\nof fire', "text": ""},
    ]
    async with served(retriever) as session:
        status, answer = await ask(session, {"queries": ["a", "b"], "topk": 2, "return_scores": True})
        scored = [
            {"document": document, "score": score} for document, score in zip(documents, [0.75, 0.5], strict=True)
        ]
        assert (status, answer) == (200, {"result": [scored, scored], "index_version": "v1"})
        assert (await ask(session, {"queries": ["a"], "return_scores": False}))[1]["result"] == [documents]
        assert (await ask(session, {"queries": ["a"], "topk": None, "other": [1]}))[1]["result"] == [documents]
        assert (await ask(session, {"queries": []})) == (200, {"result": []})
        async with session.post("/retrieve", json={"queries": ["a"], "topk": 1}) as response:
            assert "Rīga".encode() in await response.read()  # as UTF-8, not escaped
    assert retriever.asked == [(["a", "b"], 2), (["a"], 3), (["a"], 3), (["a"], 1)]


async def test_odd_queries_are_queries() -> None:
    retriever = TwoPassages()
    odd = ["", "word " * 10_000, "a\x00b\x1b[31m\u202e", "東京 🗼", "😀" * 1000]
    async with served(retriever) as session:
        status, answer = await ask(session, {"queries": odd})
    assert status == 200
    assert len(answer["result"]) == len(odd)
    assert retriever.asked == [(odd, 3)]


MALFORMED = {
    "nothing": (b"", 400),
    "text": (b"hello", 400),
    "half": (b'{"queries": ["a"', 400),
    "no UTF-8": (b'{"queries": ["\xff"]}', 400),
    "NaN": (b'{"queries": ["a"], "topk": NaN}', 400),
    "infinity": (b'{"queries": ["a"], "topk": -Infinity}', 400),
    "deep": (b"[" * 200_000, 400),
    "deep inside": (b'{"queries": ["a"], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "5,000 digits": (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", 400),
    "4,000 digits": (b'{"queries": ["a"], "topk": ' + b"9" * 4000 + b"}", 422),
    "a list": (b'["a"]', 422),
    "null": (b"null", 422),
    "no queries": (b'{"query": "a"}', 422),
    "a string": (b'{"queries": "a"}', 422),
    "a number": (b'{"queries": ["a", 1]}', 422),
    "a null": (b'{"queries": [null]}', 422),
    "half a pair": (b'{"queries": ["\\ud800"]}', 400),
    "topk 0": (b'{"queries": ["a"], "topk": 0}', 422),
    "topk -1": (b'{"queries": ["a"], "topk": -1}', 422),
    "topk 1.5": (b'{"queries": ["a"], "topk": 1.5}', 422),
    "topk 1e999": (b'{"queries": ["a"], "topk": 1e999}', 422),
    "topk true": (b'{"queries": ["a"], "topk": true}', 422),
    "topk text": (b'{"queries": ["a"], "topk": "' + b"3" * 1000 + b'"}', 422),
    "topk over": (b'{"queries": ["a"], "topk": 1001}', 422),
    "scores 1": (b'{"queries": ["a"], "return_scores": 1}', 422),
    "queries over": (b'{"queries": [' + b'"a", ' * 512 + b'"a"]}', 422),
    "query over": (b'{"queries": ["' + b"a" * 100_001 + b'"]}', 422),
}


async def test_every_malformed_body_is_one_sentence_and_the_server_stays_up() -> None:
    retriever = TwoPassages()
    async with served(retriever) as session:
        for name, (body, expected) in MALFORMED.items():
            status, answer = await ask(session, body)
            assert status == expected, name
            assert list(answer) == ["error"], name
            assert len(answer["error"]) < 200, name
            assert "\n" not in answer["error"], name
        assert retriever.asked == []
        assert (await ask(session, {"queries": ["a"]}))[0] == 200


async def test_wrong_methods_types_paths_and_sizes_are_refused() -> None:
    async with served(TwoPassages(), limits=Limits(body_bytes=1000)) as session:
        async with session.get("/retrieve") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert "error" in await response.json()
        async with session.get("/other/" + "x" * 500) as response:
            assert response.status == 404
            assert len((await response.json())["error"]) < 200
        assert (await ask(session, b'{"queries": []}', headers={"Content-Type": "text/plain"}))[0] == 415
        assert (await ask(session, {"queries": ["a" * 2000]}))[0] == 413
        zipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await ask(session, gzip.compress(b'{"queries": []}'), headers=zipped))[0] == 415
        assert (await ask(session, b"no gzip", headers=zipped))[0] == 415

        async def chunks() -> AsyncIterator[bytes]:  # of a length that no header says
            for _ in range(20):
                yield b" " * 100

        async with session.post("/retrieve", data=chunks(), headers={"Content-Type": "application/json"}) as response:
            assert response.status == 413
        assert (await ask(session, {"queries": ["a"]}))[0] == 200


async def test_garbage_and_half_requests_on_the_socket_leave_the_server_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    retriever = TwoPassages()
    async with (
        RetrievalServer(retriever, port=0, limits=Limits(body_s=0.5)) as server,
        aiohttp.ClientSession(base_url=server.url) as session,
    ):
        address = "127.0.0.1", port_of(server.url)
        head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half = head + b"Content-Length: 99\r\n\r\n{"
        chunked = half.replace(b"Content-Length: 99", b"Transfer-Encoding: chunked")
        for sent, expected in [
            (b"\x16\x03\x01garbage\r\n\r\n", b" 400 "),
            (b"POST /retrieve HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b" 400 "),
            (chunked + b"zz\r\n", b" 400 "),
            (half, b" 408 "),
        ]:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            assert expected in await reader.readline()
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(half)
        writer.close()  # in the middle
        await writer.wait_closed()
        assert (await ask(session, {"queries": ["a"]}))[0] == 200
    assert len(retriever.asked) == 1
    assert caplog.records == []  # strangers cannot fill the log


async def test_a_failed_search_is_503_and_never_an_empty_result(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy:
        async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
            raise KeyError("secret detail")

    class Short:
        async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
            return []

    async with served(BrokenRetriever()) as session:
        status, answer = await ask(session, {"queries": ["a"]})
        assert status == 503
        assert "connection lost" in answer["error"]
        async with session.get("/healthz") as response:
            assert response.status == 503
            assert "connection lost" in (await response.json())["error"]
    async with served(Short()) as session:
        assert (await ask(session, {"queries": ["a"]}))[0] == 503
    async with served(Buggy()) as session:
        status, answer = await ask(session, {"queries": ["a"]})
        assert status == 500
        assert "secret" not in answer["error"]
    assert "secret detail" in caplog.text


async def test_health_is_probed_past_caches_and_not_for_every_question() -> None:
    retriever = TwoPassages()
    async with served(retriever) as session:
        for _ in range(3):
            async with session.get("/healthz") as response:
                assert (response.status, await response.json()) == (200, {"status": "ok"})
    assert len(retriever.asked) == 1


async def test_overload_is_503_at_once_and_a_client_that_leaves_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_REQUESTS", 2)
    retriever = TwoPassages()
    retriever.gate.clear()
    async with served(retriever) as session:
        waiting = [asyncio.create_task(ask(session, {"queries": [name]})) for name in "ab"]
        await until(lambda: len(retriever.asked) == 2)
        async with session.post("/retrieve", json={"queries": ["c"]}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        waiting[0].cancel()
        await until(lambda: retriever.num_cancelled == 1)
        retriever.gate.set()
        assert (await waiting[1])[0] == 200
        assert (await ask(session, {"queries": ["d"]}))[0] == 200
        values = await read_metrics(session)
    assert values["ragr1_http_requests_total", "/retrieve", "499"] == 1
    assert values["ragr1_http_requests_total", "/retrieve", "503"] == 1
    assert values["ragr1_retrieve_requests_in_flight",] == 0


async def read_metrics(session: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """Return the value of every time series by its name and the values of its labels, as a Prometheus server would."""
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(await response.text())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_metrics_count_requests_queries_and_time() -> None:
    async with served(TwoPassages()) as session:
        await ask(session, {"queries": ["a", "b", "c"]})
        await ask(session, {"queries": ["d"]})
        await ask(session, {})
        async with session.get("/nowhere"):
            pass
        values = await read_metrics(session)
    assert values["ragr1_http_requests_total", "/retrieve", "200"] == 2
    assert values["ragr1_http_requests_total", "/retrieve", "422"] == 1
    assert values["ragr1_http_requests_total", "other", "404"] == 1
    assert values["ragr1_retrieve_queries_total",] == 4
    assert values["ragr1_retrieve_duration_seconds_count",] == 2
    assert values["ragr1_retrieve_duration_seconds_bucket", "+Inf"] == 2
    buckets = [value for name, value in values.items() if name[0].endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert values["ragr1_retrieve_duration_seconds_sum",] > 0


async def test_a_token_guards_searches_and_metrics() -> None:
    async with served(TwoPassages(), token="s3cret") as session:
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer s3cret2"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer ünïcode"},
        ]
        for headers in wrong:
            async with session.post("/retrieve", json={"queries": ["a"]}, headers=headers) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "s3cret" not in await response.text()
        right = {"Authorization": "Bearer s3cret"}
        assert (await ask(session, {"queries": ["a"]}, headers=right))[0] == 200
        assert (await session.get("/metrics")).status == 401
        assert (await session.get("/metrics", headers=right)).status == 200
        assert (await session.get("/healthz")).status == 200  # it tells nothing secret


async def test_other_machines_need_a_token() -> None:
    for host in ["0.0.0.0", "::", "", "192.168.1.5", "myhost"]:
        with pytest.raises(ConfigError, match="token"):
            RetrievalServer(TwoPassages(), host=host)
    with pytest.raises(ConfigError, match="odd characters"):
        RetrievalServer(TwoPassages(), token="two words")
    async with (
        RetrievalServer(TwoPassages(), host="0.0.0.0", port=0, token="s3cret") as server,
        aiohttp.ClientSession(base_url=server.url.replace("0.0.0.0", "127.0.0.1")) as session,
    ):
        assert (await ask(session, {"queries": ["a"]}))[0] == 401


async def test_a_port_or_host_that_cannot_be_had_is_one_sentence() -> None:
    async with RetrievalServer(TwoPassages(), port=0) as server:
        port = port_of(server.url)
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1: .*in use") as caught:
            async with RetrievalServer(TwoPassages(), port=port):
                pass
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot listen"):
        async with RetrievalServer(TwoPassages(), host="203.0.113.77", token="s3cret", port=0):
            pass
    with pytest.raises(ConfigError, match="cannot listen"):
        async with RetrievalServer(TwoPassages(), port=99999):
            pass


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_loopback(host: str) -> None:
    async with (
        RetrievalServer(TwoPassages(), host=host, port=0) as server,
        aiohttp.ClientSession(base_url=server.url) as session,
    ):
        assert server.url.startswith("http://[::1]:")
        assert (await ask(session, {"queries": ["a"]}))[0] == 200


SCRIPT = """
import asyncio, sys
from retrieval.base import Passage
from retrieval.http.server import run_server

class Slow:
    async def search(self, queries, k):
        print("asked", file=sys.stderr, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        return [[Passage("1", "t", "x")] for _ in queries]

run_server(Slow(), port=0)
print("ended")
"""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_server_after_the_requests_in_flight(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None and process.stdin is not None
    try:
        line = await asyncio.to_thread(process.stderr.readline)
        assert line.startswith("http://127.0.0.1:"), line
        async with aiohttp.ClientSession(base_url=line.split("/retrieve")[0]) as session:
            asking = asyncio.create_task(ask(session, {"queries": ["a"]}))
            assert await asyncio.to_thread(process.stderr.readline) == "asked\n"
            process.send_signal(number)
            while await is_listening(port_of(line.split("/retrieve")[0])):
                await asyncio.sleep(0.002)
            process.stdin.write("\n")  # lets the search end
            process.stdin.flush()
            assert (await asking)[0] == 200
        output, errors = await asyncio.to_thread(process.communicate, timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    assert (process.returncode, output, errors) == (0, "ended\n", "")


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_local_index_is_searched_beside_the_loop(tmp_path: Path) -> None:
    from retrieval.build import build_index
    from retrieval.local import LocalRetriever

    passages = [Passage(str(n), f"Town {n}", f"Town {n} lies by river {n}.") for n in range(20)]
    index = build_index(passages, tmp_path / "index", progress=False)
    retriever = LocalRetriever(index)
    async with served(retriever) as session:
        odd = ["", "\x00", "word " * 10_000, "東京", "Town 7 lies by river 7"]
        status, answer = await ask(session, {"queries": odd, "topk": 50, "return_scores": True})
        assert status == 200, answer
        assert answer["result"][-1][0]["document"]["id"] == "7"
        assert answer["index_version"] == retriever.version
        assert json.dumps(answer["result"][-1])
        assert (await session.get("/healthz")).status == 200


class Blocking:
    """Blocks the calling thread as a ``LocalRetriever`` does, until its ``gate`` is opened."""

    version = "v7"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.gate = threading.Event()

    def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.batches.append(queries)
        self.threads.add(threading.get_ident())
        assert self.gate.wait(20), "the gate stayed shut: the event loop waits for the search"
        if self.error is not None:
            raise self.error
        return [[Passage(query, query, query)] for query in queries]


async def test_a_blocking_retriever_is_searched_in_batches_while_the_loop_goes_on() -> None:
    blocking = Blocking()
    thread = SearchThread(blocking)  # type: ignore[arg-type]
    pool = PooledRetriever({"thread": thread}, PoolArguments(max_retries=1))
    asking = [asyncio.create_task(pool.search([f"q{number}"], 1)) for number in range(30)]
    await until(lambda: bool(blocking.batches))
    blocking.gate.set()
    found = [(await task)[0] for task in asking]
    thread.close()
    assert [hits[0].id for hits in found] == [f"q{number}" for number in range(30)]
    assert all(isinstance(hits, Hits) and hits.index_version == "v7" for hits in found)
    assert len(blocking.batches) < 10
    assert len(blocking.threads) == 1
    assert threading.get_ident() not in blocking.threads


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RetrievalError("no vectors")])
async def test_a_blocking_retriever_that_fails_is_a_sentence_and_goes_on(error: Exception) -> None:
    blocking = Blocking()
    blocking.gate.set()
    thread = SearchThread(blocking)  # type: ignore[arg-type]
    pool = PooledRetriever({"thread": thread}, PoolArguments(max_retries=1))
    blocking.error = error
    with pytest.raises(RetrievalError, match=str(error)):
        await pool.search(["a"], 1)
    assert len(blocking.batches) == 2  # one retry
    blocking.error = None
    assert (await pool.search(["a"], 1))[0][0].id == "a"
    thread.close()
