"""Ray workers of a local session as forks of one server process, which has imported what they need.

::

    driver ──start()──► server: imports, then accepts ──fork──► worker
                          ▲
    raylet ──► client ────┘ the worker's command, environment, folder and descriptors
               (in place of setup_worker.py and Python; ends with the worker, and by the same status)

A fork begins as a new process does, with what the raylet gave to its client. Ray watches and kills the client until the
worker registers itself, then the worker. A client that gets no fork becomes the Python process that Ray asked for. The
module imports the standard library only, so that clients start at once; they take the place of Ray's
``setup_worker.py``, which imports Ray. Figures: docs/decisions/start-up.md.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import json
import os
import resource
import runpy
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_PRELOADED = ("ragr1_actors.core.models.huggingface", "pyarrow.parquet", "deepspeed")
_PRELOADED_WITH_RAY = (
    "ragr1_actors.rollout.runners.env_runner_group",
    "learners.ranks.learner_group",
    "learners.algorithms.grpo",
    "retrieval.replicas.replica_set",
)
"""Modules of the actors, as names: the driver's module must not import them."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""Drivers of GPUs. A module that looks for them while it is imported breaks forks: workers start as Ray starts them."""
_FORK_AWARE_THREADS = {"jemalloc_bg_thd"}
"""Threads that end before a fork by themselves; any other could hold a lock that stays locked in the fork."""
_SERVE, _ASK = "serve", "ask"
_CLIENT = [sys.executable, "-I", "-S", __file__, _ASK]
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""Arguments of ``setup_worker.py``; it gives the others to the worker."""
_MAX_REQUEST_BYTES = 1 << 20
_BACKLOG = 1024


def runtime_env(python_path: str) -> dict[str, str]:
    """Return the part of a session's runtime environment with which its workers are forks.

    Call it before ``ray.init`` starts a raylet: it sets which script the raylet runs for each worker. Workers
    whose ``PYTHONPATH`` is not ``python_path`` are not forked, and on a node with a GPU none is.
    """
    from ray._private import ray_constants

    if (address := _start(python_path)) is None:
        return {}
    ray_constants.SETUP_WORKER_FILENAME = __file__  # Ray joins it to its folder: a whole path replaces that
    return {"py_executable": shlex.join([*_CLIENT, address.hex()])}


@functools.cache
def _start(python_path: str) -> bytes | None:
    """Start a server, if this process has none, and return its address; None with a GPU. It ends with this process."""
    if not hasattr(os, "pidfd_open") or any(Path(driver).exists() for driver in _GPU_DRIVERS):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a name that no file system holds
        listener.listen(_BACKLOG)
        server = subprocess.Popen(
            [sys.executable, __file__, _SERVE, str(listener.fileno())],
            stdin=subprocess.PIPE,  # it ends with this process, however that ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C and the end of a terminal do not reach it
            env={**os.environ, "PYTHONPATH": python_path},
        )
        atexit.register(_end, server)  # after ``ray.shutdown``, which ray.init registers later
        address: bytes = listener.getsockname()
        return address


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()  # it may still import
    server.communicate()


def start_early() -> None:
    """Start the server before the session, unless the session joins a cluster: it imports beside this process."""
    if not os.environ.get("RAY_ADDRESS"):
        _start(python_path())


def python_path() -> str:
    """Return a path with which workers import the packages and the user's modules from the same place as the driver."""
    root = str(Path(__file__).resolve().parents[2])
    existing = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (root, os.getcwd(), existing) if part)


def main(arguments: Sequence[str]) -> None:
    """Run as the server; or as the client of one worker, in place of ``setup_worker.py`` or of Python."""
    if arguments[0] == _SERVE:
        _serve(socket.socket(fileno=int(arguments[1])))
        return
    if arguments[0] != _ASK:
        arguments = _set_up(arguments)
    _, address, *command = arguments
    status = _fork_elsewhere(bytes.fromhex(address), command)
    if status is None:
        os.execv(sys.executable, [sys.executable, *command])
    if status < 0:  # a signal ended the worker
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _set_up(arguments: Sequence[str]) -> list[str]:
    """Take the environment of a worker, and return the arguments of its client.

    Ray's script takes the place of this process if the runtime environment asks for more, such as another Python.
    """
    context: dict[str, Any] = {"py_executable": ""}
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT))
    variables = context.pop("env_vars", {})
    executable = shlex.split(context.pop("py_executable"))
    refers = any("$" in value for value in variables.values())  # to other variables
    if executable[:-1] != _CLIENT or refers or any(context.values()):
        package = importlib.util.find_spec("ray")
        assert package is not None and package.origin is not None
        script = Path(package.origin).parent / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(script), *arguments])
    os.environ.update(variables)
    return [*executable[-2:], *(each for each in arguments if not each.startswith((_CONTEXT, _LANGUAGE)))]


def _fork_elsewhere(address: bytes, command: list[str]) -> int | None:
    """Let the server fork a worker, and wait for its end; return its status, or None if there is no fork."""
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(address)
            socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
            is_forked = connection.recv(1) != b""
        except OSError:
            return None
        return int(connection.recv(16) or -signal.SIGKILL) if is_forked else None


def _serve(listener: socket.socket) -> None:
    initial = set(os.environ)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # it has two descriptors per worker
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this module; a worker gets the folder of default_worker.py
    _import(_PRELOADED)
    _become_worker(_Server(listener).run(), initial)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if not (child := os.fork()):  # OpenBLAS ends its threads before a fork, and starts them when it needs them
        os._exit(0)
    os.waitpid(child, 0)
    gc.collect()
    gc.freeze()  # else the collector writes to each object, and the fork copies its page


class _Request(NamedTuple):
    command: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    client: int

    @property
    def settings(self) -> dict[str, str]:
        """Variables that modules read while they are imported."""
        return {n: value for n, value in self.environment.items() if n == "PYTHONPATH" or n.startswith("RAY_")}


class _Server:
    """Forks a worker per connection; the connection ends with the worker, and the worker with its client."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._settings: dict[str, str] = {}
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        """Process and client by the process's descriptor."""
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def run(self) -> _Request:
        """Serve until the driver ends; return in each worker, with its request."""
        while True:
            ready = self._selector.select()
            if any(key.fileobj is sys.stdin for key, _ in ready):
                sys.exit()
            for key, _ in ready:
                # a worker and its client may end at the same time, and the next client get a descriptor of theirs
                is_open = self._selector.get_map().get(key.fd) == key
                request: _Request | None = key.data() if is_open else None
                if request:
                    return request

    def _accept(self) -> _Request | None:
        """Fork the worker of the next client; return its request in the worker."""
        client, _ = self._listener.accept()
        process_id, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        data, descriptors = b"", list[int]()
        if user == os.getuid():  # anyone on this machine may connect to a name outside of the file system
            data, descriptors, *_ = socket.recv_fds(client, _MAX_REQUEST_BYTES, 3)
        if not data:
            client.close()
            return None
        request = _Request(**json.loads(data), descriptors=descriptors, client=process_id)
        if not self._is_ready(request) or _num_threads() > 1:
            _close(client, *descriptors)
            return None
        if not (process := os.fork()):
            _close(client, self._listener, self._selector, *(client for _, client in self._workers.values()))
            _close(*self._workers)
            return request
        _close(*descriptors)
        worker = os.pidfd_open(process)
        self._workers[worker] = process, client
        self._selector.register(worker, selectors.EVENT_READ, functools.partial(self._bury, worker))
        self._selector.register(client, selectors.EVENT_READ, functools.partial(self._kill, worker))
        with suppress(OSError):  # the client was killed meanwhile: the next event kills its worker
            client.send(b"1")
        return None

    def _is_ready(self, request: _Request) -> bool:
        """Import what imports Ray, which then reads its settings; return whether they are the request's."""
        if not self._settings and request.settings.get("PYTHONPATH") == os.environ["PYTHONPATH"]:
            self._settings = request.settings
            os.environ.update(self._settings)
            _import(_PRELOADED_WITH_RAY)
        return request.settings == self._settings

    def _kill(self, worker: int) -> None:
        """Kill the worker of a client that was killed."""
        self._selector.unregister(self._workers[worker][1])
        signal.pidfd_send_signal(worker, signal.SIGKILL)

    def _bury(self, worker: int) -> None:
        """Tell the client with which status its worker has ended."""
        process, client = self._workers.pop(worker)
        self._selector.unregister(worker)
        with suppress(KeyError):  # killed
            self._selector.unregister(client)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(OSError):
            client.send(str(status).encode())
        _close(client, worker)


def _num_threads() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name not in _FORK_AWARE_THREADS for name in names)


def _close(*opened: Any) -> None:
    for each in opened:
        os.close(each) if isinstance(each, int) else each.close()


def _take_limits(client: int) -> None:
    """Take the client's limit of open files, and exchange scores of the kernel's out-of-memory killer with it.

    The raylet gives its workers the highest score. A client keeps none: its end would free nothing but end the worker.
    """
    with suppress(OSError):  # the client was killed: so is this process
        resource.setrlimit(resource.RLIMIT_NOFILE, resource.prlimit(client, resource.RLIMIT_NOFILE))
        own, other = (Path("/proc", str(process), "oom_score_adj") for process in (os.getpid(), client))
        scores = other.read_bytes(), own.read_bytes()
        own.write_bytes(scores[0])
        other.write_bytes(scores[1])  # only root may: it is lower


def _become_worker(request: _Request, initial: set[str]) -> None:
    """Run the command of a worker, without those ``initial`` variables of the server that the worker has not."""
    for name in initial - set(request.environment):
        del os.environ[name]
    os.environ.update(request.environment)
    os.setsid()
    _take_limits(request.client)
    for target, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, target)
    _close(*request.descriptors)
    os.chdir(request.folder)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as a new process does; ``random`` seeds itself
    sys.argv = request.command
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
