"""RpcServer and RpcClient: answers, order, killed peers and impostors. Ray only gives the node's address."""

import ast
import asyncio
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from waits import until
from zmq.utils import z85

from cluster.rpc import RpcAddress, RpcClient, RpcServer, decode, encode
from ragr1_actors.core.errors import RpcError

pytestmark = pytest.mark.timeout(600)


class Panic(BaseException):
    """A library in Rust raises an error that is no Exception."""


@dataclass
class Actor:
    """The methods that are called, and what a test observes of them."""

    server: RpcServer
    threads: set[str] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def double(self, values: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return 2 * values

    def wait(self, number: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        self.order.append(number)
        return number

    def fail(self, number: int) -> None:
        raise ValueError(f"got {number}")

    def panic(self) -> None:
        raise Panic("index out of bounds")

    @property
    def address(self) -> RpcAddress:
        assert self.server.address is not None
        return self.server.address


@pytest.fixture
def actor() -> Iterator[Actor]:
    server = RpcServer()
    actor = Actor(server)
    server.open({"double": actor.double, "wait": actor.wait, "fail": actor.fail, "panic": actor.panic})
    yield actor
    actor.may_go_on.set()
    server.drain()


async def test_a_call_is_answered_by_the_one_worker_thread(actor: Actor) -> None:
    client = RpcClient(actor.address)
    assert await client.call("double", "ab") == "abab"
    for shape in ((0,), (3, 2), (512, 1000)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        answer = await client.call("double", values)
        assert answer.dtype == values.dtype
        np.testing.assert_array_equal(answer, 2 * values)
    assert actor.server.run(actor.double, 4) == actor.server.call("double", 4) == 8
    assert len(actor.threads) == 1


@pytest.mark.integration
async def test_a_message_of_100_megabytes_arrives_whole(actor: Actor) -> None:
    content = os.urandom(2**20)
    assert await RpcClient(actor.address).call("double", 50 * content) == 100 * content


def test_messages_keep_data_and_refuse_all_else() -> None:
    content = {"text": "\x00\ud800é", "list": [1, -2.5, None, True, b"\xff"], "array": np.arange(6, dtype=np.int64)}
    decoded = decode(encode(content))
    np.testing.assert_array_equal(decoded.pop("array"), content.pop("array"))
    assert decoded == content
    for refused in (object(), np.array([object()]), {1, 2}):
        with pytest.raises(TypeError, match="expected plain data or an array of numbers"):
            encode(refused)


async def test_the_error_of_a_method_reaches_the_caller_and_the_server_goes_on(actor: Actor) -> None:
    client = RpcClient(actor.address)
    with pytest.raises(RpcError, match=r"^ValueError: got 7$"):
        await client.call("fail", 7)
    with pytest.raises(RpcError, match="Panic: index out of bounds"):
        await client.call("panic")
    with pytest.raises(RpcError, match="KeyError: 'nothing'"):
        await client.call("nothing")
    with pytest.raises(RpcError, match="TypeError"):
        await client.call("double")
    assert await client.call("double", 1) == 2


async def test_concurrent_calls_run_one_at_a_time_in_order(actor: Actor) -> None:
    client = RpcClient(actor.address)
    calls = [asyncio.create_task(client.call("wait", number)) for number in range(5)]
    await until(actor.has_begun.is_set)
    answering = asyncio.create_task(asyncio.to_thread(actor.server.run, actor.double, 4))
    await asyncio.sleep(0.05)  # no state shows that no other call has begun
    assert actor.order == [] and not answering.done()
    actor.may_go_on.set()
    assert await asyncio.gather(*calls) == actor.order == [0, 1, 2, 3, 4]
    assert await answering == 8
    assert len(actor.threads) == 1


async def test_answers_of_many_concurrent_calls_are_not_mixed_up(actor: Actor) -> None:
    clients = [RpcClient(actor.address) for _ in range(4)]
    calls = [clients[number % 4].call("double", number) for number in range(400)]
    assert await asyncio.gather(*calls) == [2 * number for number in range(400)]


async def test_a_cancelled_call_does_not_affect_another(actor: Actor) -> None:
    client = RpcClient(actor.address)
    cancelled = asyncio.create_task(client.call("wait", 0))
    await until(actor.has_begun.is_set)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    actor.may_go_on.set()
    assert [await client.call("wait", number) for number in (1, 2)] == [1, 2]


def test_a_client_serves_one_event_loop_after_another_without_leaking_descriptors(actor: Actor) -> None:
    client = RpcClient(actor.address)
    for number in range(3):
        assert asyncio.run(client.call("double", number)) == 2 * number
    before = num_descriptors()
    for number in range(10):
        assert asyncio.run(client.call("double", number)) == 2 * number
    asyncio.run(until(lambda: num_descriptors() <= before + 5))


@pytest.mark.integration
def test_a_client_that_is_dropped_closes_its_sockets(actor: Actor) -> None:
    asyncio.run(RpcClient(actor.address).call("double", 1))  # loads what stays
    gc.collect()

    async def use() -> None:
        await asyncio.sleep(0.2)  # a thread of ZeroMQ closes the sockets of the client above; no state shows it
        before = num_descriptors()
        clients = [RpcClient(actor.address) for _ in range(10)]
        for client in clients:
            await client.call("double", 1)
        assert num_descriptors() >= before + 10
        del client, clients
        gc.collect()
        await until(lambda: num_descriptors() <= before + 5)

    asyncio.run(use())


async def test_calls_that_arrived_are_answered_before_the_end(actor: Actor) -> None:
    client = RpcClient(actor.address)
    calls = [asyncio.create_task(client.call("wait", number)) for number in range(4)]
    await until(actor.has_begun.is_set)
    await asyncio.sleep(1.0)  # the others are sent; no state of the server shows it
    draining = asyncio.create_task(asyncio.to_thread(actor.server.drain))
    await asyncio.sleep(0.05)  # no state shows that it waits
    assert not draining.done()
    actor.may_go_on.set()
    await draining
    assert sorted(await asyncio.gather(*calls)) == [0, 1, 2, 3]
    with pytest.raises(RpcError, match=r"cannot connect to|lost the connection to"):
        await client.call("double", 1)


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


async def test_a_pickle_from_a_client_with_the_right_key_is_not_executed(actor: Actor, tmp_path: Path) -> None:
    bomb = pickle.dumps(("double", (Bomb(tmp_path / "bomb"),)))
    with raw_client(actor.address) as raw:
        raw.send_multipart([b"1", bomb])
        raw.send_multipart([b"2", encode(("double", (bomb,)))])
        raw.send_multipart([b"one frame only"])
        raw.send_multipart([b"3", encode(("double", (1,)))])
        found = dict([await asyncio.to_thread(raw.recv_multipart) for _ in range(3)])
    assert decode(found[b"1"])[0] is False
    assert decode(found[b"2"]) == [True, 2 * bomb]
    assert decode(found[b"3"]) == [True, 2]
    assert not (tmp_path / "bomb").exists()
    pickle.loads(bomb)
    assert (tmp_path / "bomb").exists()  # so it is one


@pytest.mark.parametrize("wrong", ["client", "server", "both"])
async def test_a_client_with_a_wrong_key_is_refused(actor: Actor, wrong: str) -> None:
    public, secret = zmq.curve_keypair()
    address = actor.address
    if wrong in ("client", "both"):
        address = address._replace(client_public_key=public, client_secret_key=secret)
    if wrong in ("server", "both"):
        address = address._replace(server_key=zmq.curve_keypair()[0])
    with pytest.raises(RpcError, match=f"cannot connect to {address.host}:{address.port}"):
        await RpcClient(address).call("double", 1)
    assert actor.threads == set()  # nothing was run
    assert await RpcClient(actor.address).call("double", 1) == 2


async def test_a_client_without_keys_is_refused(actor: Actor) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{actor.address.host}:{actor.address.port}")
        plain.send_multipart([b"1", encode(("double", (1,)))])
        assert not await asyncio.to_thread(plain.poll, 500)
    context.term()
    assert actor.threads == set()


@pytest.mark.parametrize("kind", ["plain", "curve", "pickle"])
async def test_an_impostor_on_the_port_of_a_dead_actor_learns_nothing_and_runs_no_code(
    actor: Actor, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers every request: with a pickle, as in the former protocol, or over ZeroMQ."""
    monkeypatch.setattr("cluster.rpc._CONNECT_TIMEOUT_S", 2.0)
    actor.may_go_on.set()
    actor.server.drain()
    address = actor.address
    bomb = pickle.dumps((True, Bomb(tmp_path / "bomb")))
    heard: list[bytes] = []
    listening, stop = threading.Event(), threading.Event()
    impostor = threading.Thread(target=impersonate, args=(address, kind, bomb, heard, listening, stop))
    impostor.start()
    try:
        assert await asyncio.to_thread(listening.wait, 30)
        with pytest.raises(RpcError, match="cannot connect to") as refused:
            await RpcClient(address).call("double", "a secret question")
    finally:
        stop.set()
        await asyncio.to_thread(impostor.join)
    for secret in (b"a secret question", address.server_key, address.client_public_key, address.client_secret_key):
        assert secret not in b"".join(heard)
        assert len(secret) != 40 or z85.decode(secret) not in b"".join(heard)
    assert "no server listens there" not in str(refused.value)  # it was the impostor that was refused
    assert kind != "pickle" or b"".join(heard)
    assert not (tmp_path / "bomb").exists()


def impersonate(
    address: RpcAddress, kind: str, bomb: bytes, heard: list[bytes], listening: threading.Event, stop: threading.Event
) -> None:
    if kind == "pickle":
        with socket.create_server((address.host, address.port)) as listener:
            listening.set()
            listener.settimeout(10)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                heard.append(connection.recv(2**16))
                connection.settimeout(0.1)
                connection.sendall(len(bomb).to_bytes(8, "little") + bomb)
                while not stop.is_set():
                    try:
                        heard.append(connection.recv(2**16))
                    except OSError:
                        time.sleep(0.01)
        return
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        if kind == "curve":  # it has keys, but not the actor's
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = zmq.curve_keypair()
        router.bind(f"tcp://{address.host}:{address.port}")
        listening.set()
        while not stop.is_set():
            if router.poll(10):
                client, call_id, *request = router.recv_multipart()
                heard += request
                router.send_multipart([client, call_id, bomb])
    context.term()


@contextmanager
def raw_client(address: RpcAddress) -> Iterator["zmq.Socket[bytes]"]:
    """A socket with the right keys that sends any bytes."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.curve_serverkey = address.server_key
        raw.curve_publickey, raw.curve_secretkey = address.client_public_key, address.client_secret_key
        raw.connect(f"tcp://{address.host}:{address.port}")
        yield raw
    context.term()


def test_a_stranger_that_sends_garbage_disturbs_no_client(actor: Actor) -> None:
    for sent in (b"", b"\xff", os.urandom(64), b"\xff" + (2**60).to_bytes(8, "big") + bytes(1000), bytes(2**16)):
        with socket.create_connection(actor.address[:2], timeout=30) as stranger:
            stranger.sendall(sent)
            assert asyncio.run(RpcClient(actor.address).call("double", 2)) == 4


def test_a_stranger_that_sends_nothing_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.rpc._HANDSHAKE_TIMEOUT_S", 0.2)
    server = RpcServer()
    server.open({})
    assert server.address is not None
    with socket.create_connection(server.address[:2], timeout=30) as stranger:
        while stranger.recv(100):  # the greeting of ZeroMQ, then the end
            pass
    server.drain()


async def test_a_client_that_does_not_read_delays_no_other(actor: Actor) -> None:
    with raw_client(actor.address) as lazy:
        for number in range(21):
            lazy.send_multipart([b"%d" % number, encode(("double", (bytes(2**20),)))])
        client = RpcClient(actor.address)
        for number in range(5):
            assert await client.call("double", number) == 2 * number
        for _ in range(21):
            assert len((await asyncio.to_thread(lazy.recv_multipart))[1]) > 2**21


def test_an_address_prints_without_its_keys(actor: Actor) -> None:
    for text in (repr(actor.address), f"{actor.address}", repr([actor.address])):
        assert str(actor.address.port) in text
        assert not any(key.decode() in text for key in actor.address[2:])


async def test_no_server_listens_there(actor: Actor) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RpcError, match=f"cannot connect to 127.0.0.1:{port}: no server listens there"):
        await RpcClient(actor.address._replace(host="127.0.0.1", port=port)).connect()


SERVE = """
import threading, time
import ray.util
from cluster.rpc import RpcServer
ray.util.get_node_ip_address = lambda: "127.0.0.1"
def sleep(duration_s):
    print("begun", flush=True)
    time.sleep(duration_s)
server = RpcServer()
server.open({"sleep": sleep, "double": lambda value: 2 * value})
print(repr(tuple(server.address)), flush=True)
threading.Event().wait()
"""


@pytest.fixture
def process() -> Iterator[tuple["subprocess.Popen[str]", RpcAddress]]:
    command = [sys.executable, "-c", SERVE]
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": root}
    ) as started:
        try:
            assert started.stdout is not None
            yield started, RpcAddress(*ast.literal_eval(started.stdout.readline()))
        finally:
            started.kill()


async def test_a_peer_killed_in_a_call_is_noticed_at_once(
    process: tuple["subprocess.Popen[str]", RpcAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.rpc._DEAD_AFTER_S", 600.0)  # no heartbeat says it
    started, address = process
    client = RpcClient(address)
    assert await client.call("double", 2) == 4
    calls = [asyncio.create_task(client.call("sleep", 500)) for _ in range(3)]
    await asyncio.to_thread(started.stdout.readline)
    started.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failed, RpcError) and "lost the connection to 127.0.0.1" in str(failed)
    assert time.monotonic() - killed < 60


@pytest.mark.slow
async def test_a_peer_that_is_stopped_misses_its_heartbeats(
    process: tuple["subprocess.Popen[str]", RpcAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.rpc._DEAD_AFTER_S", 5.0)
    started, address = process
    client = RpcClient(address)
    call = asyncio.create_task(client.call("sleep", 500))
    await asyncio.to_thread(started.stdout.readline)
    started.send_signal(signal.SIGSTOP)
    with pytest.raises(RpcError, match="lost the connection to"):
        async with asyncio.timeout(120):
            await call


def test_an_address_that_cannot_be_listened_at_leaves_calls_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "203.0.113.77")  # reserved for examples: RFC 5737
    server = RpcServer()
    server.open({"double": lambda value: 2 * value})
    assert server.address is None
    assert server.call("double", 3) == 6
    server.drain()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
