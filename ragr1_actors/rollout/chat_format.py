r"""Chat formats: how messages and tools become token ids around a policy's turns.

::

    prompt_ids(messages, tools)              <|im_start|>user\nWho ..?<|im_end|>\n<|im_start|>assistant\n
    a turn, sampled                          <tool_call>..</tool_call><|im_end|>
    extension_ids(before, added, tools)      \n<|im_start|>user\n<tool_response>\nAna ..</tool_response><|im_end|>\n
                                             <|im_start|>assistant\n

``tags`` adds plain text after a turn, and the message continues. The other formats add the text of the chat template
between the turn and the next one. A turn is never encoded again: to find the text around it, the conversations up to it
and after it are rendered with a character in the place of each sampled text, which no template changes. If the first is
not a beginning of the second, the template changes earlier messages: Qwen3 removes old thoughts.

Contents are texts of others. If one names an added token of the tokenizer, such a character is rendered too, and the
name is encoded as plain text: a page cannot write a control token. All other rendered text is the template's. If tags
around a result are no added tokens, as Qwen2.5's ``</tool_response>``, results get them in round brackets.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from envs.base import ENVS, TextEnv
from envs.grammars.calls import (
    END_OF_THOUGHT,
    GRAMMARS,
    Grammar,
    GrammarName,
    ToolSchema,
    TurnParser,
    parse_turn,
)
from envs.grammars.tags import THINK
from envs.observations import defuse_result
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.content import Content, Image, PlacedImage, changed, joined, parts_of
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import CallRequest, Message, TokenKind
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.engines.endpoint_engine import EndpointTokenizer

Piece = tuple[list[int], TokenKind]
"""Token ids of one kind."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens that follow a turn of the policy."""

    pieces: list[Piece]
    is_new_message: bool
    """Whether the next turn begins a message; else it continues the message of the turn."""


# Characters of plane 16, for private use, which our texts lack, stand for texts and mark where kinds begin.
_FIRST_TURN, _FIRST_HELD = 0x100000, 0x108000
_OBSERVATION, _NOTICE = "\U0010fffc", "\U0010fffd"
_MARKS = {_OBSERVATION: TokenKind.OBSERVATION, _NOTICE: TokenKind.NOTICE}
_HELD = "[\U00108000-\U0010fffb]"
_PRIVATE = "[\U00100000-\U0010fffd]"
_THOUGHT_TAGS = (THINK, END_OF_THOUGHT)
_PROBE = CallRequest("probe", {"of": "Riga"})
_PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"of": {"type": "string", "description": "What."}},
    "required": ["of"],
}
_OWN_TOOLS = """You have tools. To call one, write
{form}
The results follow in <tool_response>. These are the tools, one a line, as JSON schemas:
{schemas}"""


class ChatFormat(Protocol):
    """Conversion of conversations to token ids and of turns to calls; ``my_module:MyFormat`` takes the tokenizer."""

    end_ids: frozenset[int]
    """Ids of the tokens that end a turn."""

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Return the ids of a conversation up to the policy's turn."""

    def extension_ids(
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[ToolSchema], *, has_end: bool
    ) -> Extension | None:
        """Return the tokens between the policy's turn, the last of ``before``, and its next turn.

        ``has_end`` tells whether the last token of the turn is one of ``end_ids``; the length limit may have cut it
        before. None means that earlier messages are framed differently now, and the conversation needs a new row.
        """

    def parser(self, tools: Sequence[ToolSchema]) -> TurnParser:
        """Return a parser that reads one turn while it is sampled."""

    def write(self, turn: Message) -> str:
        """Return the text of a turn of the policy, for a demonstration."""

    def turn_ids(self, text: str) -> list[int]:
        """Return the ids of a text of ``write``, with the end-of-turn token."""


class Tokenizer(Protocol):
    """Methods of the policy's tokenizer that an attempt needs; ``PolicyTokenizer`` describes them."""

    def encode(self, text: str) -> list[int]: ...  # noqa: D102
    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...  # noqa: D102
    def defuse(self, text: str) -> str: ...  # noqa: D102
    def turn_start(self, prompt_ids: Sequence[int]) -> str: ...  # noqa: D102
    def decode(self, token_ids: Sequence[int]) -> str: ...  # noqa: D102
    def image_ids(self, image: Image) -> list[int]: ...  # noqa: D102
    def place(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[PlacedImage]: ...  # noqa: D102


# -- the formats -------------------------------------------------------------------------------------------------------


class TagsFormat:
    """``ChatFormat`` of ``tags``: text after a turn is plain, and the turn continues after it."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None) -> None:
        """Take the template that frames messages after a turn that ended; None if there is none."""
        self._tokenizer, self._template = tokenizer, template
        self.end_ids = frozenset() if template is None else template.tokenizer.eos_token_ids

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:  # noqa: D102
        return self._tokenizer.prompt_ids(messages)

    def extension_ids(  # noqa: D102 - see ChatFormat
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[ToolSchema], *, has_end: bool
    ) -> Extension | None:
        if self._template is not None and has_end and not any(message.content for message in added):
            return Extension(self._template.header(added), is_new_message=True)  # else it reads as the policy's words
        pieces = [piece for message in added for piece in _plain(message, self._tokenizer)]
        return Extension(pieces, is_new_message=False)

    def parser(self, tools: Sequence[ToolSchema]) -> TurnParser:  # noqa: D102
        return TurnParser()

    def write(self, turn: Message) -> str:  # noqa: D102
        return turn.text

    def turn_ids(self, text: str) -> list[int]:  # noqa: D102
        return self._tokenizer.encode(text)


def _plain(message: Message, tokenizer: Tokenizer) -> list[Piece]:
    parts = (*((part, TokenKind.OBSERVATION) for part in parts_of(message.content)), (message.notice, TokenKind.NOTICE))
    return [
        (tokenizer.image_ids(part) if isinstance(part, Image) else tokenizer.encode(part), kind)
        for part, kind in parts
        if part
    ]


class TemplateFormat:
    """``ChatFormat`` of a chat template, with the calls of one family."""

    def __init__(self, tokenizer: PolicyTokenizer, name: GrammarName | None = None) -> None:
        """Take the grammar ``name``, or with None the template's.

        Raises:
            ConfigError: there is no chat template; or it writes calls in another grammar, or for None in no known one.
        """
        if not tokenizer.has_template or tokenizer.end_of_turn_id is None:
            raise ConfigError(
                "policy.chat_format: the policy has no chat template whose turns end with a token; set it to tags"
            )
        self._template = Template(tokenizer)
        self.end_ids = tokenizer.eos_token_ids
        self._end: list[Piece] = [([tokenizer.end_of_turn_id], TokenKind.NOTICE)]
        written = self._template.written_grammar()
        if name is None and written is None:
            raise ConfigError(
                "policy.chat_format: the policy's chat template writes no tool calls in a form that is known here; set "
                f"it to one of {', '.join(GRAMMARS)}, and the prompt explains that form"
            )
        if name is not None and written is not None and name != written:
            raise ConfigError(f"policy.chat_format: got {name}, but the chat template writes {written}; set it to auto")
        self.name = name or written
        self.grammar: Grammar = GRAMMARS[self.name or "hermes"]
        self._has_tools = written is not None

    def parser(self, tools: Sequence[ToolSchema]) -> TurnParser:  # noqa: D102 - see ChatFormat
        return self.grammar.parser(tools)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:  # noqa: D102
        pieces = self._template.prompt(*self._own(messages, tools))
        return [token for ids, _ in pieces for token in ids]

    def extension_ids(  # noqa: D102
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[ToolSchema], *, has_end: bool
    ) -> Extension | None:
        kind = TokenKind.OBSERVATION if added[0].content else TokenKind.NOTICE
        found = self._template.between(*self._own([*before, *added], tools), kind)
        return None if found is None else Extension(found if has_end else self._end + found, is_new_message=True)

    def write(self, turn: Message) -> str:  # noqa: D102
        written = self._template.turn(turn) if self._has_tools else ""
        return written or _in_grammar(turn, self.grammar)

    def turn_ids(self, text: str) -> list[int]:  # noqa: D102
        return self._template.turn_ids(text, self.grammar.marks) + self._end[0][0]

    def _own(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        """Return messages and tools in the form of the template, with results without the tags of their frame."""
        messages = [
            replace(one, content=changed(one.content, defuse_result)) if one.role == "tool" else one for one in messages
        ]
        return (messages, tools) if self._has_tools else (in_own_words(messages, tools, self.grammar), ())


class EndpointFormat:
    """``ChatFormat`` of a chat endpoint, which frames messages, tools and calls itself."""

    end_ids: frozenset[int] = frozenset()

    def __init__(self, tokenizer: EndpointTokenizer, name: GrammarName | None = None) -> None:
        """Take the tokenizer; with a grammar the prompt explains it and calls are text; None: the endpoint's calls."""
        self._tokenizer, self._grammar = tokenizer, GRAMMARS[name or "hermes"]
        self.is_native = name is None

    def parser(self, tools: Sequence[ToolSchema]) -> TurnParser:  # noqa: D102 - see ChatFormat
        return self._grammar.parser(tools)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:  # noqa: D102
        ids = self._tokenizer.tool_ids(tools) if self.is_native else []
        for message in self._own(messages, tools):
            ids += self._turn(message) if message.calls else self._tokenizer.prompt_ids([message])
        return ids

    def extension_ids(  # noqa: D102
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[ToolSchema], *, has_end: bool
    ) -> Extension:
        pieces: list[Piece] = []
        for message in self._own(added, ()):
            kind = TokenKind.OBSERVATION if message.content else TokenKind.NOTICE
            pieces.append((self._tokenizer.prompt_ids([Message(message.role, "")]), kind))
            pieces += _plain(message, self._tokenizer)
        return Extension(pieces, is_new_message=True)

    def write(self, turn: Message) -> str:  # noqa: D102
        return _in_grammar(turn, self._grammar)

    def turn_ids(self, text: str) -> list[int]:  # noqa: D102
        return self._tokenizer.sampled(text, len(self._tokenizer.encode(text)))

    def _turn(self, turn: Message) -> list[int]:
        """Return the ids of a message with calls that was not sampled here."""
        chat, text = _as_chat(turn.role, turn.text, turn.calls), self.write(turn)
        for call in chat["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return self._tokenizer.sampled(text, len(self._tokenizer.encode(text)), chat)

    def _own(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Sequence[Message]:
        """Return messages for the endpoint, with results without the control tokens of known model families."""
        harmless = [
            replace(one, content=changed(one.content, self._tokenizer.defuse)) if one.role == "tool" else one
            for one in messages
        ]
        return harmless if self.is_native else in_own_words(harmless, tools, self._grammar)


FORMATS: dict[str, Any] = {"auto": TemplateFormat, **{name: partial(TemplateFormat, name=name) for name in GRAMMARS}}
"""Known values of ``policy.chat_format`` besides ``tags``; any other is a class ``my_module:MyFormat``."""


def chat_format_of(config: SamplerConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of a recipe; ``auto`` means the format of its environment.

    Raises:
        ConfigError: the name is unknown, or the policy cannot have this format.
    """
    name, env_class = config.policy.chat_format, load_object(config.environment.env, ENVS)
    if name == "auto":
        is_env = inspect.isclass(env_class) and issubclass(env_class, TextEnv)
        name = "auto" if config.environment.agent is not None else env_class.chat_format if is_env else "tags"
    if isinstance(tokenizer, PolicyTokenizer):
        return make_chat_format(name, tokenizer)
    if isinstance(tokenizer, EndpointTokenizer) and name in FORMATS:
        return EndpointFormat(tokenizer, next((known for known in GRAMMARS if known == name), None))
    if name != "tags":
        raise ConfigError(
            f"policy.chat_format {name} needs the policy's tokenizer, and the engine {config.env_runners.engine} has "
            f"none here; set it to one of {', '.join(FORMATS)}"
        )
    return TagsFormat(tokenizer)


def make_chat_format(name: str, tokenizer: PolicyTokenizer) -> ChatFormat:
    """Return the chat format of a name; ``auto`` reads the template.

    Raises:
        ConfigError: the name is unknown, or the policy cannot have this format.
    """
    if name == "tags":
        return TagsFormat(tokenizer, Template(tokenizer) if tokenizer.has_template else None)
    made: ChatFormat = load_object(name, FORMATS)(tokenizer)
    return made


def in_own_words(messages: Sequence[Message], tools: Sequence[ToolSchema], grammar: Grammar) -> list[Message]:
    """Return messages for a template without tools: the first explains the tools, and results are a user's."""
    found: list[Message] = []
    for last, message in zip([None, *messages], messages, strict=False):
        if message.role == "assistant":
            found.append(Message("assistant", _in_grammar(message, grammar)))
        elif message.role == "tool":
            content = joined("<tool_response>\n", message.content, "\n</tool_response>")
            if last is not None and last.role == "tool":
                content = joined(found.pop().content, "\n", content)
            found.append(Message("user", content, notice=message.notice))
        else:
            found.append(message)
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        first, words = found[0], _OWN_TOOLS.format(form=grammar.form, schemas=schemas)
        found[0] = Message(first.role, joined(f"{words}\n\n", first.content), notice=first.notice)
    return found


def _in_grammar(turn: Message, grammar: Grammar) -> str:
    return "\n".join(filter(None, (turn.text, grammar.write(turn.calls) if turn.calls else "")))


# -- the chat template -------------------------------------------------------------------------------------------------


class Template:
    """Chat template, applied as text and as token ids."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        """Use the tokenizer's template."""
        self.tokenizer = tokenizer
        self._end_of_turn = re.compile("|".join(map(re.escape, sorted(tokenizer.end_texts, key=len, reverse=True))))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """Return the pieces of a whole conversation up to the policy's turn."""
        holder = _Holder(self.tokenizer.added_texts)
        chat = [
            _as_chat(
                message.role,
                holder.hold_parts(joined(message.content, message.notice), is_turn=message.role == "assistant"),
                [replace(call, arguments=holder.hold_in(call.arguments)) for call in message.calls],
            )
            for message in messages
        ]
        text = self.tokenizer.render(_with_ids(chat), holder.hold_in(tools))
        return self._encode(text, holder.held, TokenKind.PROMPT)

    def between(self, messages: Sequence[Message], tools: Sequence[ToolSchema], kind: TokenKind) -> list[Piece] | None:
        """Return the pieces between the end of the policy's last turn and its next one.

        Return None if the messages up to the last turn are framed differently than before it was sampled.
        """
        turn = max(number for number, message in enumerate(messages) if message.role == "assistant")
        asked, _ = self._render(messages[:turn], tools)
        whole, held = self._render(messages, tools)
        if not whole.startswith(asked):
            return None
        content, calls = _placed(messages[turn], sum(one.role == "assistant" for one in messages[:turn]))
        position = len(asked)
        for place in re.findall(_PRIVATE, content + "".join(call.name for call in calls)):
            if (position := whole.find(place, position)) < 0:
                return None
        end = self._end_of_turn.search(whole, position)
        return None if end is None else self._encode(whole[end.end() :], held, kind)

    def turn(self, turn: Message) -> str:
        """Return the text of a policy's turn as the template writes it; empty if the template changes it."""
        chat = _with_ids([_as_chat("user", "a"), _as_chat("assistant", turn.text, turn.calls)])
        asked = self.tokenizer.render(chat[:1], ())
        whole = self.tokenizer.render(chat, (), is_prompt=False)
        end = self._end_of_turn.search(whole, len(asked))
        return whole[len(asked) : end.start()] if end is not None and whole.startswith(asked) else ""

    def turn_ids(self, text: str, marks: Sequence[str]) -> list[int]:
        """Return the ids of a turn, in which only ``marks`` and the tags of thoughts can be added tokens."""
        holder = _Holder([name for name in self.tokenizer.added_texts if name not in marks])
        pieces = self._encode(holder.hold(text, is_turn=True), holder.held, TokenKind.MODEL)
        return [token for ids, _ in pieces for token in ids]

    def header(self, added: Sequence[Message]) -> list[Piece]:
        """Return messages of a user with their frame, as they follow a turn in any conversation."""
        whole, held = self._render([Message("user", "a"), Message("assistant", "b"), *added], ())
        _, _, behind = whole.rpartition(_placed(Message("assistant", "b"), 0)[0])
        end = self._end_of_turn.search(behind)
        return self._encode(behind if end is None else behind[end.end() :], held, TokenKind.NOTICE)

    def written_grammar(self) -> GrammarName | None:
        """Return the grammar in which the template writes calls; None if it writes no known one."""
        schema = {"name": _PROBE.name, "description": "Try it.", "parameters": _PROBE_PARAMETERS}
        tools = [{"type": "function", "function": schema}]
        chat = _with_ids([_as_chat("user", "a"), _as_chat("assistant", "", [_PROBE])])
        try:
            asked = self.tokenizer.render(chat[:1], tools)
            whole = self.tokenizer.render(chat, tools, is_prompt=False)
        except ConfigError:  # it refuses unknown input
            return None
        turn, *_ = self._end_of_turn.split(whole.removeprefix(asked), maxsplit=1)
        found = (name for name, grammar in GRAMMARS.items() if parse_turn(turn, grammar, tools).calls == (_PROBE,))
        return next(found, None)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[str, dict[str, str | Image]]:
        """Return the text up to the policy's turn with placeholders and marks of kinds, and the placeholders' texts."""
        holder, chat, num_turns = _Holder(self.tokenizer.added_texts), list[dict[str, Any]](), 0
        for message in messages:
            if message.role == "assistant":
                chat.append(_as_chat(message.role, *_placed(message, num_turns)))
                num_turns += 1
            else:
                content = _marked(holder.hold_parts(message.content), _OBSERVATION)
                chat.append(_as_chat(message.role, content + _marked(holder.hold(message.notice), _NOTICE)))
        return self.tokenizer.render(_with_ids(chat), tools), holder.held

    def _encode(self, text: str, held: Mapping[str, str | Image], kind: TokenKind) -> list[Piece]:
        """Return the ids of a rendered text: held texts are plain text, all other text is the template's."""
        pieces: list[Piece] = []
        for part in re.split(f"({_HELD})", text):
            if part in held:
                one, tokenizer = held[part], self.tokenizer
                ids = tokenizer.image_ids(one) if isinstance(one, Image) else tokenizer.encode_plain(one)
                pieces.append((ids, kind))
                continue
            plain, begins = "", [(0, kind)]
            for one in re.split(f"([{''.join(_MARKS)}])", part):
                if one in _MARKS:
                    begins.append((len(plain), _MARKS[one]))
                else:
                    plain += one
            ids, starts = self.tokenizer.encode_frame(plain)
            for (begin, own), (end, _) in zip(begins, [*begins[1:], (len(plain) + 1, kind)], strict=True):
                pieces.append(([token for token, at in zip(ids, starts, strict=True) if begin <= at < end], own))
            kind = begins[-1][1]
        return [piece for piece in pieces if piece[0]]


class _Holder:
    """Puts placeholder characters in the places of control tokens' names, and of images."""

    def __init__(self, control: Sequence[str]) -> None:
        """Take the names ``control``; private characters in a text are replaced too."""
        self.held: dict[str, str | Image] = {}
        """Text or image of each placeholder character."""
        self._places: dict[str, str] = {}
        self._control = sorted(control, key=len, reverse=True)

    def hold(self, text: str, *, is_turn: bool = False) -> str:
        """Return the text with names replaced; ``is_turn``: a template reads the thoughts in a policy's turn."""
        names = [name for name in self._control if name in text and not (is_turn and name in _THOUGHT_TAGS)]
        return re.sub("|".join([*map(re.escape, names), _PRIVATE]), self._hold, text)

    def hold_parts(self, content: Content, *, is_turn: bool = False) -> str:
        """Return a content with names and images replaced; a different character stands for each image."""
        return "".join(
            self._hold_image(part) if isinstance(part, Image) else self.hold(part, is_turn=is_turn)
            for part in parts_of(content)
        )

    def _hold_image(self, image: Image) -> str:
        place = chr(_FIRST_HELD + len(self.held))
        self.held[place] = image
        return place

    def hold_in(self, value: Any) -> Any:
        """Return a value of JSON with names replaced in all its texts."""
        if isinstance(value, Mapping):
            return {self.hold(key): self.hold_in(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hold_in(one) for one in value]
        return self.hold(value) if isinstance(value, str) else value

    def _hold(self, found: re.Match[str]) -> str:
        if found[0] not in self._places:
            place = chr(_FIRST_HELD + len(self.held))
            self._places[found[0]], self.held[place] = place, found[0]
        return self._places[found[0]]


def _placed(turn: Message, number: int) -> tuple[str, list[CallRequest]]:
    """Return content and calls of a policy's turn with placeholders for thought, text and names of calls."""
    thought, text, name = (chr(_FIRST_TURN + 3 * number + part) for part in range(3))
    calls = [CallRequest(name, {})] if turn.calls else []
    before, closed, behind = turn.text.rpartition(END_OF_THOUGHT)
    content = f"{THINK}\n{thought}\n{END_OF_THOUGHT}\n\n" if closed and before.strip() else ""
    return content + (text if behind.strip() or not calls else ""), calls


def _marked(content: str, mark: str) -> str:
    """Return a content with the mark of its kind in front, after white space, which a template may strip."""
    if not content or content.startswith("<tool_response>"):  # Qwen3's template looks for this beginning
        return content
    blanks = len(content) - len(content.lstrip())
    return content[:blanks] + mark + content[blanks:]


def _as_chat(role: str, content: str, calls: Sequence[CallRequest] = ()) -> dict[str, Any]:
    """Return a message in the form of chat templates; ``_with_ids`` completes it."""
    found: dict[str, Any] = {"role": role, "content": content}
    if calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        found["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return found


def _with_ids(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number calls and results, with nine characters, as Mistral's templates require."""
    for number, call in enumerate(call for message in chat for call in message.get("tool_calls", ())):
        call["id"] = f"{number:09d}"
    for number, message in enumerate(one for one in chat if one["role"] == "tool"):
        message["tool_call_id"] = f"{number:09d}"
    return chat
