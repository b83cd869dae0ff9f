"""What an agent gives and asks besides turns: searches, answers, rewards and the results of calls."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from fakes import OnePassage
from gateway_world import CALL, TOOL, Client, play
from tool_templates import write_tool_family

import ragr1_actors.rollout.gateway.session as gateway_session
from ragr1_actors import Passage
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.gateway.agents import AgentSession

HERE = __name__
AGENTS: dict[str, Any] = {}


async def solve(task: Task, session: AgentSession) -> Any:
    return await AGENTS["solve"](task, session)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("gateway") / "policy", "qwen2.5")


async def test_searches_are_kept_with_the_newest_turn(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        first, second = Client(session), Client(session)
        second.messages = [{"role": "user", "content": "Who was Bo?"}]

        async def search(query: str) -> None:
            assert (await first.post("/retrieve", {"queries": [query], "topk": 1}))[0] == 200

        await search("before")
        for client, query in ((first, "one"), (second, "two"), (first, "three")):
            client.messages.append({"role": "user", "content": "Go on."})
            await client.ask()
            await search(query)
        assert (await second.post("/v1/chat/completions", {"messages": second.messages, "n": 2}))[0] == 400
        await search("four")
        return "Riga"

    AGENTS["solve"] = agent
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": ["Hm", "So"], "t/0~1": ["Well"]})
    assert found.error == ""
    assert [(turn.completion_text, [call.arguments["query"] for call in turn.calls]) for turn in found.turns] == [
        ("Well", ["two"]),
        ("Hm", ["before", "one"]),
        ("So", ["three", "four"]),  # the conversation with the newest turn is last
    ]


async def test_searches_of_an_agent_have_their_time(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(self: OnePassage, queries: list[str], k: int) -> list[list[Passage]]:
        await asyncio.sleep(0.05)
        return [[Passage("a", "A", "a")] for _ in queries]

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        await client.post("/retrieve", {"queries": ["one", "two"], "topk": 1})
        return "Riga"

    AGENTS["solve"] = agent
    monkeypatch.setattr(OnePassage, "search", slow)
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": ["Hm"]})
    took_s = found.metrics["time/retrieval_waited_s"]
    assert took_s > 0.04 and found.metrics["time/retrieval_s"] == 2 * took_s
    assert [call.waited_s for call in found.calls if call.tool == "retrieve"] == [took_s, took_s]


@pytest.mark.parametrize("answers", [[], None, [[Passage("a", "A", "a", math.nan)]]])
async def test_a_wrong_answer_of_the_retriever_is_no_failure_of_the_agent(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch, answers: Any
) -> None:
    async def wrong(self: OnePassage, queries: list[str], k: int) -> Any:
        return answers

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        status, _ = await client.post("/retrieve", {"queries": ["one"], "topk": 1, "return_scores": True})
        assert status == 503
        return "Riga"

    AGENTS["solve"] = agent
    monkeypatch.setattr(OnePassage, "search", wrong)
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": ["Hm"]})
    assert found.stop_reason.is_failure


async def test_searches_are_limited_per_attempt(tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_session, "MAX_QUERIES", 3)

    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask()
        assert (await client.post("/retrieve", {"queries": ["Ana", "Bo"]}))[0] == 200
        status, found = await client.post("/retrieve", {"queries": ["Ana", "Bo"]})
        assert status == 429 and "3 queries; 2 are used" in found["error"]["message"]
        assert (await client.post("/retrieve", {"queries": ["Ana"]}))[0] == 200
        return "Riga"

    AGENTS["solve"] = agent
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": ["Hm"]})
    assert found.error == "" and len(found.calls) == 3


@pytest.mark.parametrize("with_ids", [True, False])
async def test_results_in_another_order_are_those_of_the_calls_that_they_name(
    tokenizer: PolicyTokenizer, with_ids: bool
) -> None:
    async def agent(task: Task, session: AgentSession) -> str:
        client = Client(session)
        await client.ask(tools=[TOOL])
        for call in reversed(client.messages[-1]["tool_calls"]):
            query = json.loads(call["function"]["arguments"])["query"]
            named = {"tool_call_id": call["id"]} if with_ids else {}
            client.messages.append({"role": "tool", "content": f"of {query}", **named})
        await client.ask(tools=[TOOL])
        return "Riga"

    AGENTS["solve"] = agent
    said = CALL + "\n" + CALL.replace("Ana", "Bo")
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": [said, "Riga"]})
    assert found.error == "" and len(found.rows) == 1
    expected = [("Ana", "of Ana"), ("Bo", "of Bo")] if with_ids else [("Ana", "of Bo"), ("Bo", "of Ana")]
    assert [(call.arguments["query"], call.result) for call in found.turns[0].calls] == expected


async def test_an_agent_gives_answer_and_reward_and_searches(tokenizer: PolicyTokenizer) -> None:
    async def agent(task: Task, session: AgentSession) -> None:
        client = Client(session)
        await client.ask()
        assert (await client.post("/v1/reward", {"reward": "much"}))[0] == 400
        assert (await client.post("/v1/reward", {"reward": 1e38}))[0] == 400
        assert (await client.post("/v1/reward", {"reward": 0.25}))[0] == 200
        assert (await client.post("/v1/answer", {"answer": "Riga"}))[0] == 200
        status, found = await client.post("/retrieve", {"queries": ["Ana", "Bo"], "topk": 1})
        assert status == 200 and [one[0]["title"] for one in found["result"]] == ["Riga", "Riga"]

    AGENTS["solve"] = agent
    (found,) = await play(tokenizer, f"{HERE}:solve", {"t/0": ["Hm"]})
    assert (found.error, found.answer, found.reward, found.turns[0].reward) == ("", "Riga", 1.25, 0.25)
    assert [(call.tool, call.arguments["query"], call.records[0].title) for call in found.turns[0].calls] == [
        ("retrieve", "Ana", "Riga"),
        ("retrieve", "Bo", "Riga"),
    ]
    assert (found.metrics["rounds"], found.metrics["queries"]) == (1.0, 2.0)
