"""EndpointEngine: any OpenAI-compatible chat endpoint as the policy, so that a hosted model can be a baseline.

An engine continues token ids, an endpoint continues messages. ``EndpointTokenizer`` writes text as ids that can be read
back, so the ids of an attempt are its conversation, and the engine keeps none::

    ids ──► messages ──► POST /chat/completions ──► text, closed at its tag ──► ids: one with the text, the others count

The endpoint reports how many tokens it sampled, but neither ids nor log-probs: nothing can be trained on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from envs.actions import THINK, open_thought, skip_thoughts
from envs.observations import defuse
from ragr1_actors.core.config import EndpointSettings
from ragr1_actors.core.errors import EngineDeadError, EngineError, ServiceError
from ragr1_actors.core.types import Completion, FinishReason, Message, OnText, Sampling
from ragr1_actors.rollout.engines.base import EngineSettings
from ragr1_actors.rollout.engines.chat_client import KEY_REFUSED, ChatClient, Options, status_of

_ROLES = ("system", "user", "assistant")
# The server's tokenizer is not known. Those of Qwen, Llama 3 and DeepSeek; of Llama 2 and Gemma; of tool calls; of
# Mistral.
_CONTROL = re.compile(
    r"<\|[^<>|]{1,64}\|>|<\uff5c[^<>\uff5c]{1,64}\uff5c>|</?s>|<(?:[be]os|pad|unk|(?:start|end)_of_turn)>"
    r"|</?tool_(?:call|response)>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
)
_PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]{1,3}|.", re.DOTALL)
_COUNTED = 0
"""The id of every token of a completion but the first, which has the whole text."""
_MAX_TOKENS = 10**6
"""More tokens in one answer are a wrong count."""


class EndpointTokenizer:
    """Text as ids that can be read back: a piece of a word, a number, or one character each.

    Budgets of observations and context are counted in these. English has somewhat more of them than tokens of a model,
    so that what fits here fits the endpoint.
    """

    def __init__(self) -> None:
        """Begin with the ids of a counted token and of the roles."""
        self._texts = ["", *_ROLES]
        self._ids: dict[str, int] = {}
        self._turns: dict[int, str] = {}

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

    def sampled(self, text: str, num_tokens: int) -> list[int]:
        """Return ``num_tokens`` ids, at least one, for a turn with this text."""
        first = len(self._texts)
        self._texts.append("")
        self._turns[first] = text
        return [first] + [_COUNTED] * (num_tokens - 1)

    def defuse(self, text: str) -> str:
        """Return a document or a question without tags and the control tokens of known model families."""
        return defuse(text, _CONTROL)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return for every message the id of its role, and those of its text."""
        return [i for message in messages for i in (1 + _ROLES.index(message.role), *self.encode(message.content))]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of what ``encode`` returned."""
        return "".join(self._texts[token_id] for token_id in token_ids)

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        """Return an empty text: how the endpoint begins a turn is not known; see ``whole_turn``."""
        return ""

    def messages(self, token_ids: Sequence[int]) -> list[Message]:
        """Return the conversation of ``prompt_ids`` and of what follows it: turns, and between them the user's text."""
        found = [("", "")]
        for token_id in token_ids:
            if 1 <= token_id <= len(_ROLES):
                found.append((_ROLES[token_id - 1], ""))
            elif token_id in self._turns:
                found += [("assistant", self._turns[token_id]), ("", "")]
            else:
                found[-1] = (found[-1][0], found[-1][1] + self._texts[token_id])
        told = ((role, text) if role else ("user", text.strip()) for role, text in found if role or text.strip())
        return [Message(role, text) for role, text in told]


class EndpointEngine:
    """An ``Engine`` over ``POST URL/chat/completions``. The policy's folder is not used."""

    def __init__(self, policy_dir: str | Path, tokenizer: EndpointTokenizer, settings: EngineSettings) -> None:
        """Check the options, which are ``EndpointSettings``; nothing is sent before the first request.

        Raises:
            ConfigError: an option is wrong, or the variable that should hold the key does not.
        """
        options = EndpointSettings.read(settings.options, "env_runners.engine_options")
        self._tokenizer, self._version = tokenizer, settings.version
        self._client = ChatClient(options, settings.max_rows, Options())

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue the conversation that the ids are; see ``Engine.generate``. ``on_text`` gets the whole turn at once.

        Raises:
            EngineError: no attempt succeeded, or the answer is no chat completion.
            EngineDeadError: the endpoint refuses the key; no other request would be answered either.
        """
        try:
            answer = await self._client.complete(self._tokenizer.messages(prompt_token_ids), sampling)
        except ServiceError as error:
            if (status := status_of(error)) in KEY_REFUSED:
                raise EngineDeadError(f"{error}; {self._client.advice(status)}") from error
            raise EngineError(str(error)) from error
        text = whole_turn(answer.text, sampling.stop, is_cut=answer.is_cut)
        num_tokens = answer.num_tokens
        if num_tokens is None or not 0 <= num_tokens <= _MAX_TOKENS:
            num_tokens = len(self._tokenizer.encode(text))
        is_cut = answer.is_cut or bool(open_thought(text))  # an endpoint cannot go on with a turn
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        if on_text is not None:
            on_text(text)
        ids = self._tokenizer.sampled(text, num_tokens)
        return Completion(ids, [0.0] * len(ids), [self._version] * len(ids), text, finish)

    def release(self, request_id: str) -> None:
        """Nothing to forget: nothing is kept."""

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Raise ``EngineError``: the weights are the endpoint's own."""
        raise EngineError("the engine endpoint takes no weights; train with the engine vllm or transformers")

    async def check(self) -> None:
        """Nothing to check: every request has its own attempts and its own error."""

    async def close(self) -> None:
        """Nothing to free: the connections end with the event loop."""

    async def probe(self) -> None:
        """Send one short request; see ``ChatClient.probe``."""
        await self._client.probe()


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
