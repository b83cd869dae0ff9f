"""``ragr1 check agent``: an agent solves a made-up task at the gateway. Its policy is a script; no model is loaded.

The script calls each tool of a request once, with made-up arguments, and then answers. For an agent that stops at
``</search>`` or ``</answer>`` it searches once and then answers in these tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs.checker import TASK, Check, OnePassage, made_up_arguments
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling, StopReason, Trajectory
from ragr1_actors.planning.fit import changed
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.engines.endpoint_engine import EndpointTokenizer
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest

DEADLINE_S = 120.0
"""Limit in seconds for the agent, if its deadline is later."""


class _Script(ScriptedEngine):
    """Calls each tool once, and then gives the answer of the task."""

    def __init__(self, tokenizer: EndpointTokenizer) -> None:
        super().__init__({}, tokenizer.encode)
        self._tokenizer = tokenizer

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        chat, tools = self._tokenizer.chat(prompt_token_ids)
        num_turns = sum(message["role"] == "assistant" for message in chat)  # some agents send calls back as text
        left: list[dict[str, Any]] = [tool["function"] for tool in tools[num_turns:]]
        text, message = TASK.golden_answers[0], None
        if "</search>" in sampling.stop and not num_turns:
            text = "<search>lamp</search>"
        elif "</answer>" in sampling.stop:
            text = f"<answer>{text}</answer>"
        if left:
            arguments = json.dumps(made_up_arguments(left[0].get("parameters") or {}))
            function = {"name": left[0]["name"], "arguments": arguments}
            text = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
            message = {"content": None, "tool_calls": [{"type": "function", "function": function}]}
        if on_text is not None:
            on_text(text)
        ids = self._tokenizer.sampled(text, 1, message)
        return Completion(ids, [0.0], [0], text, FinishReason.STOP)


def try_agent(config: SamplerConfig) -> list[Check]:
    """Let the agent of a recipe solve a made-up task; a function of ``ray`` is called in this process.

    Raises:
        ConfigError: there is no agent, or it cannot run.
    """
    agent = config.environment.agent
    if agent is None:
        raise ConfigError("environment.agent: got none, expected the agent that is checked")
    here: dict[str, Any] = {"deadline_s": min(DEADLINE_S, agent.deadline_s)}
    if agent.ray:
        here |= {"function": agent.ray, "ray": ""}
    config = changed(config, "environment", {"agent": agent.model_copy(update=here)})
    tokenizer = EndpointTokenizer()
    runner = EnvRunner(config, tokenizer, OnePassage(), _Script(tokenizer))
    loop = DriverLoop()
    try:
        group = loop.run(runner.sample_group(GroupRequest("check", TASK, 1, 0.0)))
    finally:
        loop.close(runner.close())
    return checks_of(group.trajectories[0])


def checks_of(ended: Trajectory) -> list[Check]:
    """Return the checks that ``ragr1 check agent`` prints for the attempt."""
    *_, last = [call.result for call in ended.calls if call.tool == "agent"] or [""]
    last = shortened(last.strip().rpartition("\n")[2])
    if ended.stop_reason is not StopReason.ANSWERED:
        problem = f"it ended with {ended.stop_reason.value}: {ended.error or last}"
        return [Check("it solves a made-up task", problem)]
    names = dict.fromkeys(call.tool for call in ended.calls if call.tool != "agent")
    calls = f", with calls of {', '.join(names)}" if names else ""
    no_answer = "" if ended.answer or ended.reward else ": ".join(filter(None, ("it gave no answer", last)))
    return [
        Check(f"it solves a made-up task: turns {len(ended.turns)}, rows {len(ended.rows)}{calls}"),
        Check(f"its answer {shortened(repr(ended.answer))} has the reward {ended.reward:g}", no_answer),
    ]
