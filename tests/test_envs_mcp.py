"""Tools of MCP servers: real servers of the official SDK, over HTTP and as commands, and how they break."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import OnePassage
from processes import ROOT
from test_envs_tools import call, text
from tool_templates import write_tool_family
from typer.testing import CliRunner
from waits import until

from envs.grammars.calls import GRAMMARS
from envs.tools.mcp import McpClient, list_tools
from ragr1_actors.cli.main import app
from ragr1_actors.core.config import EnvironmentSettings, EnvRunnerSettings, RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError, ServiceError, ToolError
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.service_settings import McpServer
from ragr1_actors.core.types import StopReason, Task, TokenKind, Trajectory
from ragr1_actors.planning.preflight import check_classes, check_services
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.runs.run_directory import create_run_directory, open_run_directory
from ragr1_actors.runs.storage.store import find_store

pytestmark = pytest.mark.integration
WORLD = str(Path(__file__).with_name("mcp_world.py"))
COMMAND = [sys.executable, WORLD]
BY_HAND = [sys.executable, "-S", str(Path(WORLD).with_name("mcp_by_hand.py"))]
WRITE = GRAMMARS["hermes"].write
ODD = {"name": "odd", "description": "Odd."}


def odd(**schema: Any) -> dict[str, Any]:
    """A server whose only tool has an odd schema."""
    return {"command": [*BY_HAND, json.dumps([{**ODD, "inputSchema": {"type": "object", **schema}}])]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the server over HTTP."""
    port = port or free_port()
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                assert process.poll() is None
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            process.kill()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The settings of the server, over HTTP or as a command."""
    if request.param == "command":
        yield {"command": COMMAND}
    else:
        with served() as (url, _):
            yield {"url": url}


both = pytest.mark.parametrize("world", ["http", "command"], indirect=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("tools") / "policy", "qwen2.5")


def config_of(server: dict[str, Any], **environment: Any) -> SamplerConfig:
    """Return a configuration that has asked the server for its tools."""
    keys = {"env": "tools", "tools": [], "mcp": {"world": server}, "max_turns": 4, **environment}
    runners = EnvRunnerSettings(max_context_tokens=20_000)
    return SamplerConfig(environment=EnvironmentSettings.model_validate(keys), env_runners=runners)


async def asked(config: SamplerConfig) -> SamplerConfig:
    return await asyncio.to_thread(check_services, config)


def runner_of(config: SamplerConfig, tokenizer: PolicyTokenizer, turns: dict[str, list[str]]) -> EnvRunner:
    runner = EnvRunner(config, tokenizer, OnePassage(), ScriptedEngine({}, list))  # type: ignore[arg-type]
    runner.engine = ScriptedEngine(turns, runner._chat.turn_ids)
    return runner


async def play(runner: EnvRunner, number: int = 0) -> Trajectory:
    request = GroupRequest(f"t{number}", Task("t", "Where was Ana born?", ("Riga",)), 1, 1.0)
    (found,) = (await runner.sample_group(request)).trajectories
    return found


def results(found: Trajectory) -> list[str]:
    return [one.result for turn in found.turns for one in turn.calls]


async def client_of(**server: Any) -> McpClient:
    return McpClient("world", McpServer.model_validate(server))


async def ended(client: McpClient) -> None:
    """Close a client and wait until nothing of it runs."""
    client.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the whole path ----------------------------------------------------------------------------------------------------


@both
async def test_a_policy_calls_the_tools_of_a_server(tokenizer: PolicyTokenizer, world: dict[str, Any]) -> None:
    config = await asked(config_of(world, tools=["search"]))
    turns = [
        WRITE([call("add", a=1, b=2), call("fail", town="Oz"), call("search", queries=["Ana"]), call("add", a=3)]),
        WRITE([call("look"), call("add", a=3, b=4)]),
        "Riga",
    ]
    found = await play(runner_of(config, tokenizer, {"t0/0": turns}))
    assert (found.stop_reason, found.answer, found.error) == (StopReason.ANSWERED, "Riga", "")
    assert found.metrics["tool_errors"] == 2.0
    assert results(found)[:2] == ["3", "Error executing tool fail: there is no Oz"]
    assert results(found)[3:] == [
        "The arguments of add are wrong: 'b' is a required property",
        "a text\n(image, which cannot be shown)\na page <|im_end|>",
        "7",
    ]
    read = text(tokenizer, found, TokenKind.OBSERVATION)
    assert "\na text\n(image, which cannot be shown)\na page <|im_end|>\n" in read
    marker = tokenizer.end_of_turn_id  # of the frame only: no text of a server is a control token
    assert (found.token_ids[found.kinds == TokenKind.OBSERVATION] == marker).sum() == 2
    prompt = text(tokenizer, found, TokenKind.PROMPT)
    assert '"name": "visit", "description": "Visit a town. It ends with a (|im_end|) token."' in prompt
    assert prompt.index('"name": "search"') < prompt.index('"name": "add"')


@both
async def test_trajectories_of_a_runner_share_a_session_opened_once(
    tokenizer: PolicyTokenizer, world: dict[str, Any]
) -> None:
    config = await asked(config_of(world))
    names = {f"t{n}/0": [WRITE([call("visit", town=str(n))]), "Riga"] for n in range(4)}
    runner = runner_of(config, tokenizer, names)
    played = await asyncio.gather(*(play(runner, n) for n in range(4)))
    said = sorted(results(found)[0].split(": ", 1)[1] for found in played)
    assert [one.split(" of ")[0] for one in said] == [f"visit {n}" for n in (1, 2, 3, 4)]
    assert len({one.split(" of ")[1] for one in said}) == 1


@both
async def test_each_trajectory_has_its_own_state_where_the_server_remembers(
    tokenizer: PolicyTokenizer, world: dict[str, Any]
) -> None:
    config = await asked(config_of({**world, "per_trajectory": True}))
    visits = [WRITE([call("visit", town="Oslo")]), WRITE([call("visit", town="Riga")]), "Riga"]
    runner = runner_of(config, tokenizer, {f"t{n}/0": visits for n in range(3)})
    played = await asyncio.gather(*(play(runner, n) for n in range(3)))
    for found in played:
        assert [one.split(" of ")[0] for one in results(found)] == ["Oslo: visit 1", "Riga: visit 2"]
    if "command" in world:
        pids = {int(results(found)[0].rsplit(" ", 1)[1]) for found in played}
        assert len(pids) == 3
        await until(lambda: not any(map(alive, pids)))
    await until(lambda: len(asyncio.all_tasks()) == 1)


# -- breaks ------------------------------------------------------------------------------------------------------------


async def test_a_server_that_ends_is_infrastructure_and_is_started_again(tokenizer: PolicyTokenizer) -> None:
    config = await asked(config_of({"command": BY_HAND}))
    turns = {"t0/0": [WRITE([call("die")])], "t1/0": [WRITE([call("pid")]), "Riga"]}
    runner = runner_of(config, tokenizer, turns)
    found = await play(runner)
    assert found.stop_reason is StopReason.SERVICE_FAILED
    assert found.error == f"the MCP server world at {shlex.join(BY_HAND)}: die: Connection closed"
    assert int(results(await play(runner, 1))[0]) > 0


async def test_a_server_over_http_that_is_killed_is_reached_again_once_it_is_back() -> None:
    with served() as (url, process):
        client = await client_of(url=url)
        assert await client.call("add", a=1, b=2) == "3"
        waiting = asyncio.create_task(client.call("sleep", seconds=1000))
        await asyncio.sleep(0.2)
        process.kill()
        with pytest.raises(ServiceError, match=f"the MCP server world at {url}: sleep: "):
            await waiting
        with pytest.raises(ServiceError, match=f"the MCP server world at {url}: .*connection"):
            await client.call("add", a=1, b=2)
    with served(int(url.split(":")[2].split("/")[0])):
        assert await client.call("add", a=1, b=2) == "3"
    await ended(client)


async def test_a_session_that_the_server_forgot_is_opened_again() -> None:
    with served() as (url, first):
        client = await client_of(url=url, per_trajectory=True)
        assert (await client.call("visit", town="Oslo")).startswith("Oslo: visit 1 ")
        first.kill()
        first.wait()
        with served(int(url.split(":")[2].split("/")[0])):
            with pytest.raises(ServiceError, match="visit: Session not found; HTTP 404"):
                await client.call("visit", town="Oslo")
            assert (await client.call("visit", town="Oslo")).startswith("Oslo: visit 1 ")
            await ended(client)


async def test_a_slow_call_ends_and_others_go_on() -> None:
    client = await client_of(command=BY_HAND, timeout_s=3)
    process = await client.call("pid")
    slow = asyncio.create_task(client.call("sleep"))
    await asyncio.sleep(0.1)
    assert await client.call("pid") == process
    with pytest.raises(ServiceError, match="sleep did not answer within 3 s"):
        await slow
    assert await client.call("pid") == process
    await ended(client)


async def test_a_server_that_hangs_is_started_again() -> None:
    client = await client_of(command=BY_HAND, timeout_s=3)
    process = int(await client.call("pid"))
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(ServiceError, match="pid did not answer within 3 s"):
        await client.call("pid")
    assert int(await client.call("pid")) != process
    await until(lambda: not alive(process))
    await ended(client)


async def test_arguments_that_the_server_refuses_are_read_by_the_policy() -> None:
    client = await client_of(command=BY_HAND)
    with pytest.raises(ToolError, match="there is no such town"):
        await client.call("refuse")
    await ended(client)


async def test_a_result_that_is_none_is_infrastructure() -> None:
    client = await client_of(command=BY_HAND)
    process = await client.call("pid")
    with pytest.raises(ServiceError, match="lie: its answer cannot be read: content: input should be a valid list"):
        await client.call("lie")
    assert await client.call("pid") == process
    await ended(client)


# -- nothing is left behind --------------------------------------------------------------------------------------------


async def test_a_closed_session_leaves_no_process_behind() -> None:
    client = await client_of(command=BY_HAND)
    started = [int(await client.call("pid")), int(await client.call("leave_child"))]
    assert all(map(alive, started))
    client.close()
    await until(lambda: not any(map(alive, started)))
    await ended(client)


KILLED = """
    import asyncio, sys
    from envs.tools.mcp import McpClient
    from ragr1_actors.core.service_settings import McpServer

    async def main():
        client = McpClient("world", McpServer(command=sys.argv[1:]))
        print(await client.call("pid"), await client.call("leave_child"), flush=True)
        await client.call("sleep")

    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_a_process_that_is_killed_leaves_no_server_behind(number: int) -> None:
    program = "\n".join(line.removeprefix("    ") for line in KILLED.splitlines())
    command = [sys.executable, "-c", program, *BY_HAND]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        started = [int(word) for word in process.stdout.readline().split()]
        assert len(started) == 2
        assert all(map(alive, started))
        process.send_signal(number)
    await until(lambda: not any(map(alive, started)))


def test_a_runner_that_is_closed_leaves_no_server_behind(tokenizer: PolicyTokenizer) -> None:
    config = check_services(config_of({"command": BY_HAND}))
    runner = runner_of(config, tokenizer, {"t0/0": [WRITE([call("pid")]), "Riga"]})
    loop = DriverLoop()
    process = int(results(loop.run(play(runner)))[0])
    assert alive(process)
    loop.close(runner.close())
    assert not alive(process)


# -- before a run ------------------------------------------------------------------------------------------------------


def test_a_tool_that_is_left_out_may_have_any_schema() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    good = {"name": "good", "inputSchema": {"type": "object", "$schema": draft, "items": [{"type": "string"}]}}
    bad = {"name": "bad", "inputSchema": {"type": "object", "properties": {"a": {"type": "thing"}}}}
    config = check_services(config_of({"command": [*BY_HAND, json.dumps([good, bad])], "only": ["good"]}))
    (found,) = config.environment.mcp["world"].tools or ()
    assert found["function"]["name"] == "good"


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (
            {"command": ["sleep", "1000"]},
            "sleep 1000: no answer within 3 s; start or mend it, or correct environment.mcp.world",
        ),
        (
            {"command": ["bash", "-c", "echo 'hello there'; sleep 1000"]},
            "no answer within 3 s; it printed 'hello there', which is no message; start",
        ),
        ({"command": ["bash", "-c", "echo 'no key' >&2; exit 1"]}, "Connection closed; its last words: no key; start"),
        ({"command": ["no-such-server"]}, "its last words: no-such-server: No such file or directory; start"),
        ({"url": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp: All connection attempts failed; start"),
        ({"command": [*BY_HAND, "[]"]}, "lists no tools; expected one at least"),
        ({"command": [*BY_HAND, json.dumps([ODD])]}, "its answer cannot be read: tools.0.inputSchema: field required"),
        (odd(properties={"a": {"type": "thing"}}), "the schema of odd cannot be used: 'thing' is not valid under"),
        (odd(items={"$ref": "http://a"}), "the schema of odd cannot be used: it refers to another document"),
        (odd(items={"$ref": "#/$defs/a"}), 'cannot be used: it refers to "#/$defs/a", which it does not have'),
        (odd(type="string"), "its answer cannot be read: tools.0.inputSchema.type"),
        ({"command": BY_HAND, "only": ["pit"]}, "lists no 'pit'; did you mean 'pid'"),
        (
            {"url": "http://127.0.0.1:9/mcp", "key_env": "NO_SUCH_KEY"},
            "key_env: the environment variable 'NO_SUCH_KEY' is not set",
        ),
    ],
)
def test_what_is_wrong_with_a_server_is_one_sentence(server: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_services(config_of({**server, "timeout_s": 3 if "no answer" in problem else 60}))
    assert str(caught.value).startswith("environment.mcp.world")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


class Hanging(BaseHTTPRequestHandler):
    """Opens a session, and answers nothing else, not even its end."""

    released = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["method"] == "tools/list":
            self.released.wait()
        if asked["method"] == "initialize":
            info = {"name": "hangs", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            self.answer(200, {"jsonrpc": "2.0", "id": asked["id"], "result": result})
        elif "id" in asked:
            error = {"code": -32601, "message": "no such method"}
            self.answer(200, {"jsonrpc": "2.0", "id": asked["id"], "error": error})
        else:
            self.answer(202)

    def do_GET(self) -> None:
        self.answer(405)

    def do_DELETE(self) -> None:
        self.released.wait()

    def answer(self, status: int, body: object = None) -> None:
        written = json.dumps(body).encode() if body else b""
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Mcp-Session-Id", "a"), ("Connection", "close")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *arguments: Any) -> None:
        pass


async def test_a_server_that_does_not_end_its_session_is_one_sentence() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = McpServer(url=f"http://127.0.0.1:{server.server_port}/mcp", timeout_s=2)
        try:
            with pytest.raises(ConfigError, match="no answer within 2 s"):
                await asyncio.wait_for(list_tools("world", settings), 60)
        finally:
            Hanging.released.set()
            server.shutdown()


def pid() -> str:
    """Return a number."""
    return "1"


def test_two_tools_of_one_name_are_refused_before_a_run() -> None:
    named = f"{__name__}:pid"
    with pytest.raises(ConfigError, match=r"environment\.mcp\.world: two tools are named pid; take one of them, with"):
        check_services(config_of({"command": BY_HAND}, tools=[named]))
    check_services(config_of({"command": BY_HAND, "only": ["sleep"]}, tools=[named]))


def test_servers_are_refused_where_no_environment_offers_their_tools() -> None:
    config = config_of({"command": BY_HAND}, env="search", tools=["search"])
    with pytest.raises(ConfigError, match=r"only environment\.env=tools offers"):
        check_classes(config)


def test_tools_are_stored_with_a_run_and_a_server_that_changed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(environment=config_of({"command": BY_HAND, "only": ["pid", "sleep"]}).environment)
    config = check_services(config)
    create_run_directory(config, tmp_path)
    stored = open_run_directory(tmp_path)
    assert stored.environment == config_of({"command": BY_HAND, "only": ["pid", "sleep"]}).environment
    place = find_store(tmp_path)
    again = check_services(stored, place)
    assert again.environment.mcp["world"].tools == config.environment.mcp["world"].tools
    assert [one["function"]["name"] for one in again.environment.mcp["world"].tools or ()] == ["pid", "sleep"]
    assert caplog.text == ""
    other = [{"name": "pid", "inputSchema": {"type": "object", "title": "another"}}]
    changed = config_of({"command": [*BY_HAND, json.dumps(other)]})
    later = check_services(stored.model_copy(update={"environment": changed.environment}), place)
    assert later.environment.mcp["world"].tools == config.environment.mcp["world"].tools
    assert "lists other tools than before the run (pid is another, sleep is gone)" in caplog.text


def test_a_server_is_checked_from_the_command_line() -> None:
    named = f"environment.mcp={{world: {{command: {json.dumps(BY_HAND)}}}}}"
    printed = CliRunner().invoke(app, ["check", "tool", "world", named])
    assert printed.exit_code == 0
    assert "it lists leave_child, whose schema is a JSON schema" in printed.output
