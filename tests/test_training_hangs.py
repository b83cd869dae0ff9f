"""Whole runs of which one process is stopped: an actor, or one of Ray's own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_world import a_persons_environment, descendants, make_files, make_recipe, started, wait_for

from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]

NUM_ITERATIONS, BATCH = 6, 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def recipe(files: Path, directory: Path, hang_timeout_s: float) -> str:
    """Write a recipe of two runners and a long SFT."""
    path = make_recipe(directory / "recipe.yaml", files, num_iterations=NUM_ITERATIONS)
    config = json.loads(path.read_text())
    config["env_runners"]["num_env_runners"], config["sft"]["num_steps"] = 2, 60
    config["debugging"]["fault_tolerance"] = {"hang_timeout_s": hang_timeout_s}
    path.write_text(json.dumps(config))
    return str(path)


def num_rows(run_dir: Path, stage: str) -> int:
    path = run_dir / "metrics.jsonl"
    return sum(row["stage"] == stage for row in read_metrics(run_dir)) if path.exists() else 0


def processes(root: int, name: str) -> list[int]:
    """Return the processes below ``root`` whose program or title ends, or begins, with ``name``."""
    found = []
    for pid in sorted(descendants(root)):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
        except OSError:
            continue
        if title.startswith(name) or title.endswith(name):
            found.append(pid)
    return found


def check_books(run_dir: Path) -> None:
    tasks = read_report(run_dir).tasks
    assert (tasks.issued, tasks.trained) == (NUM_ITERATIONS * BATCH, NUM_ITERATIONS * BATCH)
    assert (tasks.failed, tasks.lost, tasks.doubled) == (0, 0, 0)


def last(run_dir: Path, name: str) -> Any:
    return [row[name] for row in read_metrics(run_dir) if name in row][-1]


def test_short_stops_restart_nothing(files: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(recipe(files, tmp_path, 300), "--run-dir", str(run_dir), cwd=tmp_path) as run:
        assert wait_for(lambda: num_rows(run_dir, "sft") > 0, 900, run), run.communicate()
        for name in ("gcs_server", "ray::EnvRunnerActor", "ray::LearnerWorker", "ray::RetrieverActor"):
            (stopped, *_) = processes(run.pid, name)
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(5)  # how long it is stopped is what is tested
            os.kill(stopped, signal.SIGCONT)
        output, errors = run.communicate(timeout=1200)
    assert run.returncode == 0, output + errors
    assert "hangs" not in output + errors
    restarts = ("env_runners/num_restarts", "loop/learner_restarts", "retrieval/retriever_restarts")
    assert [last(run_dir, metric) for metric in restarts] == [0, 0, 0]
    check_books(run_dir)


@contextmanager
def command(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command of ``ragr1`` with its output in one pipe, and end it with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ragr1_actors", *arguments],
        cwd=cwd,
        env=a_persons_environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=600)


def test_a_retriever_behind_a_server_is_replaced(files: Path, tmp_path: Path) -> None:
    with command("index", "serve", str(files / "index"), "--retrievers", "1", "--port", "0", cwd=tmp_path) as server:
        assert server.stdout is not None
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        (stopped,) = processes(server.pid, "ray::RetrieverActor")
        os.kill(stopped, signal.SIGSTOP)
        asked = json.dumps({"queries": ["Where does the lamp lie ?"], "topk": 1}).encode()

        def answers() -> bool:
            request = urllib.request.Request(f"{url}/retrieve", asked, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    return "lamp" in answer.read().decode()
            except urllib.error.HTTPError:  # no replica answers
                return False

        assert wait_for(answers, 600, server)
        assert processes(server.pid, "ray::RetrieverActor") != [stopped]
