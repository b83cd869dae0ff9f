"""Calls over a channel: answers, order, deaths, strangers; no Ray but where the address comes from."""

import asyncio
import gc
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.rpc import Channel, ChannelAddress, ChannelServer
from ragr1_actors.core.errors import ChannelError

pytestmark = pytest.mark.timeout(60)


class Panic(BaseException):
    """What a library in Rust raises is no Exception."""


@dataclass
class Actor:
    """What is called, and what a test sees of it."""

    server: ChannelServer
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
    def address(self) -> ChannelAddress:
        assert self.server.address is not None
        return self.server.address


@pytest.fixture
def actor() -> Iterator[Actor]:
    server = ChannelServer()
    actor = Actor(server)
    server.open({"double": actor.double, "wait": actor.wait, "fail": actor.fail, "panic": actor.panic})
    yield actor
    actor.may_go_on.set()
    server.drain()


async def test_a_call_is_answered_by_the_one_worker_thread(actor: Actor) -> None:
    channel = Channel(actor.address)
    assert await channel.call("double", "ab") == "abab"
    for shape in ((0,), (3, 2), (512, 1000)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        answer = await channel.call("double", values)
        assert answer.dtype == values.dtype
        np.testing.assert_array_equal(answer, 2 * values)
    assert actor.server.run(actor.double, 4) == 8
    assert len(actor.threads) == 1


async def test_what_a_method_raises_is_said_and_the_channel_serves_on(actor: Actor) -> None:
    channel = Channel(actor.address)
    with pytest.raises(ChannelError, match=r"^ValueError: got 7$"):
        await channel.call("fail", 7)
    with pytest.raises(ChannelError, match="Panic: index out of bounds"):
        await channel.call("panic")
    with pytest.raises(ChannelError, match="KeyError: 'nothing'"):
        await channel.call("nothing")
    with pytest.raises(ChannelError, match="TypeError"):
        await channel.call("double")
    assert await channel.call("double", 1) == 2


async def test_calls_at_a_time_have_a_connection_each_and_wait_for_their_turn(actor: Actor) -> None:
    channel = Channel(actor.address)
    calls = [asyncio.create_task(channel.call("wait", number)) for number in range(5)]
    await until(actor.has_begun.is_set)
    answering = asyncio.create_task(asyncio.to_thread(actor.server.run, actor.double, 4))
    await asyncio.sleep(0.05)
    assert actor.order == [] and not answering.done()
    actor.may_go_on.set()
    assert await asyncio.gather(*calls) == sorted(actor.order) == [0, 1, 2, 3, 4]
    assert await answering == 8
    assert len(actor.threads) == 1
    assert len(channel._idle) == 5


async def test_a_call_that_is_given_up_spoils_no_other(actor: Actor) -> None:
    channel = Channel(actor.address)
    given_up = asyncio.create_task(channel.call("wait", 0))
    await until(actor.has_begun.is_set)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert channel._idle == []
    actor.may_go_on.set()
    assert [await channel.call("wait", number) for number in (1, 2)] == [1, 2]


def test_a_channel_serves_one_event_loop_after_another(actor: Actor) -> None:
    channel = Channel(actor.address)
    for number in range(3):
        assert asyncio.run(channel.call("double", number)) == 2 * number
        assert len(actor.server._clients) == 1


def test_what_is_asked_is_answered_before_the_end(actor: Actor) -> None:
    async def use() -> None:
        channel = Channel(actor.address)
        calls = [asyncio.create_task(channel.call("wait", number)) for number in range(4)]
        await until(actor.has_begun.is_set)
        for _ in range(100):  # the others are sent, which takes turns of this loop but no server
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(asyncio.to_thread(actor.server.drain))
        await asyncio.sleep(0.05)
        assert not draining.done()
        actor.may_go_on.set()
        await draining
        assert sorted(await asyncio.gather(*calls)) == [0, 1, 2, 3]
        with pytest.raises(ChannelError, match="lost the connection to"):
            await channel.call("double", 1)

    asyncio.run(use())


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("is_known", [False, True])
def test_nothing_of_a_stranger_is_unpickled(actor: Actor, tmp_path: Path, is_known: bool) -> None:
    host, port, token = actor.address
    bomb = pickle.dumps(("double", (Bomb(tmp_path / "bomb"),)))
    with socket.create_connection((host, port), timeout=30) as stranger:
        stranger.sendall((token if is_known else bytes(len(token))) + struct.pack("<Q", len(bomb)) + bomb)
        answer = receive_some(stranger)
    assert bool(answer) is is_known
    assert (tmp_path / "bomb").exists() is is_known  # so the bomb is one


def test_a_stranger_who_goes_away_is_forgotten(actor: Actor) -> None:
    host, port, token = actor.address
    for said in (b"", token[:5], token, token + b"\x05", token + struct.pack("<Q", 2**60) + bytes(1000)):
        with socket.create_connection((host, port), timeout=30) as stranger:
            stranger.sendall(said)
            asyncio.run(until(lambda: actor.server._clients))
        asyncio.run(until(lambda: not actor.server._clients))
    assert asyncio.run(Channel(actor.address).call("double", 2)) == 4


def test_a_stranger_who_says_nothing_is_sent_away(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port, _ = actor.address
    with socket.create_connection((host, port), timeout=30) as stranger:
        asyncio.run(until(lambda: actor.server._clients))
        monkeypatch.setattr("cluster.rpc._HELLO_TIMEOUT_S", 0.0)
        with socket.create_connection((host, port), timeout=30):
            assert receive_some(stranger) == b""


def test_a_client_that_does_not_read_keeps_nobody_waiting(actor: Actor) -> None:
    host, port, token = actor.address
    frame = pickle.dumps(("double", (bytes(2**20),)))
    with socket.create_connection((host, port), timeout=30) as lazy:
        lazy.sendall(token + struct.pack("<Q", len(frame)) + frame)
        lazy.sendall(20 * (struct.pack("<Q", len(frame)) + frame))
        channel = Channel(actor.address)
        for number in range(5):
            assert asyncio.run(channel.call("double", number)) == 2 * number
        num_bytes = 0
        while num_bytes < 21 * 2**21:
            num_bytes += len(lazy.recv(2**20))  # all of it comes once it is read


async def test_nobody_listens_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ChannelError, match=f"cannot connect to 127.0.0.1:{port}"):
        await Channel(ChannelAddress("127.0.0.1", port, bytes(32))).connect()


async def test_the_other_side_dies_in_a_call() -> None:
    """Its kernel closes the sockets: there is no time to wait for."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    started = time.monotonic()
    with pytest.raises(ChannelError, match=f"lost the connection to 127.0.0.1:{port}"):
        await Channel(ChannelAddress(host, port, bytes(32))).call("double", 1)
    assert time.monotonic() - started < 5
    server.close()
    await server.wait_closed()


def test_an_address_that_cannot_be_listened_at_leaves_calls_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "203.0.113.77")  # of nobody: RFC 5737
    server = ChannelServer()
    server.open({"double": lambda value: 2 * value})
    assert server.address is None
    assert server.run(lambda: 3) == 3
    server.drain()


def test_a_channel_that_is_dropped_closes_its_sockets(actor: Actor) -> None:
    channel = Channel(actor.address)
    asyncio.run(channel.call("double", 1))
    del channel
    gc.collect()
    asyncio.run(until(lambda: not actor.server._clients))


async def until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def receive_some(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(100)
    except ConnectionResetError:  # it was closed with bytes unread
        return b""
