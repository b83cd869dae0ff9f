"""How long a person waits on a cluster: for a fleet that grows, and for a job that is submitted."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import log
from benchmarks.scale.clusters import free_port, wait_for_head
from benchmarks.scale.driver import NoPassages, Sleeper, sleeping_runners
from ragr1_actors.core.errors import UserError
from ragr1_actors.lab.simulation.workload import made_up_task
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup

SMALL = ["sft.num_demonstrations=8", "sft.num_steps=1", "training.num_iterations=1", "evaluation.num_tasks=1"]
"""What the quickstart needs to reach its first iteration."""
_POLL_S = 0.01
_LOADED = re.compile(r"actors loaded in ([\d.]+) s")
_LOAD = "import sys; from benchmarks.scale.latency import load; load(sys.argv[1])"


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a person waited in seconds, and how much of it models were loading."""

    total_s: float
    loading_s: float

    @property
    def beyond_loading_s(self) -> float:
        """What this project and Ray add to the loading."""
        return self.total_s - self.loading_s


class LoadedSleeper(Sleeper):
    """Loads the transformers engine, and then sleeps instead of using it."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine

        super().__init__(policy_dir, tokenizer, settings)
        TransformersEngine(policy_dir, tokenizer, EngineArguments(settings.max_rows, settings.max_context_tokens))


def load(policy_dir: str) -> None:
    """Load the engine as a runner does."""
    LoadedSleeper(policy_dir, PolicyTokenizer(policy_dir), EngineArguments(1, 512, options={"seconds": 0.0}))


def scale_out(policy_dir: Path) -> Wait:
    """From the order for a second env runner to its first request; loading is that of a process without Ray."""
    from cluster.session.ray_session import ray_session

    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", _LOAD, str(policy_dir)], check=True)
    loading_s = time.perf_counter() - started
    os.environ.pop("RAY_ADDRESS", None)  # a private cluster, also where another one runs
    config = sleeping_runners(1, num_trajectories=1, seconds=0.01, engine="benchmarks.scale.latency:LoadedSleeper")
    with ray_session(num_cpus=2):
        fleet = EnvRunnerGroup(config, policy_dir, NoPassages())
        try:
            fleet.wait_until_ready()
            for number in range(100_000):  # there is always a request that waits
                task = made_up_task(number)
                fleet.loop.begin(fleet.sample(GroupRequest(task.task_id, task, 1, 1.0)))
            started = time.perf_counter()
            fleet.scale_to(2)
            while fleet.state().num_running < 2:  # the call that finds a runner ready gives it a request
                fleet.loop.run(asyncio.sleep(_POLL_S))
            return Wait(time.perf_counter() - started, loading_s)
        finally:
            fleet.stop()


def submission() -> Wait:
    """From ``ragr1 submit`` to the first iteration of training, on a cluster that is up; the run prints its loading."""
    with (
        tempfile.TemporaryDirectory(prefix="rs", dir="/tmp", ignore_cleanup_errors=True) as folder,
        _head(folder) as env,
    ):
        started = time.perf_counter()
        command = [sys.executable, "-m", "ragr1_actors", "submit", "quickstart", *SMALL, "--run-dir", f"{folder}/run"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            loading_s = 0.0
            for line in job.stdout:
                if found := _LOADED.search(line):
                    loading_s = float(found[1])
                if line.startswith("RL "):
                    seconds = time.perf_counter() - started
                    job.stdout.read()
                    return Wait(seconds, loading_s)
        raise UserError(f"the job ended with status {job.returncode} before its first iteration; see `ragr1 submit`")


@contextmanager
def _head(folder: str) -> Iterator[dict[str, str]]:
    """Start a head with a dashboard, and yield the environment in which it is found."""
    port, dashboard, client = free_port(), free_port(), free_port()
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"  # a job runs ``python``
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    command += [f"--temp-dir={folder}", "--num-cpus=8", "--object-store-memory=200000000"]
    command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    with Path(folder, "head.log").open("w+") as output:
        head = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            wait_for_head(head, Path(folder, "head.log"))
            log(f"a head at port {port}")
            yield env | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait()
