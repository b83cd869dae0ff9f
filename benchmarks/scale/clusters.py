"""Ray clusters on this machine whose autoscaler starts and ends nodes."""

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

from ragr1_actors.core.errors import UserError

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
        wait_for_head(head, log)
        yield environment
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        _end_processes_of(directory)
        head.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


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


def wait_for_head(head: subprocess.Popen[bytes], log: Path, timeout_s: float = 400.0) -> None:
    """Return once Ray says in ``log`` that the head has started.

    Raises:
        UserError: it ended, or takes longer than ``timeout_s``; the text has the log.
    """
    deadline = time.monotonic() + timeout_s
    while "Ray runtime started" not in log.read_text():
        if head.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"no Ray head started within {timeout_s:g} s: {log.read_text()}")
        time.sleep(0.1)


def _end_processes_of(directory: Path) -> None:
    """End what the cluster has left: the nodes that its autoscaler started know the cluster by its folder."""
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or ())]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
