"""The web-search retriever against a real API on loopback: fields, key, record and replay, rate, failures."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from http_stub import always, breaking, free_port, port_of, silent, stub_server

from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Passage
from retrieval.http.web import LONGEST_WAIT_S, WebRetriever

KEY = "k3y+/with=odd&chars"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_KEY", KEY)


class Api:
    """Answers like a search API; keeps what it was asked. ``statuses`` come first, one per request."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.statuses = list(statuses)
        self.headers = headers or {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.monotonic())
        body = await request.json() if request.can_read_body else {}
        asked = {"method": request.method, "query": dict(request.query), "body": body, "headers": dict(request.headers)}
        self.requests.append(asked)
        if self.statuses:
            status = self.statuses.pop(0)
            if status != 200:
                problem = {"message": f"status {status} for {request.path_qs} {asked['headers']}"}
                return web.json_response(problem, status=status, headers=self.headers)
        query = request.query.get("q") or body.get("q") or ""
        results = [
            {"title": f"T{n}", "snippet": f"{query} {n}", "link": f"http://site/{n}", "more": {"text": f"more {n}"}}
            for n in range(5)
        ]
        # some APIs repeat the whole request with the key
        return web.json_response({"search": asked, "organic": [*results, {"title": "no text"}, {"url": str(asked)}]})


def web_retriever(url: str, **options: Any) -> WebRetriever:
    return WebRetriever({"url": f"{url}/search", "results_path": "organic", "timeout_s": 5, **options})


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


async def test_a_get_api() -> None:
    api = Api()
    async with stub_server(api.answer) as url:
        retriever = web_retriever(
            url, count_param="num", params={"gl": "lv", "safe": True}, key_env="STUB_KEY", key_param="api_key"
        )
        (found,) = await pickle.loads(pickle.dumps(retriever)).search(["Rīga & co? 🗼"], 2)
    assert found == [
        Passage("http://site/0", "T0", "Rīga & co? 🗼 0"),
        Passage("http://site/1", "T1", "Rīga & co? 🗼 1"),
    ]
    assert (found.index_version, found.is_cached) == (f"{url}/search", False)
    (asked,) = api.requests
    assert asked["method"] == "GET"
    assert asked["query"] == {"gl": "lv", "safe": "true", "q": "Rīga & co? 🗼", "num": "2", "api_key": KEY}


async def test_a_post_api_with_other_fields() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        api.requests.append({"body": await request.json(), "key": request.headers["Authorization"]})
        page = {"name": "N", "body": {"parts": ["first", "second"]}, "number": 7}
        return web.json_response({"web": {"results": [page, "no object", {**page, "number": None}]}})

    api = Api()
    async with stub_server(answer) as url:
        retriever = web_retriever(
            url,
            method="POST",
            query_param="request.text",
            count_param="request.page.size",
            params={"request": {"page": {"from": 0}}, "lang": ["lv"]},
            headers={"X-Client": "ragr1"},
            key_env="STUB_KEY",
            key_header="Authorization",
            key_prefix="Bearer ",
            results_path="web.results",
            title_field="name",
            text_field="body.parts.1",
            id_field="number",
        )
        (found,) = await retriever.search(["where?"], 3)
    body = {"request": {"page": {"from": 0, "size": 3}, "text": "where?"}, "lang": ["lv"]}
    assert api.requests == [{"body": body, "key": f"Bearer {KEY}"}]
    assert found[0] == Passage("7", "N", "second")
    assert (found[1].title, found[1].text, len(found[1].id)) == ("N", "second", 16)


async def test_what_was_recorded_is_replayed_without_network_or_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"key_env": "STUB_KEY", "key_param": "api_key", "record_dir": str(tmp_path / "web")}
    api = Api()
    async with stub_server(api.answer) as url:
        recording = web_retriever(url, **options, mode="record")
        first = await recording.search(["a b", "Rīga"], 2)
        again = await recording.search([" a  b"], 2)
        assert (again[0], again[0].is_cached) == (first[0], True)
        await recording.search(["a b"], 3)  # another k is another question
        assert len(api.requests) == 3
    monkeypatch.delenv("STUB_KEY")
    replaying = web_retriever(url, **options, mode="replay")
    replayed = await replaying.search(["a b", "Rīga"], 2)
    assert replayed == first
    assert all(hits.is_cached and hits.index_version == f"{url}/search" for hits in replayed)
    with pytest.raises(RetrievalError, match=r"no record of the query 'c' with k=2 .*mode: record"):
        await replaying.search(["c"], 2)
    with pytest.raises(RetrievalError, match="no record"):
        await web_retriever(url, **options, mode="replay", params={"gl": "lv"}).search(["a b"], 2)
    assert len(api.requests) == 3


async def test_the_key_is_neither_on_disk_nor_in_messages_nor_in_passages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    record = {"mode": "record", "record_dir": str(tmp_path)}
    for place in [{"key_header": "X-API-KEY"}, {"key_param": "api_key"}]:
        options = {"key_env": "STUB_KEY", "max_retries": 0, "text_field": "url", **place, **record}
        async with stub_server(Api(403, 500).answer) as url:
            retriever = web_retriever(url, **options)
            for status in [403, 500]:
                with pytest.raises(RetrievalError, match=f"answered {status}") as caught:
                    await retriever.search(["a"], 1)
                assert not leaks("".join(traceback.format_exception(caught.value)))
            (found,) = await retriever.search(["a"], 1)
            assert "***" in found[0].text
            assert not leaks(found[0].text)
            assert KEY.encode() not in pickle.dumps(retriever)
        with pytest.raises(RetrievalError) as caught:
            await retriever.search(["b"], 1)  # no server listens any more
        assert not leaks("".join(traceback.format_exception(caught.value)))
    assert len(files(tmp_path)) == 2
    assert not any(leaks(path.read_text()) for path in files(tmp_path))
    assert not leaks(caplog.text)


def leaks(text: str) -> bool:
    return "k3y" in text


async def test_damaged_records_are_named_or_written_again(tmp_path: Path) -> None:
    options = {"record_dir": str(tmp_path)}
    api = Api()
    async with stub_server(api.answer) as url:
        (found,) = await web_retriever(url, **options, mode="record").search(["a"], 1)
        (path,) = files(tmp_path)
        whole = path.read_text()
        for damaged in [whole[:50], "", "[]", "{}", whole.replace('"a"', '"b"'), "\udcff"]:
            path.write_bytes(damaged.encode("utf-8", "surrogateescape"))
            with pytest.raises(RetrievalError, match="is not the record of a search") as caught:
                await web_retriever(url, **options, mode="replay").search(["a"], 1)
            assert str(path) in str(caught.value)
            assert (await web_retriever(url, **options, mode="record").search(["a"], 1)) == [found]
            assert path.read_text() == whole
    assert files(tmp_path) == [path]  # nothing half written stays


async def test_a_record_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with stub_server(Api().answer) as url:
        with pytest.raises(RetrievalError, match=r"cannot (read|write) .*file"):
            await web_retriever(url, mode="record", record_dir=str(tmp_path / "file")).search(["a"], 1)


async def test_failures_and_wrong_paths_are_not_recorded(tmp_path: Path) -> None:
    options = {"mode": "record", "record_dir": str(tmp_path), "max_retries": 0}
    async with stub_server(Api(500).answer) as url:
        with pytest.raises(RetrievalError, match="answered 500"):
            await web_retriever(url, **options).search(["a"], 1)
        with pytest.raises(RetrievalError, match=r"no list at results_path='results'; it has 'search', 'organic'"):
            await web_retriever(url, **options, **{"results_path": "results"}).search(["a"], 1)
        with pytest.raises(RetrievalError, match=r"none of 7 results has a text at text_field='body'; .*'snippet'"):
            await web_retriever(url, **options, text_field="body").search(["a"], 1)
    assert files(tmp_path) == []


async def test_nothing_found_is_an_answer_where_the_api_says_so() -> None:
    async with stub_server(always({"organic": []})) as url:
        assert await web_retriever(url).search(["a", ""], 1) == [[], []]
    async with stub_server(always({"error": "nothing found"})) as url:
        assert await web_retriever(url, empty_if_missing=True).search(["a"], 1) == [[]]
    for body, problem in [("<html>", "expected JSON, got <html>"), ([1], "no list"), ({"organic": "x"}, "no list")]:
        async with stub_server(always(body)) as url:
            with pytest.raises(RetrievalError, match=problem):
                await web_retriever(url, max_retries=0).search(["a"], 1)


async def test_odd_queries_are_asked_without_what_no_server_takes() -> None:
    api = Api()
    async with stub_server(api.answer) as url:
        odd = ["", "\x00\n", "word " * 10_000, "x" * 9000, "a\x00b\x1b[31m", "half \ud800 pair", "東京"]
        found = await web_retriever(url, max_query_chars=100).search(odd, 1)
    asked = [request["query"]["q"] for request in api.requests]
    assert sorted(asked) == sorted(["word " * 19 + "word", "x" * 100, "a b [31m", "half pair", "東京"])
    assert [len(hits) for hits in found] == [0, 0, 1, 1, 1, 1, 1]


async def test_identical_queries_in_flight_are_asked_once_and_share_no_list() -> None:
    api = Api()
    async with stub_server(api.answer) as url:
        retriever = web_retriever(url)
        leaver = asyncio.create_task(retriever.search(["same"], 1))
        waiting = [asyncio.create_task(retriever.search(["same", "same"], 1)) for _ in range(5)]
        await asyncio.sleep(0)
        leaver.cancel()
        found = [hits for answers in await asyncio.gather(*waiting) for hits in answers]
        assert len(api.requests) == 1
        found[0].clear()
        assert all(len(hits) == 1 for hits in found[1:])
        await retriever.search(["same"], 1)  # nothing is in flight any more
        assert len(api.requests) == 2


async def test_failures_are_tried_again_and_refusals_are_not() -> None:
    api = Api(500, 502, 200)
    async with stub_server(api.answer) as url:
        assert (await web_retriever(url).search(["a"], 1))[0][0].text == "a 0"
        assert len(api.requests) == 3
        api.statuses = [400]
        with pytest.raises(RetrievalError, match=r"answered 400: .*status 400") as caught:
            await web_retriever(url).search(["b"], 1)
        assert "\n" not in str(caught.value)
        assert len(api.requests) == 4
        api.statuses = [500, 500]
        with pytest.raises(RetrievalError, match=r"after 2 attempts: .*answered 500"):
            await web_retriever(url, max_retries=1).search(["c"], 1)
        assert len(api.requests) == 6


async def test_an_api_that_breaks_off_is_asked_again_and_a_silent_one_fails() -> None:
    async with stub_server(silent) as url:
        with pytest.raises(RetrievalError, match=r"after 1 attempts: .*no answer within 0\.05 s"):
            await web_retriever(url, timeout_s=0.05, max_retries=0).search(["a"], 1)
    broken = asyncio.Event()
    async with stub_server(breaking(broken)) as url:
        searching = asyncio.create_task(web_retriever(url, max_retries=9).search(["a"], 1))
        await broken.wait()
    async with stub_server(Api().answer, port=port_of(url)):
        assert (await searching)[0][0].text == "a 0"


async def test_too_many_requests_holds_all_queries_for_as_long_as_is_asked() -> None:
    api = Api(429, headers={"Retry-After": "0.3"})
    async with stub_server(api.answer) as url:
        retriever = web_retriever(url, max_concurrent_requests=1)
        found = await retriever.search(["a", "b", "c"], 1)
    assert [hits[0].text for hits in found] == ["a 0", "b 0", "c 0"]
    assert min(later - api.times[0] for later in api.times[1:]) >= 0.29
    assert len(api.requests) == 4


async def test_a_used_up_quota_is_a_failure_at_once() -> None:
    api = Api(429, headers={"Retry-After": str(LONGEST_WAIT_S + 1)})
    async with stub_server(api.answer) as url:
        with pytest.raises(RetrievalError, match=r"answered 429: .*asks for a pause of 61 s"):
            await web_retriever(url).search(["a"], 1)
    assert len(api.requests) == 1


async def test_the_api_is_asked_once_whether_it_can_search(tmp_path: Path) -> None:
    api = Api()
    async with stub_server(api.answer) as url:
        await web_retriever(url, mode="record", record_dir=str(tmp_path)).probe()
        assert [asked["query"]["q"] for asked in api.requests] == ["Where is Riga?"]
        assert files(tmp_path) == [], "the question of a probe is no search of the run"
        wrong = [("results_path", "found", "no list at results_path='found'"), ("text_field", "x", "text_field='x'")]
        for option, value, problem in wrong:
            with pytest.raises(RetrievalError, match=problem):
                await web_retriever(url, **{option: value}).probe()
    num_asked = len(api.requests)
    for status, headers in ((500, {}), (403, {}), (429, {"Retry-After": str(2 * LONGEST_WAIT_S)})):
        api.statuses, api.headers = [status] * 9, headers
        async with stub_server(api.answer) as url:
            with pytest.raises(RetrievalError, match=rf"{url}/search answered {status}: .*status {status}"):
                await web_retriever(url, max_retries=9).probe()
        num_asked += 1
        assert len(api.requests) == num_asked, "an API that is away is not waited for"
    api.statuses, api.headers = [429], {"Retry-After": "1"}
    async with stub_server(api.answer) as url:
        await web_retriever(url).probe()
    with pytest.raises(RetrievalError, match=f"{url}/search: ClientConnectorError"):
        await web_retriever(url).probe()
    await web_retriever(url, mode="replay", record_dir=str(tmp_path)).probe()


async def test_the_rate_holds_over_concurrent_callers() -> None:
    api = Api()
    async with stub_server(api.answer) as url:
        retriever = web_retriever(url, rate_per_s=50)
        started = time.monotonic()
        await asyncio.gather(*[retriever.search([f"q{n}"], 1) for n in range(10)])
    assert len(api.times) == 10
    assert api.times[-1] - started >= 9 / 50 - 0.001


async def test_searches_and_pages_share_the_limits_of_an_api() -> None:
    api = Wiki()
    async with stub_server(api.answer) as url:
        retriever = web_retriever(url, **{**WIKI, "page": PAGE}, rate_per_s=50)
        started = time.monotonic()
        searches = [retriever.search([f"q{n}"], 1) for n in range(5)]
        await asyncio.gather(*searches, *[retriever.open_pages([f"Page {n}"]) for n in range(5)])
    assert len(api.requests) >= 10
    assert time.monotonic() - started >= (len(api.requests) - 1) / 50 - 0.001


def test_one_retriever_serves_one_loop_after_another() -> None:
    made: list[WebRetriever] = []

    async def search(query: str) -> str:
        async with stub_server(Api().answer, port=port) as url:
            if not made:
                made.append(web_retriever(url, rate_per_s=1000))
            return (await made[0].search([query], 1))[0][0].text

    port = free_port()
    assert [asyncio.run(search(query)) for query in "abc"] == ["a 0", "b 0", "c 0"]


GOOD: dict[str, Any] = {"url": "http://h/search", "results_path": "organic"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"results_paht": "x"}, "unknown key retrieval.options.results_paht; did you mean 'results_path'"),
        ({"results_path": ""}, "results_path"),
        ({"url": "nowhere"}, "expected an address"),
        ({"method": "PUT"}, "method"),
        ({"rate_per_s": -1}, "rate_per_s"),
        ({"key_env": "STUB_KEY"}, "either key_header or key_param"),
        ({"key_header": "X"}, "either key_header or key_param"),
        ({"key_env": "STUB_KEY", "key_header": "X", "key_param": "y"}, "either key_header or key_param"),
        ({"key_env": "NOT_THERE", "key_header": "X"}, "'NOT_THERE' is not set"),
        (
            {"key_env": "STUB_KEY", "key_header": "X", "params": {"k": KEY}},
            "another option also holds the value of STUB_KEY",
        ),
        ({"key_env": "STUB_KEY", "key_header": "two words"}, "'two words' is not a header"),
        ({"headers": {"X": "a\nb"}}, "'X' is not a header"),
        ({"params": {"a": {"b": 1}}}, "only method: POST"),
        ({"method": "POST", "query_param": "a.q", "params": {"a": 1}}, "expected an object to go down into"),
        ({"method": "POST", "params": {"a": float("inf")}}, "params"),
        ({"mode": "record"}, "record_dir"),
        ({"record_dir": "x"}, "record_dir"),
        ({"mode": "replay", "record_dir": "not/there"}, "no directory not/there"),
    ],
)
def test_options_are_checked_before_anything_is_sent(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        WebRetriever({**GOOD, **options})
    assert not leaks(str(caught.value))
    assert "\n" not in str(caught.value)


async def test_k_is_checked() -> None:
    with pytest.raises(ValueError, match="k=0"):
        await WebRetriever(GOOD).search(["a"], 0)


class Wiki(Api):
    """Answers as MediaWiki does: a search finds snippets, and a request by title the text of that page."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append({"query": dict(request.query)})
        if "titles" in request.query:
            title = request.query["titles"]
            page = {"title": title.capitalize(), "extract": f"all of {title}", "pageid": 7}
            return web.json_response({"query": {"pages": [page if "ri" in title.lower() else {"title": title}]}})
        titles = enumerate(("RIGA", "Riga", "Rigas"))
        found = [{"title": title, "snippet": f"{title} ..", "pageid": n} for n, title in titles]
        return web.json_response({"query": {"search": found}})


WIKI = {"results_path": "query.search", "query_param": "srsearch", "id_field": "pageid", "count_param": "srlimit"}
PAGE = {
    **{"query_param": "titles", "count_param": "", "results_path": "query.pages", "text_field": "extract"},
    "empty_if_missing": True,
}


async def test_a_page_is_what_a_search_finds_of_its_title() -> None:
    api = Wiki()
    async with stub_server(api.answer) as url:
        exact, lower, missing = await web_retriever(url, **WIKI).open_pages(["Riga", "rIGA", "Rome"])
    assert (exact, exact.near, exact.index_version) == ([Passage("1", "Riga", "Riga ..")], (), f"{url}/search")
    assert [passage.title for passage in lower] == ["RIGA", "Riga"]
    assert (missing, missing.near) == ([], ("RIGA", "Riga", "Rigas"))
    assert [asked["query"]["srlimit"] for asked in api.requests] == ["10"] * 3


async def test_a_page_may_have_a_request_of_its_own_and_is_recorded(tmp_path: Path) -> None:
    api, options = Wiki(), {**WIKI, "page": PAGE, "record_dir": str(tmp_path)}
    async with stub_server(api.answer) as url:
        retriever = pickle.loads(pickle.dumps(web_retriever(url, mode="record", **options)))
        found, missing = await retriever.open_pages(["riga", "Rome"])
        assert (found, found.is_cached) == ([Passage("7", "Riga", "all of riga")], False)
        assert (missing, missing.near) == ([], ())
        assert {"titles": "riga"} in [asked["query"] for asked in api.requests]
    replay = web_retriever(url, mode="replay", **options)
    found, missing = await replay.open_pages(["riga", "Rome"])
    assert (found, found.is_cached, missing) == ([Passage("7", "Riga", "all of riga")], True, [])
    with pytest.raises(RetrievalError, match="no record of the query 'Oslo'"):
        await replay.open_pages(["Oslo"])


def test_an_option_of_pages_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="text_fild"):
        web_retriever("http://127.0.0.1:1", page={"text_fild": "extract"})
