"""Tool calls in the text of a turn: what is read, what is malformed, and when a call is complete."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from envs.grammars.calls import GRAMMARS, GrammarName, ParsedTurn, parse_turn
from ragr1_actors.core.types import CallRequest

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": "string"}}}
FIND = {
    "type": "object",
    "properties": {
        "queries": {"type": "array", "items": {"type": "string"}},
        "is_new": {"type": "boolean"},
        "near": {"type": "object"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("add", ADD), ("find", FIND))
]
ODD = "x; {y}, [z] (w) \"q\" 'p' \\ é 🎉 </tool_call> ]}) \n\n end"
families = pytest.mark.parametrize("name", GRAMMARS)


def call(name: str, **arguments: object) -> CallRequest:
    return CallRequest(name, arguments)


CALLS = (call("add", a=1, b=2.5, c="two words"), call("find", queries=["Ana Bell", "Bo"], is_new=True, near={"x": [1]}))


def parse(turn: str, name: GrammarName) -> ParsedTurn:
    return parse_turn(turn, GRAMMARS[name], TOOLS)


@families
def test_what_is_written_is_read(name: GrammarName) -> None:
    turn = f"<think>\nadd(a=1) <tool_call> {{}}</think>\n\n{GRAMMARS[name].write(CALLS)}"
    found = parse(turn, name)
    assert (found.calls, found.problem, found.text) == (CALLS, "", "")
    assert found.content == turn[: turn.index("</think>") + len("</think>")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("before", ["", "<think>look</think>", "<think>a <tool_call></think> <think>b</think>"])
def test_a_thought_behind_a_call_or_in_an_argument_is_no_content(name: GrammarName, before: str) -> None:
    written = GRAMMARS[name].write((call("add", c="what <think> means"),))
    for turn in (f"{before}{written}", f"{before}{written}<think>b</think>"):
        found = parse(turn, name)
        assert (found.content, len(found.calls)) == (before, 1)


@families
def test_odd_texts_in_arguments_are_kept(name: GrammarName) -> None:
    is_marked = name in ("hermes", "qwen3_coder")  # their mark cannot be written inside a text
    odd = ODD.replace("</tool_call>", "") if is_marked else ODD
    calls = (call("add", c=odd), call("find", queries=[odd, ""]))
    assert parse(GRAMMARS[name].write(calls), name).calls == calls


@families
def test_calls_are_fed_once_each_as_soon_as_they_are_complete(name: GrammarName) -> None:
    turn = f"<think>a</think>{GRAMMARS[name].write(CALLS)}"
    parser, found = GRAMMARS[name].parser(TOOLS), []
    for end in range(1, len(turn) + 1):
        found += [(end, one) for one in parser.feed(turn[:end])]
    assert parser.end(turn).calls == CALLS
    ends = [end for end, _ in found]
    assert [one for _, one in found] == list(CALLS[: len(found)])
    assert ends[0] < turn.rindex("find")  # before the second begins
    if name != "qwen3_coder":  # white space may follow its last mark
        assert len(ends) == 2


@families
def test_a_turn_that_is_cut_anywhere_has_no_call_that_is_not_whole(name: GrammarName) -> None:
    written = GRAMMARS[name].write(CALLS)
    for end in range(len(written)):
        found = parse(written[:end], name)
        assert found.calls in ((), CALLS[:1])
        assert not (found.calls and '"find' in written[:end])
    assert parse(written[: written.rindex("find") + 8], name).problem


@families
def test_a_turn_without_calls_is_its_text(name: GrammarName) -> None:
    found = parse("<think>a {b} [c]</think>\n\nRiga, said [1] and {2}.", name)
    assert found == ParsedTurn("<think>a {b} [c]</think>\n\nRiga, said [1] and {2}.", "Riga, said [1] and {2}.")


@families
def test_a_call_in_a_thought_is_text(name: GrammarName) -> None:
    written = GRAMMARS[name].write(CALLS)
    found = parse(f"<think>I could {written}</think>Riga", name)
    assert (found.calls, found.text, found.is_thinking) == ((), "Riga", False)
    found = parse(f"<think>a</think><think>I could\n{written}", name)
    assert (found.calls, found.problem, found.is_thinking) == ((), "", True)


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("hermes", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", "<tool_call>\n[1]\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"c": "\\ud800"}}\n</tool_call>'),
        ("hermes", "<tool_call>\n{'name': 'add'}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call><tool_call>no</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 100_000),
        ("qwen3_coder", "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\nand more</function>\n</tool_call>",
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}} and'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}} or {"name": "add", "parameters": {}}'),
        ("llama3_json", '{"name": "add", "parameters": 3}'),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(a=b)]"),
        ("pythonic", "[add(a={1, 2})]"),
        ("pythonic", "[add(**{'a': 1})]"),
        ("pythonic", "[add(a=1), find(queries=[]"),
        ("pythonic", "[add(a=1)] and"),
        ("pythonic", "[add(a=" + "(" * 5_000 + ")" * 5_000 + ")]"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}'),
        ("mistral", "[TOOL_CALLS] [add]"),
        ("mistral", '[TOOL_CALLS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1'),
    ],
)
def test_a_malformed_block_is_said_and_has_no_calls(name: GrammarName, turn: str) -> None:
    found = parse(turn, name)
    assert found.calls == ()
    assert found.problem
    assert "\n" not in found.problem
    assert found.content == turn


@pytest.mark.parametrize(
    ("name", "turn", "expected"),
    [
        ("hermes", 'Well.\n<tool_call>{"name": "add"}</tool_call>', call("add")),
        ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>", call("add")),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>", call("add", a=7)),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', call("add", a=1)),
        ("llama3_json", '{"name": "add", "arguments": {"a": 1}}', call("add", a=1)),
        ("pythonic", "<|python_start|>[add(a=-1)]<|python_end|>", call("add", a=-1)),
        ("pythonic", "[math.add(a=(1, 2))]", call("math.add", a=[1, 2])),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', call("add", a=1)),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', call("add", a=1)),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', call("add", a=1)),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', call("add", a=1)),
    ],
)
def test_other_spellings_of_a_family(name: GrammarName, turn: str, expected: CallRequest) -> None:
    assert parse(turn, name).calls == (expected,)


def test_two_calls_with_names_before_their_arguments() -> None:
    turn = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]find[ARGS]{"queries": ["{"]}'
    assert parse(turn, "mistral").calls == (call("add", a=1), call("find", queries=["{"]))


def test_an_answer_in_json_is_no_call() -> None:
    assert parse('{"city": "Riga"}', "llama3_json").text == '{"city": "Riga"}'
    assert parse("[Riga, Oslo]", "pythonic").text == "[Riga, Oslo]"


@families
def test_random_texts_and_pieces_of_calls_are_read_without_an_error(name: GrammarName) -> None:
    rng = random.Random(0)
    written = GRAMMARS[name].write(CALLS)
    pieces = [*"(){}\"'\\\né", ")]", "add", "<think>", "</think>", "<tool_call>", "[TOOL_CALLS]"]
    for _ in range(300):
        start = rng.randrange(len(written))
        text = "".join(rng.choices([*pieces, written, written[start : start + 30]], k=rng.randrange(1, 12)))
        parser = GRAMMARS[name].parser(TOOLS)
        for end in sorted(rng.sample(range(len(text) + 1), min(4, len(text)))):
            parser.feed(text[:end])
        found = parser.end(text)
        assert found == parse(text, name)
        assert not (found.calls and found.problem)
        json.dumps([one.arguments for one in found.calls], allow_nan=False)


@pytest.mark.parametrize("function", [{"name": "look"}, {"name": "look", "parameters": None}])
def test_a_tool_may_have_no_parameters(function: Any) -> None:
    turn = "<tool_call>\n<function=look>\n</function>\n</tool_call>"
    (call,) = parse_turn(turn, GRAMMARS["qwen3_coder"], [{"type": "function", "function": function}]).calls
    assert call.arguments == {}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Place"}], "description": "Where."}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "true", True),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/nothing"}, "2", "2"),
        ({"$ref": "#/properties/a"}, "2", "2"),
        ({"type": ["integer", "null"]}, "2", 2),
        ({}, "2", "2"),
    ],
)
def test_arguments_without_quotes_have_the_types_of_their_schema(schema: Any, written: str, value: Any) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"Place": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    turn = f"<tool_call>\n<function=look>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_turn(turn, GRAMMARS["qwen3_coder"], [tool]).calls
    assert call.arguments == {"a": value}
