"""Language models that answer messages: over HTTP, or with an engine in this process.

``ChatClient`` speaks to any OpenAI-compatible endpoint. The engine ``endpoint`` samples with it; rewards, environments
and retrievers ask it by its name in ``environment.models``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from envs.grammars.calls import ToolSchema
from ragr1_actors.core.config import DEFAULT_KEY_ENV, EndpointSettings, ModelSettings, PolicySettings
from ragr1_actors.core.content import Content, images_of
from ragr1_actors.core.credentials import read_secret, refuse_credentials
from ragr1_actors.core.errors import ConfigError, EngineError, RetrievalError, ServiceError
from ragr1_actors.core.images import data_url
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import ChatModel, Message, Sampling
from ragr1_actors.rollout.engines.base import ENGINES, EngineArguments, load_tokenizer, show_images
from retrieval.http.retriever import HttpClient, StatusError, check_url, is_busy, retry

LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds between two attempts; a longer one that the endpoint asks for is cut to this."""
KEY_REFUSED = (401, 402, 403)
_TOOLS_REFUSED = (400, 404, 422, 500, 501)
"""Statuses with which endpoints without tool calls refuse a request with tools."""
TOOLS_ADVICE = (
    "turn on the tool calls of the server, such as vLLM's --enable-auto-tool-choice, or set policy.chat_format=hermes, "
    "which writes the tools into the prompt"
)
PROBE_TIMEOUT_S = 60.0
"""Seconds for the one short request before the first task. The first answer of a new server takes longest."""
_PROBE = [{"role": "user", "content": "Answer with the word yes."}]
_PROBE_SAMPLING = Sampling(16, temperature=0.0, stop=("</answer>",))


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Answer of an endpoint."""

    text: str
    is_cut: bool
    """Whether the answer ran into the limit of tokens."""
    num_tokens: int | None
    """Number of tokens, as the endpoint counted them; None if it did not."""
    thought: str = ""
    """Text that the server's reasoning parser moved out of the answer; only for a request with tools."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """Message as it came, if it has ``tool_calls``; only for a request with tools."""


@dataclass(frozen=True, slots=True)
class Options:
    """Names of an endpoint's settings for messages."""

    where: str = "--endpoint"
    key_env: str = "--key-env"
    model: str = "--model"
    body: str = "--body"
    load: str = "--concurrency"


class ChatClient:
    """Asks one model at an OpenAI-compatible endpoint."""

    def __init__(self, settings: EndpointSettings, max_in_flight: int, named: Options) -> None:
        """Check the settings; nothing is sent before the first question.

        While ``max_in_flight`` requests are in flight, further ones wait.

        Raises:
            ConfigError: the address is invalid, or the variable for the key is not set.
        """
        refuse_credentials(settings.url, named.where)
        is_usual = settings.key_env == DEFAULT_KEY_ENV and not os.environ.get(DEFAULT_KEY_ENV)
        key = "" if is_usual else read_secret(named.key_env, settings.key_env)
        self._settings, self._named = settings, named
        url = check_url(settings.url, named.where)
        path = url.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._url = url.with_path(f"{path}/chat/completions", keep_query=True)
        self._client = HttpClient(max_connections=max_in_flight, secret=key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._slots = asyncio.Semaphore(max_in_flight)

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """See ``ChatModel.chat``."""
        chat = [{"role": one.role, "content": as_sent(one.content)} for one in messages]
        return (await self.complete(chat, sampling)).text

    async def complete(
        self,
        chat: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        tools: Sequence[ToolSchema] = (),
        *,
        is_probe: bool = False,
    ) -> ChatAnswer:
        """Return the answer to a conversation, whose messages are sent as they are; a probe is repeated less often.

        Raises:
            ServiceError: no attempt succeeded (``StatusError`` is the cause), or the answer is no chat completion.
        """
        may_pass, attempts, longest_pause_s = _may_pass, self._settings.max_retries + 1, LONGEST_PAUSE_S
        if is_probe:  # it does not wait for an endpoint that is away
            may_pass, attempts, longest_pause_s = is_busy, 3, 10.0
        fields: dict[str, Any] = {
            "model": self._settings.model,
            "messages": list(chat),
            "tools": list(tools) or None,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 and sampling.temperature else None,
            "seed": sampling.seed % 2**31 if sampling.seed is not None and sampling.temperature else None,
            "stop": list(sampling.stop) or None,
        }
        body = {name: value for name, value in (fields | self._settings.body).items() if value is not None}
        retrying = retry(may_pass, attempts=attempts, longest_pause_s=longest_pause_s)
        try:
            content: bytes = await retrying(self._send, body)
            return self._read(self._client.read_json(content, self._url), has_tools=bool(tools))
        except RetrievalError as error:
            counted = f" ({attempts} attempts)" if may_pass(error) else ""
            raise ServiceError(f"{error}{counted}") from error

    async def probe(
        self,
        chat: Sequence[Mapping[str, Any]] = _PROBE,
        sampling: Sampling = _PROBE_SAMPLING,
        tools: Sequence[ToolSchema] = (),
    ) -> ChatAnswer:
        """Send one short request, so that a wrong address, key or field fails before the first task.

        Raises:
            ConfigError: the endpoint does not answer; the message says what to change.
        """
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self.complete(chat, sampling, tools, is_probe=True)
        except TimeoutError as error:
            server = self._client.name_of(self._url)
            raise ConfigError(
                f"{self._named.where}: {server}: no answer within {PROBE_TIMEOUT_S:g} s; {self.advice(0)}"
            ) from error
        except ServiceError as error:
            status = status_of(error)
            advice = TOOLS_ADVICE if tools and status in _TOOLS_REFUSED else self.advice(status)
            raise ConfigError(f"{self._named.where}: {error}; {advice}") from error

    def advice(self, status: int) -> str:
        """Return advice for a person about an answer with ``status``; 0 means no answer."""
        named = self._named
        if status in KEY_REFUSED:
            return f"export a valid key as {self._settings.key_env}, or name another variable with {named.key_env}"
        if status == 404:
            return (
                f"give the address that ends in /v1, and in {named.model} a name that the endpoint lists at /v1/models"
            )
        if status in (400, 422):
            return f"leave the field that it refuses out, such as {named.body} '{{\"stop\": null}}'"
        if status == 429:
            return f"wait, or lower {named.load}"
        return "see whether the server runs, and correct the address"

    async def _send(self, body: dict[str, Any]) -> bytes:
        timeout_s = self._settings.timeout_s
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._client.send("POST", self._url, body=body, headers=self._headers)
            except TimeoutError:
                raise RetrievalError(f"{self._client.name_of(self._url)}: no answer within {timeout_s:g} s") from None

    def _read(self, answer: Any, *, has_tools: bool) -> ChatAnswer:
        server = self._client.name_of(self._url)
        try:
            choice = answer["choices"][0]
            message, ended = _in_utf8(choice["message"]), choice.get("finish_reason")
            content = message.get("content")
            moved = message if has_tools else {}
            thought = moved.get("reasoning_content") or moved.get("reasoning")
            names = [call["function"]["name"] for call in moved.get("tool_calls") or ()]
            counted = (answer.get("usage") or {}).get("completion_tokens")
        except (KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise ServiceError(f"{server}: expected a chat completion with choices[0].message, got another") from None
        if content is None and (has_tools or ended == "length"):
            content = ""  # only calls, or it was cut in the thought, which the server keeps elsewhere
        if content is None:
            raise ServiceError(
                f"{server}: the message has no content (finish_reason {ended!r}), expected text; if the server moves "
                "thoughts or tool calls out of it, turn off its reasoning and tool parsers"
            )
        if not all(isinstance(text, str) for text in (content, *names)):
            raise ServiceError(f"{server}: the content of the message, or the name of a call, is no text")
        is_count = type(counted) is int  # true is an int for isinstance
        return ChatAnswer(
            content,
            ended == "length",
            counted if is_count else None,
            thought if isinstance(thought, str) else "",
            message if names else {},
        )


def _in_utf8(message: Any) -> Any:
    """Return JSON with a question mark for each half of a surrogate pair, which UTF-8 cannot encode."""
    return json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))


Loading = Callable[[], AbstractContextManager[None]]
"""Context in which an engine loads in a process that answers nothing meanwhile."""


class EngineChat:
    """Asks a model that an engine of this process runs; it loads with the first question."""

    def __init__(self, settings: ModelSettings, loading: Loading = nullcontext) -> None:
        """Take the settings; the model loads with the first question, in ``loading``."""
        self._settings, self._loading = settings, loading
        self._numbers = itertools.count()

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """See ``ChatModel.chat``; ``ValueError`` if the conversation does not fit into the context."""
        tokenizer, engine = self._loaded
        request_id = f"chat/{next(self._numbers)}"
        prompt_ids = tokenizer.prompt_ids(messages)
        room = min(sampling.max_new_tokens, self._settings.max_context_tokens - len(prompt_ids))
        if room < 1:
            raise ValueError(
                f"{self._settings.model}: got a conversation of {len(prompt_ids)} tokens, expected fewer than "
                f"{self._settings.max_context_tokens}; shorten it, or raise its max_context_tokens"
            )
        try:
            if images := images_of(*(message.content for message in messages)):
                show_images(engine, request_id, tokenizer.place(prompt_ids, images))
            limited = replace(sampling, max_new_tokens=room)
            completion = await engine.generate(prompt_ids, limited, request_id=request_id)
        except EngineError as error:
            raise ServiceError(f"the engine {self._settings.engine} of {self._settings.model}: {error}") from error
        finally:
            engine.release(request_id)
        return str(completion.text)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        settings = self._settings
        with self._loading():
            tokenizer = load_tokenizer(settings.model, PolicySettings())
            limits = EngineArguments(settings.max_in_flight, settings.max_context_tokens)
            return tokenizer, load_object(settings.engine, ENGINES)(settings.model, tokenizer, limits)


def open_models(models: Mapping[str, ModelSettings], loading: Loading = nullcontext) -> dict[str, ChatModel]:
    """Return a client for each of ``environment.models``; nothing is loaded or sent yet. Raises ``ConfigError``."""
    return {name: _open(name, settings, loading) for name, settings in models.items()}


def _open(name: str, settings: ModelSettings, loading: Loading) -> ChatModel:
    key = f"environment.models.{name}"
    if bool(settings.url) == bool(settings.engine):
        raise ConfigError(
            f"{key}: got url {settings.url!r} and engine {settings.engine!r}, expected one of them: the address of an "
            "endpoint, or an engine that runs the folder model in each env runner"
        )
    if settings.engine:
        return EngineChat(settings, loading)
    names = {field: f"{key}.{field}" for field in ("key_env", "model", "body")}
    return ChatClient(settings, settings.max_in_flight, Options(f"{key}.url", **names, load=f"{key}.max_in_flight"))


def as_sent(content: Content) -> str | list[dict[str, Any]]:
    """Return a content in the form of an endpoint: an image is a ``data:`` URL."""
    if isinstance(content, str):
        return content
    sent: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            sent += [{"type": "text", "text": part}] if part else []
        else:
            sent.append({"type": "image_url", "image_url": {"url": data_url(part)}})
    return sent


def status_of(error: ServiceError) -> int:
    """Return the status of an endpoint's answer; 0 if it did not answer."""
    return error.__cause__.status if isinstance(error.__cause__, StatusError) else 0


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, RetrievalError) and not (isinstance(error, StatusError) and error.is_refusal)
