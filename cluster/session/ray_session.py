"""Ray session of a run: a cluster that it joins, or a local one that it starts and ends."""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a C extension
from ray.exceptions import AuthenticationError, RayError, RpcError

from cluster.session import leftovers, watcher, worker_forks
from ragr1_actors.core.errors import FleetError, UserError, one_line
from ragr1_actors.core.process.interrupts import SIGNALS, TerminationError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
_ATTEMPTS = 2
_NODE_LOOK_S = 5.0
_LEAST_FILES = 128
_LOST_NODE = (
    "Ray's head has lost the node of this process, because its raylet does not answer any more: it was stopped, or the "
    "machine is overloaded; give the same command again, a training run with --resume"
)
_SYSTEM_CONFIG = {
    "timeout_ms_task_wait_for_death_info": 0,
    "worker_niceness": 0,
    "worker_register_timeout_seconds": 300,
}
"""Settings of Ray. A call to a killed actor fails at once; by default it waits 1 to 2 s for the cause of death, which
is not reported if the actor restarts.

Actors get the share of a core that any process gets. By default Ray runs them at niceness 15: beside one busy process
per core they get a thirtieth of it, and an actor that works looks like one that hangs.

The first workers wait for the imports of ``worker_forks``, which take a busy machine longer than Ray's 60 s.
"""


@contextmanager
def ray_session(num_cpus: float = 0.0, *, forks_workers: bool = False) -> Iterator[None]:
    """Connect to Ray in this context; ``placement.wait_for_room`` checks that the actors have room there.

    Under ``ray job submit``, or with ``RAY_ADDRESS`` set, it joins that cluster. Otherwise it starts a local cluster,
    and ends its processes; it does not join another one that runs on the machine. If Ray is connected already, it does
    nothing.

    Args:
        num_cpus: a local session declares at least this many CPUs, more than the machine has if necessary: actors may
            share a core.
        forks_workers: whether workers of a local session are forks of a process that has imported torch, transformers
            and the modules of the fleets: ``worker_forks``.

    Raises:
        UserError: the cluster does not answer, refuses the token or has other versions; or Ray cannot start a local
            session with the Python of this process, or with its limit of open files.
        FleetError: the local session did not start.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    with nullcontext("") if address else _session_folder() as folder:
        with _own_handlers():
            _connect(address, num_cpus, folder, forks_workers)
        try:
            with _ended_with_its_node():
                yield
        finally:
            ray.shutdown(wait_for_processes=True)  # they write into the folder


@contextmanager
def _ended_with_its_node() -> Iterator[None]:
    """End this process with one sentence if Ray's head declares its node lost, which takes it about a minute.

    A call of Ray to a stopped raylet never returns, and no signal ends it.
    """
    node_id, has_ended = ray.get_runtime_context().get_node_id(), threading.Event()

    def look() -> None:
        while not has_ended.wait(_NODE_LOOK_S):
            with suppress(RayError):  # the head does not answer: nothing can be said
                lost = any(node["NodeID"] == node_id and not node["Alive"] for node in ray.nodes())
                if lost and not has_ended.is_set():
                    print(f"\nfailed: {_LOST_NODE}", file=sys.stderr, flush=True)
                    os._exit(1)

    thread = threading.Thread(target=look, name="own node", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(_NODE_LOOK_S)


@contextmanager
def _session_folder() -> Iterator[str]:
    """Make a folder for the files of a local session; its end removes it with the rest of the session.

    The process holds a lock on it. A folder without a lock belongs to a killed process, and is removed, too.
    """
    for _ in leftovers.remove_leftovers():
        pass
    folder, descriptor = leftovers.make_folder(leftovers.PREFIX, leftovers.TEMP)
    try:
        with leftovers.watched(folder, descriptor):
            yield str(folder)
    finally:
        os.close(descriptor)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep this process's handlers of signals, which ``ray.init`` replaces; its own raises ``SystemExit``."""
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set them, Ray included
    before = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
    try:
        yield
    except SystemExit as error:
        raise TerminationError from error
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def _connect(address: str | None, num_cpus: float, folder: str, forks_workers: bool) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address:
            _check_head(address)
            ray.init(address=address, **common)
        else:
            _check_process()
            _give_token()
            python_path = worker_forks.python_path()
            runtime_env: dict[str, Any] = {"env_vars": {"PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"}}
            if forks_workers:
                runtime_env |= worker_forks.runtime_env(python_path)
            common |= {"num_cpus": max(os.cpu_count() or 1, math.ceil(num_cpus)), "runtime_env": runtime_env}
            _start(Path(folder), **common)
    except AuthenticationError as error:
        raise UserError(
            f"the cluster at {address} asks for a token, or refuses this one; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to a file with it"
        ) from error
    except ConnectionError as error:
        raise UserError(
            f"no Ray cluster answers at {address or 'this machine'}: {one_line(error)}; check RAY_ADDRESS and the "
            "network"
        ) from error
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise UserError(f"{one_line(error)}; run with the versions of the cluster at {address}") from error


def _start(folder: Path, **options: Any) -> None:
    """Start a local cluster; try twice, since Ray gives its processes 30 s, and a busy machine takes longer."""
    for attempt in range(_ATTEMPTS):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                _system_config=_SYSTEM_CONFIG,
                _temp_dir=str(folder),
                **options,
            )
            return
        except Exception as error:  # Ray raises a plain Exception if a process that it starts fails
            if type(error) is not Exception:
                raise
            watcher.kill_processes(folder, spared=os.getpid())
            if attempt == _ATTEMPTS - 1:
                raise FleetError(
                    f"Ray did not start: {one_line(error)}; try again when this machine is less busy"
                ) from error
            logger.warning("Ray did not start, trying once more: %s", one_line(error))


def _check_head(address: str) -> None:
    """Raise ``ConnectionError`` or ``AuthenticationError`` if ``ray.init`` would try for 20 s and give no reason."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():  # "auto", ray://...: ray.init finds the head
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        GcsClient(address=address)
    except OSError as error:
        raise ConnectionError(str(error)) from error
    except RpcError as error:
        raise ConnectionError(f"what listens there is no Ray head: {error}") from error


def _check_process() -> None:
    """Refuse a process with which Ray would wait for its own processes without end.

    Its shell splits the path of Python at blanks. Its raylet opens 56 files, and three per actor.
    """
    if not re.fullmatch(r"[\w/.,:=@%+~-]+", sys.executable):  # shlex.quote quotes other alphabets too
        raise UserError(
            f"got a Python at {sys.executable}, expected a path without blanks, quotes and brackets, as Ray cannot "
            "start its workers with this one; make the environment in another folder"
        )
    if 0 <= (most := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < _LEAST_FILES:
        raise UserError(
            f"got a limit of {most} open files, expected at least {_LEAST_FILES}, without which Ray's processes do not "
            "answer; start it from a shell whose ulimit -Hn is higher"
        )


def _give_token() -> None:
    """Give a local session a token that is in the environment of its processes only.

    Without one, Ray writes a token to ``~/.ray/auth_token``. A head that is started later with ``ray start --head``
    would ask for that token, and ``ray job submit`` would not send it. This process keeps the token after the session:
    Ray reads it once per process.
    """
    names = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not names & set(os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
