"""WebRetriever: a JSON search API as a retriever. The recipe names its fields; an environment variable has its key.

::

    retrieval:
      type: web
      options: {url: "https://api.example.com/search", method: POST, count_param: num, results_path: organic,
                key_env: SEARCH_KEY, key_header: X-API-KEY, rate_per_s: 5, mode: record, record_dir: runs/web}

    query ──► on disk? ──► in flight? ──► rate limit ──► request, retried if it may help ──► results ──► to disk

A recorded run can be repeated with ``mode: replay``, without key and network, and with the same passages.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue
from tenacity import RetryCallState
from yarl import URL

from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError, valid_unicode
from ragr1_actors.core.section import Section
from retrieval.base import Hits, Page, Passage
from retrieval.http.retriever import (
    PROBE,
    HttpClient,
    StatusError,
    check_url,
    clean_query,
    is_busy,
    retry,
    text_id,
)

LONGEST_WAIT_S = 60.0
"""Longest pause in seconds for which a server may ask: if it is longer, the quota is used up and the search fails."""
_MAX_QUOTED = 80
_NUM_PIECES, _NUM_NEAR = 10, 3
"""Number of results requested to open a page, and of titles that are named if none of them is the title."""
_HEADER_NAME = re.compile("[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class WebOptions(Section):
    """Options of ``retrieval.type=web``. A path such as ``web.results.0`` goes down into objects and lists."""

    url: str
    """Address of the API, ``http://`` or ``https://``, without a key."""
    results_path: str = Field(min_length=1)
    """Path of the list of results in an answer."""
    method: Literal["GET", "POST"] = "GET"
    """``GET`` sends parameters, ``POST`` a JSON body."""
    query_param: str = Field("q", min_length=1)
    """Name of the query parameter; for ``POST`` a path in the body."""
    count_param: str = ""
    """Name of the parameter with the number of results; empty: it is not sent."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Further parameters, the same in every request."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers, the same in every request."""
    key_env: str = ""
    """Name of the environment variable with the key; empty: no key is sent."""
    key_header: str = ""
    """Name of the header for the key."""
    key_param: str = ""
    """Name of the address parameter for the key, instead of a header."""
    key_prefix: str = ""
    """Text before the key, such as ``"Bearer "``."""
    title_field: str = "title"
    """Path of the title in a result; without it the title is empty."""
    text_field: str = "snippet"
    """Path of the text in a result; a result without it is dropped."""
    id_field: str = "link"
    """Path of the id in a result; without it the id is a hash of title and text."""
    page: dict[str, JsonValue] = Field(default_factory=dict)
    """Options that differ for a request that opens a page; its query is the title. Empty: a page is opened by a search
    for the title. The page consists of the results with its title."""
    empty_if_missing: bool = False
    """Whether an answer without ``results_path``, or without a text in any result, means that nothing was found; if
    False it is an error."""
    max_query_chars: int = Field(2048, ge=1)
    """Limit of a query, in characters, as addresses have a limit; a longer query is cut."""
    rate_per_s: float = Field(0, ge=0)
    """Requests per second of one searching process; 0 sets no limit."""
    max_concurrent_requests: int = Field(8, ge=1)
    """Limit of concurrent requests of one searching process."""
    timeout_s: float = Field(30, gt=0)
    """Limit of one attempt, in seconds."""
    max_retries: int = Field(3, ge=0)
    """Number of attempts after the first one."""
    mode: Literal["live", "record", "replay"] = "live"
    """``record`` answers from disk, and requests and writes what is missing; ``replay`` never sends a request."""
    record_dir: str = ""
    """Directory of the recorded answers, for ``record`` and ``replay``."""


class WebRetriever:
    """Searches through an API. It pickles as its arguments: each process reads the key from its own environment."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options (see ``WebOptions``); nothing is sent before the first search.

        Raises:
            ConfigError: an option is unknown or has a wrong value, or the key or a directory is missing.
        """
        self._arguments = (dict(options),)
        self._options = settings = WebOptions.read(options, "retrieval.options")
        self._url = check_url(settings.url)
        key = "" if settings.mode == "replay" else read_secret("retrieval.options.key_env", settings.key_env)
        _check(settings, self._url, key)
        self._version = str(self._url.with_query(None))
        self._key = settings.key_prefix + key if key else ""
        self._client = HttpClient(max_connections=settings.max_concurrent_requests, secret=key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shares: WebRetriever = self
        """Retriever whose limits hold for the requests of this one, too."""
        self._request("", 1)  # raises now if ``query_param`` does not fit ``params``
        self._pages = WebRetriever({**options, "page": {}, **settings.page}) if settings.page else self
        limits = {"rate_per_s", "max_concurrent_requests"}
        if self._pages._url.host == self._url.host and limits.isdisjoint(settings.page):
            self._pages._shares = self  # one API counts searches and pages together

    def __reduce__(self) -> tuple[type[WebRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return WebRetriever, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages per query, each a ``Hits``; a query without a word finds nothing.

        ``Hits.is_cached`` is true if the answer was on disk.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, the API refused the query, or there is no record to replay.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        self._bind()
        clean = [_shorten(clean_query(query), self._options.max_query_chars) for query in queries]
        return list(await asyncio.gather(*[self._search_one(query, k) for query in clean]))

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return the page that each title finds; see ``PageRetriever``. Raises ``RetrievalError``, like ``search``."""
        found = await self._pages.search(titles, _NUM_PIECES)
        return [_page(title, hits) for title, hits in zip(titles, found, strict=True)]

    async def probe(self) -> None:
        """Send one request and read its results, without a record; see ``ProbedRetriever``. ``replay`` sends none."""
        if self._options.mode == "replay":
            return
        self._bind()
        try:
            payload = await self._send(self._request(PROBE, 1))
        except StatusError as error:
            if not is_busy(error) or not _may_pass(error):
                raise
        else:
            self._read_passages(self._read_results(payload))

    def _bind(self) -> None:
        """Bind to the running event loop, since tasks and semaphores of an earlier one cannot be awaited."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._in_flight: dict[tuple[str, int], asyncio.Task[Hits]] = {}
            self._slots = asyncio.Semaphore(self._options.max_concurrent_requests)
            self._rate_limit = RateLimit(self._options.rate_per_s)
            if self._shares is not self:
                self._shares._bind()
                self._slots, self._rate_limit = self._shares._slots, self._shares._rate_limit

    async def _search_one(self, query: str, k: int) -> Hits:
        if not query:
            return Hits(index_version=self._version)
        task = self._in_flight.get((query, k))
        if task is None:
            task = self._in_flight[query, k] = asyncio.create_task(self._answer(query, k))
            task.add_done_callback(lambda ended: self._forget((query, k), ended))
        found = await asyncio.shield(task)  # other callers may wait for it, and it can be recorded
        return Hits(found, is_cached=found.is_cached, index_version=self._version)

    def _forget(self, question: tuple[str, int], ended: asyncio.Task[Hits]) -> None:
        self._in_flight.pop(question, None)
        if not ended.cancelled():
            ended.exception()  # otherwise asyncio logs it if every caller was cancelled

    async def _answer(self, query: str, k: int) -> Hits:
        request, is_replay = self._request(query, k), self._options.mode == "replay"
        recorded: list[Any] | None = None
        if self._options.record_dir:
            try:
                recorded = await asyncio.to_thread(self._read_record, request)
            except RetrievalError:
                if is_replay:
                    raise  # ``record`` requests the results again and replaces the damaged record
        if recorded is None and is_replay:
            raise RetrievalError(
                f"no record of the query {query[:_MAX_QUOTED]!r} with k={k} in {self._options.record_dir}; record it "
                "with mode: record and the same url, params and k"
            )
        results = await self._fetch(request) if recorded is None else recorded
        passages = self._read_passages(results)[:k]
        if self._options.record_dir and recorded is None:
            await asyncio.to_thread(self._write_record, request, results)
        return Hits(passages, is_cached=recorded is not None)

    def _request(self, query: str, k: int) -> dict[str, Any]:
        """Return the identity of a request, without key and headers, by which records are found."""
        options = self._options
        params: dict[str, Any] = copy.deepcopy(options.params)
        for path, value in [(options.query_param, query), (options.count_param, k)]:
            if path:
                _put(params, path.split(".") if options.method == "POST" else [path], value)
        return {"method": options.method, "url": options.url, "params": params, "k": k}

    async def _fetch(self, request: dict[str, Any]) -> list[Any]:
        """Return the results, with ``***`` wherever the API repeats the key."""

        def hold_all(state: RetryCallState) -> None:
            if state.outcome and is_busy(state.outcome.exception()):  # the API asks all queries to wait
                self._rate_limit.hold(state.upcoming_sleep)

        attempts = self._options.max_retries + 1
        retrying = retry(_may_pass, attempts=attempts, longest_pause_s=LONGEST_WAIT_S, before_pause=hold_all)
        try:
            payload: Any = await retrying(self._send, request)
        except RetrievalError as error:
            if not _may_pass(error):
                raise
            raise RetrievalError(f"search failed after {attempts} attempts: {error}") from None
        return self._read_results(payload)

    async def _send(self, request: dict[str, Any]) -> Any:
        """Send one request and return the decoded answer."""
        options, url = self._options, self._url
        headers, body = dict(options.headers), None
        if options.method == "POST":
            body = request["params"]
        else:
            url = url.update_query({name: _as_text(value) for name, value in request["params"].items()})
        if self._key and options.key_header:
            headers[options.key_header] = self._key
        elif self._key:
            url = url.update_query({options.key_param: self._key})
        async with self._slots:
            await self._rate_limit.wait()
            try:
                async with asyncio.timeout(options.timeout_s):
                    content = await self._client.send(options.method, url, body=body, headers=headers)
            except TimeoutError:
                raise RetrievalError(f"{self._version}: no answer within {options.timeout_s:g} s") from None
        return self._client.read_json(content, url)

    def _read_results(self, payload: Any) -> list[Any]:
        found = _walk(payload, self._options.results_path)
        if found is None and self._options.empty_if_missing:
            return []
        if not isinstance(found, list):
            raise RetrievalError(
                f"{self._version}: the answer has no list at results_path={self._options.results_path!r}; "
                f"it has {self._client.redact(_names(payload))}"
            )
        try:
            return [_clean(result, self._client) for result in found]
        except RecursionError:
            raise RetrievalError(f"{self._version}: the results are nested too deeply") from None

    def _read_passages(self, results: list[Any]) -> list[Passage]:
        options, passages = self._options, []
        for result in results:
            text = _walk(result, options.text_field)
            if not isinstance(text, str) or not text.strip():
                continue
            title = _walk(result, options.title_field)
            title = title if isinstance(title, str) else ""
            identity = _walk(result, options.id_field)
            identity = str(identity) if isinstance(identity, str | int) else text_id(title, text)
            passages.append(Passage(identity, title, text))
        if results and not passages and not options.empty_if_missing:
            raise RetrievalError(
                f"{self._version}: none of {len(results)} results has a text at text_field={options.text_field!r}; "
                f"the first has {_names(results[0])}"
            )
        return passages

    def _read_record(self, request: dict[str, Any]) -> list[Any] | None:
        """Return the recorded results of the same request, or None; ``RetrievalError`` if the record is damaged."""
        path = self._record_path(request)
        if not path.is_file():
            return None
        with contextlib.suppress(DataError, TypeError, KeyError):
            record = read_json(path)
            if record["request"] == request and isinstance(record["results"], list):
                return list(record["results"])
        raise RetrievalError(f"{path} is not the record of a search; delete it and record it again with mode: record")

    def _write_record(self, request: dict[str, Any], results: list[Any]) -> None:
        path = self._record_path(request)
        text = json.dumps({"request": request, "results": results}, ensure_ascii=False, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, lambda writing: writing.write_bytes(text.encode("utf-8", "replace")))
        except OSError as error:
            raise RetrievalError(f"cannot write {path}: {error.strerror}") from error

    def _record_path(self, request: dict[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        return Path(self._options.record_dir, name[:2], f"{name}.json")


class RateLimit:
    """Lets the concurrent callers of one process pass at even intervals.

    ``aiolimiter`` has no ``hold``; see docs/decisions/http-libraries.md.
    """

    def __init__(self, rate_per_s: float) -> None:
        """Let ``rate_per_s`` callers pass per second; 0 sets no limit."""
        self._interval_s = 1.0 / rate_per_s if rate_per_s else 0.0
        self._next = 0.0
        self._held_until = 0.0

    async def wait(self) -> None:
        """Return when it is the caller's turn. A cancelled caller leaves its turn unused."""
        while True:
            turn = max(time.monotonic(), self._next, self._held_until)
            self._next = turn + self._interval_s
            await asyncio.sleep(turn - time.monotonic())
            if turn >= self._held_until:  # otherwise a hold began during the sleep
                return

    def hold(self, seconds: float) -> None:
        """Let no caller pass for ``seconds``, including those that already wait."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)


def _check(options: WebOptions, url: URL, key: str) -> None:
    """Check the options together; raises ``ConfigError`` if they do not fit, or if a record would contain the key."""
    where = "retrieval.options"
    if bool(options.key_header) + bool(options.key_param) != bool(options.key_env):
        raise ConfigError(f"{where}: key_env needs either key_header or key_param, which both need key_env")
    if key and key in f"{url.human_repr()} {url} {json.dumps(options.params)} {options.headers}":
        raise ConfigError(f"{where}: another option also holds the value of {options.key_env}; remove it there")
    headers = {**options.headers, **({options.key_header: options.key_prefix} if options.key_header else {})}
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not (value + "x").isprintable():
            raise ConfigError(f"{where}: {name[:_MAX_QUOTED]!r} is not a header with a value of printable ASCII")
    if options.method == "GET" and any(isinstance(value, dict | list) for value in options.params.values()):
        raise ConfigError(f"{where}.params: got lists or objects, which only method: POST sends; use plain values")
    if bool(options.record_dir) != (options.mode != "live"):
        raise ConfigError(f"{where}.record_dir: mode: record and mode: replay need it, mode: live does not take it")
    if options.mode == "replay" and not Path(options.record_dir).is_dir():
        raise ConfigError(
            f"{where}.record_dir: there is no directory {options.record_dir}; run with mode: record first"
        )


def _may_pass(error: BaseException) -> bool:
    """Return whether a second attempt may succeed: the error is not a refusal, and the quota is not used up."""
    if isinstance(error, StatusError):
        return not error.is_refusal and error.pause_s <= LONGEST_WAIT_S
    return isinstance(error, RetrievalError)


def _page(title: str, found: Sequence[Passage]) -> Page:
    """Return the passages found for a title as its page."""
    assert isinstance(found, Hits)
    own = [passage for passage in found if passage.title == title]
    own = own or [passage for passage in found if passage.title.lower() == title.lower()]
    near = [] if own else list(dict.fromkeys(" ".join(passage.title.split()) for passage in found))[:_NUM_NEAR]
    return Page(own, near=near, is_cached=found.is_cached, index_version=found.index_version)


def _put(params: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        params = params.setdefault(name, {})
        if not isinstance(params, dict):
            raise ConfigError(f"retrieval.options.params: got a value at {name!r}, expected an object to go down into")
    params[last] = value


def _walk(value: Any, path: str) -> Any:
    """Return the value at ``web.results`` or ``items.0.text``, or None."""
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _clean(value: Any, client: HttpClient) -> Any:
    """Return a JSON value without the key and lone surrogates."""
    if isinstance(value, str):
        return client.redact(valid_unicode(value))
    if isinstance(value, list):
        return [_clean(item, client) for item in value]
    if isinstance(value, dict):
        return {_clean(name, client): _clean(item, client) for name, item in value.items()}
    return value


def _names(value: Any) -> str:
    """Return the keys of an object, as a hint for the right path."""
    if not isinstance(value, dict):
        return f"no keys: it is a {type(value).__name__}"
    return ", ".join(repr(name[:_MAX_QUOTED]) for name in list(value)[:12]) or "nothing"


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else "" if value is None else str(value)


def _shorten(query: str, max_chars: int) -> str:
    """Cut a long query, at the end of a word if possible."""
    if len(query) <= max_chars:
        return query
    return query[: max_chars + 1].rpartition(" ")[0] or query[:max_chars]
