"""Tools of MCP servers, by the official SDK, which is imported when the first session is opened.

::

    call ──► session ──► tools/call ──► text that the policy reads
               a separate asyncio task opens it, keeps it until it is closed or breaks, and ends the server it started

Each server is asked for its tools once, before the run (``list_tools``): all trajectories get the same. A result with
``isError`` is a ``ToolError``. A server that is not reached or does not answer is a ``ServiceError``; after one that
breaks the session, the next call opens another session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from envs.base import EnvContext
from envs.grammars.calls import ToolSchema
from envs.options import ToolOptions
from envs.tools.base import FunctionTool, Tool, make_tools
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.disk.json_files import first_problem
from ragr1_actors.core.errors import ConfigError, ServiceError, ToolError, nearest, one_line, shortened
from ragr1_actors.core.process.tied_process import tied
from ragr1_actors.core.service_settings import McpServer
from ragr1_actors.core.types import DefuseFn

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

_REMOTE = re.compile(r'"\$(?:ref|dynamicRef)": "(?!#)')
"""Reference to another document, which jsonschema would fetch."""
_LOCAL = re.compile(r'"\$(?:ref|dynamicRef)": ("#(?:[^"\\]|\\.)*")')
"""Reference to a part of the schema."""
_FORGOTTEN = "HTTP 404"
"""Status from a server that does not know the session any more, such as after a restart."""
_MAX_QUOTED = 200

logger = logging.getLogger(__name__)


def all_tools(settings: EnvironmentSettings, context: EnvContext, options: ToolOptions) -> dict[str, Tool]:
    """Make the tools of one trajectory, by name, from ``environment.tools`` and ``environment.mcp``.

    Raises:
        ConfigError: a name is unknown, or two tools have the same name.
    """
    found = make_tools(settings.tools, context, options)
    for name, server in settings.mcp.items():
        if server.tools is None:
            raise ConfigError(f"environment.mcp.{name}: its tools are not known; ask for them with check_services")
        client = McpClient(name, server)
        if not server.per_trajectory:
            client = context.mcp.setdefault(name, client)
        for schema in server.tools:
            tool = McpTool(client, schema, context, options)
            if tool.name in found:
                raise ConfigError(
                    f"environment.mcp.{name}: two tools are named {tool.name}; take one of them, with "
                    f"environment.mcp.{name}.only or environment.tools"
                )
            found[tool.name] = tool
    return found


async def list_tools(name: str, server: McpServer) -> list[ToolSchema]:
    """Ask a server for its tools, and return those that ``only`` names, or all.

    If the settings have tools already, a warning names those that have changed or are gone.

    Raises:
        ConfigError: it does not answer, it lists no tools or not all of ``only``, or a schema cannot be used.
    """
    where = f"environment.mcp.{name}"
    if find_spec("mcp") is None:
        raise ConfigError(f"{where} needs the package mcp, which is not installed; pip install -e '.[mcp]'")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        session = _Session(name, server, stderr)
        try:
            await session.opened()
        except ServiceError as error:
            await session.end()
            stderr.seek(0)
            last = stderr.read().strip().rpartition("\n")[2]
            said = f"{error}; its last words: {shortened(last, _MAX_QUOTED)}" if last else str(error)
            raise ConfigError(f"{where}: {server.address}: {said}; start or mend it, or correct {where}") from error
        await session.end()
    if not session.tools:
        raise ConfigError(f"{where}: {server.address} lists no tools; expected one at least")
    known = [tool["function"]["name"] for tool in session.tools]
    for one in server.only:
        if one not in known:
            raise ConfigError(f"{where}.only: {server.address} lists no {one!r}{nearest(one, known)}")
    taken = [tool for tool in session.tools if not server.only or tool["function"]["name"] in server.only]
    for tool in taken:
        if problem := _problem_of(tool["function"]["parameters"]):
            raise ConfigError(f"{where}: the schema of {tool['function']['name']} cannot be used: {problem}")
    return taken


def _problem_of(parameters: Mapping[str, Any]) -> str:
    """Return why a schema cannot check arguments; empty if it can."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        validator_for(parameters, Draft202012Validator).check_schema(parameters)
    except SchemaError as error:
        return shortened(error.message)
    written = json.dumps(parameters)
    if _REMOTE.search(written):
        return "it refers to another document"
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(parameters))
    for reference in _LOCAL.findall(written):
        try:
            resolver.lookup(json.loads(reference))
        except Unresolvable:
            return f"it refers to {reference}, which it does not have"
    return ""


class McpTool(FunctionTool):
    """Tool of a server. The calls of a turn are made at the same time."""

    def __init__(self, client: McpClient, schema: ToolSchema, context: EnvContext, options: ToolOptions) -> None:
        """Take the client and the schema, a text of others, from which control tokens are removed for the policy."""
        name = schema["function"]["name"]
        super().__init__(partial(client.call, name), context, options, _defused(schema, context.defuse))
        self._client = client

    def close(self) -> None:
        """End the session, unless other trajectories share it."""
        if self._client.server.per_trajectory:
            self._client.close()


def _defused(value: Any, defuse: DefuseFn) -> Any:
    """Return a JSON value with all its texts defused."""
    if isinstance(value, Mapping):
        return {defuse(key): _defused(one, defuse) for key, one in value.items()}
    if isinstance(value, list):
        return [_defused(one, defuse) for one in value]
    return defuse(value) if isinstance(value, str) else value


class McpClient:
    """Calls the tools of one server. The first call opens a session, also the first one after a session broke."""

    def __init__(self, name: str, server: McpServer) -> None:
        """Take the settings of a server; no session is opened yet."""
        self._name, self.server = name, server
        self._session: _Session | None = None

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Return the text of a tool's result.

        Raises:
            ToolError: the server says that the call failed.
            ServiceError: the server is not reached, does not answer in time, or ended.
        """
        session = self._session
        if session is None or session.closing.is_set():
            session = self._session = _Session(self._name, self.server)
        try:
            result = await session.call(tool, arguments)
        except ServiceError as error:
            raise ServiceError(f"the MCP server {self._name} at {self.server.address}: {error}") from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or "The call failed.")
        return text

    def close(self) -> None:
        """End the session; a server that it started ends within a second."""
        if self._session is not None:
            self._session.close()


def _text_of(result: CallToolResult) -> str:
    """Return the text for the policy: the texts of a result, and a note for any other content."""
    texts = []
    for block in result.content:
        found = block.text if block.type == "text" else None
        if block.type == "resource":
            found = block.resource.model_dump().get("text")
        texts.append(f"({block.type}, which cannot be shown)" if found is None else str(found))
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


class _Session:
    """A session with a server, in a separate asyncio task, which enters and leaves a task group of the SDK."""

    def __init__(self, name: str, server: McpServer, stderr: TextIO | None = None) -> None:
        self._name, self._server, self._stderr = name, server, stderr
        self.tools: list[ToolSchema] = []
        self._client: Client | None = None
        self._settled, self.closing = asyncio.Event(), asyncio.Event()
        self._problem = self._odd_output = self._status = ""
        self._answered_s = 0.0
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self.closing.set()

    async def end(self) -> None:
        self.close()
        await self._task

    async def opened(self) -> Client:
        """Return the client once the server has listed its tools; ``ServiceError`` if it did not, or has ended."""
        await self._settled.wait()
        if self._client is None:
            raise ServiceError(self._problem)
        return self._client

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Return a result; raises ``ServiceError`` if there is none, and closes the session if it is broken."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        client, now = await self.opened(), asyncio.get_running_loop().time
        started_s = now()
        try:
            async with asyncio.timeout(self._server.timeout_s):
                result = await client.call_tool(tool, arguments)
        except TimeoutError as error:
            if self._answered_s < started_s:  # no other call was answered either
                self.close()
            raise ServiceError(f"{tool} did not answer within {self._server.timeout_s:g} s") from error
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            if error.code == CONNECTION_CLOSED or self._status == _FORGOTTEN:
                self.close()
            raise ServiceError(f"{tool}: {self._said(error)}") from error
        except (ValueError, RuntimeError) as error:  # the result breaks the protocol or the server's schema
            raise ServiceError(f"{tool}: {self._said(error)}") from error
        self._answered_s = now()
        return result

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.timeout_s):
                    client = await stack.enter_async_context(await self._connect(stack))
                    await self._list(client)
                self._client = client
                self._settled.set()
                await self.closing.wait()
        except Exception as error:  # a process boundary: an SDK that raises groups of exceptions
            self._problem = self._said(error)
        finally:
            self._client, self._problem = None, self._problem or "the session ended"
            self.close()
            self._settled.set()

    async def _connect(self, stack: AsyncExitStack) -> Client:
        import httpx2
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # avoids a traceback for each line that is not a message
        server = self._server
        transport: AbstractAsyncContextManager[Any]
        if server.url:
            key = read_secret("key_env", server.key_env)
            http = httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(server.timeout_s, read=None),
                limits=httpx2.Limits(),  # as many connections as there are calls
                event_hooks={"request": [self._limit_end], "response": [self._note_status]},
            )
            transport = streamable_http_client(server.url, http_client=await stack.enter_async_context(http))
        else:
            command, *arguments = tied(server.command)
            started = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            # not read during a run: many servers write a line for each call
            transport = stdio_client(started, errlog=self._stderr or subprocess.DEVNULL)  # type: ignore[arg-type]
        # the newest protocol has no sessions over HTTP; a server that keeps state needs the one before
        mode = "legacy" if server.url and server.per_trajectory else "auto"
        return Client(transport, mode=mode, message_handler=self._note, cache=None)

    async def _list(self, client: Client) -> None:
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        for tool in tools:
            function = {"name": tool.name, "description": tool.description or tool.title or ""}
            self.tools.append({"type": "function", "function": {**function, "parameters": tool.input_schema}})
        if note := _difference(self._server.tools or (), self.tools):
            where = f"environment.mcp.{self._name}: {self._server.address}"
            _warn(f"{where} lists other tools than before the run ({note})")

    async def _note(self, message: object) -> None:
        if problem := first_problem(message):  # the line is not a message
            self._odd_output = self._odd_output or str(problem[1])

    async def _limit_end(self, request: Any) -> None:
        if request.method == "DELETE":  # the end of a session, whose answer the SDK would wait for without a limit
            request.extensions["timeout"]["read"] = self._server.timeout_s

    async def _note_status(self, response: Any) -> None:
        if response.request.method == "POST":
            self._status = f"HTTP {response.status_code}" if response.status_code >= 400 else ""

    def _said(self, error: BaseException) -> str:
        """Return an SDK error in one sentence, with the HTTP status and unexpected output of the server, if any."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            said = f"no answer within {self._server.timeout_s:g} s"
        elif problem := first_problem(error):
            said = f"its answer cannot be read: {problem[0]}: {problem[2]}"
        else:
            said = one_line(error, _MAX_QUOTED)
        odd = f"it printed {shortened(self._odd_output)!r}, which is no message" if self._odd_output else ""
        return "; ".join(filter(None, (said, self._status, odd)))


def _difference(known: Sequence[ToolSchema], listed: Sequence[ToolSchema]) -> str:
    """Return the difference between the known and the listed tools: ``"add is gone"``."""
    now = {tool["function"]["name"]: tool for tool in listed}
    before = {tool["function"]["name"]: tool for tool in known}
    differing = [name for name, tool in before.items() if now.get(name) != tool]
    return ", ".join(f"{name} is {'another' if name in now else 'gone'}" for name in differing)


@lru_cache(64)
def _warn(text: str) -> None:
    """Warn once, since each trajectory may open a session."""
    logger.warning("%s", text)
