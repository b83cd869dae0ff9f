"""How long a person waits: for the first token of a command, for a fleet that grows, and for a submitted job."""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measurement import log
from benchmarks.scale.clusters import free_port, wait_for_head
from benchmarks.scale.driver import NoPassages, Sleeper, sleeping_runners
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.types import Completion, OnText, Sampling
from ragr1_actors.lab.simulation.workload import made_up_task
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup

SMALL = ["sft.num_demonstrations=8", "sft.num_steps=1", "training.num_iterations=1", "evaluation.num_tasks=1"]
"""What the quickstart needs to reach its first iteration."""
_POLL_S = 0.01
_LOADED = re.compile(r"actors loaded in ([\d.]+) s")
_LIBRARIES = ["-c", "import torch, ragr1_actors.core.models.huggingface"]
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


class FirstToken(TransformersEngine):
    """The transformers engine; the first token of each process is noted: its time is the content of ``file``."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        self._file = Path(str(settings.options["file"]))
        super().__init__(policy_dir, tokenizer, replace(settings, options={}))

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        def note(text: str) -> None:
            if not self._file.exists():
                self._file.write_text(str(time.time()))
            if on_text is not None:
                on_text(text)

        return await super().generate(prompt_token_ids, sampling, request_id=request_id, on_text=note)


class LoadedSleeper(Sleeper):
    """Loads the transformers engine, and then sleeps instead of using it."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        super().__init__(policy_dir, tokenizer, settings)
        TransformersEngine(policy_dir, tokenizer, EngineArguments(settings.max_rows, settings.max_context_tokens))


def load(policy_dir: str) -> None:
    """Load the engine as a runner does."""
    LoadedSleeper(policy_dir, PolicyTokenizer(policy_dir), EngineArguments(1, 512, options={"seconds": 0.0}))


def libraries_s() -> float:
    """Return the seconds in which a process imports torch and transformers' model classes, and ends."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *_LIBRARIES], check=True)
    return time.perf_counter() - started


def ask(run_dir: Path) -> float:
    """Return the seconds from ``ragr1 ask`` to the first token on standard output."""
    command = [sys.executable, "-m", "ragr1_actors", "ask", str(run_dir), "Where was Ana Bell born?"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise UserError(f"{' '.join(command)} ended with status {process.returncode}")
    return seconds


def train(folder: Path) -> dict[str, float]:
    """Return the seconds from ``ragr1 train quickstart`` to what it shows on its way to the first token.

    ``command`` is its first line, ``actors`` the table of actors, ``loaded`` the end of their loading.
    """
    note = folder / "first_token"
    engine = ["env_runners.engine=benchmarks.scale.latency:FirstToken", f"env_runners.engine_options={{file: {note}}}"]
    command = [sys.executable, "-m", "ragr1_actors", "train", "quickstart", *SMALL, *engine]
    marks = {"actors": "actors  ", "loaded": "actors loaded in"}
    started, found = time.time(), dict[str, float]()
    command += ["--run-dir", str(folder / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.setdefault("command", time.time() - started)
            found |= {name: time.time() - started for name, mark in marks.items() if line.startswith(mark)}
    if process.returncode or not note.exists():
        raise UserError(f"{' '.join(command)} ended with status {process.returncode} and sampled nothing that is noted")
    return found | {"token": float(note.read_text()) - started}


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
