"""The client of /retrieve servers, ours and others: correct, wrong, busy and dead ones, and those that come back."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from http_stub import Answer, always, breaking, free_port, port_of, silent, stub_server
from vision_world import page

from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.http.retriever import MAX_ANSWER_BYTES, HttpRetriever
from retrieval.http.server import MAX_QUERY_CHARS, RetrievalServer

TOKEN = "t0ken+/with=odd"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STUB_TOKEN", TOKEN)
    yield


class Echo:
    """Finds passages whose text is the query; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.asked.append(queries)
        return [
            Hits((Passage(f"{query[:9]}/{n}", 'The "T"', query, 1.0 / (n + 1)) for n in range(k)), index_version="v1")
            for query in queries
        ]


def http(url: str | list[str], **options: Any) -> HttpRetriever:
    return HttpRetriever({"url": url, "timeout_s": 5, "max_retries": 1, **options})


async def test_every_field_of_our_server_comes_back() -> None:
    echo = Echo()
    async with RetrievalServer(echo, port=0, token=TOKEN) as server:
        retriever = pickle.loads(pickle.dumps(http(server.url, token_env="STUB_TOKEN")))
        found = await retriever.search(["Rīga 🗼", "b"], 2)
        assert found == await Echo().search(["Rīga 🗼", "b"], 2)
        assert [(hits.index_version, hits.is_cached) for hits in found] == [("v1", False)] * 2
        (again,) = await retriever.search([" b\n"], 2)
        assert (again, again.is_cached) == (found[1], True)
        assert again is not found[1]
    assert echo.asked == [["Rīga 🗼", "b"]]


async def test_the_pictures_of_passages_come_back_and_a_broken_one_fails_the_search() -> None:
    pictured = Passage("7", "T", "A caption.", 0.5, image=page())
    found: list[Any] = [pictured, replace(pictured, image=None)]

    class Pages(Echo):
        async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
            return [found for _ in queries]

    async with RetrievalServer(Pages(), port=0) as server:
        assert await http(server.url).search(["a"], 2) == [found]
        found[0] = replace(pictured, image=Image(b"Riga", "image/png"))
        with pytest.raises(RetrievalError, match="image: cannot be read as an image in PNG"):
            await http(server.url).search(["b"], 2)


async def test_what_another_server_writes_as_image_is_left_out() -> None:
    document = {"id": "7", "title": "T", "text": "t", "image": "pages/7.png"}
    async with stub_server(always({"result": [[document]]})) as url:
        assert await http(url).search(["a"], 1) == [[Passage("7", "T", "t")]]


async def test_odd_queries_are_asked_without_what_no_server_takes() -> None:
    echo = Echo()
    async with RetrievalServer(echo, port=0) as server:
        odd = ["", " \x00\n", "word " * 10_000, "a\x00b\x1b[31m", "half \ud800 pair", "東京"]
        found = await http(server.url).search(odd, 1)
    assert [len(hits) for hits in found] == [0, 0, 1, 1, 1, 1]
    assert [hits[0].text[:20] for hits in found[2:]] == ["word word word word ", "a b [31m", "half pair", "東京"]
    assert [len(asked) for asked in echo.asked] == [4]


async def test_concurrent_searches_share_requests_and_requests_have_a_size() -> None:
    echo = Echo()
    async with RetrievalServer(echo, port=0) as server:
        retriever = http(server.url, max_queries_per_request=8, max_concurrent_requests=2)
        found = await asyncio.gather(*[retriever.search([f"q{n % 20}"], 1) for n in range(100)])
    assert [hits[0][0].text for hits in found] == [f"q{n % 20}" for n in range(100)]
    assert sorted(query for asked in echo.asked for query in asked) == sorted(f"q{n}" for n in range(20))
    assert max(len(asked) for asked in echo.asked) == 8


CONTENTS = '"Old Town"\nIn Riga.\nIt is old.'
SHAPES: dict[str, tuple[Any, Passage]] = {
    "Search-R1": (
        {"document": {"id": "7", "contents": CONTENTS}, "score": 0.5},
        Passage("7", "Old Town", "In Riga.\nIt is old.", 0.5),
    ),
    "Search-R1 without scores": ({"id": "7", "contents": CONTENTS}, Passage("7", "Old Town", "In Riga.\nIt is old.")),
    "its search engines": (
        {"document": {"contents": CONTENTS}},
        Passage("ff815c935d6f1fe8", "Old Town", "In Riga.\nIt is old."),
    ),
    "RAG-R1": ({"document": {"id": 7, "contents": "In Riga."}, "score": 2}, Passage("7", "", "In Riga.", 2.0)),
    "apart": (
        {"document": {"id": "7", "title": "T", "text": "x", "contents": "other"}, "score": None},
        Passage("7", "T", "x"),
    ),
    "no title": ({"document": {"id": "7", "text": "x\ud800"}}, Passage("7", "", "x\ufffd")),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_server_s_documents_are_read(shape: str) -> None:
    item, passage = SHAPES[shape]
    async with stub_server(always({"result": [[item, item, item]]})) as url:  # more than was asked for
        (found,) = await http(url).search(["a"], 2)
    assert found == [passage, passage]
    assert found.index_version == f"{url}/retrieve"


MALFORMED: dict[str, tuple[Any, str]] = {
    "HTML": ("<html>Welcome</html>", "expected JSON, got <html>Welcome"),
    "nothing": ("", "expected JSON, got nothing"),
    "a list": ([], "expected {"),
    "no result": ({"results": []}, "expected {"),
    "passages without a query": ({"result": [{"id": "7"}]}, "expected {"),
    "too few": ({"result": []}, "got 0 lists of passages for 1 queries"),
    "too many": ({"result": [[], []]}, "got 2 lists of passages for 1 queries"),
    "text": ({"result": [["a passage"]]}, "got a str for a passage"),
    "no text": ({"result": [[{"id": "7"}]]}, "neither 'text' nor 'contents'"),
    "NaN": ({"result": [[{"document": {"text": "x"}, "score": float("nan")}]]}, "not a finite number"),
    "a score of text": ({"result": [[{"document": {"text": "x"}, "score": "high"}]]}, "not a finite number"),
    "a huge score": ({"result": [[{"document": {"text": "x"}, "score": 10**400}]]}, "not a finite number"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_answer_is_a_failure_and_not_an_empty_result(name: str) -> None:
    body, problem = MALFORMED[name]
    async with stub_server(always(body)) as url:
        with pytest.raises(RetrievalError, match="after 2 attempts") as caught:
            await http(url).search(["a"], 1)
    assert problem in str(caught.value)
    assert f"{url}/retrieve: " in str(caught.value)


async def test_an_answer_without_end_is_cut_off() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(ConnectionError):
            while True:
                await response.write(b" " * 2**20)
        return response

    async with stub_server(endless) as url:
        with pytest.raises(RetrievalError, match=f"larger than {MAX_ANSWER_BYTES // 2**20} MiB"):
            await http(url, max_retries=0).search(["a"], 1)


async def test_an_answer_that_is_too_large_is_asked_for_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval.http.retriever.MAX_ANSWER_BYTES", 4000)
    queries = [f"{n} " + "x" * 500 for n in range(12)]
    async with RetrievalServer(Echo(), port=0) as server:
        found = await http(server.url, max_retries=0).search(queries, 1)
        assert [hits[0].text for hits in found] == queries
        with pytest.raises(RetrievalError, match="the answer is larger than"):
            await http(server.url, max_retries=0).search(["y" * 3000], 3)


async def test_a_batch_is_one_round_of_requests_each_with_its_time_out() -> None:
    num_at_once, at_once = 0, []

    async def slow(request: web.Request) -> web.Response:
        nonlocal num_at_once
        num_at_once += 1
        at_once.append(num_at_once)
        await asyncio.sleep(0.02)
        num_at_once -= 1
        return web.json_response({"result": [[{"id": "a", "contents": "a"}]]})

    async with stub_server(slow) as url:
        retriever = http(url, max_queries_per_request=1, max_concurrent_requests=4, timeout_s=1, max_retries=0)
        found = await asyncio.gather(*[retriever.search([f"q{n}"], 1) for n in range(240)])  # 60 rounds: 1.2 s and more
    assert all(hits[0][0].text == "a" for hits in found)
    assert max(at_once) <= 4


async def test_an_address_keeps_its_parameters() -> None:
    paths: list[str] = []

    async def noted(request: web.Request) -> web.Response:
        paths.append(request.path_qs)
        return web.json_response({"result": [[]]})

    async with stub_server(noted) as url:
        await http(f"{url}/?api=2").search(["a"], 1)
    assert paths == ["/retrieve?api=2"]


async def test_only_the_query_that_causes_a_refusal_is_refused() -> None:
    echo = Echo()
    async with RetrievalServer(echo, port=0) as server:
        retriever = http(server.url)
        queries = [f"q{n}" for n in range(30)] + ["x" * (MAX_QUERY_CHARS + 1)]
        found = await asyncio.gather(*[retriever.search([query], 1) for query in queries], return_exceptions=True)
    assert [hits[0][0].text for hits in found[:-1] if isinstance(hits, list)] == queries[:-1]
    assert isinstance(found[-1], RetrievalError)
    assert "answered 422: " in str(found[-1])
    assert f"at most {MAX_QUERY_CHARS} characters" in str(found[-1])


async def test_a_wrong_token_fails_at_once_and_stays_secret() -> None:
    async def tell(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"error": f"no good: {request.headers['Authorization']} {request.path_qs}"}, status=403
        )

    asked = Echo()
    async with RetrievalServer(asked, port=0, token="another") as server:
        with pytest.raises(RetrievalError, match=r"answered 401: .*Bearer"):
            await http(server.url, token_env="STUB_TOKEN").search(["a"], 1)
    async with stub_server(tell) as url:
        with pytest.raises(RetrievalError, match=r"answered 403: .*no good: Bearer \*\*\*") as caught:
            await http(url, token_env="STUB_TOKEN").search(["a"], 1)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert TOKEN.encode() not in pickle.dumps(http(url, token_env="STUB_TOKEN"))
    async with stub_server(always({}, status=302, Location="http://127.0.0.1:1/")) as url:
        with pytest.raises(RetrievalError, match="answered 302"):
            await http(url).search(["a"], 1)
    assert asked.asked == []


async def test_a_busy_server_is_asked_again_and_a_failing_one_too() -> None:
    statuses = [503, 429, 200, 500, 200, 200]
    served: list[int] = []
    asked: list[str] = []

    async def moody(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        served.append(statuses[len(served)])
        asked.extend(body["queries"])
        headers = {"Retry-After": "0.01"}
        result = {"result": [[{"text": query}] for query in body["queries"]]}
        return web.json_response(result, status=served[-1], headers=headers)

    async with stub_server(moody) as url:
        retriever = http(url)
        assert (await retriever.search(["a"], 1))[0][0].text == "a"
        assert asked == ["a", "a", "a"], "a busy server is not down: it is not pinged"
        assert (await retriever.search(["b"], 1))[0][0].text == "b"
    assert served == statuses
    assert asked[3:] == ["b", "ping", "b"]


async def test_no_server_and_a_silent_server_are_a_sentence() -> None:
    async with stub_server(always({})) as url:
        pass
    with pytest.raises(RetrievalError, match="Cannot connect to host") as caught:
        await http(url, timeout_s=0.2).search(["a"], 1)
    assert "\n" not in str(caught.value)

    async with stub_server(silent) as url:
        with pytest.raises(RetrievalError, match=r"no answer within 0\.1 s"):
            await http(url, timeout_s=0.1, max_retries=0).search(["a"], 1)


OUT_OF_MEMORY = {"detail": "CUDA out of memory"}


async def test_a_search_that_finds_no_server_up_has_the_address_and_the_last_error() -> None:
    """Also the second one, which no server is asked; the first one marked it as down."""
    async with stub_server(always(OUT_OF_MEMORY, 500)) as url:
        retriever = http(url, timeout_s=1, max_retries=0)
        first, second = [await search_error(retriever, query) for query in "ab"]
    cause = f'{url}/retrieve answered 500: "CUDA out of memory"'
    assert first.startswith("search failed after 1 attempts on 1 of 1 replicas: " + cause)
    assert second.endswith(f"no replica was up for 1 s; the last error: {cause}")


async def search_error(retriever: HttpRetriever, query: str) -> str:
    with pytest.raises(RetrievalError) as caught:
        await retriever.search([query], 1)
    return str(caught.value)


async def no_such_path(request: web.Request) -> web.StreamResponse:
    return web.json_response({"detail": f"no {request.path}"}, status=404)


PROBED: list[tuple[Any, str]] = [
    (always(OUT_OF_MEMORY, 500), 'URL/retrieve answered 500: "CUDA out of memory"'),
    (always({}, 401), "URL/retrieve answered 401: {}"),
    (no_such_path, 'URL/retrieve answered 404: "no /retrieve"'),
    (always("<html>Welcome</html>"), "URL/retrieve: expected JSON, got <html>Welcome</html>"),
    (silent, "URL/retrieve: no answer within 0.5 s"),
    (always({"result": [[]]}), ""),
]


@pytest.mark.parametrize(("answer", "problem"), PROBED)
async def test_a_server_is_asked_whether_it_can_search(answer: Answer, problem: str) -> None:
    async with stub_server(answer) as url:
        retriever = http(url, timeout_s=0.5 if problem.endswith("0.5 s") else 60)
        if problem:
            with pytest.raises(RetrievalError) as caught:
                await retriever.probe()
            assert str(caught.value) == problem.replace("URL", url)
        else:
            await retriever.probe()


async def test_of_several_servers_one_must_be_there(caplog: pytest.LogCaptureFixture) -> None:
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(RetrievalError) as caught:
        await http(dead).probe()
    assert all(f"{url}/retrieve: ClientConnectorError: Cannot connect to host" in str(caught.value) for url in dead)
    async with stub_server(always({}, 503)) as url:
        await http([url, f"{url}/two"]).probe()  # busy: they are there
    async with RetrievalServer(Echo(), port=0) as server:
        await http([dead[0], server.url]).probe()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"a search server does not answer, and is asked again while the others search: {dead[0]}")


async def test_a_server_that_breaks_an_answer_off_and_comes_back_is_asked_again() -> None:
    broken = asyncio.Event()
    async with stub_server(breaking(broken)) as url:
        retriever = http(url, timeout_s=60)
        searching = asyncio.create_task(retriever.search(["a"], 1))
        await broken.wait()
    pinged = asyncio.Event()

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pinged.set()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", port_of(url)):
        await pinged.wait()
    async with RetrievalServer(Echo(), port=port_of(url)):
        assert (await searching)[0][0].text == "a"
        assert (await retriever.search(["b"], 1))[0][0].text == "b"


async def test_another_server_answers_for_one_that_is_gone() -> None:
    async with stub_server(always({})) as gone:
        pass
    async with RetrievalServer(Echo(), port=0) as server:
        retriever = http([gone, f"{server.url}/retrieve"])
        found = await asyncio.gather(*[retriever.search([f"q{n}"], 1) for n in range(20)])
        assert [hits[0][0].text for hits in found] == [f"q{n}" for n in range(20)]
        await retriever.wait_for_room()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_another_server_answers_for_one_that_is_configured_wrong(status: int) -> None:
    async with stub_server(always({"detail": "no"}, status)) as wrong, RetrievalServer(Echo(), port=0) as server:
        retriever = http([wrong, server.url])
        for n in range(20):
            assert (await retriever.search([f"q{n}"], 1))[0][0].text == f"q{n}"


def test_one_retriever_serves_one_loop_after_another_and_leaves_nothing_open() -> None:
    retriever: list[HttpRetriever] = []

    async def search(query: str) -> str:
        async with RetrievalServer(Echo(), port=port) as server:
            if not retriever:
                retriever.append(http(server.url))
            return (await retriever[0].search([query], 1))[0][0].text

    port = free_port()
    assert [asyncio.run(search(query)) for query in "abc"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "retrieval.options.url: .*field required"),
        ({"url": "http://h", "tokenenv": "X"}, "unknown key retrieval.options.tokenenv; did you mean 'token_env'"),
        ({"url": "http://h", "max_retries": -1}, "max_retries"),
        ({"url": "http://h", "timeout_s": "soon"}, "timeout_s"),
        ({"url": "http://h", "token_env": "NOT_THERE"}, "'NOT_THERE' is not set"),
        ({"url": []}, "empty list"),
        ({"url": ""}, "expected an address"),
        ({"url": "h:8000"}, "expected an address"),
        ({"url": "ftp://h"}, "expected an address"),
        ({"url": "http://[::1"}, "expected an address"),
        ({"url": "http://h:99999"}, "expected an address"),
        ({"url": "http://user:secret@h"}, "put secrets into the environment"),
    ],
)
def test_options_are_checked_before_anything_is_sent(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        HttpRetriever(options)
    assert "secret@" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_k_is_checked() -> None:
    with pytest.raises(ValueError, match="k=0"):
        await http("http://127.0.0.1:1").search(["a"], 0)
