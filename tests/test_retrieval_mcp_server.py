"""`ragr1 index serve --mcp`: any client of MCP searches the index; strangers and browsers do not."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import BrokenRetriever, OnePassage
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CallToolResult
from processes import ROOT
from waits import until

from envs.tools.mcp import McpClient, list_tools
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.service_settings import McpServer
from retrieval.base import Passage
from retrieval.build import build_index
from retrieval.http.mcp_server import McpEndpoint
from retrieval.http.server import RetrievalServer

pytestmark = pytest.mark.integration
PASSAGES = [Passage(str(n), f"Town {n}", f"Town {n} lies at river {n}.", 0.0) for n in range(20)]
DISCOVER = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp") / "index"
    build_index(PASSAGES, folder, index_type="bm25")
    return folder


@contextmanager
def serving(index: Path, *options: str, **variables: str) -> Iterator[str]:
    """Run ``ragr1 index serve INDEX --mcp`` as a process, and return its URL."""
    command = [sys.executable, "-m", "ragr1_actors", "index", "serve", str(index), "--mcp", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next((line for line in process.stderr if " answers; " in line), "")
            yield line.split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


async def ask(client: Client, **arguments: Any) -> CallToolResult:
    return await client.call_tool("search", arguments)


async def post(url: str, body: Any = DISCOVER, **headers: str) -> tuple[int, str]:
    usual = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    sent = io.BytesIO(json.dumps(body).encode())
    async with aiohttp.ClientSession() as session, session.post(url, data=sent, headers=usual | headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_searches_a_served_index(index: Path, mode: str) -> None:
    with serving(index) as url:
        async with Client(url, mode=mode) as client:
            (tool,) = (await client.list_tools()).tools
            found = await ask(client, queries=["river 7", "river 12"], k=2)
            wrong = await ask(client, queries="river 7")
    assert (tool.name, tool.input_schema["required"]) == ("search", ["queries"])
    assert tool.input_schema["properties"]["queries"]["description"] == "What to look for, each on its own."
    assert not found.is_error
    text, first, second = found.content[0].text, *found.structured_content["result"]  # type: ignore[union-attr]
    assert text.startswith("Query: river 7\n(1) Town 7: Town 7 lies at river 7.\n(2) ")
    assert "\n\nQuery: river 12\n(1) Town 12: " in text
    assert [one[0]["id"] for one in (first, second)] == ["7", "12"]
    assert len(first) == 2
    assert wrong.is_error


async def test_a_client_searches_over_standard_input(index: Path) -> None:
    arguments = ["-m", "ragr1_actors", "index", "serve", str(index), "--mcp", "--stdio"]
    server = StdioServerParameters(command=sys.executable, args=arguments, env={"PYTHONPATH": str(ROOT)})
    async with Client(server) as client:
        found = await ask(client, queries=["river 3"])
    assert found.structured_content["result"][0][0]["title"] == "Town 3"


async def test_a_search_that_fails_is_no_result_that_a_policy_reads() -> None:
    async with (
        RetrievalServer(BrokenRetriever(), port=0, mcp=McpEndpoint) as server,
        Client(f"{server.url}/mcp") as client,
    ):
        with pytest.raises(MCPError, match="the search failed: tried 3 replicas"):
            await ask(client, queries=["a"])


@pytest.mark.parametrize("modern", [True, False])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
async def test_what_a_browser_sends_for_a_page_elsewhere_is_refused(
    headers: dict[str, str], status: int, modern: bool
) -> None:
    version = {"MCP-Protocol-Version": "2026-07-28" if modern else "2025-06-18"}
    async with RetrievalServer(OnePassage(), port=0, mcp=McpEndpoint) as server:
        assert (await post(f"{server.url}/mcp", **headers, **version))[0] == status
        ours = server.url.replace("127.0.0.1", "localhost")
        found, text = await post(f"{server.url}/mcp", **{"Origin": ours, "Host": ours.removeprefix("http://")})
    assert (found, '"name":"search"' in text) == (200, True)


async def test_a_large_body_is_refused() -> None:
    async with RetrievalServer(OnePassage(), port=0, mcp=McpEndpoint) as server:
        assert (await post(f"{server.url}/mcp", {**DISCOVER, "params": "x" * 9_000_000}))[0] == 413


async def test_a_host_that_others_reach_needs_a_token(index: Path) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="no token was given"):
            RetrievalServer(OnePassage(), host=host)
    options = ("--host", "0.0.0.0", "--token-env", "THE_TOKEN", "--allow-host", "search.example")
    with serving(index, *options, THE_TOKEN="s3cret") as url:
        here = url.replace("0.0.0.0", "127.0.0.1")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert (await post(here, **headers))[0] == 401
        right = {"Authorization": "Bearer s3cret"}
        assert (await post(here, **right))[0] == 200
        assert (await post(here, **right, Host="search.example"))[0] == 200
        assert (await post(here, **right, Host="evil.example"))[0] == 403


async def test_the_environment_of_tools_searches_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RetrievalServer(OnePassage(), port=0, token="s3cret", mcp=McpEndpoint) as server:
        settings = McpServer(url=f"{server.url}/mcp", key_env="THE_KEY")
        monkeypatch.setenv("THE_KEY", "wrong")
        with pytest.raises(ConfigError, match="HTTP 401"):
            await list_tools("fleet", settings)
        monkeypatch.setenv("THE_KEY", "s3cret")
        (tool,) = await list_tools("fleet", settings)
        client = McpClient("fleet", settings)
        assert await client.call("search", queries=["a"]) == "Query: a\n(1) Riga: Riga is a city in Latvia."
        client.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert tool["function"]["name"] == "search"
