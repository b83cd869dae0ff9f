"""Hosts on one machine: namespaces with their own addresses, disks and processes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ROOT

SWITCH = ["unshare", "--map-root-user", "--net", "--mount"]
HOST = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]


@dataclass(frozen=True)
class Host:
    """One host: ``name`` is that of its cable."""

    address: str
    name: str
    _pid: int
    _switch: int
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, *command: str, cwd: Path = ROOT, **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host; it ends with the network."""
        enter = [*_enter(self._pid), f"--pid=/proc/{self._pid}/ns/pid_for_children"]
        self._started.append(subprocess.Popen([*enter, "env", "-C", str(cwd), *command], **options))
        return self._started[-1]

    def connect(self, is_connected: bool) -> None:
        """Plug the cable in, or pull it."""
        _run(self._switch, f"ip link set {self.name} {'up' if is_connected else 'down'}")


@contextmanager
def network(num_hosts: int, folders: Mapping[int, Path]) -> Iterator[list[Host]]:
    """Yield hosts with the addresses 10.77.0.1, 10.77.0.2, ... on one switch.

    Each has its own ``/tmp`` and ``/dev/shm``. It sees the project and this Python, and of ``folders`` that of its
    number.

    Raises:
        PermissionError: the system permits no such namespaces.
    """
    refused = subprocess.run([*SWITCH, *HOST, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        raise PermissionError(refused.stderr.strip())
    hosts: list[Host] = []
    with ExitStack() as processes:
        switch = processes.enter_context(_until_killed([*SWITCH, "sh", "-c", "echo ready; exec sleep infinity"]))
        _run(switch, "ip link add switch type bridge; ip link set switch up")
        for number in range(num_hosts):
            command = [*_enter(switch), *HOST, _setup(folders.get(number))]
            pid = processes.enter_context(_until_killed(command))
            hosts.append(Host(f"10.77.0.{number + 1}", f"cable{number}", pid, switch))
            _plug_in(hosts[-1], switch, pid)
        yield hosts
    for host in hosts:
        for process in host._started:
            process.wait()


def _setup(folder: Path | None) -> str:
    """Return the script of a host: what is kept below ``/tmp`` is opened first, and mounted from there."""
    paths = [Path(path) for path in (ROOT, sys.prefix, folder) if path]
    kept = [shlex.quote(str(path)) for path in paths if path.is_relative_to("/tmp")]
    lines = [f"exec {number}<{path}" for number, path in enumerate(kept, 3)]
    lines += ["mount -t tmpfs tmpfs /tmp", "mount -t tmpfs tmpfs /dev/shm"]
    for number, path in enumerate(kept, 3):
        lines.append(f"mkdir -p {path}; mount --no-canonicalize --bind /proc/self/fd/{number} {path}; exec {number}<&-")
    return "set -e\n" + "\n".join([*lines, "ip link set lo up", "echo ready", "exec sleep infinity"])


def _plug_in(host: Host, switch: int, pid: int) -> None:
    _run(switch, f"ip link add {host.name} type veth peer name port netns {pid}")
    _run(switch, f"ip link set {host.name} master switch; ip link set {host.name} up")
    _run(pid, f"ip address add {host.address}/24 dev port; ip link set port up")


@contextmanager
def _until_killed(command: list[str]) -> Iterator[int]:
    """Start a program that prints a line when it is ready, and yield its process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()  # the init of a host dies with it, and so does all that runs on the host
        process.communicate()


def _run(pid: int, script: str) -> None:
    subprocess.run([*_enter(pid), "sh", "-ec", script], check=True)


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--mount", "--preserve-credentials"]
