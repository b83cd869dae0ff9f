"""Ray clusters of several nodes on this machine, and what is run on them: each in a process that ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider"


@contextmanager
def autoscaled_cluster(
    node_types: Mapping[str, Mapping[str, Any]], *, num_cpus: int = 1, idle_timeout_s: float = 60.0
) -> Iterator[dict[str, str]]:
    """Start a head whose autoscaler (v2) starts and ends nodes on this machine, up to eight.

    ``node_types`` are ``available_node_types`` of a cluster configuration, without ``node_config``. Yields the
    environment in which Ray finds the cluster: address and token.
    """
    directory = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    port = free_port()
    environment = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    config = directory / "autoscaler.json"
    config.write_text(json.dumps(_autoscaling_config(port, node_types, idle_timeout_s)))
    options = {
        "port": port,
        "temp-dir": directory,
        "autoscaling-config": config,
        "num-cpus": num_cpus,
        "include-dashboard": "false",
        "object-store-memory": 100_000_000,
        "dashboard-agent-listen-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    head_environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        **{name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": _head_node_id(),
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _head_node_id(),
    }
    log = directory / "head.log"
    with log.open("wb") as output:
        head = subprocess.Popen(command, env=head_environment, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for(lambda: "Ray runtime started" in log.read_text(), head, log)
        yield environment
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        _end_processes_of(directory)
        head.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


WATCH = """
import json, logging, ray, time
ray.init(logging_level=logging.ERROR, log_to_driver=False)
seen, changed_at = None, time.monotonic()
while time.monotonic() < changed_at + TIMEOUT_S:
    nodes = [[n["Labels"].get("role", ""), n["NodeManagerPort"]] for n in ray.nodes() if n["Alive"]]
    if nodes != seen:
        seen, changed_at = nodes, time.monotonic()
        print("NODES", json.dumps(sorted(nodes)), flush=True)
    time.sleep(0.1)
"""


class NodeWatch:
    """The nodes of a cluster, as they come and go."""

    def __init__(self, output: Iterator[str]) -> None:
        self._lines = (line.removeprefix("NODES ") for line in output if line.startswith("NODES "))
        self._nodes: list[tuple[str, int]] = []  # (role, port of the raylet), the oldest first

    def wait_for(self, *roles: str) -> None:
        """Return once the cluster has the head and nodes with just these labels ``role``."""
        wanted, seen = sorted(roles), []
        while (seen := [*seen, sorted(role for role, _ in self._nodes if role)])[-1] != wanted:
            line = next(self._lines, None)
            assert line is not None, f"no change within the time limit; got {seen}, expected {wanted}"
            now = [(role, port) for role, port in json.loads(line)]
            self._nodes = [node for node in self._nodes if node in now] + [n for n in now if n not in self._nodes]

    def kill(self, role: str) -> None:
        """Kill the raylet of the oldest node with this role, as if its machine were gone; its workers end with it."""
        port = next(port for its_role, port in self._nodes if its_role == role)
        listeners = [c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == port]
        os.kill(listeners[0], signal.SIGKILL)


@contextmanager
def watch_nodes(environment: Mapping[str, str], timeout_s: float = 900.0) -> Iterator[NodeWatch]:
    """Watch the nodes of a cluster from another process, which ends ``timeout_s`` after their last change."""
    command = [sys.executable, "-c", WATCH.replace("TIMEOUT_S", str(timeout_s))]
    watch = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    try:
        yield NodeWatch(watch.stdout)
    finally:
        watch.kill()
        watch.communicate()


def _autoscaling_config(
    port: int, node_types: Mapping[str, Mapping[str, Any]], idle_timeout_s: float
) -> dict[str, Any]:
    types = {name: {"node_config": {}, "min_workers": 0, **node_type} for name, node_type in node_types.items()}
    types["ray.head.default"] = {"node_config": {}, "resources": {"CPU": 1}, "max_workers": 0}
    empty_lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
    empty_lists += ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands")
    return {
        "cluster_name": "fake",
        "max_workers": 8,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": idle_timeout_s / 60,
        "provider": {
            "type": "external",  # Ray's own type fake_multinode reads a file that the wheel lacks
            "module": f"{PROVIDER}.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": _head_node_id(),
        },
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "auth": {},
        "docker": {},
        "head_node": {},
        "worker_start_ray_commands": [],
        **{name: [] for name in empty_lists},
    }


def _head_node_id() -> str:
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    return FAKE_HEAD_NODE_ID


def free_port() -> int:
    """Return a port that nothing listens on now, below those that the system gives to connections.

    By ``secrets``: pytest-randomly seeds ``random`` alike in all test processes.
    """
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(found.getsockname()[1])


def _wait_for(holds: Any, head: subprocess.Popen[bytes], log: Path, timeout_s: float = 400.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert head.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _end_processes_of(directory: Path) -> None:
    """End what the cluster has left: the nodes that its autoscaler started know the cluster by its folder."""
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or ())]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
