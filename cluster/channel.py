"""A channel: calls to an actor over sockets of its own, at a tenth of the latency of Ray's calls.

::

    client                                        actor
    Channel.call ── connection ──► ChannelServer, a thread that reads and writes
                 ── connection ──►       │
                                         ▼
                                   one worker thread: every call, in the order of their coming
                                         ▲
    handle.ping.remote() ─────────► Ray's main thread: waits its turn there too

Ray starts the actor, starts it again, and hands out the address. Whoever does not begin with the token that goes with
it is sent away before anything of his is unpickled. A process that dies closes its sockets, so the other side hears of
it at once; of a node that dies within ``_DEAD_AFTER_S``.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray

from ragr1_actors.errors import ChannelError

_TOKEN_BYTES = 32
_HELLO_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_DEAD_AFTER_S = 10
_LENGTH = struct.Struct("<Q")
"""What goes before every frame: its bytes."""


class ChannelAddress(NamedTuple):
    """Where a ``ChannelServer`` listens, and what opens it; only Ray carries it."""

    host: str
    port: int
    token: bytes


class ChannelServer:
    """The actor's side. All that it is asked to do is done by one thread, one call at a time.

    One thread, since what OpenMP is told of threads holds for the thread that says it.
    """

    def __init__(self) -> None:
        """Start the worker thread; nobody can connect yet."""
        self._worker = ThreadPoolExecutor(1, "worker")
        self._methods: Mapping[str, Callable[..., Any]] = {}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address: ChannelAddress | None = None
        """None before ``open``, and where this node's address cannot be listened at: Ray's calls are what is left."""

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do it in the worker thread, behind what came before, and return what it returns."""
        return self._worker.submit(work, *arguments).result()

    def open(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Let clients connect and call these."""
        self._methods = methods
        try:
            listener = _listen(ray.util.get_node_ip_address())
        except OSError:
            return
        host, port = listener.getsockname()[:2]
        self.address = ChannelAddress(host, port, self._token)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(listener),), daemon=True).start()

    def drain(self) -> None:
        """Return once what was asked is answered, and every connection closed."""
        self.run(int)
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._talk, sock=listener)
        await server.serve_forever()

    async def _close_all(self) -> None:
        for writer in self._writers:
            writer.close()  # behind what is written to it
        for writer in list(self._writers):
            try:
                await writer.wait_closed()
            except OSError:
                continue  # the client was the first to go

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, call after call, until its client goes."""
        self._writers.add(writer)
        _notice_death(writer.get_extra_info("socket"))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                token = await reader.readexactly(_TOKEN_BYTES)
            while hmac.compare_digest(token, self._token):
                (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                call = await reader.readexactly(num_bytes)
                writer.write(await loop.run_in_executor(self._worker, self._answer, call))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # the client is gone, or was none
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, call: bytes) -> bytes:
        try:
            method, arguments = pickle.loads(call)
            return _frame((True, self._methods[method](*arguments)))
        except Exception as error:  # a process boundary: whoever asked is told
            return _frame((False, f"{type(error).__name__}: {error}"))


class Channel:
    """The client's side: as many connections as calls are out at a time. They serve one event loop after another."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect to nothing yet."""
        self._address = address
        self._idle: list[_Connection] = []

    async def connect(self) -> None:
        """Open a first connection.

        Raises:
            ChannelError: nobody listens there, or the way is closed.
        """
        self._idle.append(await _Connection.open(self._address))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor's. Cancelling it closes its connection, as nobody will read the answer.

        Raises:
            ChannelError: the connection was lost, or the method raised; the message has why.
        """
        connection = self._idle.pop() if self._idle else await _Connection.open(self._address)
        try:
            is_answer, answer = await connection.exchange((method, arguments))
        except BaseException:  # cancelled, for one
            connection.close()
            raise
        self._idle.append(connection)
        if not is_answer:
            raise ChannelError(answer)
        return answer


class _Connection:
    """A socket, rather than a stream of asyncio's: that would end with the event loop it was opened in."""

    def __init__(self, open_socket: socket.socket, peer: str) -> None:
        self._socket = open_socket
        self._peer = peer

    @classmethod
    async def open(cls, address: ChannelAddress) -> _Connection:
        host, port, token = address
        loop = asyncio.get_running_loop()
        connection = cls(socket.socket(_family(host), socket.SOCK_STREAM), f"{host}:{port}")
        connection._socket.setblocking(False)
        connection._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_death(connection._socket)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await loop.sock_connect(connection._socket, (host, port))
                await loop.sock_sendall(connection._socket, token)
        except OSError as error:  # TimeoutError is one
            raise ChannelError(f"cannot connect to {host}:{port}: {error or 'no answer'}") from error
        return connection

    async def exchange(self, call: tuple[str, tuple[Any, ...]]) -> tuple[bool, Any]:
        """Send a frame and receive one."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _frame(call))
            (num_bytes,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
            answer: tuple[bool, Any] = pickle.loads(await self._receive(num_bytes))
        except OSError as error:
            raise ChannelError(f"lost the connection to {self._peer}: {error}") from error
        return answer

    async def _receive(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        rest = memoryview(received)
        while rest:
            count = await asyncio.get_running_loop().sock_recv_into(self._socket, rest)
            if not count:
                raise ConnectionResetError("the other side closed it")
            rest = rest[count:]
        return received

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        """Close it, whatever became of the event loop."""
        self.close()


def _frame(content: Any) -> bytes:
    data = pickle.dumps(content, protocol=5)
    return _LENGTH.pack(len(data)) + data


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=_family(host), backlog=1024)


def _notice_death(one: socket.socket) -> None:
    """Have a connection break where the other node is gone, as nothing else would say so."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _DEAD_AFTER_S // 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_AFTER_S)
