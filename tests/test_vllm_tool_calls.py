"""Tool calls as vLLM's parsers read them, which are what a served policy is read by: the same, but for a list."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_envs_call_grammars import CALLS, ODD, TOOLS, call
from tool_templates import write_tool_family
from transformers import AutoTokenizer

from envs.grammars.calls import GRAMMARS, GrammarName, parse_turn
from ragr1_actors.core.types import CallRequest

pytestmark = pytest.mark.vllm
FAMILIES: dict[GrammarName, str] = {
    "hermes": "qwen2.5",
    "qwen3_coder": "qwen3.5",
    "llama3_json": "llama3.1",
    "pythonic": "llama3.2",
    "mistral": "mistral",
}
ADD = {"name": "add", "arguments": {"a": 1}}
ALIKE: list[tuple[GrammarName, str]] = [
    ("hermes", 'Well.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>\n{}\n</tool_call>"),
    ("hermes", "<tool_call>\n{'name': 'add'}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>7</parameter></function></tool_call>"),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    ("llama3_json", '{"name": "add", "arguments": {"a": 1}}'),
    ("llama3_json", '{"city": "Riga"}'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}'),
    ("pythonic", "[add(a=-1)]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[Riga, Oslo]"),
    ("pythonic", "Well [add(a=1)]"),
    ("pythonic", "[add(a=1)"),
    ("mistral", f"[TOOL_CALLS][{json.dumps(ADD)}]"),
    ("mistral", f"Well.[TOOL_CALLS] [{json.dumps(ADD)}]"),
    ("mistral", f"[TOOL_CALLS] [{json.dumps(ADD)}"),
]
DIFFERENT: list[tuple[GrammarName, str, list[CallRequest], list[CallRequest], str]] = [
    ("hermes", f"<tool_call>\n{json.dumps(ADD)}", [], [call("add", a=1)], "a block that was cut is malformed here"),
    (
        "hermes",
        f"<think><tool_call>{json.dumps(ADD)}</tool_call></think>Riga",
        [],
        [call("add", a=1)],
        "a thought is text",
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [call("add")], [], "a tool may have no arguments"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        [],
        [call("add", a=1)],
        "a function without its end is malformed here",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        [],
        [call("add")],
        "a parameter without its end is lost there",
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}} and', [], [call("add", a=1)], "text behind calls"),
    ("llama3_json", 'So: {"name": "add", "parameters": {"a": 1}}', [], [call("add", a=1)], "JSON in an answer is text"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', [call("add", a=1)], [], "vLLM reads it with Mistral's own tokenizer"),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', [call("add", a=1)], [], "vLLM reads it with Mistral's own tokenizer"),
]
"""Grammar, turn, the calls here, the calls there, and why."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GrammarName, str], list[CallRequest]]:
    """Return the calls that vLLM reads in a turn."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)

    @cache
    def tokenizer(name: GrammarName) -> Any:
        folder = tmp_path_factory.mktemp("family") / "policy"
        write_tool_family(folder, FAMILIES[name])
        return AutoTokenizer.from_pretrained(folder)

    def read(name: GrammarName, turn: str) -> list[CallRequest]:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer(name), request.tools)
        found = parser.extract_tool_calls(turn, request).tool_calls
        return [CallRequest(one.function.name, json.loads(one.function.arguments)) for one in found]

    return read


def ours(name: GrammarName, turn: str) -> list[CallRequest]:
    return list(parse_turn(turn, GRAMMARS[name], TOOLS).calls)


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_written_here_is_read_there(theirs: Callable[[GrammarName, str], Any], name: GrammarName) -> None:
    odd = ODD.replace("</tool_call>", "") if name in ("hermes", "qwen3_coder") else ODD
    for calls in (CALLS, CALLS[:1], (call("add", c=odd),)):
        assert theirs(name, GRAMMARS[name].write(calls)) == list(calls)


@pytest.mark.parametrize(("name", "turn"), ALIKE)
def test_turns_that_are_read_alike(theirs: Callable[[GrammarName, str], Any], name: GrammarName, turn: str) -> None:
    assert ours(name, turn) == theirs(name, turn)


@pytest.mark.parametrize(("name", "turn", "here", "there", "why"), DIFFERENT)
def test_turns_that_are_read_otherwise(
    theirs: Callable[[GrammarName, str], Any],
    name: GrammarName,
    turn: str,
    here: list[CallRequest],
    there: list[CallRequest],
    why: str,
) -> None:
    assert (ours(name, turn), theirs(name, turn)) == (here, there), why
