"""An S3 server, a TCP connection that can be cut, and Python processes with a cache of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster import storage

ROOT = Path(__file__).resolve().parent.parent
KEY, SECRET = "AKIDEXAMPLE", "sEcReTsEcReT"


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's S3 server on loopback with the bucket ``bucket``, and return its port."""
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    uri = f"s3://{KEY}:{SECRET}@bucket?allow_bucket_creation=true&{options(port)}"
    found, path = fs.FileSystem.from_uri(uri)
    found.create_dir(path)
    try:
        yield port
    finally:
        server.stop()


def options(port: int) -> str:
    """Return the parameters of a URI for a server at this port."""
    return f"scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"


def s3_uri(port: int, name: str) -> str:
    """Return a URI with credentials."""
    return f"s3://{KEY}:{SECRET}@bucket/{name}?{options(port)}"


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of S3 in this process be tried twice, in less than a second.

    A file system that pyarrow makes of a URI tries for 6 s, every call that cleans up included, before ``Storage``
    counts its own time.
    """
    from pyarrow import fs

    connect = storage._connect

    @cache
    def connect_hastily(uri: str) -> tuple[fs.FileSystem, str]:
        found, path = connect(uri)
        make, (options,) = found.__reduce__()  # a copy: there is no setter
        return make({**options, "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=2)}), path

    monkeypatch.setattr(storage, "_connect", connect_hastily)


class CutConnection:
    """Forwards TCP connections to a port of this machine, until it is cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Sent to the target."""
        self.cut_after: int | None = None
        """Cut the connections once this many bytes were sent."""
        self.cut_at: re.Pattern[bytes] | None = None
        """Cut them once such bytes are sent: the name of an object."""
        self.num_cuts = 0
        self.port = 0
        self._listener: socket.socket | None = None
        self.mend()

    def mend(self) -> None:
        """Accept connections."""
        self.cut_after = self.cut_at = None
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        with self._lock:
            self.num_cuts += 1
            sockets = [*self._open, *([self._listener] if self._listener else [])]
            self._open, self._listener = set(), None
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                ours, _ = listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                self._open |= {ours, theirs}
            for source, target in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=(source, target, source is ours), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if counts:
                    self.num_bytes += len(chunk)
                    is_far = self.cut_after is not None and self.num_bytes > self.cut_after
                    if is_far or (self.cut_at is not None and self.cut_at.search(chunk)):
                        self.cut()
                        return
                target.sendall(chunk)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # the other thread reads from target, ends too, and closes it
        source.close()
        with self._lock:
            self._open.discard(source)


class Mender(logging.Filter):
    """Mends a connection when a warning says that a call is repeated."""

    def __init__(self, connection: CutConnection) -> None:
        super().__init__()
        self.connection, self.num_mended = connection, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if "it is tried again for" in record.getMessage() and not self.num_mended:
            self.num_mended += 1
            self.connection.mend()
        return True


def start_python(script: str, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """Start a script with the project importable."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
