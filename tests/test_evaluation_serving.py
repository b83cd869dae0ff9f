"""A served policy answers OpenAI's client: with its own tools, with those of a request, and as its environment asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fakes import OnePassage
from gateway_world import CALL, TOOL, GrowingScripts
from openai import AsyncOpenAI
from tool_templates import write_tool_family
from waits import until

from ragr1_actors.core.content import PlacedImage
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError, UserError
from ragr1_actors.core.resolve import resolve
from ragr1_actors.core.types import Completion, OnText, Sampling
from ragr1_actors.evaluation.serving import PolicyServer, ServedPolicy, run_policy_server
from ragr1_actors.rollout.engines.base import PolicyTokenizer

QUESTION: dict[str, Any] = {"role": "user", "content": "Where was Ana born?"}
SEARCH = '<tool_call>\n{"name": "search", "arguments": {"queries": ["Ana"]}}\n</tool_call>'
TOOLS = {"env": "tools", "tools": ["search"], "max_turns": 3}
TAGS = {"env": "search", "max_turns": 2}
THOUGHT = "<think>\nHm\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("served") / "policy", "qwen2.5")


class Noting(GrowingScripts):
    """Plays the same turns for every request, and notes prompts and sampling."""

    def __init__(self, tokenizer: PolicyTokenizer, turns: Sequence[str]) -> None:
        end = [tokenizer.end_of_turn_id]
        scripts = {f"serve/{number}/0": turns for number in range(1, 9)}
        super().__init__(scripts, lambda text: tokenizer.encode_frame(text)[0] + end)  # type: ignore[operator]
        self.prompts: list[str] = []
        self.sampled: list[Sampling] = []
        self.shown: list[Sequence[PlacedImage]] = []
        self.decode = tokenizer.decode

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        self.prompts.append(self.decode(prompt_token_ids))
        self.sampled.append(sampling)
        return await super().generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        self.shown.append(images)


@asynccontextmanager
async def serving(
    tokenizer: PolicyTokenizer,
    environment: dict[str, Any],
    turns: Sequence[str],
    *,
    retriever: Any = None,
    token: str = "",
    key: str = "any",
    context: int = 20_000,
    policy: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[AsyncOpenAI, Noting]]:
    runners = {"max_context_tokens": context}
    config: Any = resolve({"environment": environment, "env_runners": runners, "policy": policy or {}})  # type: ignore[dict-item]
    engine = Noting(tokenizer, turns)
    served = ServedPolicy(config, tokenizer, retriever or OnePassage(), engine)
    async with (
        PolicyServer(served, port=0, token=token) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, engine


async def ask(client: AsyncOpenAI, *messages: dict[str, Any], **fields: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=[*messages] or [QUESTION], **fields)  # type: ignore[list-item]


async def test_the_runs_own_tools_answer_a_conversation(tokenizer: PolicyTokenizer) -> None:
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
    ]
    async with serving(tokenizer, TOOLS, [SEARCH, f"{THOUGHT}In Riga."]) as (client, engine):
        found = await ask(client, *before, QUESTION)
        again = await ask(client, *before, QUESTION)
        assert [one.id for one in (await client.models.list()).data] == ["policy"]
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("In Riga.", "stop")
    assert choice.message.tool_calls is None and choice.message.reasoning_content == "Hm"
    (document,) = choice.message.ragr1["turns"][0]["documents"]
    assert document["title"] == "Riga" and document["text"] in engine.prompts[1]
    assert [engine.prompts[0].count(text) for text in ("Be brief.", "Hello.", QUESTION["content"])] == [1, 1, 1]
    assert "Answer the question below" not in engine.prompts[0]  # the recipe's prompt
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens > 0
    assert again.choices[0].message == choice.message
    assert engine.prompts[:2] == engine.prompts[2:]  # nothing is kept between requests


async def test_a_request_that_brings_tools_gets_its_calls(tokenizer: PolicyTokenizer) -> None:
    async with serving(tokenizer, TOOLS, [CALL]) as (client, engine):
        message = (await ask(client, QUESTION, tools=[TOOL])).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("search", '{"query": "Ana"}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "Ana was born in Riga."}
        await ask(client, QUESTION, message.model_dump(exclude_none=True), result, tools=[TOOL])
        await ask(client, QUESTION, message.model_dump(exclude_none=True), result)
    assert "queries" not in engine.prompts[0] and "Search." in engine.prompts[0]
    assert len(engine.prompts) == 3  # a turn each
    assert all("Ana was born in Riga." in prompt for prompt in engine.prompts[1:])


async def test_a_run_with_an_agent_answers_a_turn(tokenizer: PolicyTokenizer) -> None:
    async with serving(tokenizer, {"agent": f"{__name__}:agent"}, ["Riga"]) as (client, _):
        found = await ask(client)
    assert (found.choices[0].message.content, found.choices[0].message.model_extra) == ("Riga", {})


def agent(task: object, session: object) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("environment", "turns", "content", "num_parts"),
    [
        (TOOLS, [SEARCH, "In Riga."], "In Riga.", 1),
        (TAGS, ["<search> Ana</search>", "<answer> Riga</answer>"], "Riga", 1),
        ({"agent": f"{__name__}:agent"}, ["In Riga."], "In Riga.", 7),  # as it is sampled
    ],
    ids=["tools", "tags", "turn"],
)
async def test_the_answer_is_streamed(
    tokenizer: PolicyTokenizer, environment: dict[str, Any], turns: list[str], content: str, num_parts: int
) -> None:
    async with serving(tokenizer, environment, turns) as (client, _):
        parts = [part async for part in await ask(client, stream=True, stream_options={"include_usage": True})]
    deltas = [part.choices[0].delta for part in parts if part.choices]
    written = [delta.content for delta in deltas if delta.content]
    assert ("".join(written), len(written)) == (content, num_parts)
    assert parts[-1].usage.completion_tokens > 0
    assert sum("ragr1" in (delta.model_extra or {}) for delta in deltas) == (num_parts == 1)


# -- search in tags ----------------------------------------------------------------------------------------------------


async def test_a_policy_that_searches_in_tags_answers_the_last_question(tokenizer: PolicyTokenizer) -> None:
    turns = ["<search> Ana</search>", f"{THOUGHT}<answer> Riga</answer>"]
    async with serving(tokenizer, TAGS, turns) as (client, engine):
        found = await ask(client, {"role": "user", "content": "Hello"}, QUESTION)
    message = found.choices[0].message
    assert (message.content, found.choices[0].finish_reason) == ("Riga", "stop")
    assert [turn["queries"] for turn in message.ragr1["turns"]] == [["Ana"], []]
    assert "Hello" not in engine.prompts[0] and QUESTION["content"] in engine.prompts[0]


@pytest.mark.parametrize(
    ("messages", "fields", "said"),
    [
        ([QUESTION], {"tools": [TOOL]}, "tools: the policy searches in tags"),
        ([QUESTION, {"role": "tool", "tool_call_id": "a", "content": "Riga"}], {}, "tools: the policy"),
        ([QUESTION, {"role": "system", "content": "Be brief."}], {}, "the last one is of the system"),
    ],
)
async def test_what_tags_cannot_answer_is_refused(
    tokenizer: PolicyTokenizer, messages: list[Any], fields: dict[str, Any], said: str
) -> None:
    async with serving(tokenizer, TAGS, ["Riga"]) as (client, _):
        with pytest.raises(openai.BadRequestError, match=said):
            await ask(client, *messages, **fields)


# -- sampling and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["loop", "turn"])
async def test_a_requests_sampling_counts(tokenizer: PolicyTokenizer, tools: dict[str, Any]) -> None:
    async with serving(tokenizer, TOOLS, ["In Riga. END. "]) as (client, engine):
        found = await ask(client, temperature=0.5, top_p=0.9, seed=7, max_tokens=100, stop="END", **tools)
        cut = await ask(client, max_completion_tokens=4, **tools)
    first, second = engine.sampled
    assert (first.temperature, first.top_p, first.seed, first.max_new_tokens) == (0.5, 0.9, 7, 100)
    assert first.stop == ("END",) and found.choices[0].message.content == "In Riga."
    assert (second.temperature, second.top_p, second.max_new_tokens) == (0.0, 1.0, 4)  # greedy
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 4)


@pytest.mark.parametrize("wanted", [{"temperature": -1}, {"top_p": 0}, {"seed": -1}, {"temperature": "hot"}])
async def test_a_sampling_that_cannot_be_is_refused(tokenizer: PolicyTokenizer, wanted: dict[str, Any]) -> None:
    (name,) = wanted
    async with serving(tokenizer, TOOLS, ["Riga"]) as (client, engine):
        with pytest.raises(openai.BadRequestError, match=f"{name}: got"):
            await ask(client, **wanted)
    assert engine.prompts == []


@pytest.mark.parametrize(("environment", "call"), [(TOOLS, SEARCH), (TAGS, "<search> Ana</search>")])
async def test_turns_that_are_used_up_are_no_answer(
    tokenizer: PolicyTokenizer, environment: dict[str, Any], call: str
) -> None:
    async with serving(tokenizer, environment, [call] * 3) as (client, _):
        (choice,) = (await ask(client)).choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.ragr1["stop_reason"] == "max_turns"


@pytest.mark.parametrize(
    ("environment", "fields"), [(TOOLS, {}), (TOOLS, {"tools": [TOOL]}), (TAGS, {})], ids=["loop", "turn", "tags"]
)
async def test_a_request_beyond_the_context_is_refused(
    tokenizer: PolicyTokenizer, environment: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with serving(tokenizer, environment, ["Riga"], context=2000) as (client, _):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await ask(client, {"role": "user", "content": "long " * 3000}, **fields)
    assert caught.value.code == "context_length_exceeded"


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("environment", "fields"), [(TOOLS, {}), (TOOLS, {"tools": [TOOL]}), (TAGS, {})], ids=["loop", "turn", "tags"]
)
async def test_an_engine_that_fails_is_one_sentence(
    tokenizer: PolicyTokenizer, environment: dict[str, Any], fields: dict[str, Any], stream: bool
) -> None:
    async with serving(tokenizer, environment, []) as (client, _):
        with pytest.raises(openai.InternalServerError, match="its script ends") as caught:
            await ask(client, stream=stream, **fields)
    assert caught.value.status_code == 503


async def test_an_engine_that_fails_after_the_first_chunk_is_an_event(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(self: Noting, *arguments: Any, on_text: OnText, **options: Any) -> Completion:
        on_text("Ri")
        await asyncio.sleep(0)
        raise EngineError("the model is away")

    monkeypatch.setattr(Noting, "generate", generate)
    said = ""
    async with serving(tokenizer, {"agent": f"{__name__}:agent"}, []) as (client, _):
        with pytest.raises(openai.APIError, match="the model is away"):
            async for part in await ask(client, stream=True):
                said += part.choices[0].delta.content or ""
    assert said == "Ri"


def broken(name: str) -> str:
    """Say.

    Args:
        name: What.
    """
    raise KeyError(name)


async def test_a_tool_that_fails_is_one_sentence_with_its_line(tokenizer: PolicyTokenizer) -> None:
    call = '<tool_call>\n{"name": "broken", "arguments": {"name": "Ana"}}\n</tool_call>'
    async with serving(tokenizer, {**TOOLS, "tools": [f"{__name__}:broken"]}, [call]) as (client, _):
        with pytest.raises(openai.InternalServerError, match=r"test_evaluation_serving.py, line \d+: KeyError: 'Ana'"):
            await ask(client)


@pytest.mark.parametrize("environment", [TAGS, {"agent": f"{__name__}:agent"}], ids=["env", "agent"])
def test_a_server_whose_engine_died_ends(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any]
) -> None:
    async def generate(*_: Any, **__: Any) -> Completion:
        raise EngineDeadError("its processes ended")

    monkeypatch.setattr(Noting, "generate", generate)
    config: Any = resolve({"environment": environment})
    server = PolicyServer(ServedPolicy(config, tokenizer, OnePassage(), Noting(tokenizer, [])), port=0)

    def client() -> int:
        asyncio.run(until(lambda: server._listener is not None))
        asks = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with asks, pytest.raises(openai.APIStatusError, match="its processes ended") as caught:
            asks.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
        return caught.value.status_code

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(client)
        with pytest.raises(UserError, match="the engine died: its processes ended; start the command again"):
            run_policy_server(server)
    assert asking.result() == 503


class Away(OnePassage):
    async def search(self, queries: list[str], k: int) -> list[Any]:
        raise RetrievalError("the index is away")


async def test_a_search_that_fails_is_one_sentence(tokenizer: PolicyTokenizer) -> None:
    async with serving(tokenizer, TOOLS, [SEARCH], retriever=Away()) as (client, _):
        with pytest.raises(openai.InternalServerError, match="the index is away") as caught:
            await ask(client)
    assert caught.value.status_code == 503


async def test_messages_that_the_template_refuses_are_one_sentence(tmp_path_factory: pytest.TempPathFactory) -> None:
    llama = write_tool_family(tmp_path_factory.mktemp("llama") / "policy", "llama3.1")
    calls = [{"id": f"{n}", "type": "function", "function": {"name": "search", "arguments": "{}"}} for n in (1, 2)]
    history = [QUESTION, {"role": "assistant", "tool_calls": calls}, QUESTION]
    async with serving(llama, TOOLS, ["Riga"]) as (client, _):
        with pytest.raises(openai.BadRequestError, match=r"messages: .*one call a turn"):
            await ask(client, *history)


async def test_a_token_is_needed_where_there_is_one(tokenizer: PolicyTokenizer) -> None:
    async with serving(tokenizer, TOOLS, ["Riga"], token="sesame", key="wrong") as (client, _):
        for asked in (ask(client), client.models.list()):
            with pytest.raises(openai.AuthenticationError, match="API key"):
                await asked
    async with serving(tokenizer, TOOLS, ["Riga"], token="sesame", key="sesame") as (client, _):
        assert (await ask(client)).choices[0].message.content == "Riga"
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        PolicyServer(None, host="0.0.0.0")  # type: ignore[arg-type]
