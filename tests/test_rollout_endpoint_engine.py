"""The engine over a chat endpoint, against real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes import DictRetriever
from http_stub import always, free_port, silent, stub_server
from hypothesis import given
from hypothesis import strategies as st

from envs.base import EnvContext
from envs.measures import num_queries, num_rounds
from envs.search import SearchEnv
from envs.tools.base import schema_of
from envs.tools.env import LAST_TURN_NOTICE
from ragr1_actors.core.config import EnvironmentSettings, SamplerConfig
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError
from ragr1_actors.core.types import (
    CallRequest,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
)
from ragr1_actors.rollout.chat_format import EndpointFormat, chat_format_of
from ragr1_actors.rollout.engines.base import EngineArguments
from ragr1_actors.rollout.engines.endpoint_engine import EndpointEngine, EndpointTokenizer, whole_turn
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.recorder import EnvAttempt, Fork, Recorder, run_trajectory
from retrieval.base import Passage

ANA = Passage("p0", "Ana Bell", "Ana Bell was born in Riga.", 0.9)
TASK = Task("t/0", "Where was Ana Bell born?", ("Riga",))
STOP = ("</search>", "</answer>")
GREEDY = Sampling(64, temperature=0.0, stop=STOP)


def chat(text: str | None, finish: str = "stop", num_tokens: int | None = 7) -> dict[str, Any]:
    """Return what an endpoint answers, the stop string left out as OpenAI's does."""
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens, "prompt_tokens": 3}}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}], **usage}


class Endpoint:
    """Answers one request after the other with ``answers``, and keeps the requests."""

    def __init__(self, *answers: dict[str, Any] | int) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "not now"}}, status=answer, headers={"Retry-After": "0"})
        return web.json_response(answer)


def engine_at(url: str, max_rows: int = 4, **options: Any) -> tuple[EndpointEngine, EndpointTokenizer]:
    tokenizer = EndpointTokenizer()
    settings = EngineArguments(max_rows, 4096, options={"url": url, "model": "big", **options})
    return EndpointEngine("", tokenizer, settings), tokenizer


async def search(url: str, **options: Any) -> Trajectory:
    engine, tokenizer = engine_at(url, **options)
    env = SearchEnv(EnvironmentSettings(prompt="{question}"), EnvContext(DictRetriever([ANA]), tokenizer.encode))
    return await run_trajectory(EnvAttempt(env, Recorder("one", engine.generate, tokenizer, GREEDY, 4096, 0)), TASK)


async def test_a_trajectory_is_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    endpoint = Endpoint(
        chat("<think> born </think><search> Ana Bell", num_tokens=11), chat("<answer> Riga", num_tokens=5)
    )
    async with stub_server(endpoint.answer) as url:
        found = await search(url)
    assert (found.answer, found.stop_reason) == ("Riga", StopReason.ANSWERED)
    assert (num_rounds(found), num_queries(found)) == (1, 1)
    assert found.turn_lengths == (11, 5)  # as the endpoint counts
    assert int((found.kinds == TokenKind.OBSERVATION).sum()) > 10
    assert endpoint.paths == ["/v1/chat/completions"] * 2
    assert endpoint.keys == ["Bearer sk-1"] * 2
    first, second = endpoint.bodies
    assert first == {
        "model": "big",
        "messages": [{"role": "user", "content": TASK.question}],
        "max_tokens": 64,
        "temperature": 0.0,
        "stop": list(STOP),
    }
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "<think> born </think><search> Ana Bell</search>"
    assert second["messages"][2]["content"] == (
        "<information>\nQuery: Ana Bell\n(1) Ana Bell: Ana Bell was born in Riga.\n</information>"
    )


@pytest.mark.parametrize("counted", [True, 10**12, -1])
async def test_text_without_utf8_and_impossible_counts_are_no_failure(counted: Any) -> None:
    async with stub_server(Endpoint(chat("<answer> \ud800Riga", num_tokens=counted)).answer) as url:
        found = await search(url)
    assert (found.answer, found.stop_reason) == ("?Riga", StopReason.ANSWERED)
    assert 1 < found.num_model_tokens < 100


async def test_what_may_pass_is_tried_again_and_nothing_else() -> None:
    endpoint = Endpoint(429, 503, 500, chat("<answer> Riga"))
    async with stub_server(endpoint.answer) as url:
        found = await search(f"{url}/v1")
        assert (found.answer, len(endpoint.bodies)) == ("Riga", 4)
        endpoint.answers = [400, chat("<answer> Riga")]
        refused = await search(f"{url}/v1/chat/completions")
    assert refused.stop_reason is StopReason.ENGINE_ERROR
    assert refused.error.endswith('/v1/chat/completions answered 400: {"message": "not now"}')
    assert len(endpoint.bodies) == 5


async def test_attempts_end() -> None:
    endpoint = Endpoint(503, 429, 503)
    async with stub_server(endpoint.answer) as url:
        found = await search(url, max_retries=2)
    assert found.stop_reason is StopReason.ENGINE_ERROR
    assert found.error.endswith("(3 attempts)")
    async with stub_server(silent) as url:
        found = await search(url, max_retries=1, timeout_s=0.05)
    assert found.error.endswith("no answer within 0.05 s (2 attempts)")


async def test_requests_are_bounded() -> None:
    under_way, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.2)
        under_way -= 1
        return web.json_response(chat("<answer> Riga"))

    async with stub_server(answer) as url:
        engine, tokenizer = engine_at(url, max_rows=3)
        prompt = tokenizer.prompt_ids([Message("user", "Where?")])
        await asyncio.gather(*(engine.generate(prompt, GREEDY, request_id=str(number)) for number in range(12)))
    assert most == 3


async def test_fields_are_replaced_and_left_out() -> None:
    endpoint = Endpoint(chat("<answer>Riga</answer> and more <search>x</search>", num_tokens=None))
    async with stub_server(endpoint.answer) as url:
        engine, tokenizer = engine_at(
            url, key_env="", body={"stop": None, "max_tokens": None, "max_completion_tokens": 9}
        )
        prompt = tokenizer.prompt_ids([Message("user", "Where?")])
        sampling = Sampling(64, temperature=0.5, top_p=0.9, stop=STOP, seed=2**40 + 5)
        found = await engine.generate(prompt, sampling, request_id="a")
    assert found.text == "<answer>Riga</answer>"
    assert len(found.token_ids) == len(tokenizer.encode(found.text))  # where the endpoint does not count
    (body,) = endpoint.bodies
    assert not body.keys() & {"stop", "max_tokens"}
    assert (body["max_completion_tokens"], body["temperature"], body["top_p"], body["seed"]) == (9, 0.5, 0.9, 5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (always({"error": {"message": "bad key"}}, 401), r"401: .*bad key.*; export a valid key as OPENAI_API_KEY"),
        (always({"error": "no model big"}, 404), r"404: .*no model big.*; give the address that ends in /v1"),
        (always({"error": "stop?"}, 400), r"400: .*; leave the field that it refuses out, such as --body"),
        (always({"error": "slow down"}, 429), r"429: .*attempts\); wait, or lower --concurrency"),
        (always({"hello": 1}), r"expected a chat completion with choices\[0\]\.message"),
        (always("<html>"), r"expected JSON, got <html>.*; see whether the server runs"),
    ],
)
async def test_a_wrong_endpoint_is_said_once(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    async with stub_server(answer) as url:
        with pytest.raises(ConfigError, match=f"^--endpoint: .*{message}") as refused:
            await engine_at(url, max_retries=1)[0].probe()
    assert "sk-secret" not in str(refused.value)


async def test_a_message_without_content_is_an_error_unless_it_was_cut() -> None:
    """Servers with a reasoning parser keep the thought elsewhere; an empty turn would count as the policy's."""
    endpoint = Endpoint(chat(None), chat(None, "length"), chat(""))
    async with stub_server(endpoint.answer) as url:
        engine, tokenizer = engine_at(url)
        prompt = tokenizer.prompt_ids([Message("user", "Where?")])
        with pytest.raises(EngineError, match=r"has no content \(finish_reason 'stop'\).* turn off its reasoning"):
            await engine.generate(prompt, GREEDY, request_id="a")
        cut, empty = [await engine.generate(prompt, GREEDY, request_id=name) for name in "bc"]
    assert (cut.text, cut.finish_reason) == ("", FinishReason.LENGTH)
    assert (empty.text, empty.finish_reason) == ("", FinishReason.STOP)


async def test_without_tools_only_the_text_counts() -> None:
    call = called("add", "{}")
    endpoint = Endpoint(calling(call, content="<answer> Riga", reasoning="Hm."), calling(call, content=None))
    async with stub_server(endpoint.answer) as url:
        assert (await search(url)).turns[0].completion_text == "<answer> Riga</answer>"
        assert "has no content (finish_reason 'tool_calls')" in (await search(url)).error


async def test_an_endpoint_that_is_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        ConfigError, match=f"--endpoint: {url}/v1/chat/completions: .*Cannot connect.*; see whether the"
    ):
        await engine_at(url, max_retries=10**6)[0].probe()
    monkeypatch.setattr("ragr1_actors.rollout.engines.chat_client.PROBE_TIMEOUT_S", 0.1)
    async with stub_server(silent) as url:
        with pytest.raises(ConfigError, match=rf"{url}/v1/chat/completions: no answer within 0\.1 s; see whether the"):
            await engine_at(url)[0].probe()


async def test_a_key_that_is_refused_ends_the_evaluation() -> None:
    async with stub_server(always({}, 401)) as url:
        with pytest.raises(EngineDeadError, match=r"answered 401: .*; export a valid key as OPENAI_API_KEY"):
            await search(url)


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--key-env: the environment variable 'MY_KEY' is not set; export it"):
        engine_at("http://host", key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "two words")
    with pytest.raises(ConfigError, match="holds spaces or odd characters"):
        engine_at("http://host", key_env="MY_KEY")
    with pytest.raises(ConfigError, match=r"--endpoint: got 'ftp://host', expected an address"):
        engine_at("ftp://host")
    with pytest.raises(ConfigError, match=r"--endpoint: the address holds a password or a key"):
        engine_at("http://me:secret@host/v1")
    with pytest.raises(ConfigError, match=r"unknown key env_runners\.engine_options\.modle"):
        engine_at("http://host", modle="big")


async def test_it_takes_no_weights() -> None:
    engine, _ = engine_at("http://host")
    with pytest.raises(EngineError, match="takes no weights"):
        await engine.update_weights({}, 1)


@pytest.mark.parametrize(
    ("text", "is_cut", "closed"),
    [
        ("<search> Ana", False, "<search> Ana</search>"),
        (
            "<think> a <search> tag </think><answer> Riga",
            False,
            "<think> a <search> tag </think><answer> Riga</answer>",
        ),
        ("<search> Ana</search> <answer>x</answer>", False, "<search> Ana</search>"),
        ("<answer> Ri", True, "<answer> Ri"),
        ("Riga", False, "Riga"),
        # the template began the thought, and the server sends what comes after
        (
            "inside <answer> and </answer.</think><answer> Riga",
            False,
            "<think>inside <answer> and </answer.</think><answer> Riga</answer>",
        ),
        ("hm</think><search> Ana</search> <answer>x", False, "<think>hm</think><search> Ana</search>"),
        ("<answer> Riga</answer></think>", False, "<answer> Riga</answer>"),
        # a thought is left as it is
        ("<think> a </search> b </think> <search> Ana", False, "<think> a </search> b </think> <search> Ana</search>"),
        ("<think> it goes inside <answer> and ", False, "<think> it goes inside <answer> and "),
    ],
)
def test_a_turn_is_closed_at_its_tag(text: str, is_cut: bool, closed: str) -> None:
    assert whole_turn(text, STOP, is_cut=is_cut) == closed


@given(
    st.lists(st.tuples(st.sampled_from(("system", "user", "assistant")), st.text()), max_size=4),
    st.lists(st.tuples(st.text(), st.integers(1, 40), st.text()), max_size=3),
)
def test_a_conversation_is_read_back_from_its_ids(
    prompt: Sequence[tuple[str, str]], turns: Sequence[tuple[str, int, str]]
) -> None:
    tokenizer = EndpointTokenizer()
    messages = [Message(role, text) for role, text in prompt]
    ids = tokenizer.prompt_ids(messages)
    for said, num_tokens, reply in turns:
        sampled = tokenizer.sampled(said, num_tokens)
        assert len(sampled) == num_tokens
        ids += sampled + tokenizer.encode(reply)
        messages.append(Message("assistant", said))
        if reply.strip():
            messages.append(Message("user", reply.strip()))
    assert tokenizer.chat(ids) == ([{"role": one.role, "content": one.content} for one in messages], [])


async def test_a_fork_goes_on_with_the_conversation_of_its_parent() -> None:
    """Its turns are in the ids that it copies; the endpoint has seen no request of it before."""
    endpoint = Endpoint(chat("<search> Ana Bell"), chat("<answer> Oslo"), chat("<answer> Riga"))
    async with stub_server(endpoint.answer) as url:
        engine, tokenizer = engine_at(url)

        async def play(name: str, fork: Fork | None = None) -> Trajectory:
            env = SearchEnv(
                EnvironmentSettings(prompt="{question}"), EnvContext(DictRetriever([ANA]), tokenizer.encode)
            )
            recorder = Recorder(name, engine.generate, tokenizer, GREEDY, 4096, 0)
            return await run_trajectory(EnvAttempt(env, recorder), TASK, fork=fork)

        parent = await play("parent")
        child = await play("child", (parent, 1, ""))
    assert (parent.answer, child.answer) == ("Oslo", "Riga")
    _, of_parent, of_child = (body["messages"] for body in endpoint.bodies)
    assert of_child == of_parent
    assert [message["role"] for message in of_child] == ["user", "assistant", "user"]


HERE = __name__
NATIVE = {"env": "tools", "tools": ["search", f"{HERE}:add"], "prompt": "{question}"}


def add(a: int, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return f"{a + b}<|im_end|>"


def called(name: str, arguments: Any, call_id: str | None = "call_x") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": 0, "type": "function", "function": function, **({} if call_id is None else {"id": call_id})}


def calling(*calls: dict[str, Any], content: str | None = None, finish: str = "tool_calls", **kept: str) -> Any:
    """Return an answer with calls, and the empty fields that OpenAI adds."""
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": [], "tool_calls": list(calls)}
    return {"choices": [{"message": message | kept, "finish_reason": finish}], "usage": {"completion_tokens": 9}}


async def act(url: str, chat_format: str = "auto", **environment: Any) -> Trajectory:
    config = SamplerConfig.model_validate(
        {
            "environment": NATIVE | environment,
            "policy": {"chat_format": chat_format},
            "env_runners": {"engine": "endpoint", "engine_options": {"url": url, "model": "big", "max_retries": 0}},
        }
    )
    runner = EnvRunner.load(config, Path("none"), DictRetriever([ANA]))
    return (await runner.sample_group(GroupRequest("t", TASK, 1, 0.0))).trajectories[0]


async def test_tools_are_called_as_the_endpoint_calls_them() -> None:
    search_call = called("search", '{"queries":["Ana Bell"]}', "call_1")
    add_call = called("add", '{ "a": 2 }', None)
    endpoint = Endpoint(
        calling(search_call, add_call, content="I look.", reasoning="Two <think> things."),
        calling(called("add", {"a": 1}, "call_2"), called("add", {"a": 1, "b": 1}, "")),
        chat("Riga"),
    )
    async with stub_server(endpoint.answer) as url:
        found = await act(url)
    assert (found.answer, found.stop_reason, found.turn_lengths) == ("Riga", StopReason.ANSWERED, (9, 9, 7))
    assert [(one.tool, one.result) for one in found.turns[0].calls[1:]] == [("add", "2<|im_end|>")]
    assert (found.calls[0].arguments["query"], found.calls[0].records[0].title) == ("Ana Bell", "Ana Bell")
    assert found.turns[0].completion_text.startswith("<think>\nTwo  things.\n</think>\n\nI look.\n<tool_call>\n{")
    first, second, third = endpoint.bodies
    assert [tool["function"]["name"] for tool in first["tools"]] == ["search", "add"]
    assert first["messages"] == [{"role": "user", "content": TASK.question}]
    assert not first.keys() & {"stop", "tool_choice"}
    assert second["tools"] == third["tools"] == first["tools"]
    _, turn, passages, total = second["messages"]
    (own,) = {call["id"] for call in turn["tool_calls"]} - {"call_1"}
    assert len(own) == 9
    del search_call["index"], add_call["index"]
    assert turn == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Two <think> things.",
        "tool_calls": [search_call, add_call | {"id": own}],
    }
    assert passages.items() >= {"role": "tool", "tool_call_id": "call_1"}.items()
    assert "Ana Bell was born in Riga." in passages["content"]
    assert total == {"role": "tool", "tool_call_id": own, "content": "2(|im_end|)"}
    assert third["messages"][:4] == second["messages"]
    again, _, result = third["messages"][4:]
    assert (again["content"], result["content"]) == (None, "2(|im_end|)")
    assert result["tool_call_id"] == again["tool_calls"][1]["id"] not in ("", own)
    assert {TokenKind.OBSERVATION, TokenKind.MODEL, TokenKind.PROMPT} == {TokenKind(kind) for kind in found.kinds}


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (calling(called("add", '{"a": 1}, "name": "search"')), "malformed"),
        (calling(called("add", '{"a": 1'), finish="length"), "malformed"),
        (calling(called("add", '"{}"'), called("add", '{"a": 1}')), "malformed"),
        (calling(called("add", '{"a": NaN}')), "malformed"),
        (calling(called("add", "[" * 5000)), "malformed"),
        (chat("Well. <tool_call>\n{", "length"), "malformed"),  # a server that could not read it
        (chat("<think>hm", "length"), "malformed"),
        (chat(None), "malformed"),  # neither call nor answer
        (calling(reasoning_content="hm", finish="stop"), "malformed"),
        (calling(called("nothing", "")), "call"),
        (calling(called("add", '{"a": 1}'), finish="length"), "call"),
        (calling(called("search", '{"queries": ["</tool_call><think>", "\\ud800"]}'), finish="stop"), "malformed"),
        (calling(called("search", '{"queries": ["</tool_call><think>", "\ud800"]}'), finish="stop"), "call"),
        (calling(called("add", '{"a": 1}'), content="Now <tool_call>:"), "call"),
        (calling(called("add", '{"a": 1}'), content="<think>no end"), "call"),
        (calling(called("add", '{"a": 1}'), content="Its template began</think>it"), "call"),
    ],
)
async def test_odd_answers_are_turns_of_the_policy(answer: dict[str, Any], action: str) -> None:
    endpoint = Endpoint(answer, chat("Riga"))
    async with stub_server(endpoint.answer) as url:
        found = await act(url)
    assert ([turn.action for turn in found.turns], found.answer) == ([action, "answer"], "Riga"), found.error
    roles = [message["role"] for message in endpoint.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool" if action == "call" else "user"]
    turn = endpoint.bodies[1]["messages"][1]
    assert ("tool_calls" in turn) == (action == "call")  # an endpoint refuses a call without a result
    assert action == "call" or isinstance(turn["content"], str)


async def test_the_notice_of_the_last_turn_joins_the_last_result() -> None:
    endpoint = Endpoint(calling(called("add", '{"a": 1}'), called("add", '{"a": 2}', "call_y")), chat("Riga"))
    async with stub_server(endpoint.answer) as url:
        await act(url, max_turns=2)
    *_, first, last = endpoint.bodies[1]["messages"]
    assert (first["content"], last["content"]) == ("1(|im_end|)", "2(|im_end|)" + LAST_TURN_NOTICE)


@pytest.mark.parametrize("wrong", [{"tool_calls": [{}]}, {"tool_calls": 3}, {"tool_calls": [called(3, "{}")]}])  # type: ignore[arg-type]
async def test_calls_that_are_none_are_an_error_of_the_endpoint(wrong: dict[str, Any]) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": None} | wrong}]}
    async with stub_server(always(answer)) as url:
        found = await act(url)
    assert found.stop_reason is StopReason.ENGINE_ERROR
    assert re.search("expected a chat completion|the name of a call, is no text", found.error)


async def test_a_grammar_writes_the_tools_into_the_prompt() -> None:
    endpoint = Endpoint(chat('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), chat("Riga"))
    async with stub_server(endpoint.answer) as url:
        found = await act(url, "hermes")
    assert (found.answer, [call.tool for call in found.calls]) == ("Riga", ["add"])
    first, second = endpoint.bodies
    assert "tools" not in first
    assert "Add two numbers." in first["messages"][0]["content"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][2]["content"] == "<tool_response>\n1(|im_end|)\n</tool_response>"


async def test_a_call_in_text_gets_its_result_as_text() -> None:
    endpoint = Endpoint(chat('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), chat("Riga"))
    async with stub_server(endpoint.answer) as url:
        found = await act(url)
    assert [call.tool for call in found.calls] == ["add"]
    assert endpoint.bodies[1]["messages"][2] == {"role": "user", "content": "1(|im_end|)"}


def test_a_conversation_with_calls_is_written_for_an_endpoint() -> None:
    """As an environment begins again with one."""
    tokenizer = EndpointTokenizer()
    calls = (CallRequest("add", {"a": 1}), CallRequest("add", {"a": "é"}))
    said = [Message("user", "Add."), Message("assistant", "Well.", calls), Message("tool", "1"), Message("tool", "2")]
    ids = EndpointFormat(tokenizer).prompt_ids(said, [add_schema := schema_of(add)])
    (_, turn, *results), tools = tokenizer.chat(ids)
    assert (turn["content"], tools) == ("Well.", [add_schema])
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == ['{"a": 1}', '{"a": "é"}']
    assert [one["tool_call_id"] for one in results] == [call["id"] for call in turn["tool_calls"]]
    assert len({one["tool_call_id"] for one in results}) == 2
    chat_, _ = tokenizer.chat(EndpointFormat(tokenizer, "pythonic").prompt_ids(said, []))
    assert [one["role"] for one in chat_] == ["user", "assistant", "user"]
    assert chat_[1]["content"] == 'Well.\n[add(a=1), add(a="é")]'


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([chat("yes"), 400], r"answered 400: .*; turn on the tool calls of the server.*policy\.chat_format=hermes"),
        ([chat("yes"), 501], r"answered 501: .*; turn on the tool calls"),
        ([chat("yes"), chat("search(x)")], r"answered in text: 'search\(x\)'; turn on the tool calls"),
        ([chat("yes"), calling(called("search", "{}")), 422], r"answered 422: .*; turn on the tool calls"),
        ([400], r"answered 400: .*; leave the field that it refuses out"),
        ([chat("yes"), 401], r"answered 401: .*; export a valid key"),
    ],
)
async def test_an_endpoint_without_tool_calls_is_said_once(answers: list[Any], message: str) -> None:
    endpoint = Endpoint(*answers)
    async with stub_server(endpoint.answer) as url:
        with pytest.raises(ConfigError, match=f"^--endpoint: .*{message}"):
            await engine_at(url)[0].probe([schema_of(add)])
    assert endpoint.answers == []
    assert all("stop" not in body for body in endpoint.bodies)


@pytest.mark.parametrize(
    "answers", [[calling(called("add", '{"a": 1', "call_7")), chat("Done.")], [chat("<think>hm", "length")]]
)
async def test_an_endpoint_with_tool_calls_is_asked_for_one_and_given_its_result(answers: list[Any]) -> None:
    endpoint = Endpoint(chat("yes"), *answers)
    async with stub_server(endpoint.answer) as url:
        await engine_at(url)[0].probe([schema_of(add)])
    assert [body.get("tools") for body in endpoint.bodies] == [None] + [[schema_of(add)]] * len(answers)
    if len(answers) == 2:
        assert endpoint.bodies[2]["messages"][2] == {"role": "tool", "tool_call_id": "call_7", "content": "Done."}


def test_a_format_of_your_own_needs_a_tokenizer() -> None:
    config = SamplerConfig.model_validate({"policy": {"chat_format": f"{HERE}:Own"}})
    with pytest.raises(ConfigError, match=r"needs the policy's tokenizer.*set it to one of auto, hermes, "):
        chat_format_of(config, EndpointTokenizer())


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("a<|im_end|>\n<|im_start|>user", "a(|im_end|)\n(|im_start|)user"),
        ("a</s><s>b <eos> <end_of_turn>", "a(/s)(s)b (eos) (end_of_turn)"),
        ("<\uff5cend▁of▁sentence\uff5c><\uff5cUser\uff5c>", "(\uff5cend▁of▁sentence\uff5c)(\uff5cUser\uff5c)"),
        ("</tool_response>[/INST]</information>", "(/tool_response)(/INST)(/information)"),
        ("2 < 3 > 1, <b>bold</b>, [1]", "2 < 3 > 1, <b>bold</b>, [1]"),
    ],
)
def test_control_tokens_of_known_families_do_not_reach_an_endpoint(text: str, harmless: str) -> None:
    assert EndpointTokenizer().defuse(text) == harmless


@pytest.mark.parametrize("text", ["<|" * 100_000, "<\uff5c" * 100_000, "[/" * 100_000])
def test_defusing_for_an_endpoint_takes_linear_time(text: str) -> None:
    started = time.process_time()
    assert EndpointTokenizer().defuse(text) == text
    assert time.process_time() - started < 1.0


def test_a_cut_turn_says_so() -> None:
    async def ask() -> FinishReason:
        async with stub_server(Endpoint(chat(None, "length", 64)).answer) as url:
            engine, tokenizer = engine_at(url)
            prompt = tokenizer.prompt_ids([Message("user", json.dumps("Where?"))])
            return (await engine.generate(prompt, GREEDY, request_id="a")).finish_reason

    assert asyncio.run(ask()) is FinishReason.LENGTH
