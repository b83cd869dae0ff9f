"""A node that does not see the driver's disk: everything that its actors open comes by storage or object store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from small_world import ROOT, a_persons_environment, descendants, invoke, make_files, make_recipe, wait_for
from storage_world import KEY, SECRET, options, s3_server

from cluster.storage import Storage

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True)
class Cluster:
    """A head without CPUs, and a node on which every actor runs."""

    address: str
    directory: Path
    """``driver/`` in it is hidden from the node."""

    @property
    def node_cache(self) -> Path:
        return self.directory / "node"

    def train(self, recipe: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ragr1_actors", "train", str(recipe), *arguments],
            cwd=self.directory / "driver",
            env=a_persons_environment()
            | {"RAY_ADDRESS": self.address, "RAGR1_CACHE": str(self.directory / "driver" / "cache")}
            | environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    refused = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"mount namespaces are not permitted here: {refused.stderr.strip()}")
    directory = tmp_path_factory.mktemp("cluster")
    (directory / "driver").mkdir()
    temp_dir = tempfile.mkdtemp(prefix="rh", dir="/tmp")  # a socket's path may have 107 characters
    common = ["--block", "--disable-usage-stats", "--object-store-memory=200000000"]
    common += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["RAGR1_CACHE"] = str(directory / "node")
    environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    processes: list[subprocess.Popen[bytes]] = []
    ray = [str(Path(sys.executable).parent / "ray"), "start"]
    try:
        port_file = directory / "head.log"
        head = [*ray, "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={temp_dir}"]
        processes.append(_start([*head, *common], port_file, environment))
        address = _wait_for_text(port_file, r"--address='([\d.]+:\d+)'", processes[0])
        hide = f'mount -t tmpfs tmpfs {directory / "driver"} && exec "$@"'
        node = [*ray, f"--address={address}", "--num-cpus=4", *common]
        log = directory / "node.log"
        processes.append(_start(["unshare", "-rm", "bash", "-c", hide, "bash", *node], log, environment))
        _wait_for_text(log, "Ray runtime started", processes[1])
        yield Cluster(address, directory)
    finally:
        pids = {pid for process in processes for pid in {process.pid, *descendants(process.pid)}}
        for pid in pids:  # Ray's own end takes most of a minute, as its processes wait for one another
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait(30)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def _wait_for_text(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """Return what a pattern finds in a log: its first group, if it has one."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = re.findall(pattern, log.read_text())
        return bool(found) or process.poll() is not None

    assert wait_for(is_there, 400) and found, log.read_text()
    return found[0]


def make_run(cluster: Cluster, name: str, **learners: object) -> Path:
    """Write a recipe whose files are on the driver's disk, and whose actors each need a CPU or a part of one."""
    directory = cluster.directory / "driver" / name
    directory.mkdir()
    recipe = make_recipe(directory / "recipe.json", make_files(directory), num_iterations=3)
    config = json.loads(recipe.read_text())
    config["learners"] |= {"num_learners": 1, "num_cpus_per_learner": 0.5, **learners}
    config["retrieval"] |= {"num_cpus_per_retriever": 0.5}
    config["checkpointing"] |= {"interval": 2}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(config))
    return directory / "recipe.yaml"


def test_a_run_at_a_uri_needs_no_shared_disk(cluster: Cluster, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_run(cluster, "stored", lora={"rank": 4})
    uri = f"s3://bucket/hidden?{options(port)}"
    credentials = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    done = cluster.train(recipe, "--run-dir", uri, **credentials)
    assert done.returncode == 0, done.stdout + done.stderr
    storage = Storage(f"s3://{KEY}:{SECRET}@bucket/hidden?{options(port)}")
    tasks = json.loads(storage.read("report.json") or b"")["tasks"]
    assert tasks["issued"] == tasks["trained"] == 24 and tasks["lost"] == tasks["doubled"] == 0
    assert storage.find("checkpoints/step_3") is not None and storage.find("policy_sft") is not None
    fetched = {path.name for entry in cluster.node_cache.iterdir() if entry.name[0] != "." for path in entry.iterdir()}
    assert {"manifest.json", "corpus.arrow", "model.safetensors", "config.json"} <= fetched
    shown = done.stdout + done.stderr + (storage.read("config.yaml") or b"").decode()
    assert SECRET not in shown and KEY not in shown

    recipe.parent.rename(recipe.parent.with_name("gone"))  # as on another machine, without the index
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("RAGR1_CACHE", str(cluster.directory / "third"))
    assert "Where is the lamp ?" in invoke("ask", uri, "Where is the lamp ?")


def test_small_folders_reach_the_node_without_a_storage(cluster: Cluster) -> None:
    recipe = make_run(cluster, "local", num_learners=0)  # a learner in the driver: it has the run directory
    run_dir = recipe.parent / "run"
    done = cluster.train(recipe, "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    tasks = json.loads((run_dir / "report.json").read_text())["tasks"]
    assert tasks["issued"] == tasks["trained"] == 24 and tasks["lost"] == tasks["doubled"] == 0


def test_a_learner_that_does_not_see_the_run_directory_is_named(cluster: Cluster) -> None:
    recipe = make_run(cluster, "blind")
    done = cluster.train(recipe, "--run-dir", str(recipe.parent / "run"))
    assert done.returncode == 2
    assert "does not see the run directory" in done.stderr and "or on a storage such as s3://" in done.stderr
