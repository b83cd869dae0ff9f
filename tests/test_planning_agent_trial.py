"""``ragr1 check agent``: an agent solves a made-up task before a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_world import TOOL, Client
from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from ragr1_actors.core.types import Task
from ragr1_actors.planning import agent_trial
from ragr1_actors.rollout.gateway.agents import AgentSession

HERE = __name__


async def calls_its_tools(task: Task, session: AgentSession) -> str:
    client = Client(session)
    another = {"type": "function", "function": {**TOOL["function"], "name": "look"}}
    client.messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task.question}]
    called = []
    while (await client.ask(tools=[TOOL, another]))["choices"][0]["finish_reason"] == "tool_calls":
        (call,) = client.messages[-1]["tool_calls"]
        called.append((call["function"]["name"], call["function"]["arguments"]))
        client.answer_calls("It lies in Riga.")
    assert called == [("search", '{"query": "lamp"}'), ("look", '{"query": "lamp"}')]
    return str(client.messages[-1]["content"])


async def writes_tags(task: Task, session: AgentSession) -> str:
    client = Client(session)
    asked = await client.ask(stop=["</search>", "</answer>"])
    assert asked["choices"][0]["message"]["content"] == "<search>lamp"
    client.messages.append({"role": "user", "content": "It lies in Riga."})
    said = await client.ask(stop=["</search>", "</answer>"])
    return str(said["choices"][0]["message"]["content"]).removeprefix("<answer>")


async def posts_a_reward(task: Task, session: AgentSession) -> None:
    client = Client(session)
    await client.ask()
    await client.post("/v1/reward", {"reward": 0.5})


async def says_nothing(task: Task, session: AgentSession) -> None:
    await Client(session).ask()


async def raises(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    raise KeyError("lamp")


async def never_asks(task: Task, session: AgentSession) -> str:
    return "Riga"


def plain(task: Task, session: AgentSession) -> str:
    return "Riga"


def check(agent: str, *overrides: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["check", "agent", agent, *overrides])
    return found.exit_code, " ".join([*found.output.split(), str(found.exception)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("calls_its_tools", "turns 3, rows 1, with calls of search, look ok its answer 'Riga' has the reward 1"),
        ("writes_tags", "turns 2, rows 1 ok its answer 'Riga' has the reward 1"),
        ("posts_a_reward", "turns 1, rows 1 ok its answer '' has the reward 0.5"),
    ],
)
def test_an_agent_that_works_has_no_fault(name: str, said: str) -> None:
    assert check(f"{HERE}:{name}") == (0, f"ok it solves a made-up task: {said} None")


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (f"{HERE}:says_nothing", "its answer '' has the reward 0: it gave no answer"),
        (f"{HERE}:raises", "agent_trial.py, line 55: KeyError: 'lamp'"),
        (f"{HERE}:never_asks", "the agent ended before the policy acted: it asked nothing"),
        (f"{{ray: '{HERE}:plain'}}", "the agent ended before the policy acted: it asked nothing"),
        (f"{HERE}:nothing", "has no 'nothing'"),
        ("{command: [no-such-program]}", "ended with status 1: no-such-program: No such file or directory"),
    ],
)
def test_what_is_wrong_with_an_agent_is_said(agent: str, problem: str) -> None:
    status, said = check(agent)
    assert status != 0 and problem in said


def test_an_agent_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_trial, "DEADLINE_S", 0.5)
    status, said = check(f"{HERE}:never_ends")
    assert status == 1 and "it ended with agent_deadline: the agent did not end within 0.5 s" in said


async def never_ends(task: Task, session: AgentSession) -> Any:
    client = Client(session)
    await client.ask()
    while True:
        await client.post("/v1/answer", {"answer": "Riga"})


def test_a_program_is_checked(tmp_path: Path) -> None:
    text = "import json, os, sys, urllib.request as u\n"
    text += "b = json.dumps({'messages': [{'role': 'user', 'content': sys.argv[1]}]}).encode()\n"
    text += "h = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
    text += "r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', b, h)\n"
    text += "print(json.load(u.urlopen(r))['choices'][0]['message']['content'])\n"
    (tmp_path / "agent.py").write_text(text)
    status, said = check(f"{{command: ['{sys.executable}', '{tmp_path}/agent.py', '{{question}}']}}")
    assert (status, said) == (
        0,
        "ok it solves a made-up task: turns 1, rows 1 ok its answer 'Riga' has the reward 1 None",
    )
