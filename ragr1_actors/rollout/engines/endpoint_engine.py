"""EndpointEngine: any OpenAI-compatible chat endpoint as the policy, so that a hosted model can be a baseline.

An engine continues token ids, an endpoint continues messages. ``EndpointTokenizer`` writes text as ids that can be read
back, and the engine keeps the conversation of every trajectory::

    prompt ids ──► messages ──► POST /chat/completions ──► text, closed at its tag ──► ids that only count tokens
                      ▲                                                                     │
                      └── observation ids ──► one more user message ◄───────────────────────┘

The endpoint reports how many tokens it sampled, but neither ids nor log-probs: nothing can be trained on them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import Field
from yarl import URL

from envs.actions import THINK, open_thought, skip_thoughts
from envs.observations import defuse
from ragr1_actors.core.config import Section
from ragr1_actors.core.credentials import refuse_credentials
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError
from ragr1_actors.core.types import Completion, FinishReason, Message, OnText, Sampling
from ragr1_actors.rollout.engines.base import EngineSettings
from retrieval.http.retriever import HttpClient, StatusError, check_url, is_busy, is_token, retry

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
LONGEST_PAUSE_S = 60.0
"""The longest pause between two attempts; a longer one that the endpoint asks for is cut to this."""
_ROLES = ("system", "user", "assistant")
# The server's tokenizer is not known. Those of Qwen, Llama 3 and DeepSeek; of Llama 2 and Gemma; of tool calls; of
# Mistral.
_CONTROL = re.compile(
    r"<\|[^<>|]{1,64}\|>|<\uff5c[^<>\uff5c]{1,64}\uff5c>|</?s>|<(?:[be]os|pad|unk|(?:start|end)_of_turn)>"
    r"|</?tool_(?:call|response)>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
)
_PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]{1,3}|.", re.DOTALL)
_SAMPLED = 0
"""The id of every token of a completion: its text is in the conversation."""
_KEY_REFUSED = (401, 402, 403)
_PROBE = [Message("user", "Answer with the word yes.")]
_PROBE_TOKENS = 16
PROBE_TIMEOUT_S = 60.0
"""For the one short request before the first task. The first answer of a server that has just started takes longest."""
_MAX_TOKENS = 10**6
"""More tokens in one answer are a wrong count."""


class EndpointOptions(Section):
    """``env_runners.engine_options`` of the engine ``endpoint``."""

    url: str
    """Address of the API, such as ``http://10.0.0.2:8000/v1``; ``/v1`` is added to an address without a path."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint lists it."""
    key_env: str = DEFAULT_KEY_ENV
    """Name of the environment variable with the API key. That of the default may be missing: no key is sent then."""
    timeout_s: float = Field(300, gt=0)
    """Per attempt."""
    max_retries: int = Field(5, ge=0)
    """Attempts after the first one, of a request that another attempt may help: status 408, 425, 429 and 5xx, no
    connection, no answer in time."""
    body: dict[str, Any] = Field({})
    """Fields of every request in place of the usual ones; null leaves a field out, such as ``stop``."""


class EndpointTokenizer:
    """Text as ids that can be read back: a piece of a word, a number, or one character each.

    Budgets of observations and context are counted in these. English has somewhat more of them than tokens of a model,
    so that what fits here fits the endpoint.
    """

    def __init__(self) -> None:
        """Begin with the ids of a sampled token and of the roles."""
        self._texts = ["", *_ROLES]
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return ids whose texts, one behind the other, are ``text``."""
        ids = []
        for piece in _PIECE.findall(text):
            found = self._ids.get(piece)
            if found is None:
                found = self._ids[piece] = len(self._texts)
                self._texts.append(piece)
            ids.append(found)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids from ``encode``; a sampled token has none."""
        return "".join(self._texts[token_id] for token_id in token_ids)

    def defuse(self, text: str) -> str:
        """Return a document or a question without tags and the control tokens of known model families."""
        return defuse(text, _CONTROL)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return for every message the id of its role, and those of its text."""
        return [i for message in messages for i in (1 + _ROLES.index(message.role), *self.encode(message.content))]

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        """Return an empty text: how the endpoint begins a turn is not known; see ``whole_turn``."""
        return ""

    def messages(self, prompt_ids: Sequence[int]) -> list[Message]:
        """Return the messages of ``prompt_ids``."""
        found: list[Message] = []
        for token_id in prompt_ids:
            if 1 <= token_id <= len(_ROLES):
                found.append(Message(_ROLES[token_id - 1], ""))
            else:
                found[-1] = Message(found[-1].role, found[-1].content + self._texts[token_id])
        return found


@dataclass(slots=True)
class _Conversation:
    messages: list[Message]
    num_ids: int
    """Number of ids in the context that the messages render."""


class EndpointEngine:
    """An ``Engine`` over ``POST URL/chat/completions``. The policy's folder is not used."""

    def __init__(self, policy_dir: str | Path, tokenizer: EndpointTokenizer, settings: EngineSettings) -> None:
        """Check the options; nothing is sent before the first request.

        Raises:
            ConfigError: an option is wrong, or the variable that should hold the key does not.
        """
        options = EndpointOptions.read(settings.options, "env_runners.engine_options")
        refuse_credentials(options.url, "--endpoint")
        key = _read_key(options.key_env)
        self._options, self._tokenizer, self._version = options, tokenizer, settings.version
        self._url = _completions_url(options.url)
        self._client = HttpClient(max_connections=settings.max_rows, secret=key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._slots = asyncio.Semaphore(settings.max_rows)
        self._conversations: dict[str, _Conversation] = {}

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue the conversation ``request_id``; see ``Engine.generate``. ``on_text`` gets the whole turn at once.

        Raises:
            EngineError: no attempt succeeded, or the answer is no chat completion.
            EngineDeadError: the endpoint refuses the key; no other request would be answered either.
        """
        conversation = self._continued(prompt_token_ids, request_id)
        tries = _Tries(_may_pass, self._options.max_retries + 1, LONGEST_PAUSE_S)
        answer = await self._ask(conversation.messages, sampling, tries)
        text, finish, num_tokens = self._read(answer, sampling.stop)
        conversation.messages.append(Message("assistant", text))
        conversation.num_ids = len(prompt_token_ids) + num_tokens
        if on_text is not None:
            on_text(text)
        versions = [self._version] * num_tokens
        return Completion([_SAMPLED] * num_tokens, [0.0] * num_tokens, versions, text, finish)

    def release(self, request_id: str) -> None:
        """Forget a conversation."""
        self._conversations.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Raise ``EngineError``: the weights are the endpoint's own."""
        raise EngineError("the engine endpoint takes no weights; train with the engine vllm or transformers")

    async def check(self) -> None:
        """Nothing to check: every request has its own attempts and its own error."""

    async def close(self) -> None:
        """Nothing to free: the connections end with the event loop."""

    async def probe(self) -> None:
        """Send one short request, so that a wrong address, key or field fails before the first task.

        Raises:
            ConfigError: the endpoint does not answer it; the message says what to change.
        """
        sampling = Sampling(_PROBE_TOKENS, temperature=0.0, stop=("</answer>",))
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                self._read(await self._ask(_PROBE, sampling, _PROBE_TRIES), sampling.stop)
        except TimeoutError as error:
            server = self._client.name_of(self._url)
            raise ConfigError(
                f"--endpoint: {server}: no answer within {PROBE_TIMEOUT_S:g} s; {self._advice(0)}"
            ) from error
        except EngineDeadError as error:
            raise ConfigError(f"--endpoint: {error}") from error
        except EngineError as error:
            cause = error.__cause__
            status = cause.status if isinstance(cause, StatusError) else 0
            raise ConfigError(f"--endpoint: {error}; {self._advice(status)}") from error

    def _advice(self, status: int) -> str:
        if status in _KEY_REFUSED:
            return f"export a valid key as {self._options.key_env}, or name another variable with --key-env"
        if status == 404:
            return "give the address that ends in /v1, and in --model a name that the endpoint lists at /v1/models"
        if status in (400, 422):
            return "leave the field that it refuses out, such as --body '{\"stop\": null}'"
        if status == 429:
            return "wait, or lower --concurrency"
        return "see whether the server runs, and correct the address"

    def _continued(self, ids: Sequence[int], request_id: str) -> _Conversation:
        """Return the conversation with what was added to the context since its last turn."""
        conversation = self._conversations.get(request_id)
        if conversation is None:
            conversation = _Conversation(self._tokenizer.messages(ids), len(ids))
            self._conversations[request_id] = conversation
            return conversation
        added = self._tokenizer.decode(ids[conversation.num_ids :]).strip()
        if added:
            conversation.messages.append(Message("user", added))
        conversation.num_ids = len(ids)
        return conversation

    async def _ask(self, messages: Sequence[Message], sampling: Sampling, tries: _Tries) -> Any:
        """Return the decoded answer; ``EngineError``, whose cause has the status, if no attempt succeeded."""
        fields: dict[str, Any] = {
            "model": self._options.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 and sampling.temperature else None,
            "seed": sampling.seed % 2**31 if sampling.seed is not None and sampling.temperature else None,
            "stop": list(sampling.stop) or None,
        }
        body = {name: value for name, value in (fields | self._options.body).items() if value is not None}
        retrying = retry(tries.may_pass, attempts=tries.attempts, longest_pause_s=tries.longest_pause_s)
        try:
            content: bytes = await retrying(self._send, body)
            return self._client.read_json(content, self._url)
        except RetrievalError as error:
            if isinstance(error, StatusError) and error.status in _KEY_REFUSED:
                raise EngineDeadError(f"{error}; {self._advice(error.status)}") from error
            counted = f" ({tries.attempts} attempts)" if tries.may_pass(error) else ""
            raise EngineError(f"{error}{counted}") from error

    async def _send(self, body: dict[str, Any]) -> bytes:
        timeout_s = self._options.timeout_s
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._client.send("POST", self._url, body=body, headers=self._headers)
            except TimeoutError:
                raise RetrievalError(f"{self._client.name_of(self._url)}: no answer within {timeout_s:g} s") from None

    def _read(self, answer: Any, stop: Sequence[str]) -> tuple[str, FinishReason, int]:
        """Return the text of a turn with its closing tag, why it ended, and its number of tokens."""
        try:
            choice = answer["choices"][0]
            content, ended = choice["message"].get("content"), choice.get("finish_reason")
            usage = answer.get("usage") or {}
            counted = usage.get("completion_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            server = self._client.name_of(self._url)
            raise EngineError(f"{server}: expected a chat completion with choices[0].message, got another") from None
        if content is None and ended == "length":
            content = ""  # cut in the thought, which the server keeps elsewhere
        if content is None:
            raise EngineError(
                f"{self._client.name_of(self._url)}: the message has no content (finish_reason {ended!r}), expected "
                "text; if the server moves thoughts or tool calls out of it, turn off its reasoning and tool parsers"
            )
        if not isinstance(content, str):
            raise EngineError(f"{self._client.name_of(self._url)}: the content of the message is no text")
        content = content.encode("utf-8", "replace").decode()  # halves of surrogate pairs have no UTF-8
        text = whole_turn(content, stop, is_cut=ended == "length")
        if type(counted) is not int or not 0 <= counted <= _MAX_TOKENS:  # true is an int for isinstance
            counted = len(self._tokenizer.encode(text))
        is_cut = ended == "length" or bool(open_thought(text))  # an endpoint cannot go on with a turn
        return text, FinishReason.LENGTH if is_cut else FinishReason.STOP, counted


def whole_turn(text: str, stop: Sequence[str], *, is_cut: bool) -> str:
    """Return the text of a turn with the ``<think>`` that the endpoint's template wrote, and closed at its tag.

    ``whole_turn("a </think><search> Ana", STOP_TAGS, is_cut=False) == "<think>a </think><search> Ana</search>"``: a
    ``</think>`` before any closed action ends a thought that began in the prompt. Tags in a thought are text. Most
    endpoints leave out the stop string where they stop.
    """
    before, closing, _ = text.partition("</think>")
    if closing and THINK not in before and not any(tag in before for tag in stop):
        text = THINK + text
    position = skip_thoughts(text)
    return text if open_thought(text) else text[:position] + _close_tag(text[position:], stop, is_cut=is_cut)


def _close_tag(text: str, stop: Sequence[str], *, is_cut: bool) -> str:
    """Return a turn without thoughts up to its first stop string; else close the tag that was opened last.

    With ``is_cut`` the text ran into its limit, and stays open.
    """
    ends = [position + len(tag) for tag in stop if (position := text.find(tag)) >= 0]
    if ends:
        return text[: min(ends)]
    opened = {text.rfind(tag.replace("</", "<")): tag for tag in stop if tag.startswith("</")}
    last = max(opened, default=-1)
    return text if is_cut or last < 0 else text + opened[last]


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, RetrievalError) and not (isinstance(error, StatusError) and error.is_refusal)


@dataclass(frozen=True, slots=True)
class _Tries:
    """How often a request is sent: ``attempts`` times, after errors that ``may_pass``."""

    may_pass: Callable[[BaseException], bool]
    attempts: int
    longest_pause_s: float


_PROBE_TRIES = _Tries(is_busy, 3, 10.0)
"""An endpoint that is away is not waited for."""


def _completions_url(url: str) -> URL:
    parsed = check_url(url, "--endpoint")
    path = parsed.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return parsed.with_path(f"{path}/chat/completions", keep_query=True)


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "") if variable else ""
    if not key and variable not in ("", DEFAULT_KEY_ENV):
        raise ConfigError(f"--key-env: the environment variable {variable!r} is not set; export it")
    if not is_token(key):
        raise ConfigError(f"the environment variable {variable!r} holds spaces or odd characters, expected a key")
    return key
