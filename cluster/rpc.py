"""A channel: calls to an actor over sockets of its own, at a third of the latency of Ray's (``bench retrieval``).

::

    client                             actor
    Channel.call ── connection ──► ChannelServer: one thread that reads, works and writes
                 ── connection ──►       ▲
    handle.ping.remote() ──────────► Ray's thread: waits its turn there too

Ray starts the actor, starts it again, and hands out the address. Whoever does not begin with the token that goes with
it is sent away before anything of his is unpickled. A process that dies closes its sockets, so the other side hears of
it at once; of a node that dies while it is waited for, within ``_DEAD_AFTER_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray

from ragr1_actors.core.errors import ChannelError

_TOKEN_BYTES = 32
_HELLO_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_DEAD_AFTER_S = 10
_READ_BYTES = 2**18
_LENGTH = struct.Struct("<Q")
"""What goes before every frame: its bytes."""


class ChannelAddress(NamedTuple):
    """Where a ``ChannelServer`` listens, and what opens it; only Ray carries it."""

    host: str
    port: int
    token: bytes


class ChannelServer:
    """The actor's side: one thread that reads, works and writes, one call at a time.

    One thread, since what OpenMP is told of threads holds for the thread that says it, and since every other one is a
    switch that a short search waits for.
    """

    def __init__(self) -> None:
        """Start the thread; nobody can connect yet."""
        self.address: ChannelAddress | None = None
        """None before ``open``, and where this node's address cannot be listened at: Ray's calls are what is left."""
        self._methods: Mapping[str, Callable[..., Any]] = {}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._clients: set[_Client] = set()
        self._listener: socket.socket | None = None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._do_jobs)
        threading.Thread(target=self._serve, name="channel", daemon=True).start()

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do it in the server's thread, after what it is doing, and return what it returns."""
        job: Future[Any] = Future()
        self._jobs.put((job, work, arguments))
        self._waker.send(b"\0")
        return job.result()

    def open(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Let clients connect and call these."""
        self._methods = methods
        with contextlib.suppress(OSError):
            self._listener = _listen(ray.util.get_node_ip_address())
            self._listener.setblocking(False)
            host, port = self._listener.getsockname()[:2]
            self.run(self._selector.register, self._listener, selectors.EVENT_READ, self._accept)
            self.address = ChannelAddress(host, port, self._token)

    def call(self, method: str, *arguments: Any) -> Any:
        """Do what a client's call does, for one who has no way to here but Ray's."""
        return self.run(self._methods[method], *arguments)

    def drain(self) -> None:
        """Return once what was asked is answered, and every connection closed."""
        self.run(self._drain)

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                key.data(events)

    def _do_jobs(self, _: int) -> None:
        self._woken.recv(4096)
        while not self._jobs.empty():
            job, work, arguments = self._jobs.get()
            try:
                job.set_result(work(*arguments))
            except BaseException as error:  # goes on in the thread that waits for it
                job.set_exception(error)

    def _accept(self, _: int) -> None:
        if self._listener is None:  # closed since it was selected
            return
        with contextlib.suppress(OSError):  # nobody else is there, or he is gone again
            while True:
                client = _Client(self._listener.accept()[0], self._token, self._answer)
                self._selector.register(client.socket, selectors.EVENT_READ, partial(self._attend, client))
                self._clients.add(client)
        for stranger in [client for client in self._clients if client.is_stranger_for_long]:
            self._dismiss(stranger)

    def _attend(self, client: _Client, events: int) -> None:
        if client not in self._clients:  # dismissed since it was selected
            return
        try:
            client.attend(events)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.has_unsent else 0)
            if wanted != self._selector.get_key(client.socket).events:
                self._selector.modify(client.socket, wanted, partial(self._attend, client))
        except OSError:  # it is gone, or a stranger
            self._dismiss(client)

    def _dismiss(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _drain(self) -> None:
        if self._listener is not None:
            self._accept(0)
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for key, events in self._selector.select(0):
            if key.fileobj is not self._woken:
                key.data(events)
        for client in tuple(self._clients):
            with contextlib.suppress(OSError):
                client.send_rest()
            self._dismiss(client)

    def _answer(self, call: memoryview) -> bytes:
        try:
            method, arguments = pickle.loads(call)
            return _frame((True, self._methods[method](*arguments)))
        except BaseException as error:  # a process boundary: whoever asked is told, of a panic in Rust too
            return _frame((False, f"{type(error).__name__}: {error}"))


class _Client:
    """A connection as the server sees it. Never waited for: what has not come or does not go yet is kept."""

    def __init__(self, accepted: socket.socket, token: bytes, answer: Callable[[memoryview], bytes]) -> None:
        accepted.setblocking(False)
        _prepare(accepted)
        self.socket = accepted
        self._token = token
        self._answer = answer
        self._received = bytearray()
        self._unsent = b""
        self._is_known = False
        self._since = time.monotonic()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_stranger_for_long(self) -> bool:
        return not self._is_known and time.monotonic() > self._since + _HELLO_TIMEOUT_S

    def attend(self, events: int) -> None:
        """Read and write what can be, and answer the calls that are whole; an OSError ends the connection."""
        if events & selectors.EVENT_WRITE:
            self._send()
        if events & selectors.EVENT_READ:
            received = self.socket.recv(_READ_BYTES)
            if not received:
                raise ConnectionResetError("the client closed it")
            self._received += received
            if self._is_known or self._knows_token():
                self._answer_all()

    def send_rest(self) -> None:
        """Wait for what is unsent, as this is the end."""
        self.socket.settimeout(_HELLO_TIMEOUT_S)
        self.socket.sendall(self._unsent)

    def _knows_token(self) -> bool:
        if len(self._received) < _TOKEN_BYTES:
            return False
        if not hmac.compare_digest(self._received[:_TOKEN_BYTES], self._token):
            raise PermissionError("a stranger")
        del self._received[:_TOKEN_BYTES]
        self._is_known = True
        return True

    def _answer_all(self) -> None:
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            call, self._received = self._received[:end], self._received[end:]
            self._unsent += self._answer(memoryview(call)[_LENGTH.size :])
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]


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
        _prepare(connection._socket)
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


def _prepare(one: socket.socket) -> None:
    """Have a connection send at once, and break where the other node is gone, as nothing else would say so."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _DEAD_AFTER_S // 2)
