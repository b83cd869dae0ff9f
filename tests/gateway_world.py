"""A runner whose policy plays scripts through the gateway, and agents that ask it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from fakes import OnePassage

from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.resolve import resolve
from ragr1_actors.core.types import Completion, OnText, Sampling, Task, Trajectory
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.gateway.agents import AgentSession
from ragr1_actors.rollout.groups import GroupRequest

TASK = Task("t", "Where was Ana born?", ("Riga",))
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ana"}}\n</tool_call>'


class GrowingScripts(ScriptedEngine):
    """Shows a scripted turn character by character, before it ends it."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        turn = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        for end in range(1, len(turn.text) + 1) if on_text is not None else ():
            on_text(turn.text[:end])
            await asyncio.sleep(0)
        return turn


def config_of(agent: object, max_turns: int = 5, **sections: Mapping[str, Any]) -> SamplerConfig:
    """Return a configuration with an agent."""
    environment = {"agent": agent, "max_turns": max_turns} | sections.pop("environment", {})
    return resolve({"environment": environment, "env_runners": {"max_context_tokens": 20_000}, **sections})  # type: ignore[dict-item]


def runner_of(
    tokenizer: PolicyTokenizer, config: SamplerConfig, scripts: Mapping[str, Sequence[str]], retriever: Any = None
) -> EnvRunner:
    """Return a runner that plays turns, by trajectory and conversation: ``{"t/0": [..], "t/0~1": [..]}``."""
    end = [tokenizer.end_of_turn_id]
    engine = GrowingScripts(scripts, lambda text: tokenizer.encode_frame(text)[0] + end)  # type: ignore[arg-type,operator]
    return EnvRunner(config, tokenizer, retriever or OnePassage(), engine)


async def play(
    tokenizer: PolicyTokenizer,
    agent: object,
    scripts: Mapping[str, Sequence[str]],
    *,
    number: int = 1,
    retriever: Any = None,
    task: Task = TASK,
    **more: Any,
) -> list[Trajectory]:
    """Return the trajectories of a task that an agent solved."""
    runner = runner_of(tokenizer, config_of(agent, **more), scripts, retriever)
    try:
        group = await runner.sample_group(GroupRequest("t", task, number, 1.0))
    finally:
        assert runner._agents is not None
        await runner._agents.close()
    assert all(sum(one.turn_lengths) == one.num_model_tokens for one in group.trajectories)
    return list(group.trajectories)


class Client:
    """Asks as OpenAI's client does, and keeps the history."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Where was Ana born?"}]

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, Any]:
        headers = {
            "Authorization": f"Bearer {self.session.api_key if key is None else key}",
            "Content-Type": "application/json",
        }
        data = io.BytesIO(json.dumps(body).encode())
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.session.url}{path}", data=data, headers=headers) as answer,
        ):
            text = await answer.text()
        return answer.status, text if answer.content_type == "text/event-stream" else json.loads(text)

    async def ask(self, **fields: Any) -> dict[str, Any]:
        """Return the policy's message, which is appended."""
        status, found = await self.post(
            "/v1/chat/completions", {"model": "policy", "messages": self.messages, **fields}
        )
        assert status == 200, found
        self.messages.append(found["choices"][0]["message"])
        return found  # type: ignore[no-any-return]

    def answer_calls(self, text: str) -> None:
        """Append a result for each call of the last message."""
        for call in self.messages[-1]["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def events(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
