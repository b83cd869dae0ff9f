"""Server of the web page over a run's trajectories. It listens on loopback only and loads nothing from outside.

::

    GET /                  the page; /view.js and /view.css beside it
    GET /api/run           the run, and how much of it is indexed
    GET /api/trajectories  ?text= &stage= &first= &last= &task= &outcome= &order= &offset= &limit=
    GET /api/trajectory    ?id= &file=

``cluster/http.py`` guards it like every server. Trajectories hold text that a model or a web page wrote: answers are
JSON, the page shows text as text, and its content security policy allows only its own script.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from pydantic_core import to_json

from cluster.http import HttpServer, Limits, RequestError
from ragr1_actors.core.errors import DataError, UserError, one_line
from ragr1_actors.pages.viewer.parts import Index
from ragr1_actors.pages.viewer.payloads import (
    Query,
    Scope,
    Searcher,
    TokenPieces,
    find_row,
    row_payloads,
    run_payload,
    trajectory_payload,
)

LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at the run for new files."""
DRAIN_S = 1.0
"""Seconds for the requests in flight when the viewer stops."""
_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/view.js": ("view.js", "text/javascript"),
    "/view.css": ("view.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

logger = logging.getLogger(__name__)


class ViewServer(HttpServer):
    """Listens, and follows the run, while its ``async with`` block runs.

    ::

        async with ViewServer(Index(run / "trajectories", run / "view"), "mine", lambda: [run / "policy"]) as server:
            print(server.url)          # http://127.0.0.1:40123
    """

    def __init__(self, index: Index, name: str, tokenizers: Callable[[], Iterable[Path]], *, port: int = 0) -> None:
        """Serve ``index`` under the ``name`` of its run.

        Args:
            index: index of the run.
            name: name of the run on the page.
            tokenizers: returns folders, of which the first with a ``tokenizer.json`` gives the text of tokens; it is
                called until there is one.
            port: port number; 0 takes a free one.
        """
        self._index, self._name, self._tokenizers = index, name, tokenizers
        self._pieces = TokenPieces(tokenizers())
        self._searcher = Searcher()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="view")
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="index")
        routes = [
            *(web.get(path, self._show_file) for path in _FILES),
            web.get("/api/run", self._show_run),
            web.get("/api/trajectories", self._show_list),
            web.get("/api/trajectory", self._show_trajectory),
        ]
        super().__init__(routes, port=port, limits=Limits(drain_s=DRAIN_S), headers=_HEADERS)
        self._follower: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to listen; raises ``ConfigError`` if the port is in use."""
        await super().__aenter__()
        self._follower = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop."""
        self._index.stop()
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        await super().__aexit__(*error)
        for threads in (self._threads, self._looking):
            threads.shutdown(cancel_futures=True)
        self._searcher.close()

    async def _follow(self) -> None:
        said = ""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._looking, self._index.refresh)
            except Exception as error:  # the task's boundary: an error must be shown and must not end the looking
                if said != (said := one_line(error)):  # not every second
                    logger.exception("the trajectories cannot be indexed")
            if not self._pieces.is_text:
                self._pieces = TokenPieces(self._tokenizers())
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _show_file(self, request: web.Request) -> web.Response:
        name, kind = _FILES[request.path]
        return web.Response(body=(_PAGE / name).read_bytes(), content_type=kind, charset="utf-8")

    async def _show_run(self, request: web.Request) -> web.Response:
        return _json(run_payload(self._name, self._index.snapshot))

    async def _show_list(self, request: web.Request) -> web.Response:
        return await self._compute(partial(self._list, request.query))

    def _list(self, given: Mapping[str, str]) -> dict[str, Any]:
        query, snapshot = _query(given), self._index.snapshot
        rows, counts = self._searcher.find(snapshot, query)
        shown = row_payloads(snapshot, rows.tolist())
        return {"version": snapshot.version, "num_rows": counts[query.outcome], "counts": counts, "rows": shown}

    async def _show_trajectory(self, request: web.Request) -> web.Response:
        file, name = request.query.get("file", ""), request.query.get("id", "")
        return await self._compute(partial(self._trajectory, file, name))

    def _trajectory(self, file: str, trajectory_id: str) -> dict[str, Any]:
        snapshot = self._index.snapshot
        return trajectory_payload(snapshot, find_row(snapshot, file, trajectory_id), self._pieces)

    async def _compute(self, compute: Callable[[], dict[str, Any]]) -> web.Response:
        try:
            return _json(await asyncio.get_running_loop().run_in_executor(self._threads, compute))
        except DataError as error:
            raise RequestError(404, str(error)) from None
        except UserError as error:
            raise RequestError(400, str(error)) from None


def _query(given: Mapping[str, str]) -> Query:
    scope = Scope(
        given.get("text", ""),
        given.get("stage", ""),
        _whole(given, "first"),
        _whole(given, "last"),
        given.get("task", ""),
    )
    limit = _whole(given, "limit")
    return Query(
        scope,
        given.get("outcome") or "all",
        given.get("order") or "newest",
        _whole(given, "offset") or 0,
        100 if limit is None else limit,
    )


def _whole(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise UserError(f"got {name}={value[:40]!r}, expected a whole number")
    return int(value)


def _json(value: Any) -> web.Response:
    # a score or log-prob that is not finite becomes null, as JSON has no NaN
    return web.Response(body=to_json(value, inf_nan_mode="null"), content_type="application/json", charset="utf-8")
