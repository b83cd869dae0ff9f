"""Training across hosts with their own addresses and disks, one of which is cut off for half a minute."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_world import Host, network
from small_world import ROOT, make_files, make_recipe, wait_for

from ragr1_actors.runs.report import read_report

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]

CUT_S = 30.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Three hosts; the first sees the test's folder."""
    try:
        with network(3, {0: tmp_path}) as found:
            yield found
    except PermissionError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


def test_a_host_that_is_cut_off_for_a_while_loses_no_task(hosts: list[Host], tmp_path: Path) -> None:
    """The learner is on the first host; each other has room for one env runner and one retriever."""
    first, second, third = hosts
    address = f"{first.address}:6379"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": address}

    def start(host: Host, name: str, *command: str) -> tuple[subprocess.Popen[Any], Path]:
        log = tmp_path / f"{name}.log"
        with log.open("wb") as output:
            options: dict[str, Any] = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT}
            return host.start(sys.executable, *command, **options), log

    def start_ray(name: str, hosts: list[Host], *options: str) -> None:
        common = ["--block", "--disable-usage-stats", "--object-store-memory=100000000", "--include-log-monitor=false"]
        command = ["-m", "ray.scripts.scripts", "start", *options, *common]
        started = [start(host, f"{name}-{host.name}", *command, f"--node-ip-address={host.address}") for host in hosts]
        for ray, log in started:
            assert wait_for(lambda log=log: "Ray runtime started" in log.read_text(), 400, ray), log.read_text()

    start_ray("head", [first], "--head", "--port=6379", "--num-cpus=1", "--include-dashboard=false")
    start_ray("node", [second, third], f"--address={address}", "--num-cpus=2")
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=40)
    run_dir = tmp_path / "run"
    options = ["env_runners.num_env_runners=2", "env_runners.num_cpus_per_env_runner=1.5"]
    options += ["retrieval.num_retrievers=2", "retrieval.num_cpus_per_retriever=0.5"]
    options += ["learners.num_cpus_per_learner=1", "debugging.fault_tolerance={hang_timeout_s: 20}"]
    run, log = start(first, "run", "-m", "ragr1_actors", "train", str(recipe), "--run-dir", str(run_dir), *options)
    metrics = run_dir / "metrics.jsonl"

    def iteration() -> int:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return max((line["iteration"] for line in lines if line["stage"] == "rl"), default=0)

    assert wait_for(lambda: iteration() >= 2, 600, run), log.read_text()
    third.connect(False)
    time.sleep(CUT_S)
    third.connect(True)
    assert wait_for(lambda: run.poll() is not None, 1500) and run.returncode == 0, log.read_text()
    for actors in ("env runners", "retrievers"):
        assert re.search(rf"{actors} +2 .* {second.address} \(\w+\), {third.address} ", log.read_text())
    tasks = read_report(run_dir).tasks
    assert (tasks.issued, tasks.lost, tasks.doubled) == (tasks.trained, 0, 0)
