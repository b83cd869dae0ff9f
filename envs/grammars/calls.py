r"""Grammars of tool calls by model family: pure functions between the text of a turn and its calls.

::

    hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>     Qwen2.5, Qwen3, Hermes
    qwen3_coder  <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>    Qwen3.5 too
    llama3_json  {"name": "add", "parameters": {"a": 1}}                               Llama 3.1 to 3.3
    pythonic     [add(a=1)]                                                            Llama 3.2 and 4
    mistral      [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]                 Mistral, Nemo, Small

A turn has thoughts, text and calls. A ``<think>`` without an end reaches to the end of the turn: calls in it are text.
A block of calls that is cut, or that its family does not write so, makes the whole turn malformed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from envs.grammars.tags import THINK
from ragr1_actors.core.errors import one_line, shortened
from ragr1_actors.core.types import CallRequest

ToolSchema = Mapping[str, Any]
"""A tool as a chat template takes it: ``{"type": "function", "function": {"name": .., "parameters": ..}}``."""
GrammarName = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral"]
END_OF_THOUGHT = "</think>"
_CODER_CALL = r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"
_CODER_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_LLAMA_START = re.compile(r"(\s*(?:<\|python_tag\|>\s*)?)\{\s*\"name\"\s*:")
_PYTHON_START = re.compile(r"(\s*(?:<\|python_start\|>\s*)?)\[\s*[A-Za-z_][\w.]*\s*\(")
_PYTHON_TAG = re.compile(r"<\|python_(?:tag|start|end)\|>")
_MISTRAL_START = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*\Z")


_PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Parts of a turn: ``ParsedTurn("<think>two</think>", "", (CallRequest("search", {"queries": ["Ana"]}),))``."""

    content: str = ""
    """Text before the calls, thoughts with their tags included: the content of the turn's message."""
    text: str = ""
    """Text outside thoughts and calls."""
    calls: tuple[CallRequest, ...] = ()
    problem: str = ""
    """Reason why the turn is malformed; it then has no calls. Empty: the turn is well formed."""
    is_thinking: bool = False
    """Whether the turn ends inside a thought."""


class TurnParser:
    """Reads one turn, also while it is being sampled; this one a turn that can have no calls."""

    def feed(self, partial: str) -> list[CallRequest]:
        """Take the turn's whole text so far; return the calls that were completed since the last one.

        The calls are a hint: the turn may still become malformed. No text is read twice.
        """
        return []

    def end(self, turn: str) -> ParsedTurn:
        """Take the whole turn and return its parts."""
        return ParsedTurn(turn, turn.strip())


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of the calls of one model family."""

    parser: Callable[[Sequence[ToolSchema]], TurnParser]
    """Makes the parser of one turn. The schemas of the tools give the types of arguments without quotes."""
    write: Callable[[Sequence[CallRequest]], str]
    """Writes the calls of a turn as the family's chat template does."""
    form: str
    """Form of the calls, for prompts."""
    marks: tuple[str, ...] = ()
    """Added tokens that a turn writes around its calls, if the tokenizer has them."""


def parse_turn(turn: str, grammar: Grammar, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
    """Return the parts of a whole turn.

    ``parse_turn('<think>a</think>[add(a=1)]', GRAMMARS["pythonic"]).calls == (CallRequest("add", {"a": 1}),)``
    """
    return grammar.parser(tools).end(turn)


def read_call(value: object, *argument_keys: str) -> CallRequest:
    """Return the call of a JSON object whose arguments have one of some keys.

    Raises:
        ValueError: it is not such an object, or a value in it cannot be written as JSON or text.
    """
    expected = f'expected {{"name": .., "{argument_keys[0]}": {{..}}}}'
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
        raise ValueError(f"a call is no object with a name, {expected}")
    arguments: object = next((value[key] for key in argument_keys if key in value), {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']} are no object, {expected}")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a set, NaN, or half of a surrogate pair
        raise ValueError(f"an argument of {value['name']} is no JSON: {one_line(error)}") from error
    return CallRequest(value["name"].strip(), arguments)


# -- blocks between marks ----------------------------------------------------------------------------------------------


class MarkedParser(TurnParser):
    """Reads calls between marks, with transformers' parser."""

    def __init__(self, field: Mapping[str, Any], tools: Sequence[ToolSchema]) -> None:
        """Read ``field`` of a response template of ``transformers.utils.chat_parsing``."""
        from transformers.utils.chat_parsing import ResponseParser

        fields = {
            "thought": {"open": THINK, "close": END_OF_THOUGHT, "repeats": True, "join": "\n"},
            "text": {"content_args": {"strip": False}, "repeats": True, "join": ""},
            "calls": field,
        }
        spec = {"start_anchor": "\n", "fields": fields}
        self._parser = ResponseParser(spec, prefix="", tools=[_with_types(tool) for tool in tools])
        self._num_read, self._problem, self._region, self._block = 0, "", "", ""
        self._calls: list[CallRequest] = []

    def feed(self, partial: str) -> list[CallRequest]:  # noqa: D102 - see TurnParser
        new, self._num_read = partial[self._num_read :], len(partial)
        return self._note(lambda: self._parser.feed(new))

    def end(self, turn: str) -> ParsedTurn:  # noqa: D102
        self.feed(turn)
        is_thinking, message = self._region == "thought", dict[str, Any]()

        def finalize() -> list[dict[str, Any]]:
            found, events = self._parser.finalize()
            message.update(found)
            return list(events)

        if self._note(finalize) and not turn.rstrip().endswith("</tool_call>"):  # it closes an open block itself
            self._problem = "a block of calls has no end"
        text = message.get("text", "").strip()
        if "<tool_call>" in text:
            self._problem = self._problem or "<tool_call> begins no call"
        calls = () if self._problem else tuple(self._calls)
        begin = _first_call(turn) if calls else len(turn)
        return ParsedTurn(turn[:begin].rstrip(), text, calls, self._problem, is_thinking and not self._problem)

    def _note(self, read_on: Callable[[], list[dict[str, Any]]]) -> list[CallRequest]:
        num_before = len(self._calls)
        try:
            for event in [] if self._problem else read_on():
                match event:
                    case {"type": "region_open", "field": field}:
                        self._region, self._block = field, ""
                    case {"type": "region_chunk", "text": text}:
                        self._block += text
                    case {"type": "region_close", "field": "calls", "value": value}:
                        self._region = ""
                        self._calls.append(read_call(value["function"], "arguments"))
                        _check_parameters(self._block)
                    case {"type": "region_close"}:
                        self._region = ""
        except (ValueError, RecursionError) as error:
            self._problem = one_line(error)
        return self._calls[num_before:]


def _with_types(tool: ToolSchema) -> dict[str, Any]:
    """Return a tool whose arguments have their types beside them, where transformers looks for them."""
    function = tool["function"]
    root = function.get("parameters") or {}
    typed = {
        name: {**one, "type": types} if (types := _types(one, root)) else one
        for name, one in root.get("properties", {}).items()
    }
    return {**tool, "function": {**function, "parameters": {**root, "properties": typed}}}


def own_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types at the key ``type`` of a JSON schema: ``["integer", "null"]``; empty without the key."""
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def _types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> list[str]:
    """Return the types that a JSON schema allows, as far as it names them; references point into ``root``."""
    if not isinstance(schema, Mapping) or not depth:
        return []
    others = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
    if (reference := str(schema.get("$ref", ""))).startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        others.append(target)
    found = [*own_types(schema), *(name for one in others for name in _types(one, root, depth - 1))]
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    return found or [name for name, kind in _KINDS.items() if any(type(value) is kind for value in values)]


_KINDS = {"integer": int, "number": float, "boolean": bool, "null": type(None), "array": list, "object": dict}
"""JSON types except text; a value with none of them is text."""


def _check_parameters(block: str) -> None:
    """Refuse text of ``qwen3_coder`` outside its parameters, which the parser of transformers passes over."""
    if "<parameter=" in block and (left := re.sub(_CODER_PARAMETER, "", block, flags=re.DOTALL).strip()):
        raise ValueError(f"{shortened(left)} is in no parameter of the call")


# -- blocks in brackets ------------------------------------------------------------------------------------------------


class BracketScanner:
    """Finds the outermost groups of one kind of brackets in a growing text; brackets inside strings are text."""

    def __init__(self, opening: str, outer: str, quotes: str) -> None:
        """Find groups that begin with ``opening`` in at most the brackets ``outer``."""
        self._opening, self._outer, self._quotes = opening, [_PAIRS[one] for one in outer], quotes
        self._position, self._start, self._quote = 0, 0, ""
        self._expected: list[str] = []  # closing brackets

    def read_on(self, text: str) -> list[slice]:
        """Take the text so far and return the positions of the groups that ended since the last call."""
        found: list[slice] = []
        while self._position < len(text):
            character = text[self._position]
            if self._quote:
                if character == "\\":
                    self._position += 1
                elif character == self._quote:
                    self._quote = ""
            elif character in self._quotes:
                self._quote = character
            elif character in _PAIRS:
                if character == self._opening and self._is_outermost():
                    self._start = self._position
                self._expected.append(_PAIRS[character])
            elif self._expected and character == self._expected[-1]:
                self._expected.pop()
                if character == _PAIRS[self._opening] and self._is_outermost():
                    found.append(slice(self._start, self._position + 1))
            self._position += 1
        return found

    def _is_outermost(self) -> bool:
        return self._expected == self._outer[: len(self._expected)] and self._opening not in self._expected


class BracketParser(TurnParser):
    """Reads calls that are groups of brackets, after all thoughts."""

    def __init__(self, family: BracketFamily) -> None:
        """Read the calls of a family."""
        self._family = family
        self._start: int | None = None  # where the block begins
        self._scanner = BracketScanner(family.opening, family.outer, family.quotes)
        self._end = 0  # end of the last call in the block
        self._calls: list[CallRequest] = []
        self._problem = ""

    def feed(self, partial: str) -> list[CallRequest]:  # noqa: D102 - see TurnParser
        if self._start is None:
            self._start = self._find_block(partial)
        if self._start is None or self._problem:
            return []
        block, num_before = partial[self._start :], len(self._calls)
        try:
            for group in self._scanner.read_on(block):
                self._calls.append(self._family.read(block[self._end : group.start], block[group]))
                self._end = group.stop
        except (ValueError, RecursionError) as error:
            self._problem = one_line(error)
        return self._calls[num_before:]

    def end(self, turn: str) -> ParsedTurn:  # noqa: D102
        self.feed(turn)
        if self._start is None:
            begin = _end_of_thoughts(turn)
            is_thinking = turn.startswith(THINK, begin)
            return ParsedTurn(turn, "" if is_thinking else turn[begin:].strip(), is_thinking=is_thinking)
        content, block = _PYTHON_TAG.sub("", turn[: self._start]).rstrip(), turn[self._start :]
        text = content[_end_of_thoughts(content) :].strip()
        if not self._problem and not (self._calls and self._family.is_end(block, block[self._end :])):
            self._problem = f"a block of calls ends with {shortened(repr(block[self._end :]))}"
        if self._problem:
            return ParsedTurn(turn, text, problem=self._problem)
        return ParsedTurn(content, text, tuple(self._calls))

    def _find_block(self, turn: str) -> int | None:
        """Return the position of the first block of calls outside thoughts; None if there is none so far."""
        position = 0
        while True:
            thought = turn.find(THINK, position)
            found = self._family.find_block(turn, position)
            if found is not None and (thought < 0 or found.end(1) < thought):
                return found.end(1)
            end = turn.find(END_OF_THOUGHT, thought)
            if thought < 0 or end < 0:
                return None
            position = end + len(END_OF_THOUGHT)


def unclosed_thought(turn: str) -> str:
    """Return ``<think>`` if a turn ends inside a thought, else an empty text."""
    return THINK if turn.startswith(THINK, _end_of_thoughts(turn)) else ""


def _end_of_thoughts(text: str) -> int:
    """Return where the thoughts of a turn end, or where an unclosed thought begins."""
    position = 0
    while (begin := text.find(THINK, position)) >= 0:
        end = text.find(END_OF_THOUGHT, begin)
        if end < 0:
            return begin
        position = end + len(END_OF_THOUGHT)
    return position


def _first_call(turn: str) -> int:
    """Return where the first ``<tool_call>`` that is in no thought begins; others may follow, or be an argument."""
    position = 0
    while 0 <= (thought := turn.find(THINK, position)) < turn.find("<tool_call>", position):
        position = max(thought + 1, turn.find(END_OF_THOUGHT, thought))
    return turn.find("<tool_call>", position)


@dataclass(frozen=True, slots=True)
class BracketFamily:
    """Brackets, quotes and readers of a family, for ``BracketParser``."""

    opening: str
    outer: str
    quotes: str
    find_block: Callable[[str, int], re.Match[str] | None]
    """Finds the beginning of the block of calls in a turn, after a position: the block begins where group 1 ends."""
    read: Callable[[str, str], CallRequest]
    """Reads a call from its group of brackets and the text between the group before and this group."""
    is_end: Callable[[str, str], bool]
    """Returns whether a block, given with the text after its last call, is complete."""


def _read_llama(before: str, group: str) -> CallRequest:
    if before.strip() not in ("", ";", ","):
        raise ValueError(f"{shortened(before.strip())} between two calls, expected a semicolon")
    return read_call(json.loads(group), "parameters", "arguments")


def _read_python(before: str, group: str) -> CallRequest:
    source = before.strip().lstrip("[,").strip() + group
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            raise ValueError(f"{shortened(source)} is no call with arguments by name")
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        return read_call({"name": ast.unparse(call.func), "arguments": _as_json(arguments)}, "arguments")
    except (SyntaxError, MemoryError) as error:  # a hundred nested brackets raise MemoryError
        raise ValueError(f"{shortened(source)} is no Python: {one_line(error)}") from error


def _as_json(value: Any) -> Any:
    """Return a Python literal with its tuples as lists."""
    if isinstance(value, dict):
        return {str(key): _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, list | tuple) else value


def _read_mistral(before: str, group: str) -> CallRequest:
    before = before.replace(_MISTRAL_START, "").strip()
    if before in ("[", ","):
        return read_call(json.loads(group), "arguments")
    if (name := _MISTRAL_NAME.fullmatch(before)) is None:
        raise ValueError(f"{shortened(repr(before))} before {{, expected the name of a tool")
    return read_call({"name": name[1], "arguments": json.loads(group)}, "arguments")


def _is_end_of_mistral(block: str, left: str) -> bool:
    is_list = block.removeprefix(_MISTRAL_START).lstrip().startswith("[")
    return left.strip() == ("]" if is_list else "")


# -- the families ------------------------------------------------------------------------------------------------------


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write_coder(call: CallRequest) -> str:
    written = {name: value if isinstance(value, str) else _json(value) for name, value in call.arguments.items()}
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _write_python(call: CallRequest) -> str:
    written = (
        f"{name}={_json(value) if isinstance(value, str) else repr(value)}" for name, value in call.arguments.items()
    )
    return f"{call.name}({', '.join(written)})"


def _named(call: CallRequest, key: str = "arguments") -> str:
    return f'{{"name": {_json(call.name)}, "{key}": {_json(call.arguments)}}}'


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_HERMES = {
    **{"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    "transform": {"function": "{content}"},
}
_CODER = {
    **{"open_pattern": _CODER_CALL, "close_pattern": r"</function>\s*</tool_call>", "repeats": True},
    **{"content": "xml-inline", "content_args": {"tag_pattern": _CODER_PARAMETER}},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}
_LLAMA = BracketFamily("{", "", '"', _LLAMA_START.match, _read_llama, lambda block, left: left.strip() in ("", ";"))
_PYTHON = BracketFamily(
    *("(", "[", "\"'", _PYTHON_START.match, _read_python),
    lambda block, left: _PYTHON_TAG.sub("", left).replace(" ", "").strip() in ("]", ",]"),
)
_MISTRAL = BracketFamily(
    "{", "[", '"', re.compile("()" + re.escape(_MISTRAL_START)).search, _read_mistral, _is_end_of_mistral
)

GRAMMARS: dict[GrammarName, Grammar] = {
    "hermes": Grammar(
        partial(MarkedParser, _HERMES),
        lambda calls: "\n".join(f"<tool_call>\n{_named(call)}\n</tool_call>" for call in calls),
        '<tool_call>\n{"name": name of the tool, "arguments": object with its arguments}\n</tool_call>',
        _TOOL_CALL,
    ),
    "qwen3_coder": Grammar(
        partial(MarkedParser, _CODER),
        lambda calls: "\n".join(map(_write_coder, calls)),
        "<tool_call>\n<function=name of the tool>\n<parameter=name of the argument>\nvalue\n</parameter>\n"
        "</function>\n</tool_call>",
        _TOOL_CALL,
    ),
    "llama3_json": Grammar(
        lambda tools: BracketParser(_LLAMA),
        lambda calls: "; ".join(_named(call, "parameters") for call in calls),
        '{"name": name of the tool, "parameters": object with its arguments}',
        ("<|python_tag|>",),
    ),
    "pythonic": Grammar(
        lambda tools: BracketParser(_PYTHON),
        lambda calls: f"[{', '.join(map(_write_python, calls))}]",
        "[name_of_the_tool(name_of_the_argument=value)]",
    ),
    "mistral": Grammar(
        lambda tools: BracketParser(_MISTRAL),
        lambda calls: f"{_MISTRAL_START} [{', '.join(map(_named, calls))}]",
        f'{_MISTRAL_START} [{{"name": name of the tool, "arguments": object with its arguments}}]',
        (_MISTRAL_START,),
    ),
}
"""Grammars of all known families, by name."""
