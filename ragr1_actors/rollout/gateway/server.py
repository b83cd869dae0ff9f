"""Gateway: the OpenAI-compatible endpoint of an env runner; the key of a request is its session.

::

    POST /v1/chat/completions   tools, stream, stop, max_tokens
    GET  /v1/models
    POST /v1/answer             {"answer": "Riga"}     the agent's answer, if it does not return one
    POST /v1/reward             {"reward": 0.5}        added to the last turn's reward
    POST /retrieve              Search-R1's protocol: the run's retriever

An unknown key gets 401, the key of an ended session 410. ``cluster/http.py`` has the guards of every server. The
gateway listens from the first session until it is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field
from yarl import URL

from cluster.http import HttpServer, Limits, RequestError, taken_in_time
from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.types import OnText, StopReason
from ragr1_actors.rollout.gateway.messages import (
    CONTEXT_LENGTH,
    ApiError,
    ChatRequest,
    Chunks,
    Reply,
    checked_as,
    completion,
    event,
    read_request,
    session_has_ended,
)
from ragr1_actors.rollout.gateway.session import Session
from retrieval.base import Retriever
from retrieval.http.server import DEFAULT_TOPK, format_answer, parse_question

MODEL = "policy"
"""Name of the only model."""
MAX_BODY_BYTES = 64 * 2**20
"""Limit of a request's body; an image of the largest size takes 43 MiB in base64."""
_LARGE_BODY_BYTES = 2**18
"""Size from which a body is read in a thread, as one with images is: other requests are answered meanwhile."""
MAX_REWARD = 1e6
"""Largest reward that an agent may post, as advantages are computed in float32."""
_KEPT_KEYS = 2**16
"""Number of keys of ended sessions that get 410; older ones get 401."""
Complete = Callable[[ChatRequest, OnText | None], Awaitable[Reply]]
"""Function that returns the next turn of a conversation; raises ``ApiError``."""
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def answer_chat(request: web.Request, body: bytes, complete: Complete) -> web.StreamResponse:
    """Answer a request for a chat completion, as a whole or in chunks."""
    is_slow = len(body) > _LARGE_BODY_BYTES or b"image_url" in body  # 64 million pixels may be 8 kB
    asked = await asyncio.to_thread(read_request, body) if is_slow else read_request(body)
    if not asked.stream:
        return web.json_response(completion(await complete(asked, None), asked.model or MODEL))
    return await _stream(request, asked, complete)


async def _stream(request: web.Request, asked: ChatRequest, complete: Complete) -> web.StreamResponse:
    chunks, texts = Chunks(asked), asyncio.Queue[str | None]()
    sampling = asyncio.ensure_future(complete(asked, texts.put_nowait))
    sampling.add_done_callback(lambda done: texts.put_nowait(None))
    response = web.StreamResponse(headers=_EVENT_STREAM)
    try:
        while (text := await texts.get()) is not None:
            if part := chunks.grown(text):
                await _write(request, response, part)
        reply = await sampling  # an error before the first chunk has a status
        await _write(request, response, chunks.end(reply))
    except ApiError as error:
        if not response.prepared:
            raise
        await _write(request, response, event(error.body))
    finally:
        sampling.cancel()
    return response


async def _write(request: web.Request, response: web.StreamResponse, part: bytes) -> None:
    if not response.prepared:
        await response.prepare(request)
    if request.transport is None:  # the client left
        return
    with taken_in_time(request, Limits().answer_s):
        await response.write(part)


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    answer: str


class _Reward(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)


class Gateway(HttpServer):
    """Server of one env runner, and the sessions of its agents."""

    def __init__(self, host: str, retriever: Retriever) -> None:
        """Take the host, on which it listens from the first session; ``retriever`` answers the agents' searches."""
        self._retriever = retriever
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        super().__init__(
            [
                web.post("/v1/chat/completions", self._guarded(self._chat)),
                web.get("/v1/models", self._guarded(self._models)),
                web.post("/v1/answer", self._guarded(self._take_answer)),
                web.post("/v1/reward", self._guarded(self._take_reward)),
                web.post("/retrieve", self._guarded(self._retrieve)),
            ],
            host=host,
            limits=Limits(body_bytes=MAX_BODY_BYTES),
        )
        self._starting = asyncio.Lock()

    @property
    def url(self) -> str:
        """Address for agents, without a path; the node's address if the server listens on all addresses."""
        listening = URL(super().url)
        if not ipaddress.ip_address(listening.raw_host or "").is_unspecified:
            return super().url
        from ray.util import get_node_ip_address

        return str(listening.with_host(get_node_ip_address())).rstrip("/")

    @asynccontextmanager
    async def opened(self, session: Session) -> AsyncIterator[str]:
        """Give a session a key while the block runs."""
        async with self._starting:
            if self._listener is None:
                await self.__aenter__()
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            self._ended[key] = None
            if len(self._ended) > _KEPT_KEYS:
                self._ended.popitem(last=False)

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            await self.__aexit__()

    def _guarded(
        self, handle: Callable[[web.Request, Session], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request)
            try:
                return await handle(request, session)
            except RequestError as error:
                session.note_refused(str(error))
                if isinstance(error, ApiError) and error.code == CONTEXT_LENGTH and session.limit is None:
                    session.limit = StopReason.CONTEXT_FULL  # its body was too long to be read
                raise

        return handler

    def _session_of(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is not None and not session.failed.done():
            return session
        if session is not None or key.strip() in self._ended:
            raise session_has_ended()
        raise ApiError(401, "expected the session's key, OPENAI_API_KEY, in 'Authorization: Bearer KEY'")

    async def _chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        return await answer_chat(request, await self.read_body(request), session.complete)

    async def _models(self, request: web.Request, session: Session) -> web.Response:
        return web.json_response(models())

    async def _take_answer(self, request: web.Request, session: Session) -> web.Response:
        session.answer = checked_as(_Answer, await self.read_body(request)).answer
        return web.json_response({"status": "ok"})

    async def _take_reward(self, request: web.Request, session: Session) -> web.Response:
        session.reward = checked_as(_Reward, await self.read_body(request)).reward
        return web.json_response({"status": "ok"})

    async def _retrieve(self, request: web.Request, session: Session) -> web.Response:
        asked = parse_question(await self.read_body(request))
        k = asked.topk or DEFAULT_TOPK
        session.take_queries(len(asked.queries))
        started = time.monotonic()
        try:
            found = await self._retriever.search(asked.queries, k) if asked.queries else []
            if len(found) != len(asked.queries):
                raise RetrievalError(f"got {len(found)} answers to {len(asked.queries)} queries")
            body = format_answer(found, return_scores=bool(asked.return_scores))
        except Exception as error:  # a user's retriever may raise anything; only this trajectory ends
            session.fail(error)
            raise ApiError(503, "the search failed; the attempt ends") from None
        session.note_searches(asked.queries, k, found, time.monotonic() - started)
        return web.Response(body=body, content_type="application/json", charset="utf-8")


def models() -> dict[str, Any]:
    """Return the body of ``/v1/models``."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ragr1-actors"}]}
