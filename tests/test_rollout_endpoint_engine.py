"""The engine over a chat endpoint, against real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
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
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError
from ragr1_actors.core.types import FinishReason, Message, Sampling, StopReason, Task, TokenKind, Trajectory
from ragr1_actors.rollout.engines.base import EngineSettings
from ragr1_actors.rollout.engines.endpoint_engine import EndpointEngine, EndpointTokenizer, whole_turn
from ragr1_actors.rollout.forks import Fork
from ragr1_actors.rollout.recorder import Recorder
from ragr1_actors.rollout.trajectory_loop import run_trajectory
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
    settings = EngineSettings(max_rows, 4096, options={"url": url, "model": "big", **options})
    return EndpointEngine("", tokenizer, settings), tokenizer


async def search(url: str, **options: Any) -> Trajectory:
    engine, tokenizer = engine_at(url, **options)
    env = SearchEnv(EnvironmentSettings(prompt="{question}"), EnvContext(DictRetriever([ANA]), tokenizer.encode))
    return await run_trajectory(env, TASK, Recorder("one", engine.generate, tokenizer, GREEDY, 4096, 0))


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
    assert tokenizer.messages(ids) == messages


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
            return await run_trajectory(env, TASK, recorder, fork=fork)

        parent = await play("parent")
        child = await play("child", (parent, 1, ""))
    assert (parent.answer, child.answer) == ("Oslo", "Riga")
    _, of_parent, of_child = (body["messages"] for body in endpoint.bodies)
    assert of_child == of_parent
    assert [message["role"] for message in of_child] == ["user", "assistant", "user"]


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
