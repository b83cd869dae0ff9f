"""EndpointEngine: any OpenAI-compatible chat endpoint as the policy, so that a hosted model can be a baseline.

An engine continues token ids, an endpoint continues messages. ``EndpointTokenizer`` writes text as ids that can be read
back, so the ids of an attempt are its conversation; its turns and images are kept until the engine releases it::

    ids ──► messages ──► POST /chat/completions ──► text, closed at its tag ──► ids: one with the text, the others count

The ids also hold the tools. The calls of an answer are written into the turn's text in the form of ``hermes``, so that
an environment reads them like those of any policy; the endpoint's message goes back unchanged, with the results.

The endpoint reports how many tokens it sampled, but neither ids nor log-probs: nothing can be trained on them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from envs.grammars.calls import END_OF_THOUGHT, ToolSchema
from envs.grammars.tags import THINK, open_thought, skip_thoughts
from envs.observations import defuse
from ragr1_actors.core.config import EndpointSettings
from ragr1_actors.core.content import Content, Image, PlacedImage, changed, images_of, joined, parts_of, text_of
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, ServiceError, shortened
from ragr1_actors.core.images import size_of
from ragr1_actors.core.types import Completion, FinishReason, Message, OnText, Sampling
from ragr1_actors.rollout.engines.base import EngineArguments
from ragr1_actors.rollout.engines.chat_client import (
    KEY_REFUSED,
    TOOLS_ADVICE,
    ChatAnswer,
    ChatClient,
    Options,
    as_sent,
    status_of,
)

_TOOL, _TOOLS = "tool", "tools"
_ROLES = ("system", "user", "assistant", _TOOL, _TOOLS)
"""Roles of messages, and the role of the tools' schemas, which are written as JSON."""
# The server's tokenizer is unknown. Tokens of Qwen, Llama 3 and DeepSeek; of Llama 2 and Gemma; of tool calls; of
# Mistral.
_CONTROL = re.compile(
    r"<\|[^<>|]{1,64}\|>|<\uff5c[^<>\uff5c]{1,64}\uff5c>|</?s>|<(?:[be]os|pad|unk|(?:start|end)_of_turn)>"
    r"|</?tool_(?:call|response)>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
)
_PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]{1,3}|.", re.DOTALL)
_COUNTED = 0
"""Id of every token of a completion except the first, which has the whole text."""
_MAX_TOKENS = 10**6
"""Limit of tokens in one answer, above which the count is wrong."""
_CALLS = "tool_calls"
_TOOL_PROBE = Sampling(256, temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Answer of an endpoint."""

    text: str
    message: Mapping[str, Any]
    """Message as it goes back, if it has calls."""
    call_ids: Sequence[str]


class EndpointTokenizer:
    """Converter between text and ids: each id is a piece of a word, a number, or one character.

    Budgets of observations and context are counted in these ids. English text has somewhat more of them than tokens of
    a model, so that a text that fits here fits the endpoint.
    """

    def __init__(self) -> None:
        """Begin with the ids of a counted token and of the roles."""
        self._texts = ["", *_ROLES]
        self._ids: dict[str, int] = {}
        self._turns: dict[int, _Turn] = {}
        self._images: dict[int, Image] = {}

    def encode(self, text: str) -> list[int]:
        """Return ids whose joined texts are ``text``."""
        ids = []
        for piece in _PIECE.findall(text):
            found = self._ids.get(piece)
            if found is None:
                found = self._ids[piece] = len(self._texts)
                self._texts.append(piece)
            ids.append(found)
        return ids

    def sampled(self, text: str, num_tokens: int, message: Mapping[str, Any] | None = None) -> list[int]:
        """Return ``num_tokens`` ids, at least one, for a turn with this text.

        ``message`` belongs to a turn with ``tool_calls``, and goes back. A call without an id gets one of nine
        characters, as Mistral requires.
        """
        message = message or {}
        first = len(self._texts)
        self._texts.append("")
        calls = [{"id": f"{first:06d}{n:03d}"} | _filled(call) for n, call in enumerate(message.get(_CALLS, ()))]
        sent = {"role": "assistant", **_filled(message), "content": message.get("content"), _CALLS: calls}
        self._turns[first] = _Turn(text, sent, [call["id"] for call in calls])
        return [first] + [_COUNTED] * (num_tokens - 1)

    def defuse(self, text: str) -> str:
        """Return a document or a question without tags and the control tokens of known model families."""
        return defuse(text, _CONTROL)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return for every message the id of its role and the ids of its text; calls belong to ``sampled`` turns."""
        ids = []
        for message in messages:
            ids.append(1 + _ROLES.index(message.role))
            for part in parts_of(joined(message.content, message.notice)):
                ids += self.encode(part) if isinstance(part, str) else self.image_ids(part)
        return ids

    def image_ids(self, image: Image) -> list[int]:
        """Return one id for an image, a new one for each use; ``DataError`` if it cannot be decoded."""
        size_of(image)
        self._images[len(self._texts)] = image
        self._texts.append("")
        return [len(self._texts) - 1]

    def place(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[PlacedImage]:
        """Return the places of images among token ids; an endpoint counts their tokens itself, so each has one here."""
        places = [position for position, token_id in enumerate(token_ids) if token_id in self._images]
        return [PlacedImage(image, place, 1, 1) for image, place in zip(images, places, strict=True)]

    def tool_ids(self, tools: Sequence[ToolSchema]) -> list[int]:
        """Return ids that tell the endpoint of tools, anywhere in a conversation; empty without tools."""
        return self.prompt_ids([Message(_TOOLS, json.dumps(tools, ensure_ascii=False))]) if tools else []

    def kept(self, token_ids: Iterable[int]) -> set[int]:
        """Return the ids of turns and images, whose content is kept until ``drop``."""
        return {one for one in token_ids if one in self._turns or one in self._images}

    def drop(self, token_ids: Iterable[int]) -> None:
        """Forget the content of turns and images: ``chat`` leaves them out."""
        for one in token_ids:
            self._turns.pop(one, None)
            self._images.pop(one, None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids from ``encode``."""
        return "".join(self._texts[token_id] for token_id in token_ids)

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        """Return an empty text: the endpoint's beginning of a turn is unknown; see ``whole_turn``."""
        return ""

    def _parts(self, token_ids: Sequence[int]) -> list[tuple[int, list[Content]]]:
        """Return the id of each role or turn, and what follows it."""
        parts: list[tuple[int, list[Content]]] = [(_COUNTED, [])]
        pieces: list[str] = []

        def end_text() -> None:
            if pieces:
                parts[-1][1].append("".join(pieces))  # once per text: it may have a million pieces
                pieces.clear()

        for token_id in token_ids:
            if 1 <= token_id <= len(_ROLES) or token_id in self._turns:
                end_text()
                parts.append((token_id, []))
            elif token_id in self._images:
                end_text()
                parts[-1][1].append((self._images[token_id],))
            else:
                pieces.append(self._texts[token_id])
        end_text()
        return parts

    def chat(self, token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[ToolSchema]]:
        """Return the conversation of ids in the form of an endpoint, and its tools.

        The ids come from ``prompt_ids``, ``tool_ids`` and turns, with the user's text between two turns. A turn goes
        back with its calls if a result for each follows, as endpoints require, else as text.
        """
        parts = self._parts(token_ids)
        chat, tools, unanswered = list[dict[str, Any]](), list[ToolSchema](), list[str]()
        for number, (first, after) in enumerate(parts):
            role, content = self._texts[first], joined(*after)
            if role == _TOOLS:
                tools = json.loads(text_of(content))
            elif role == _TOOL and unanswered:
                chat.append({"role": role, "tool_call_id": unanswered.pop(0), "content": as_sent(content)})
            elif role:
                chat.append({"role": "user" if role == _TOOL else role, "content": as_sent(content)})
            elif turn := self._turns.get(first):
                behind = parts[number + 1 : number + 1 + len(turn.call_ids)]
                has_results = [self._texts[one] for one, _ in behind] == [_TOOL] * len(turn.call_ids)
                unanswered = [*turn.call_ids] if has_results else []
                chat.append(dict(turn.message) if unanswered else {"role": "assistant", "content": turn.text})
            if not role and (images_of(content) or text_of(content).strip()):
                chat.append({"role": "user", "content": as_sent(changed(content, str.strip))})
        return chat, tools


class EndpointEngine:
    """``Engine`` over ``POST URL/chat/completions``. The policy's folder is not used."""

    def __init__(self, policy_dir: str | Path, tokenizer: EndpointTokenizer, settings: EngineArguments) -> None:
        """Check the options, which are ``EndpointSettings``; nothing is sent before the first request.

        Raises:
            ConfigError: an option is wrong, or the variable for the key is not set.
        """
        options = EndpointSettings.read(settings.options, "env_runners.engine_options")
        self._tokenizer, self._version = tokenizer, settings.version
        self._client = ChatClient(options, settings.max_rows, Options())
        self._kept: dict[str, set[int]] = {}  # ids of turns and images by the request that had them

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue the conversation of the ids; see ``Engine.generate``. ``on_text`` gets the whole turn at once.

        Raises:
            EngineError: no attempt succeeded, or the answer is not a chat completion.
            EngineDeadError: the endpoint refuses the key; no other request would be answered either.
        """
        chat, tools = self._tokenizer.chat(prompt_token_ids)
        kept = self._kept.setdefault(request_id, set())
        kept |= self._tokenizer.kept(prompt_token_ids)
        try:
            answer = await self._client.complete(chat, sampling, tools)
        except asyncio.CancelledError:  # an agent that left is released, and may go on with the same turns
            self._kept.pop(request_id, None)
            raise
        except ServiceError as error:
            if (status := status_of(error)) in KEY_REFUSED:
                raise EngineDeadError(f"{error}; {self._client.advice(status)}") from error
            raise EngineError(str(error)) from error
        text = _turn_text(answer, sampling.stop)
        num_tokens = answer.num_tokens
        if num_tokens is None or not 0 <= num_tokens <= _MAX_TOKENS:
            num_tokens = len(self._tokenizer.encode(text))
        is_cut = answer.is_cut or bool(open_thought(text))  # an endpoint cannot continue a turn
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        if on_text is not None:
            on_text(text)
        ids = self._tokenizer.sampled(text, num_tokens, answer.message)
        kept.add(ids[0])
        return Completion(ids, [0.0] * len(ids), [self._version] * len(ids), text, finish)

    def release(self, request_id: str) -> None:
        """Forget the turns and images of an attempt, which has ended."""
        self._tokenizer.drop(self._kept.pop(request_id, ()))

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        """Do nothing: the ids have the images."""

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Raise ``EngineError``: only the endpoint changes its weights."""
        raise EngineError("the engine endpoint takes no weights; train with the engine vllm or transformers")

    async def check(self) -> None:
        """Do nothing: every request has its attempts and its error."""

    async def close(self) -> None:
        """Do nothing: the connections end with the event loop."""

    async def probe(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Send one short request; with tools also one that asks for a call, and one with its result.

        Raises:
            ConfigError: the endpoint does not answer, or it answers without a call; see ``ChatClient.probe``.
        """
        if not tools:
            await self._client.probe()
            return
        await self._client.probe(sampling=_TOOL_PROBE)
        name, tokenizer = tools[0]["function"]["name"], self._tokenizer
        asked = Message("user", f"Call the tool {name} once, with arguments that you make up.")
        ids = tokenizer.tool_ids(tools) + tokenizer.prompt_ids([asked])
        answer = await self._client.probe(tokenizer.chat(ids)[0], _TOOL_PROBE, tools)
        if answer.message:
            results = [Message(_TOOL, "Done.")] * len(answer.message[_CALLS])
            ids += tokenizer.sampled("", 1, answer.message) + tokenizer.prompt_ids(results)
            await self._client.probe(tokenizer.chat(ids)[0], _TOOL_PROBE, tools)
        elif not answer.is_cut:  # else it may have been about to call
            raise ConfigError(
                f"--endpoint: asked to call the tool {name}, the endpoint answered in text: "
                f"{shortened(answer.text)!r}; {TOOLS_ADVICE}"
            )


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: endpoints answer with empty ones that they refuse in a request."""
    return {name: value for name, value in fields.items() if value}


def _turn_text(answer: ChatAnswer, stop: Sequence[str]) -> str:
    """Return the text of a turn: its thought, its content and its calls."""
    thought = re.sub("</?think>", "", answer.thought).strip()
    begin = f"{THINK}\n{thought}\n{END_OF_THOUGHT}\n\n" if thought else ""
    text = whole_turn(begin + answer.text, stop, is_cut=answer.is_cut)
    if not answer.message:
        return text
    if open_thought(text):
        text += END_OF_THOUGHT
    text = text.replace("<tool_call>", "(tool_call)").rstrip()  # the server has read all calls
    return "\n".join(filter(None, (text, *(_written(call["function"]) for call in answer.message[_CALLS]))))


def _written(function: Mapping[str, Any]) -> str:
    r"""Return a call as Hermes writes it, with ``\u003c`` for ``<``, so that no argument ends it.

    Arguments that are not JSON become a text, which is malformed if an object is expected.
    """
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)  # some servers send an object
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        arguments = json.dumps(arguments)
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
    return "<tool_call>\n" + call.replace("<", r"\u003c") + "\n</tool_call>"


def whole_turn(text: str, stop: Sequence[str], *, is_cut: bool) -> str:
    """Return the text of a turn with the ``<think>`` that the endpoint's template wrote, and closed at its tag.

    ``whole_turn("a </think><search> Ana", STOP_TAGS, is_cut=False) == "<think>a </think><search> Ana</search>"``: a
    ``</think>`` before any closed action ends a thought that began in the prompt. Tags in a thought are text. Most
    endpoints leave out the stop string.
    """
    before, closing, _ = text.partition("</think>")
    if closing and THINK not in before and not any(tag in before for tag in stop):
        text = THINK + text
    position = skip_thoughts(text)
    return text if open_thought(text) else text[:position] + _close_tag(text[position:], stop, is_cut=is_cut)


def _close_tag(text: str, stop: Sequence[str], *, is_cut: bool) -> str:
    """Return a turn without thoughts up to its first stop string, or with the tag that was opened last closed.

    With ``is_cut`` the text ran into its limit and stays open.
    """
    ends = [position + len(tag) for tag in stop if (position := text.find(tag)) >= 0]
    if ends:
        return text[: min(ends)]
    opened = {text.rfind(tag.replace("</", "<")): tag for tag in stop if tag.startswith("</")}
    last = max(opened, default=-1)
    return text if is_cut or last < 0 else text + opened[last]
