r"""OpenAI's chat completions as this project reads and writes them: pure functions and frozen data.

::

    {"messages": [..], "tools": [..], "stream": true}  ──► ChatRequest ──► session ──► Reply ──► completion, or chunks
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from cluster.http import RequestError
from envs.grammars.calls import END_OF_THOUGHT, ToolSchema
from envs.grammars.tags import THINK
from ragr1_actors.core.content import Content, Image, images_of, joined, text_of
from ragr1_actors.core.disk.json_files import checked
from ragr1_actors.core.errors import DataError, one_line, shortened
from ragr1_actors.core.images import read_data_url
from ragr1_actors.core.types import CallRequest, Message

T = TypeVar("T")
Said = tuple[str, Content, tuple[CallRequest, ...]]
"""Message in the form in which histories are compared: role, content and calls."""
Finish = Literal["stop", "length", "tool_calls"]
CONTEXT_LENGTH = "context_length_exceeded"
_OVERRIDDEN = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "parallel_tool_calls")
_ROLES = {"developer": "system"}
MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a body without its images: more would keep the parser or the tokenizer busy for minutes."""
_IMAGE = re.compile(rb'"data:image\\?/(?:[^"\\]|\\/){100,}"')


class ApiError(RequestError):
    """Refusal of a request with OpenAI's error object; its clients do not repeat the request."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        """Refuse with an HTTP status, one sentence and OpenAI's code, such as ``context_length_exceeded``."""
        super().__init__(status, message, {"x-should-retry": "false"})
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code or None}}


def context_is_full(what: str) -> ApiError:
    """Return the refusal of a request beyond the context or the turns; ``what`` gives the reason or advice."""
    # litellm recognises the error by these words; smolagents takes some numbers for other errors
    return ApiError(400, f"This model's maximum context length is reached: {what}.", CONTEXT_LENGTH)


def session_has_ended() -> ApiError:
    """Return the refusal of a request from an agent whose attempt has ended."""
    return ApiError(410, "this session has ended; stop asking")


# -- requests ----------------------------------------------------------------------------------------------------------


class _Part(BaseModel):
    type: str
    text: str = ""
    image_url: Any = None

    @property
    def url(self) -> str:
        """Address of an image; empty if there is none, or it is no text."""
        url = self.image_url.get("url") if isinstance(self.image_url, dict) else None
        return url if self.type == "image_url" and isinstance(url, str) else ""

    def read(self, role: str) -> str | Image:
        """Return the text or the image; raises ``ApiError`` for another type, and if the image cannot be read."""
        if self.type in ("text", "input_text", "output_text"):
            return self.text
        if self.type != "image_url" or role == "assistant":
            got = f"a part of type {shortened(self.type)}" + " of the assistant" * (role == "assistant")
            raise ApiError(400, f"messages: got {got}, expected text, or an image_url of another role; leave it out")
        if not self.url:
            got = shortened(repr(self.image_url))
            raise ApiError(400, f'messages: image_url: got {got}, expected {{"url": "data:image/png;base64,.."}}')
        try:
            return read_data_url(self.url, "messages: image_url")
        except DataError as error:
            raise ApiError(400, str(error)) from None


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(BaseModel):
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    tool_call_id: str | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def read(self) -> Content:
        """Return the content, in which no text follows a text; raises ``ApiError`` for a part that cannot be read."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        found: list[str | Image] = []
        for part in (part.read(self.role) for part in self.content):
            if isinstance(part, str) and found and isinstance(found[-1], str):
                found[-1] += part
            elif part:
                found.append(part)
        content = tuple(found)
        return content if images_of(content) else text_of(content)


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    messages: list[_Message] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request for a chat completion."""

    messages: tuple[Message, ...]
    said: tuple[Said, ...]
    """Messages in the form in which they are compared with the recorded ones."""
    answered_ids: tuple[str, ...]
    """Id per message: the ``tool_call_id`` of a tool's result, else an empty text."""
    model: str = ""
    """Name of the model, which is only echoed: there is one policy."""
    tools: tuple[ToolSchema, ...] = ()
    takes_calls: bool = True
    """Whether calls in the turn are read; ``tool_choice: none`` leaves them in its text."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that have no effect in training, with their values: ``{"temperature": 0.5}``."""


def checked_as(kind: type[T], given: object) -> T:
    """Return a body, or a part of it, as a model; the ``ApiError`` 400 names the first wrong key."""

    def refuse(key: str, got: Any, problem: str) -> ApiError:
        return ApiError(400, f"{key or 'the body'}: got {shortened(repr(got))}; {problem}")

    return checked(kind, given, refuse)


def read_request(body: bytes) -> ChatRequest:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400 with one sentence: it is not such JSON, or asks for something that a recorded policy cannot do.
    """
    if len(body) > MAX_TEXT_BYTES:
        _refuse_text(len(body) - sum(len(found[0]) for found in _IMAGE.finditer(body)))
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {one_line(error)}") from None
    found = checked_as(_Body, given)
    urls = [part.url for message in found.messages if isinstance(message.content, list) for part in message.content]
    _refuse_text(len(body) - sum(map(len, urls)))
    given = {name: value for name, value in (found.model_extra or {}).items() if value is not None}
    choice = given.get("tool_choice", "auto")
    _refuse(given, choice)
    if found.messages[-1].role == "assistant":
        raise ApiError(400, "messages: the last one is the assistant's; expected one of a user or a tool's result")
    limits = [limit for limit in (found.max_tokens, found.max_completion_tokens) if limit is not None]
    stop = (found.stop,) if isinstance(found.stop, str) else tuple(found.stop or ())
    tools = tuple(found.tools or ())
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise ApiError(400, f'tools: got {shortened(repr(tool))}, expected {{"type": "function", "function": ..}}')
    read = [(message, message.read()) for message in found.messages]
    return ChatRequest(
        messages=tuple(_read_message(*one) for one in read),
        said=tuple(_said(*one) for one in read),
        answered_ids=tuple(message.tool_call_id or "" for message in found.messages),
        model=found.model,
        tools=tools,
        takes_calls=choice != "none",
        stop=tuple(text for text in stop if text),
        max_tokens=min(limits, default=None),
        stream=bool(found.stream),
        include_usage=found.stream_options is not None and bool(found.stream_options.include_usage),
        overridden={name: given[name] for name in _OVERRIDDEN if name in given}
        | ({"tool_choice": choice} if choice == "required" else {}),  # smolagents and pydantic-ai send it themselves
    )


def _refuse_text(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise context_is_full(f"got {num_bytes:,} bytes without images, expected at most {MAX_TEXT_BYTES:,}")


def _refuse(given: dict[str, Any], choice: object) -> None:
    """Refuse requests that need tokens that the policy did not sample freely, or several answers."""
    if given.get("n", 1) != 1:
        raise ApiError(400, f"n: got {shortened(repr(given['n']))}, expected 1; send several requests")
    if given.get("logit_bias"):
        raise ApiError(400, "logit_bias: the policy samples without one; leave it out")
    if choice not in ("auto", "none", "required"):
        raise ApiError(400, f"tool_choice: got {shortened(repr(choice))}, expected auto, none or required")
    response_format = given.get("response_format", {"type": "text"})
    if response_format != {"type": "text"}:
        got = shortened(repr(response_format))
        raise ApiError(400, f"response_format: got {got}, expected text; ask for the format in a message")
    for name in ("functions", "function_call", "audio", "logprobs"):
        if given.get(name):
            raise ApiError(400, f"{name}: this endpoint does not support it; leave it out")


def in_front(messages: Sequence[Message]) -> list[Message]:
    """Return a whole conversation with one system message at the front, as chat templates refuse others."""
    num_leading = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    first, *others = [message.content for message in messages[:num_leading]] or [""]
    leading = joined(first, *(part for content in others for part in ("\n\n", content)))
    return [Message("system", leading)] * (num_leading > 0) + behind(messages[num_leading:])


def behind(messages: Sequence[Message]) -> list[Message]:
    """Return messages after the first ones, with the system's as a user's."""
    return [replace(message, role="user") if message.role == "system" else message for message in messages]


def _read_message(message: _Message, content: Content) -> Message:
    if message.role == "assistant" and (thought := message.reasoning_content or message.reasoning):
        content = f"{THINK}\n{thought.strip()}\n{END_OF_THOUGHT}\n\n{content}"
    calls = tuple(CallRequest(call.function.name, _arguments(call)) for call in message.tool_calls or ())
    return Message(_ROLES.get(message.role, message.role), content, calls)


def _said(message: _Message, content: Content) -> Said:
    calls = tuple(CallRequest(call.function.name, _arguments(call)) for call in message.tool_calls or ())
    return said(_ROLES.get(message.role, message.role), content, calls)


def said(role: str, content: Content, calls: Sequence[CallRequest] = ()) -> Said:
    """Return a message as histories are compared: no thoughts and no outer blanks; arguments 3 and 3.0 are equal."""
    if role == "assistant":
        content = visible(text_of(content))[1]
    return role, content, tuple(calls)


def _arguments(call: _Call) -> dict[str, Any]:
    given = call.function.arguments
    try:
        found = from_json(given or "{}", allow_inf_nan=False) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, dict):
        got = shortened(repr(given))
        raise ApiError(400, f"messages: the arguments of a call of {call.function.name} are {got}, expected an object")
    return found


# -- replies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Turn of the policy, for the agent."""

    content: str
    """Text outside thoughts and calls, before the stop string."""
    thought: str
    calls: tuple[CallRequest, ...]
    finish: Finish
    num_prompt_tokens: int
    num_sampled_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the message."""
    call_ids: tuple[str, ...] = ()
    """Ids of ``calls``."""

    def message(self) -> dict[str, Any]:
        """Return the assistant's message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        found |= self.extra
        if self.thought:
            found["reasoning_content"] = self.thought
        if self.calls:
            found["tool_calls"] = [
                {"id": name, "type": "function", "function": _written(call)}
                for name, call in zip(self.call_ids, self.calls, strict=True)
            ]
        return found

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens."""
        total = self.num_prompt_tokens + self.num_sampled_tokens
        counts = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": self.num_sampled_tokens}
        return counts | {"total_tokens": total}


def call_ids(number: int) -> tuple[str, ...]:
    """Return the ids of the calls of a turn."""
    return tuple(f"call_{secrets.token_hex(12)}" for _ in range(number))


def _written(call: CallRequest) -> dict[str, str]:
    return {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}


def visible(turn: str, stop: Sequence[str] = (), *, is_whole: bool = True) -> tuple[str, str]:
    """Return the thoughts and the content of a turn without calls, up to its first stop string.

    If ``is_whole`` is false the turn continues, so a possible beginning of a tag or a stop string is held back.

    ``visible("<think>two</think>\\n\\nRiga END", ["END"]) == ("two", "Riga")``
    """
    whole, turn = turn, before_stop(turn, stop)
    if not is_whole and turn == whole:
        turn = _without_beginning(turn, (THINK, END_OF_THOUGHT, *stop))
    content, *parts = turn.split(THINK)
    thoughts = [part.partition(END_OF_THOUGHT) for part in parts]
    shown = "\n".join(thought.strip() for thought, _, _ in thoughts)
    return shown.strip(), (content + "".join(behind for _, _, behind in thoughts)).strip()


def before_stop(turn: str, stop: Sequence[str]) -> str:
    """Return a turn up to its first stop string."""
    return turn[: min((at for text in stop if (at := turn.find(text)) >= 0), default=len(turn))]


def _without_beginning(text: str, of: Sequence[str]) -> str:
    """Return a text without an ending that may begin one of the texts ``of``."""
    longest = max((n for one in of for n in range(1, len(one)) if text.endswith(one[:n])), default=0)
    return text[: len(text) - longest]


def completion(reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of the answer."""
    choice = {"index": 0, "message": reply.message(), "logprobs": None, "finish_reason": reply.finish}
    return {**_head("chat.completion", model), "choices": [choice], "usage": reply.usage()}


class Chunks:
    """Chunks of one streamed answer, as server-sent events."""

    def __init__(self, request: ChatRequest) -> None:
        """Begin an answer to a request."""
        self._request, self._head = request, _head("chat.completion.chunk", request.model)
        self._thought = self._content = ""
        self._has_begun = False

    def grown(self, turn: str) -> bytes:
        """Return chunks for the new text of a turn that is still being sampled; empty if nothing can be shown."""
        thought, content = visible(turn, self._request.stop, is_whole=False)
        # A call may begin anywhere in the text, so with tools it is sent at the end
        is_held = bool(self._request.tools) and self._request.takes_calls
        return b"".join(self._deltas(thought, "" if is_held else content))

    def end(self, reply: Reply) -> bytes:
        """Return the rest of the answer."""
        found = list(self._deltas(reply.thought, reply.content))
        message = reply.message()
        if "tool_calls" in message:
            calls = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
            found.append(self._chunk({"tool_calls": calls}))
        found.append(self._chunk(dict(reply.extra), reply.finish))
        if self._request.include_usage:
            found.append(event({**self._head, "choices": [], "usage": reply.usage()}))
        return b"".join([*found, b"data: [DONE]\n\n"])

    def _deltas(self, thought: str, content: str) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk({"role": "assistant", "content": ""})
        if len(thought) > len(self._thought):
            yield self._chunk({"reasoning_content": thought[len(self._thought) :]})
            self._thought = thought
        if len(content) > len(self._content):
            yield self._chunk({"content": content[len(self._content) :]})
            self._content = content

    def _chunk(self, delta: dict[str, Any], finish: Finish | None = None) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}
