"""WebRetriever: a JSON search API as a retriever. Its fields are named in the recipe, its key in the environment.

::

    retrieval:
      type: web
      options: {url: "https://api.example.com/search", method: POST, count_param: num, results_path: organic,
                key_env: SEARCH_KEY, key_header: X-API-KEY, rate_per_s: 5, mode: record, record_dir: runs/web}

    query ──► on disk? ──► in flight? ──► rate limit ──► request, again if need be ──► results ──► to disk

Recorded once, a run can be repeated with ``mode: replay``: no key, no network, the same evidence.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from yarl import URL

from ragr1_actors.core.config import Section
from ragr1_actors.core.errors import ConfigError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.corpora.text import valid_unicode
from retrieval.http.client import (
    HttpAnswer,
    HttpClient,
    check_url,
    clean_query,
    parse_section,
    read_secret,
    text_id,
)
from retrieval.http.rate_limit import RateLimit
from retrieval.http.web_records import WebRecords

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
LONGEST_WAIT_S = 60.0
"""A server that asks for more patience gets none: its quota is used up."""
_MAX_QUOTED = 80
_HEADER_NAME = re.compile("[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class WebOptions(Section):
    """Options of ``retrieval.type=web``. A path such as ``web.results`` goes down into objects, and lists by number."""

    url: str
    results_path: str = Field(min_length=1)
    """Of the list of results in an answer."""
    method: Literal["GET", "POST"] = "GET"
    """``GET`` sends parameters, ``POST`` a JSON body."""
    query_param: str = Field("q", min_length=1)
    """Of the query; for ``POST`` a path in the body."""
    count_param: str = ""
    """Of the number of results that are wanted; empty does not say."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Others, the same in every request."""
    headers: dict[str, str] = Field(default_factory=dict)
    key_env: str = ""
    """Name of the environment variable with the key; empty sends none."""
    key_header: str = ""
    """Header that the key goes into."""
    key_param: str = ""
    """Or parameter of the address."""
    key_prefix: str = ""
    """Before the key, such as ``"Bearer "``."""
    title_field: str = "title"
    text_field: str = "snippet"
    """Of a result; one without it is left out."""
    id_field: str = "link"
    """Of a result; without it the id is made of title and text."""
    empty_if_missing: bool = False
    """Whether an answer without ``results_path`` means that nothing was found, rather than that the path is wrong."""
    max_query_chars: int = Field(2048, ge=1)
    """The rest of a longer query is cut off: addresses have a limit."""
    rate_per_s: float = Field(0, ge=0)
    """Requests of one searching process; 0 is no limit."""
    max_concurrent_requests: int = Field(8, ge=1)
    timeout_s: float = Field(30, gt=0)
    """Of one attempt."""
    max_retries: int = Field(3, ge=0)
    """Attempts after the first one."""
    mode: Literal["live", "record", "replay"] = "live"
    """``record`` answers from disk, and asks and writes what is not there; ``replay`` never asks."""
    record_dir: str = ""


class WebRetriever:
    """Searches through an API. Pickles as its arguments: the key is read where it is used."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options; nothing is sent before the first search.

        Args:
            options: see ``WebOptions``.

        Raises:
            ConfigError: an option that does not exist or does not fit, a key or a directory that is not there.
        """
        self._arguments = (dict(options),)
        self._options = settings = parse_section(WebOptions, options, "web")
        self._url = check_url(settings.url)
        key = "" if settings.mode == "replay" else read_secret("key_env", settings.key_env)
        self._params = _plain(settings.params)
        _check(settings, self._url, key)
        self._version = str(self._url.with_query(None))
        self._key = settings.key_prefix + key if key else ""
        self._client = HttpClient(max_connections=settings.max_concurrent_requests, secret=key)
        self._records = WebRecords(Path(settings.record_dir)) if settings.mode != "live" else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._request("", 1)  # a template that does not work is said now

    def __reduce__(self) -> tuple[type[WebRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return WebRetriever, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, each a ``Hits``; a query without a word finds nothing.

        ``Hits.is_cached`` says that the answer was on disk.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed, the API refused the query, or there is no record to replay.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        self._bind()
        clean = [_shorten(clean_query(query), self._options.max_query_chars) for query in queries]
        return list(await asyncio.gather(*[self._search_one(query, k) for query in clean]))

    def _bind(self) -> None:
        """Bind to the running event loop. Nothing of a loop that ended before can be waited for."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._asked: dict[tuple[str, int], asyncio.Task[Hits]] = {}
            self._slots = asyncio.Semaphore(self._options.max_concurrent_requests)
            self._rate_limit = RateLimit(self._options.rate_per_s)

    async def _search_one(self, query: str, k: int) -> Hits:
        if not query:
            return Hits(index_version=self._version)
        task = self._asked.get((query, k))
        if task is None:
            task = self._asked[query, k] = asyncio.create_task(self._answer(query, k))
            task.add_done_callback(lambda ended: self._forget((query, k), ended))
        found = await asyncio.shield(task)  # others may wait for it, and it can be recorded
        return Hits(found, is_cached=found.is_cached, index_version=self._version)

    def _forget(self, asked: tuple[str, int], ended: asyncio.Task[Hits]) -> None:
        self._asked.pop(asked, None)
        if not ended.cancelled():
            ended.exception()  # else asyncio would log it where whoever asked was cancelled

    async def _answer(self, query: str, k: int) -> Hits:
        request = self._request(query, k)
        results = await self._read_record(request)
        is_cached = results is not None
        if results is None:
            if self._options.mode == "replay":
                quoted = _quote(query)
                raise RetrievalError(
                    f"no record of the query {quoted} with k={k} in {self._options.record_dir}; record it with "
                    "mode: record, under the same url, params and k"
                )
            results = await self._ask(request)
        passages = self._read_passages(results)[:k]
        if self._records is not None and not is_cached:
            await asyncio.to_thread(self._records.write, request, results)
        return Hits(passages, is_cached=is_cached)

    async def _read_record(self, request: dict[str, Any]) -> list[Any] | None:
        if self._records is None:
            return None
        try:
            return await asyncio.to_thread(self._records.read, request)
        except RetrievalError:
            if self._options.mode == "replay":
                raise
            return None  # asked again, and written anew

    def _request(self, query: str, k: int) -> dict[str, Any]:
        """Return what makes a request this one, without key and headers: what a record goes by."""
        options = self._options
        params: dict[str, Any] = copy.deepcopy(self._params)
        for path, value in [(options.query_param, query), (options.count_param, k)]:
            if path:
                _put(params, path.split(".") if options.method == "POST" else [path], value)
        return {"method": options.method, "url": options.url, "params": params, "k": k}

    async def _ask(self, request: dict[str, Any]) -> list[Any]:
        """Return the results, the key blotted out wherever the API repeats it."""
        num_attempts = self._options.max_retries + 1
        pause_s, problem = _FIRST_PAUSE_S, ""
        for attempt in range(num_attempts):
            if attempt:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            try:
                answer = await self._send(request)
                payload = self._client.read_json(answer) if answer.status == 200 else None
            except RetrievalError as error:
                problem = str(error)
                continue
            if answer.status == 200:
                return self._read_results(payload)
            problem = self._client.describe(answer)
            if answer.is_refusal:
                raise RetrievalError(problem)
            if answer.is_busy:
                self._hold(answer.retry_after_s or pause_s, problem)
        raise RetrievalError(f"search failed after {num_attempts} attempts: {problem}")

    async def _send(self, request: dict[str, Any]) -> HttpAnswer:
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
                    return await self._client.send(options.method, url, body=body, headers=headers)
            except TimeoutError:
                raise RetrievalError(f"{self._version}: no answer within {options.timeout_s:g} s") from None

    def _hold(self, seconds: float, problem: str) -> None:
        """Leave the API alone for as long as it asks, with all queries."""
        if seconds > LONGEST_WAIT_S:
            raise RetrievalError(f"{problem}; it asks to be left alone for {seconds:.0f} s")
        self._rate_limit.hold(seconds)

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
        if results and not passages:
            raise RetrievalError(
                f"{self._version}: none of {len(results)} results has a text at text_field={options.text_field!r}; "
                f"the first has {_names(results[0])}"
            )
        return passages


def _check(options: WebOptions, url: URL, key: str) -> None:
    """Check what no field can know alone.

    Raises:
        ConfigError: options that do not go together, or a key that would be recorded.
    """
    where = "retrieval.options"
    if bool(options.key_header) + bool(options.key_param) != bool(options.key_env):
        raise ConfigError(f"{where}: with key_env goes either key_header or key_param, and without it neither")
    if key and key in f"{url.human_repr()} {url} {json.dumps(options.params)} {options.headers}":
        raise ConfigError(f"{where}: the value of {options.key_env} stands in another option too; take it out there")
    headers = {**options.headers, **({options.key_header: options.key_prefix} if options.key_header else {})}
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not (value + "x").isprintable():
            raise ConfigError(f"{where}: {name[:_MAX_QUOTED]!r} is not a header with a value of printable ASCII")
    if options.method == "GET" and any(isinstance(value, dict | list) for value in options.params.values()):
        raise ConfigError(
            f"{where}.params: got lists or objects, expected plain values; only method: POST sends others"
        )
    if bool(options.record_dir) != (options.mode != "live"):
        raise ConfigError(f"{where}.record_dir: it is for mode: record and mode: replay, which need it")
    if options.mode == "replay" and not Path(options.record_dir).is_dir():
        raise ConfigError(
            f"{where}.record_dir: there is no directory {options.record_dir}; run with mode: record first"
        )


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    """Return what JSON makes of the parameters: so a record reads the same as what was asked."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(params, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"retrieval.options.params: {error}; quote it") from None
    return plain


def _put(params: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        params = params.setdefault(name, {})
        if not isinstance(params, dict):
            raise ConfigError(f"retrieval.options.params: got a value at {name!r}, expected an object to go down into")
    params[last] = value


def _walk(value: Any, path: str) -> Any:
    """Return what stands at ``web.results`` or ``items.0.text``, or None."""
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _clean(value: Any, client: HttpClient) -> Any:
    """Return a result without the key, and as valid Unicode, whatever it is made of."""
    if isinstance(value, str):
        return client.redact(valid_unicode(value))
    if isinstance(value, list):
        return [_clean(item, client) for item in value]
    if isinstance(value, dict):
        return {_clean(name, client): _clean(item, client) for name, item in value.items()}
    return value


def _names(value: Any) -> str:
    """Return what an object has, for whoever looks for the right path."""
    if not isinstance(value, dict):
        return f"no names, being a {type(value).__name__}"
    return ", ".join(repr(name[:_MAX_QUOTED]) for name in list(value)[:12]) or "nothing"


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else "" if value is None else str(value)


def _shorten(query: str, max_chars: int) -> str:
    """Cut a long query off, behind a word if there is one."""
    if len(query) <= max_chars:
        return query
    return query[: max_chars + 1].rpartition(" ")[0] or query[:max_chars]


def _quote(query: str) -> str:
    return repr(query if len(query) <= _MAX_QUOTED else f"{query[:_MAX_QUOTED]}...")
