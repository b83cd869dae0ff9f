"""The gateway: an agent asks over HTTP, and what was sampled for it is recorded as rows of token ids."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gateway_world import CALL, TASK, TOOL, Client, GrowingScripts, events, play
from tool_templates import TEMPLATES, write_tool_family

from ragr1_actors.core.errors import EngineError
from ragr1_actors.core.types import CallRequest, Message, StopReason, Task, TokenKind, Trajectory
from ragr1_actors.rollout.chat_format import TemplateFormat, make_chat_format
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.gateway.agents import AgentSession
from ragr1_actors.rollout.gateway.messages import ApiError, read_request, visible
from ragr1_actors.rollout.gateway.session import Session

HERE = __name__


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("gateway") / "policy", "qwen2.5")


def text_of(tokenizer: PolicyTokenizer, trajectory: Trajectory, *kinds: TokenKind) -> str:
    return "".join(
        tokenizer._tokenizer.decode([token])
        for token, kind in zip(trajectory.token_ids, trajectory.kinds, strict=True)
        if kind in kinds
    )


async def searches(task: Task, session: AgentSession) -> str:
    client = Client(session)
    client.messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": task.question}]
    found = await client.ask(tools=[TOOL])
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    client.answer_calls("Ana was born in Riga.<|im_end|>")
    found = await client.ask(tools=[TOOL])
    return str(found["choices"][0]["message"]["content"])


async def test_an_agents_turns_are_recorded_as_they_were_sampled(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:searches", {"t/0": [f"I look.\n{CALL}", "Riga"]})
    assert (found.stop_reason, found.answer, found.reward, found.error) == (StopReason.ANSWERED, "Riga", 1.0, "")
    assert [turn.action for turn in found.turns] == ["call", "answer"]
    assert found.turns[0].calls[0].arguments == {"query": "Ana"}
    assert found.turns[0].calls[0].result == "Ana was born in Riga.<|im_end|>"
    assert len(found.rows) == 1 and found.metrics["rows"] == 1.0
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": TASK.question},
        {"role": "assistant", "content": f"I look.\n{CALL}"},
        {"role": "tool", "content": "Ana was born in Riga.<|im_end|>"},
        {"role": "assistant", "content": "Riga"},
    ]
    whole = tokenizer.render(chat, [TOOL], is_prompt=False)
    assert tokenizer._tokenizer.decode(found.token_ids.tolist()) + "\n" == whole
    sampled = [tokenizer.encode_frame(text)[0] + [tokenizer.end_of_turn_id] for text in (f"I look.\n{CALL}", "Riga")]
    assert found.token_ids[found.kinds == TokenKind.MODEL].tolist() == sampled[0] + sampled[1]
    observed = found.token_ids[found.kinds == TokenKind.OBSERVATION].tolist()
    assert observed.count(tokenizer.end_of_turn_id) == 1  # the frame's, and not the one that the result names


# -- conversations -----------------------------------------------------------------------------------------------------


async def rewrites(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask(tools=[TOOL])
    client.answer_calls("Riga.")
    client.messages[0] = {"role": "user", "content": "A summary."}
    await client.ask(tools=[TOOL])
    return "Riga"


async def test_a_history_that_is_rewritten_begins_a_row(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:rewrites", {"t/0": [CALL], "t/0~1": ["Riga"]})
    assert [turn.completion_text for turn in found.turns] == [CALL, "Riga"]
    assert len(found.rows) == 2 == found.metrics["rows"]
    second = found.kinds[found.rows[1]]
    assert TokenKind.OBSERVATION not in second and TokenKind.MODEL in second
    assert [len(at) for at in found.turn_positions] == list(found.turn_lengths)
    for row, text in zip(found.rows, (CALL, "Riga"), strict=True):
        sampled = found.token_ids[row][found.kinds[row] == TokenKind.MODEL].tolist()
        assert sampled == tokenizer.encode_frame(text)[0] + [tokenizer.end_of_turn_id]


async def branches(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    others = [Client(session) for _ in range(2)]
    for number, one in enumerate(others):
        one.messages = [*client.messages, {"role": "user", "content": f"Idea {number}?"}]
    await asyncio.gather(*(one.ask() for one in others))
    return "Riga"


async def test_branches_are_asked_at_once_and_each_sampled_token_is_in_one_row(tokenizer: PolicyTokenizer) -> None:
    scripts = {"t/0": ["Hm", "First"], "t/0~1": ["Second"]}
    (found,) = await play(tokenizer, f"{HERE}:branches", scripts)
    assert [turn.completion_text for turn in found.turns] == ["Hm", "First", "Second"]
    assert len(found.rows) == 2
    assert found.num_model_tokens == sum(found.turn_lengths)


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message | {"content": "", "refusal": None, "annotations": None, "audio": None},
        lambda message: {name: value for name, value in message.items() if name != "content"},
        lambda message: message | {"content": [{"type": "text", "text": ""}]},
        lambda message: message | {"reasoning_content": "Something else", "id": "x"},
        lambda message: message | {"tool_calls": respelled(message["tool_calls"])},
    ],
    ids=["null_fields", "no_content", "parts", "reasoning", "spelling"],
)
async def test_a_history_in_another_spelling_goes_on_in_its_row(tokenizer: PolicyTokenizer, change: Any) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask(tools=[TOOL])
        client.answer_calls("Riga.")
        client.messages[1] = change(client.messages[1])
        await client.ask(tools=[TOOL])
        return "Riga"

    AGENTS["spelling"] = agent
    call = CALL.replace('"Ana"', '"Ana", "k": 3.0')
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [f"<think>\nHm\n</think>\n\n{call}", "Riga"]})
    assert len(found.rows) == 1 and len(found.turns) == 2


AGENTS: dict[str, Any] = {}
ONE_AT_A_TIME = {"max_context_tokens": 20_000, "max_concurrent_trajectories": 1}


async def spelling(task: Task, session: AgentSession) -> Any:
    return await AGENTS["spelling"](task, session)


def respelled(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call | {"function": call["function"] | {"arguments": '{ "k":3, "query" :"\\u0041na"}'}} for call in calls]


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: messages[1].update(content="I look."),
        lambda messages: messages[1]["tool_calls"][0]["function"].update(arguments='{"query": "Bo"}'),
        lambda messages: messages[0].update(content="Where?"),
        lambda messages: messages.insert(0, {"role": "system", "content": "Be brief."}),
        lambda messages: messages.append({"role": "assistant", "content": "Riga"}) or messages.append(messages[0]),
    ],
    ids=["text", "arguments", "question", "system", "a turn that was not sampled"],
)
async def test_a_history_that_differs_is_not_taken_for_what_was_sampled(
    tokenizer: PolicyTokenizer, change: Any
) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask(tools=[TOOL])
        client.answer_calls("Riga.")
        change(client.messages)
        await client.ask(tools=[TOOL])
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [CALL], "t/0~1": ["Riga"]})
    assert len(found.rows) == 2


async def other_tools(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask(tools=[TOOL])
    client.answer_calls("Riga.")
    await client.ask()
    return "Riga"


async def test_other_tools_make_another_prompt(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:other_tools", {"t/0": [CALL], "t/0~1": ["Riga"]})
    assert len(found.rows) == 2


@pytest.mark.parametrize("again", ["the same", "more"])
async def test_a_request_that_was_cancelled_is_asked_again(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    generate, release = GrowingScripts.generate, GrowingScripts.release
    asked, left = asyncio.Event(), asyncio.Event()
    running: set[str] = set()

    async def one_at_a_time(self: GrowingScripts, *arguments: Any, request_id: str, **options: Any) -> Any:
        if request_id in running:  # as the transformers engine, which samples on after a cancellation
            raise EngineError("it is being generated already")
        running.add(request_id)
        if not asked.is_set():
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
        turn = await generate(self, *arguments, request_id=request_id, **options)
        running.discard(request_id)
        return turn

    def forget(self: GrowingScripts, request_id: str) -> None:
        running.discard(request_id)
        release(self, request_id)

    monkeypatch.setattr(GrowingScripts, "generate", one_at_a_time)
    monkeypatch.setattr(GrowingScripts, "release", forget)

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        first = asyncio.create_task(client.ask())
        await asked.wait()
        first.cancel()
        await left.wait()
        if again == "more":
            client.messages.append({"role": "user", "content": "Now."})
        await client.ask()
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Riga"], "t/0~1": ["Riga"]}, max_turns=1)
    assert (found.stop_reason, found.error, len(found.turns)) == (StopReason.ANSWERED, "", 1)
    contents = ["Where was Ana born?", *(["Now."] if again == "more" else [])]
    chat = [{"role": "user", "content": content} for content in contents]
    whole = tokenizer.render([*chat, {"role": "assistant", "content": "Riga"}], [], is_prompt=False)
    assert tokenizer._tokenizer.decode(found.token_ids.tolist()) + "\n" == whole


async def test_an_attempt_that_is_cancelled_frees_the_engine_of_all_its_conversations(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: set[str] = set()
    monkeypatch.setattr(GrowingScripts, "release", lambda self, request_id: released.add(request_id))
    asked = asyncio.Event()

    async def agent(task: Task, session: AgentSession) -> str:
        for tools in ([], [TOOL]):
            await Client(session).ask(tools=tools)
        asked.set()
        await asyncio.Event().wait()
        return ""

    AGENTS["spelling"] = agent
    playing = asyncio.create_task(play(tokenizer, f"{HERE}:spelling", {"t/0": ["Hm"], "t/0~1": ["Hm"]}))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert released == {"t/0", "t/0~1"}


async def test_a_request_whose_body_comes_after_the_end_samples_nothing() -> None:
    session = Session(None, print, None, 1)  # type: ignore[arg-type]
    session.end()
    with pytest.raises(ApiError, match="has ended") as caught:
        await session.complete(read_request(b'{"messages": [{"role": "user", "content": "a"}]}'))
    assert caught.value.status == 410


# -- requests ----------------------------------------------------------------------------------------------------------


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"function": {"name": "x", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "user"}]


async def test_thoughts_are_a_field_and_a_turn_without_tools_is_text(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        message = (await client.ask())["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALL, "reasoning_content": "Hm"}
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [f"<think>\nHm\n</think>\n\n{CALL}"]})
    assert (found.error, found.turns[0].action) == ("", "answer")


async def test_a_block_that_is_cut_is_text_and_malformed(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        found = (await Client(session).ask(tools=[TOOL], max_completion_tokens=20))["choices"][0]
        assert found["finish_reason"] == "length" and "tool_calls" not in found["message"]
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [CALL]})
    assert (found.error, found.turns[0].action, found.turns[0].num_model_tokens) == ("", "malformed", 20)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["text", "tools"])
async def test_a_stream_has_what_the_answer_has(tokenizer: PolicyTokenizer, tools: list[Any]) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        body = {"messages": client.messages, "tools": tools, "stop": ["END"], "stream": True}
        status, text = await client.post("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        assert status == 200
        chunks = events(text)
        *parts, usage = chunks
        deltas = [part["choices"][0]["delta"] for part in parts]
        assert deltas[0]["role"] == "assistant" and parts[-1]["choices"][0]["finish_reason"]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm"
        content = "".join(delta.get("content") or "" for delta in deltas)
        if tools:
            (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
            assert (calls[0]["index"], calls[0]["function"]["name"], content) == (0, "search", "I look.")
        else:
            assert content == "Ri<ga E"
            assert len(deltas) > 6  # as it was sampled
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        return "Riga"

    AGENTS["spelling"] = agent
    said = f"I look.\n{CALL}" if tools else "Ri<ga EEND"
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [f"<think>\nHm\n</think>\n\n{said}"]})
    assert found.error == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is no JSON"),
        ({"messages": []}, "messages: got []"),
        ({"messages": 3}, "messages: got 3"),
        ({}, "messages: "),
        ({"n": 2}, "n: got 2, expected 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"tools": [{"type": "web"}]}, "tools: got"),
        ({"tools": [{"type": "function", "function": "search"}]}, "tools: got"),
        ({"messages": calling('{"a": "\\ud800"}')}, "expected an object"),
        ({"messages": calling('{"a": ' + "[" * 10**5)}, "expected an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url: got None, expected"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role: got 'robot'"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "the last one"),
        (
            {"messages": calling("[1")},
            "expected an object",
        ),
    ],
)
async def test_what_a_recorded_policy_does_not_do_is_one_sentence(
    tokenizer: PolicyTokenizer, body: Any, said: str
) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        if isinstance(body, bytes):
            import aiohttp

            headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{session.base_url}/chat/completions", data=body, headers=headers) as answer,
            ):
                status, found = answer.status, await answer.json()
        else:
            whole = {"messages": client.messages} | body if body else {}
            status, found = await client.post("/v1/chat/completions", whole)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"
        assert said in found["error"]["message"] and "\n" not in found["error"]["message"]
        await client.ask()
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Riga"]})
    assert found.error == "" and len(found.turns) == 1


async def test_settings_of_the_run_win_and_are_counted(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask(temperature=0, top_p=0.5, seed=3, presence_penalty=1, tool_choice="required", tools=[TOOL])
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Riga"]})
    names = ("temperature", "top_p", "seed", "presence_penalty", "tool_choice")
    assert {name: found.metrics[f"overridden_{name}"] for name in names} == dict.fromkeys(names, 1.0)


async def test_keys_are_sessions(tokenizer: PolicyTokenizer) -> None:
    kept: list[Client] = []

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        body = {"messages": client.messages}
        assert (await client.post("/v1/chat/completions", body, key="sk-wrong"))[0] == 401
        assert (await client.post("/v1/chat/completions", body, key=""))[0] == 401
        for one in kept:
            assert (await one.post("/v1/chat/completions", body))[0] == 410
        kept.append(client)
        await client.ask()
        return "Riga"

    AGENTS["spelling"] = agent
    found = await play(
        tokenizer, f"{HERE}:spelling", {"t/0": ["Riga"], "t/1": ["Riga"]}, number=2, env_runners=ONE_AT_A_TIME
    )
    assert [one.error for one in found] == ["", ""]
    assert len({one.session.api_key for one in kept}) == 2


@pytest.mark.parametrize("family", sorted(TEMPLATES))
async def test_what_is_behind_a_stop_string_is_neither_text_nor_part_of_a_call(tmp_path: Path, family: str) -> None:
    tokenizer = write_tool_family(tmp_path / "policy", family)
    chat = make_chat_format("auto", tokenizer)
    call = chat.write(Message("assistant", "", (CallRequest("search", {"query": "Ana"}),)))

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        found = await client.ask(tools=[TOOL], stop=["Observation:"])
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [f"{call}\nObservation:"]})
    assert (found.error, found.turns[0].action) == ("", "call")


async def test_a_thought_without_a_beginning_is_text(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        client.messages[-1]["content"] = "rewritten </think> b"
        client.messages.append({"role": "user", "content": "And?"})
        await client.ask()
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["a </think> b"], "t/0~1": ["Riga"]})
    assert found.error == "" and len(found.rows) == 2


async def test_tool_choice_none_leaves_calls_in_the_text_of_the_same_row(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask(tools=[TOOL])
        client.answer_calls("Riga")
        found = await client.ask(tools=[TOOL], tool_choice="none")
        assert found["choices"][0]["finish_reason"] == "stop"
        return str(found["choices"][0]["message"]["content"])

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": [CALL, CALL]})
    assert (found.error, found.answer, len(found.rows)) == ("", CALL, 1)
    assert [turn.action for turn in found.turns] == ["call", "answer"]


async def test_what_fails_in_a_turn_is_no_failure_of_the_agent(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object) -> None:
        raise TypeError("a mistake in this project")

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        monkeypatch.setattr(Session, "_read", failing)
        await client.post("/v1/chat/completions", {"messages": client.messages[:1]})
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Hm"], "t/0~1": [CALL]})
    assert found.stop_reason is StopReason.ENV_ERROR and "TypeError" in found.error


@pytest.mark.parametrize("parameters", [{"properties": None}, {"properties": {"a": {"anyOf": 1}}}])
async def test_a_tool_whose_schema_cannot_be_read_is_refused_before_a_token_is_sampled(
    tokenizer: PolicyTokenizer, parameters: dict[str, Any]
) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        client.messages = [{"role": "user", "content": "Where?"}]
        tools = [{"type": "function", "function": {"name": "search", "parameters": parameters}}]
        status, body = await client.post("/v1/chat/completions", {"messages": client.messages[:1], "tools": tools})
        assert status == 400 and "expected JSON schemas as parameters" in json.dumps(body)
        await client.ask()
        return "Riga"

    AGENTS["spelling"] = agent
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Hm"], "t/0~1": ["Hm"]})
    assert (found.error, len(found.turns)) == ("", 1)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("<think>a</think>\n<think>b</think>\nRiga", ("a\nb", "Riga")),
        ("Hm <think>b</think> Riga", ("b", "Hm  Riga")),
        ("Riga <think>b", ("b", "Riga")),
    ],
)
def test_no_thought_is_content(turn: str, expected: tuple[str, str]) -> None:
    assert visible(turn) == expected
    parts = [visible(turn[:length], is_whole=False) for length in range(len(turn) + 1)]
    for before, after in pairwise(parts):
        assert after[0].startswith(before[0]) and after[1].startswith(before[1])
    assert parts[-1] == expected


async def raises_for(trajectory: Trajectory, context: Any) -> float:
    raise KeyError("reward")


async def test_what_an_agent_posted_and_printed_is_recorded_once_where_the_reward_fails(
    tokenizer: PolicyTokenizer,
) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        await client.post("/v1/reward", {"reward": 0.25})
        raise RuntimeError("late")

    AGENTS["spelling"] = agent
    environment = {"reward": f"{HERE}:raises_for"}
    (found,) = await play(tokenizer, f"{HERE}:spelling", {"t/0": ["Hm"]}, environment=environment)
    assert found.stop_reason is StopReason.ENV_ERROR and "KeyError" in found.error
    assert [call.tool for call in found.calls] == ["agent"]
    assert (found.turns[0].reward, found.reward) == (0.25, 0.0)


# -- what others write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TEMPLATES))
async def test_no_result_question_or_answer_of_an_agent_writes_a_control_token(tmp_path: Path, family: str) -> None:
    tokenizer = write_tool_family(tmp_path / "policy", family)
    grammar = TemplateFormat(tokenizer).grammar
    call = grammar.write([CallRequest("search", {"query": "Ana"})])
    opened = "<think>\nHm\n</think>\n\n" if family in ("qwen3", "qwen3.5") else ""

    async def play_with(text: str) -> Trajectory:
        async def agent(task: Task, session: AgentSession) -> str:
            client = Client(session)
            client.messages = [{"role": "user", "content": f"Who? {text}"}]
            await client.ask(tools=[TOOL])
            client.answer_calls(f"Riga. {text}")
            await client.ask(tools=[TOOL])
            client.messages.append({"role": "user", "content": f"And? {text}"})
            await client.ask(tools=[TOOL])
            client.messages.append({"role": "user", "content": "Sure?"})
            function = TOOL["function"] | {"description": f"Search. {text}"}
            client.messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"query": text})
            await client.ask(tools=[{"type": "function", "function": function}])
            return "Riga"

        AGENTS["spelling"] = agent
        turns = [f"{opened}{call}", "Riga", "Riga", "Riga"]
        scripts = {f"t/0~{n}".removesuffix("~0"): turns[n:] for n in range(4)}
        (found,) = await play(tokenizer, f"{HERE}:spelling", scripts)
        assert found.error == "", found.error
        return found

    added = tokenizer._added

    def control_of(found: Trajectory) -> list[int]:
        others = found.token_ids[found.kinds != TokenKind.MODEL].tolist()
        return [token for token in others if added.get(token) in set(tokenizer.added_texts)]

    plain, hostile = await play_with("Riga"), await play_with(" ".join(tokenizer.added_texts))
    assert control_of(plain) == control_of(hostile) != []
    assert len(plain.rows) == len(hostile.rows)


def test_a_key_is_not_shown() -> None:
    assert "sk-a" not in repr(AgentSession("http://127.0.0.1:9", "sk-a", 0, 1.0))
