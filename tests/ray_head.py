"""A Ray head with a dashboard, as a cluster has one: its ports, its folder and its processes are this test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from small_world import descendants, ended, wait_for

from benchmarks.scale.clusters import free_port

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent


def clean_environment(**more: str) -> dict[str, str]:
    """Return an environment with this Python on the path, and without the project: it comes with the job."""
    dropped = ("PYTHONPATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "200"} | more


class Head(NamedTuple):
    """The addresses of a head: ``http://127.0.0.1:8265`` and ``127.0.0.1:6379``."""

    dashboard: str
    gcs: str


@contextmanager
def running_head(temp_dir: str) -> Iterator[Head]:
    """Start a head that asks for the token of ``conftest.py``.

    ``temp_dir`` has a short path, as a Unix socket's path may have 107 characters.
    """
    head, addresses = _start(temp_dir)
    try:
        yield addresses
    finally:
        started = descendants(head.pid)
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(60)
        for pid in {head.pid, *started}:
            if not ended({pid}):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        head.wait(60)


def _start(temp_dir: str) -> tuple[subprocess.Popen[str], Head]:
    """Start a head; again if its node was not up within the 30 s that Ray waits, as on a busy machine."""
    output = Path(temp_dir, "head.txt")
    while True:
        dashboard, gcs = free_port(), free_port()
        command = [BIN / "ray", "start", "--head", "--block", f"--port={gcs}", f"--temp-dir={temp_dir}"]
        command += [f"--dashboard-port={dashboard}", "--include-dashboard=true", "--dashboard-agent-listen-port=0"]
        command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--num-cpus=6", "--object-store-memory=200000000", "--disable-usage-stats"]
        with output.open("w") as written:
            head = subprocess.Popen(
                command, stdout=written, stderr=written, env=clean_environment(), cwd=temp_dir, start_new_session=True
            )
        if wait_for(lambda: "Ray runtime started" in output.read_text(), 300, head):
            return head, Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}")
        for process in psutil.process_iter(["cmdline"]):
            if temp_dir in " ".join(process.info["cmdline"] or ()):
                with suppress(psutil.Error):
                    process.kill()
        head.wait(60)
        assert "The current node timed out during startup" in output.read_text(), output.read_text()
