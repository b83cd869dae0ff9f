"""Agents: functions, programs and Ray tasks, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_world import TASK, Client, GrowingScripts, play
from tool_templates import write_tool_family
from waits import until

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.service_settings import AgentSettings
from ragr1_actors.core.types import Completion, StopReason, Task, TokenKind
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.gateway import agents, attempt
from ragr1_actors.rollout.gateway.agents import AgentSession, make_agent
from ragr1_actors.rollout.gateway.messages import MAX_TEXT_BYTES
from ragr1_actors.rollout.gateway.session import MAX_REFUSED

HERE = __name__
ASKS = """
import json, os, sys, urllib.request
def ask(question):
    body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("agents") / "policy", "qwen2.5")


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "agent.py"
    path.write_text(ASKS + text)
    return [sys.executable, str(path), "{question}"]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- functions ---------------------------------------------------------------------------------------------------------


async def raises_first(task: Task, session: AgentSession) -> str:
    raise KeyError("first")


async def raises_later(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    raise KeyError("later")


async def asks_nothing(task: Task, session: AgentSession) -> str:
    return "Riga"


async def returns_a_number(task: Task, session: AgentSession) -> Any:
    await Client(session).ask()
    return 3


def in_a_thread(task: Task, session: AgentSession) -> str:
    assert threading.current_thread() is not threading.main_thread()
    asyncio.run(Client(session).ask())
    return "Riga"


def finds_nothing(task: Task, session: AgentSession) -> str:
    asyncio.run(Client(session).ask())
    return next(iter(()))


async def never_ends(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    await asyncio.sleep(10**6)
    return ""


async def never_begins(task: Task, session: AgentSession) -> str:
    await asyncio.sleep(10**6)
    return ""


def interrupts(task: Task, session: AgentSession) -> str:
    asyncio.run(Client(session).ask())
    raise KeyboardInterrupt


class PanicError(BaseException):
    pass


async def panics(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    raise PanicError("at the disco")


async def cancels_itself(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(1000)
    return ""


class AnObject:
    async def __call__(self, task: Task, session: AgentSession) -> str:
        return str((await Client(session).ask())["choices"][0]["message"]["content"])


AN_OBJECT = AnObject()


@pytest.mark.parametrize(
    ("name", "deadline_s", "expected", "said"),
    [
        (
            "raises_first",
            60,
            StopReason.ENV_ERROR,
            r"before the policy acted: .*agents\.py, line \d+: KeyError: 'first'",
        ),
        ("asks_nothing", 60, StopReason.ENV_ERROR, "it asked nothing"),
        ("never_begins", 0.2, StopReason.ENV_ERROR, "did not end within 0.2 s"),
        ("raises_later", 60, StopReason.AGENT_FAILED, r"agents\.py, line \d+: KeyError: 'later'"),
        ("returns_a_number", 60, StopReason.AGENT_FAILED, "returned 3, expected the answer as a text, or None"),
        ("finds_nothing", 60, StopReason.AGENT_FAILED, "StopIteration: next"),
        ("never_ends", 1, StopReason.AGENT_DEADLINE, "the agent did not end within 1 s"),
        ("interrupts", 60, StopReason.AGENT_FAILED, "KeyboardInterrupt: it raised one"),
        ("panics", 60, StopReason.AGENT_FAILED, "PanicError: at the disco"),
        ("cancels_itself", 60, StopReason.AGENT_FAILED, "the agent cancelled its own task"),
        ("in_a_thread", 60, StopReason.ANSWERED, ""),
        ("AN_OBJECT", 60, StopReason.ANSWERED, ""),
    ],
)
async def test_how_functions_end(
    tokenizer: PolicyTokenizer, name: str, deadline_s: float, expected: StopReason, said: str
) -> None:
    agent = {"function": f"{HERE}:{name}", "deadline_s": deadline_s}
    (found,) = await play(tokenizer, agent, {"t/0": ["Riga"]})
    assert found.stop_reason is expected
    assert re.search(said, found.error) if said else found.error == ""
    if not found.stop_reason.is_failure:
        assert TokenKind.MODEL in found.kinds
        assert found.reward == float(expected is StopReason.ANSWERED)
        assert (found.error and found.calls[-1].result) == found.error


async def test_an_answer_so_far_is_rewarded_when_the_agent_fails(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:answers_and_raises", {"t/0": ["Riga"]})
    assert (found.stop_reason, found.answer, found.reward) == (StopReason.AGENT_FAILED, "Riga", 1.0)


async def answers_and_raises(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    await client.post("/v1/answer", {"answer": "Riga"})
    raise KeyError("late")


async def uses_all_turns(task: Task, session: AgentSession) -> str:
    client = Client(session)
    for number in range(9):
        status, found = await client.post("/v1/chat/completions", {"messages": client.messages})
        if status != 200:
            assert number == 2, (number, found)
            assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
            assert "This model's maximum context length" in found["error"]["message"]
            assert not any(map(str.isdigit, found["error"]["message"]))
            break
        client.messages += [found["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    if task.meta.get("raises"):
        raise RuntimeError("no turns")
    return "Riga"


async def ends_quietly(task: Task, session: AgentSession) -> None:
    await uses_all_turns(task, session)


async def test_an_agent_that_ends_without_an_answer_beyond_its_turns_has_used_them(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:ends_quietly", {"t/0": ["a", "b"]}, max_turns=2)
    assert (found.stop_reason, found.answer) == (StopReason.MAX_TURNS, "")


@pytest.mark.parametrize("raises", [True, False])
async def test_beyond_its_turns_an_agent_is_told_so(tokenizer: PolicyTokenizer, raises: bool) -> None:
    task = Task("t", TASK.question, TASK.golden_answers, meta={"raises": raises})
    (found,) = await play(tokenizer, f"{HERE}:uses_all_turns", {"t/0": ["a", "b"]}, max_turns=2, task=task)
    assert found.stop_reason is (StopReason.MAX_TURNS if raises else StopReason.ANSWERED), found.error
    assert len(found.turns) == 2 and found.reward == float(not raises)


async def asks_too_much(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    size = MAX_TEXT_BYTES if task.task_id == "long" else 30_000
    client.messages.append({"role": "user", "content": "x" * size})
    status, found = await client.post("/v1/chat/completions", {"messages": client.messages})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    raise RuntimeError("full")


@pytest.mark.parametrize("name", ["t", "long"])
async def test_beyond_its_context_an_agent_is_told_so(tokenizer: PolicyTokenizer, name: str) -> None:
    task = Task(name, "Where is Riga?", ("Latvia",))
    (found,) = await play(tokenizer, f"{HERE}:asks_too_much", {"t/0": ["a"]}, task=task)
    assert (found.stop_reason, len(found.turns)) == (StopReason.CONTEXT_FULL, 1)
    assert found.num_tokens < 20_000


async def shortens(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    long = [*client.messages, {"role": "user", "content": "x" * 30_000}]
    assert (await client.post("/v1/chat/completions", {"messages": long}))[0] == 400
    client.messages = [{"role": "user", "content": "A summary. Where?"}]
    await client.ask()
    raise KeyError("later")


async def test_an_agent_that_shortens_its_messages_goes_on(tokenizer: PolicyTokenizer) -> None:
    scripts = {"t/0": ["a"], "t/0~1": ["Riga"]}
    (found,) = await play(tokenizer, f"{HERE}:shortens", scripts, max_turns=2)
    assert (found.stop_reason, len(found.turns), len(found.rows)) == (StopReason.AGENT_FAILED, 2, 2)


async def floods_with_nonsense(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    while True:
        await client.post("/v1/chat/completions", {"messages": 3})


async def test_requests_that_are_refused_end_an_agent_that_does_not_stop(tokenizer: PolicyTokenizer) -> None:
    agent = {"function": f"{HERE}:floods_with_nonsense", "deadline_s": 30}
    (found,) = await play(tokenizer, agent, {"t/0": ["a"]})
    assert found.stop_reason is StopReason.AGENT_FAILED and "in a row" in found.calls[-1].result


async def asks_nonsense(task: Task, session: AgentSession) -> str:
    client = Client(session)
    if task.question == "after a turn":
        await client.ask()
    status, _ = await client.post("/v1/chat/completions", {"messages": 3})
    if task.question == "and goes on":
        await client.ask()
    raise RuntimeError(f"got {status}")


@pytest.mark.parametrize(("question", "refused"), [("at once", True), ("after a turn", True), ("and goes on", False)])
async def test_a_failed_agent_is_told_with_the_refusal_of_its_last_request(
    tokenizer: PolicyTokenizer, question: str, refused: bool
) -> None:
    agent, task = {"function": f"{HERE}:asks_nonsense"}, replace(TASK, question=question)
    (found,) = await play(tokenizer, agent, {"t/0": ["a"]}, task=task)
    assert "got 400" in found.error
    assert ("; its last request was refused: messages: got 3" in found.error) == refused


async def catches_its_end(task: Task, session: AgentSession) -> str:
    await Client(session).ask()
    while not GO_ON.is_set():
        with suppress(asyncio.CancelledError):
            await GO_ON.wait()
    return ""


GO_ON = asyncio.Event()


async def test_an_agent_that_catches_its_cancellation_is_not_waited_for(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "END_TIMEOUT_S", 0.1)
    GO_ON.clear()
    agent = {"function": f"{HERE}:catches_its_end", "deadline_s": 1}
    try:
        (found,) = await asyncio.wait_for(play(tokenizer, agent, {"t/0": ["a"]}), 60)
    finally:
        GO_ON.set()
    assert found.stop_reason is StopReason.AGENT_DEADLINE


async def floods(task: Task, session: AgentSession) -> str:
    client = Client(session)
    while True:
        status, _ = await client.post("/v1/chat/completions", {"messages": client.messages})
        FLOOD.append(status)


FLOOD: list[int] = []


async def test_an_agent_that_does_not_stop_to_ask_is_ended(tokenizer: PolicyTokenizer) -> None:
    FLOOD.clear()
    (found,) = await play(tokenizer, f"{HERE}:floods", {"t/0": ["a"]}, max_turns=1)
    assert found.stop_reason is StopReason.MAX_TURNS
    assert FLOOD.count(400) <= MAX_REFUSED + 1 and len(FLOOD) <= MAX_REFUSED + 3


async def asks_twice(task: Task, session: AgentSession) -> str:
    client = Client(session)
    for _ in range(2):
        await client.post("/v1/chat/completions", {"messages": client.messages})
    await asyncio.sleep(10**6)
    return ""


async def test_an_engine_that_fails_is_infrastructure_and_ends_the_agent(tokenizer: PolicyTokenizer) -> None:
    (found,) = await play(tokenizer, f"{HERE}:asks_twice", {"t/0": ["a"]})
    assert found.stop_reason is StopReason.ENGINE_ERROR and "its script ends" in found.error


async def test_an_engine_that_is_slower_than_the_deadline_is_infrastructure(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(*_: Any, **__: Any) -> Completion:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(GrowingScripts, "generate", waits)
    (found,) = await play(tokenizer, {"function": f"{HERE}:asks_twice", "deadline_s": 1}, {"t/0": []})
    assert found.stop_reason is StopReason.ENGINE_ERROR and "raise environment.agent.deadline_s" in found.error


async def asks_at_the_nodes_address(task: Task, session: AgentSession) -> str:
    assert "0.0.0.0" not in session.url
    return str((await Client(session).ask())["choices"][0]["message"]["content"])


async def test_a_gateway_on_all_addresses_gives_that_of_its_node(tokenizer: PolicyTokenizer) -> None:
    agent = {"function": f"{HERE}:asks_at_the_nodes_address", "host": "0.0.0.0"}
    (found,) = await play(tokenizer, agent, {"t/0": ["Riga"]})
    assert (found.error, found.answer) == ("", "Riga")


def test_a_process_does_not_wait_for_a_function_that_never_ends() -> None:
    script = """
import asyncio, threading
from ragr1_actors.core.process.users_code import in_daemon_thread
async def main():
    try:
        await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("gave up")
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "gave up\n", "")


# -- programs ----------------------------------------------------------------------------------------------------------


async def test_the_last_line_of_a_program_is_the_answer(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "print('thinking'); print(ask(sys.argv[1])); print()\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert (found.error, found.answer, found.reward) == ("", "Riga", 1.0)
    assert found.calls[-1].tool == "agent" and found.calls[-1].result == "thinking\nRiga\n\n"


async def test_what_a_program_has_printed_is_kept_where_it_is_ended(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "ask(sys.argv[1]); print('so far', flush=True); import time; time.sleep(1000)\n")
    (found,) = await play(tokenizer, {"command": command, "deadline_s": 4}, {"t/0": ["Riga"]})
    assert found.stop_reason is StopReason.AGENT_DEADLINE
    assert found.calls[-1].result == "so far\n\nthe agent did not end within 4 s"


async def test_a_warning_is_no_answer(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "print(ask(sys.argv[1])); print('careful', file=sys.stderr)\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert (found.answer, found.calls[-1].result) == ("Riga", "Riga\ncareful\n")


async def test_a_posted_answer_counts_before_what_a_program_prints(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    posts = """
ask(sys.argv[1])
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/answer"
urllib.request.urlopen(urllib.request.Request(url, json.dumps({"answer": "Riga"}).encode(), headers))
print("done")
"""
    (found,) = await play(tokenizer, {"command": program(tmp_path, posts)}, {"t/0": ["Hm"]})
    assert (found.error, found.answer, found.reward) == ("", "Riga", 1.0)


async def test_a_program_that_fails_is_told_with_its_last_line(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "ask(sys.argv[1]); sys.exit('no luck')\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert found.stop_reason is StopReason.AGENT_FAILED and "no luck" in found.calls[-1].result
    (found,) = await play(tokenizer, {"command": program(tmp_path, "sys.exit(3)\n")}, {"t/0": []})
    assert found.stop_reason is StopReason.ENV_ERROR and "ended with status 3" in found.error
    (found,) = await play(tokenizer, {"command": ["/no/such"]}, {"t/0": []})
    assert "/no/such: No such file" in found.error
    (found,) = await play(tokenizer, {"command": program(tmp_path, "os.kill(os.getpid(), 9)\n")}, {"t/0": []})
    assert "ended with status 137" in found.error


async def test_a_program_has_an_empty_input(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "print(ask(sys.argv[1]) + sys.stdin.read())\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert (found.error, found.answer) == ("", "Riga")


async def test_only_a_line_feed_ends_a_line(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "ask(sys.argv[1]); print('Riga\\u2028Latvia\\r')\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert (found.error, found.answer) == ("", "Riga\u2028Latvia")


async def test_a_program_that_ends_its_process_group_has_failed(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    text = "ask(sys.argv[1]); print('Riga', flush=True); os.kill(0, 15); import time; time.sleep(1000)\n"
    (found,) = await play(tokenizer, {"command": program(tmp_path, text)}, {"t/0": ["Riga"]})
    assert found.stop_reason is StopReason.AGENT_FAILED and "ended with status 143" in found.error


async def test_python_is_the_runs_own_and_reaches_the_gateway_without_a_proxy(
    tokenizer: PolicyTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.1")
    monkeypatch.setenv("PATH", "")
    text = "print(ask(sys.argv[1]), sys.executable, os.environ['no_proxy'])\n"
    _, *arguments = program(tmp_path, text)
    (found,) = await play(tokenizer, {"command": ["python", *arguments]}, {"t/0": ["Riga"]})
    assert (found.error, found.answer) == ("", f"Riga {sys.executable} 10.0.0.1,127.0.0.1")


async def test_of_megabytes_the_end_is_kept(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "print('x' * 30_000_000); print(ask(sys.argv[1]))\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["Riga"]})
    assert found.answer == "Riga" and len(found.calls[-1].result) == 2**16


async def test_a_question_is_one_argument(tokenizer: PolicyTokenizer, tmp_path: Path) -> None:
    command = program(tmp_path, "ask('Who?'); print(sys.argv[1])\n")
    (found,) = await play(tokenizer, {"command": command}, {"t/0": ["a"]}, task=Task("t", "Is {task_id}\0 odd?", ()))
    assert found.answer == "Is {task_id} odd?"
    long = Task("t", "x" * 200_000, ())
    (found,) = await play(tokenizer, {"command": command[:2]}, {"t/0": []}, task=long)
    assert "an argument of 200000 bytes, expected at most 100000" in found.error


async def test_a_program_that_does_not_stop_to_print_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "END_TIMEOUT_S", 20.0)
    begun = tmp_path / "begun"
    text = f"open({str(begun)!r}, 'w').close()\nwhile True: print('x' * 10_000)\n"
    agent = agents.CommandAgent(program(tmp_path, text))
    session = AgentSession("http://127.0.0.1:9", "sk-a", 0, 1.0)
    solving = asyncio.create_task(agent.solve(TASK, session, asyncio.Event()))
    await until(begun.exists)
    solving.cancel()
    ended = await solving
    assert "xxx" in ended.output and len(ended.output) <= 2 * agents.MAX_OUTPUT_BYTES


HIDES = """
import subprocess, time
children = [
    subprocess.Popen(["sleep", "1000"]),
    subprocess.Popen(["sleep", "1000"], start_new_session=True, env={}),
    subprocess.Popen(["sh", "-c", "(setsid sleep 1000 & echo $!) ; exit"], stdout=subprocess.PIPE),
]
orphan = int(children[2].stdout.readline())
children[2].wait()
pids = [os.getpid(), children[0].pid, children[1].pid, orphan]
open(PIDS + ".new", "w").write(" ".join(map(str, pids)))
os.rename(PIDS + ".new", PIDS)
"""


@pytest.mark.parametrize("end", ["it ends", "its deadline"])
async def test_nothing_that_a_program_started_is_left(tokenizer: PolicyTokenizer, tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"
    rest = "print('Riga')\n" if end == "it ends" else "time.sleep(1000)\n"
    command = program(tmp_path, f"PIDS = {str(pids)!r}\nask(sys.argv[1])\n{HIDES}\n{rest}")
    deadline_s = 60 if end == "it ends" else 5
    (found,) = await play(tokenizer, {"command": command, "deadline_s": deadline_s}, {"t/0": ["Riga"]})
    assert found.stop_reason is (StopReason.ANSWERED if end == "it ends" else StopReason.AGENT_DEADLINE), found.error
    assert len(pids.read_text().split()) == 4
    assert not [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)]


RUNNER = """
import asyncio, sys
from pathlib import Path
from gateway_world import play
from ragr1_actors.core.config import PolicySettings
from ragr1_actors.rollout.engines.base import load_tokenizer
command = sys.argv[2:]
tokenizer = load_tokenizer(sys.argv[1], PolicySettings())
asyncio.run(play(tokenizer, {"command": command}, {f"t/{n}": ["Riga"] for n in range(10)}, number=10))
"""


async def test_nothing_is_left_of_ten_agents_whose_runner_is_killed(tmp_path: Path) -> None:
    write_tool_family(tmp_path / "policy", "qwen2.5")
    (tmp_path / "pids").mkdir()
    text = f"PIDS = {str(tmp_path / 'pids')!r} + '/' + str(os.getpid())\nask(sys.argv[1])\n{HIDES}\ntime.sleep(1000)\n"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path / "policy"), *program(tmp_path, text)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        await until(lambda: len([one for one in (tmp_path / "pids").iterdir() if one.suffix != ".new"]) == 10)
        found = [int(pid) for one in (tmp_path / "pids").iterdir() for pid in one.read_text().split()]
        assert len(found) == 40 and all(map(is_alive, found))
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    await until(lambda: not any(map(is_alive, found)))


# -- names -------------------------------------------------------------------------------------------------------------


def one_argument(task: Task) -> str:
    return ""


async def an_async_one(task: Task, session: AgentSession) -> str:
    return ""


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "got nothing, expected one of function, command and ray"),
        ({"function": "a:b", "command": ["x"]}, "got function and command, expected one"),
        ({"function": f"{HERE}:nothing"}, "has no 'nothing'"),
        ({"function": f"{HERE}:one_argument"}, r"one_argument \(.*line \d+\): too many positional.*\(task, session\)"),
        ({"function": f"{HERE}:Client"}, r"expected a function of \(task, session\)"),
        ({"ray": f"{HERE}:an_async_one"}, "is async, which a Ray task cannot be"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_agent(AgentSettings.read(settings, "environment.agent"))


async def leaves_a_request(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    client.messages.append({"role": "user", "content": "And?"})
    LEFT.append(asyncio.create_task(client.post("/v1/chat/completions", {"messages": client.messages})))
    await ENGINE_IS_ASKED.wait()
    return "Riga"


LEFT: list[asyncio.Task[Any]] = []
ENGINE_IS_ASKED = asyncio.Event()


async def test_a_request_that_an_agent_leaves_behind_is_cancelled(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = asyncio.Event()
    generate = GrowingScripts.generate

    async def once(self: GrowingScripts, *arguments: Any, **options: Any) -> Any:
        if self._next_turn:
            ENGINE_IS_ASKED.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return await generate(self, *arguments, **options)

    monkeypatch.setattr(GrowingScripts, "generate", once)
    LEFT.clear()
    ENGINE_IS_ASKED.clear()
    (found,) = await play(tokenizer, f"{HERE}:leaves_a_request", {"t/0": ["a"]})
    assert (found.stop_reason, len(found.turns)) == (StopReason.ANSWERED, 1)
    assert found.num_model_tokens == sum(found.turn_lengths)
    await asyncio.wait_for(cancelled.wait(), 60)
    with pytest.raises(aiohttp.ClientError):
        await LEFT[0]
