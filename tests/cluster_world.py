"""The nodes of a Ray cluster on this machine, as tests watch and kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

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
