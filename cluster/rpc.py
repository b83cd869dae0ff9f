"""Remote calls to a Ray actor over ZeroMQ: a fifth of the latency of Ray's own calls (``ragr1 bench retrieval``).

::

    client                               actor
    RpcClient.call ──── CURVE ────►  RpcServer: one thread that receives, runs the method and answers
    handle.call.remote() ──Ray────►  the same methods, in the same thread

Ray starts the actor, restarts it, and carries its ``RpcAddress`` with the keys. CURVE encrypts every message, proves
the server's key to the client and the client's key to the server; neither key travels over the socket. Messages are
msgpack, which holds data only: receiving one runs no code. The client learns of a killed process when its kernel
closes the connection, and of a lost node or a stopped process when heartbeats are missing for ``_DEAD_AFTER_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgpack
import numpy as np
import ray
import zmq
from numpy.typing import NDArray
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ragr1_actors.core.errors import RpcError

_CONNECT_TIMEOUT_S = 5.0
_HANDSHAKE_TIMEOUT_S = 10.0
_DEAD_AFTER_S = 10.0
_DRAIN_TIMEOUT_S = 60.0
"""Seconds for the calls that have arrived at a server that ends; limited, since a client may go on calling."""
_LINGER_S = 5.0
"""Seconds in which answers leave a server that ends, since a client may be gone."""
_MAX_MESSAGE_BYTES = 2**31
_NEVER_MS = 2**31 - 1
_ARRAY = 1
"""Number of the msgpack extension type of a NumPy array: dtype, shape and bytes."""
_ENDS: dict[int, str] = {
    zmq.EVENT_CLOSED: "no server listens there",
    zmq.EVENT_DISCONNECTED: "the other side closed it",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server refused this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the server did not prove its key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the server did not prove its key",
}
"""Meaning of each event that ends a connection."""


class RpcAddress(NamedTuple):
    """Address at which an ``RpcServer`` listens, with the keys that open it. A secret: only Ray carries it."""

    host: str
    port: int
    server_key: bytes
    """Public key of the server, which it proves to clients."""
    client_public_key: bytes
    client_secret_key: bytes
    """Key pair of the clients of this server, which they prove to it."""

    def __repr__(self) -> str:
        """Return host and port without the keys, which must not get into a log."""
        return f"RpcAddress({self.host!r}, {self.port})"


class RpcServer:
    """Side of the actor. One thread receives, runs methods and answers, one call at a time.

    OpenMP's number of threads is a property of the calling thread, so all work must run in the same one.
    """

    def __init__(self) -> None:
        """Start the thread. No client can connect before ``open``."""
        self.address: RpcAddress | None = None
        """Address; None before ``open``, or if this node's address cannot be bound: then only Ray's calls work."""
        self._methods: Mapping[str, Callable[..., Any]] = {}
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        threading.Thread(target=self._serve, name="rpc", daemon=True).start()

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``work`` in the server's thread, after the calls before it, and return its result."""
        job: Future[Any] = Future()
        self._jobs.put((job, work, arguments))
        self._waker.send(b"\0")
        return job.result()

    def open(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Let clients connect and call ``methods`` by name. ``encode`` says which arguments and results are legal."""
        self._methods = methods
        with contextlib.suppress(zmq.ZMQError):
            self.address = self.run(self._listen, ray.util.get_node_ip_address())

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method for a client that can only reach this actor by Ray's calls."""
        return self.run(self._methods[method], *arguments)

    def drain(self) -> None:
        """Answer the calls that have arrived, close every connection and return."""
        self.run(self._close)
        self._context.term()

    def _serve(self) -> None:
        while True:
            for ready, _ in self._poller.poll():
                if ready is self._router:
                    self._answer()
                else:
                    self._do_jobs()

    def _do_jobs(self) -> None:
        self._woken.recv(4096)
        while not self._jobs.empty():
            job, work, arguments = self._jobs.get()
            try:
                job.set_result(work(*arguments))
            except BaseException as error:  # raised again in the thread that waits for the result
                job.set_exception(error)

    def _listen(self, host: str) -> RpcAddress:
        server_key, server_secret_key = zmq.curve_keypair()
        client_public_key, client_secret_key = zmq.curve_keypair()
        admission = self._context.socket(zmq.REP)
        admission.bind("inproc://zeromq.zap.01")  # address at which libzmq asks about the key of each client
        threading.Thread(target=_admit, args=(admission, client_public_key), name="rpc-admit", daemon=True).start()
        router = _open_socket(self._context, zmq.ROUTER, host)
        router.curve_server = True
        router.curve_secretkey = server_secret_key
        router.linger = round(_LINGER_S * 1000)
        try:
            port = router.bind_to_random_port(f"tcp://{_bracketed(host)}")
        except zmq.ZMQError:
            router.close()
            raise
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        return RpcAddress(host, port, server_key, client_public_key, client_secret_key)

    def _answer(self) -> None:
        assert self._router is not None
        client, *call = self._router.recv_multipart()
        if len(call) != 2:  # not a call
            return
        call_id, request = call
        try:
            method, arguments = decode(request)
            answer = encode((True, self._methods[method](*arguments)))
        except BaseException as error:  # a process boundary: the caller gets every error, panics of Rust code too
            answer = encode((False, f"{type(error).__name__}: {error}"))
        self._router.send_multipart([client, call_id, answer])

    def _close(self) -> None:
        if self._router is None:
            return
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while self._router.poll(0) and time.monotonic() < deadline:
            self._answer()
        self._poller.unregister(self._router)
        self._router.close()
        self._router = None


class RpcClient:
    """Side of the client: one connection for any number of concurrent calls, opened again in a new event loop."""

    def __init__(self, address: RpcAddress) -> None:
        """Take the address; nothing is connected yet."""
        self._address = address
        self._peer = f"{address.host}:{address.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that reads the socket's events; None while no socket is open."""
        self._calls: dict[bytes, asyncio.Future[bytes]] = {}
        self._call_ids = map(b"%d".__mod__, itertools.count())

    async def connect(self) -> None:
        """Connect, if not connected, and return once both sides have proved their keys.

        Raises:
            RpcError: no server answers there, it has another key, or it refuses this client's key.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._close("the client is used in another event loop")
            self._open(loop)
        opened = self._opened
        if opened.done():
            return opened.result()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await asyncio.shield(opened)  # other calls wait for it too
        except TimeoutError:
            if opened is self._opened:
                self._close("no answer")
            raise RpcError(f"cannot connect to {self._peer}: no answer") from None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor. If the caller is cancelled, the method still runs, and its answer is dropped.

        Raises:
            RpcError: the connection failed or was lost, or the method raised; the message has the cause.
        """
        await self.connect()
        loop, call_id, request = asyncio.get_running_loop(), next(self._call_ids), encode((method, arguments))
        answer = self._calls[call_id] = loop.create_future()
        try:
            self._socket.send_multipart([call_id, request], zmq.NOBLOCK)
            loop.call_soon(self._read_answers)  # a send may take the signal of an answer that has arrived
            is_result, result = decode(await answer)
        except zmq.ZMQError as error:
            raise RpcError(f"lost the connection to {self._peer}: {error}") from error
        finally:
            self._calls.pop(call_id, None)
        if not is_result:
            raise RpcError(result)
        return result

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._opened: asyncio.Future[None] = loop.create_future()
        self._socket = _open_socket(zmq.Context.instance(), zmq.DEALER, self._address.host)
        self._socket.linger = 0
        # An actor that restarts has another address. With -1 libzmq would drop answers that arrived before the end.
        self._socket.reconnect_ivl = _NEVER_MS
        self._socket.connect_timeout = round(_CONNECT_TIMEOUT_S * 1000)
        self._socket.curve_serverkey = self._address.server_key
        self._socket.curve_publickey = self._address.client_public_key
        self._socket.curve_secretkey = self._address.client_secret_key
        self._events = self._socket.get_monitor_socket(sum(_ENDS) | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._loop = loop
        for descriptor, read in ((self._socket.FD, self._read_answers), (self._events.FD, self._read_events)):
            loop.add_reader(descriptor, _call_if_alive, weakref.WeakMethod(read))
            read()  # libzmq signals only to a reader that has found nothing
        self._socket.connect(f"tcp://{_bracketed(self._address.host)}:{self._address.port}")

    def _close(self, reason: str = "the client closed it") -> None:
        """Fail the open calls, and close the socket."""
        if self._loop is None:
            return
        loop, calls = self._loop, self._calls
        self._loop, self._calls = None, {}
        for opened in (self._socket, self._events):
            loop.remove_reader(opened.FD)
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)
        if loop.is_closed():
            return
        if not self._opened.done():
            self._opened.set_exception(RpcError(f"cannot connect to {self._peer}: {reason}"))
            self._opened.exception()  # maybe no call waits for it any more
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(RpcError(f"lost the connection to {self._peer}: {reason}"))

    __del__ = _close

    def _read_answers(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._loop is not None:
                call_id, answer = self._socket.recv_multipart(zmq.NOBLOCK)
                waiting = self._calls.get(call_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._loop is not None:
                event = recv_monitor_message(self._events, zmq.NOBLOCK)
                if event["event"] in _ENDS:
                    self._read_answers()  # reads the answers that arrived before the end
                    self._close(_ENDS[event["event"]])
                elif not self._opened.done():
                    self._opened.set_result(None)


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method of a client by a weak reference, so that a running event loop does not keep the client."""
    if (read := method()) is not None:
        read()


def encode(content: Any) -> bytes:
    """Return a message of None, bool, int, float, str, bytes, lists, tuples, dicts and NumPy arrays of numbers.

    Raises:
        TypeError: it contains another type.
    """
    message: bytes = msgpack.packb(content, default=_encode_array, unicode_errors="surrogatepass")
    return message


def decode(message: bytes) -> Any:
    """Undo ``encode``; tuples become lists.

    Raises:
        ValueError: it is not such a message.
    """
    return msgpack.unpackb(message, ext_hook=_decode_array, unicode_errors="surrogatepass")


def _encode_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"got a {type(value).__name__} in a message, expected plain data or an array of numbers")
    return msgpack.ExtType(_ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))


def _decode_array(kind: int, data: bytes) -> NDArray[Any]:
    if kind != _ARRAY:
        raise ValueError(f"got a message with extension type {kind}, expected {_ARRAY}")
    dtype, shape, values = msgpack.unpackb(data)
    return np.frombuffer(bytearray(values), dtype).reshape(shape)


def _admit(admission: zmq.Socket[bytes], client_key: bytes) -> None:
    """Answer libzmq's requests (ZAP, RFC 27) in a thread, as the server's may be busy: one key is let in."""
    with contextlib.suppress(zmq.ContextTerminated), admission:
        expected = z85.decode(client_key)
        while True:
            version, request_id, _, _, _, mechanism, *keys = admission.recv_multipart()
            is_known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(keys), expected)
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            admission.send_multipart([version, request_id, *status, b"", b""])


def _open_socket(context: zmq.Context[Any], kind: int, host: str) -> zmq.Socket[bytes]:
    opened: zmq.Socket[bytes] = context.socket(kind)
    opened.ipv6 = ":" in host
    opened.sndhwm = opened.rcvhwm = 0  # callers bound what is out; nothing is dropped
    opened.maxmsgsize = _MAX_MESSAGE_BYTES
    opened.handshake_ivl = round(_HANDSHAKE_TIMEOUT_S * 1000)
    opened.heartbeat_ivl = round(_DEAD_AFTER_S * 1000 / 4)
    opened.heartbeat_timeout = round(_DEAD_AFTER_S * 1000)
    return opened


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
