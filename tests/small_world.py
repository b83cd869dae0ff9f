"""A world of eight sentences, and runs in it: in this process and by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import UserError
from ragr1_actors.runs.telemetry.metrics import INCIDENTS, TIME_PREFIX
from ragr1_actors.training.algorithm_config import AlgorithmConfig

ROOT = Path(__file__).resolve().parent.parent
THINGS = ["lamp", "coin", "shoe", "book", "ring", "cup", "key", "fork"]
PLACES = ["Riga", "Oslo", "Bonn", "Lyon"]
SHORT = {"num_steps": 14, "num_demonstrations": 64}


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics without wall times, incidents and the fleets' load; two runs with one seed agree in them."""
    changing = (TIME_PREFIX, "env_runners/", "retrieval/", "scaling/", INCIDENTS)
    return {name: value for name, value in metrics.items() if not name.startswith(changing)}


def make_files(directory: Path) -> Path:
    """Write a corpus about eight things, an index over it, and a question per thing to train and one to evaluate."""
    from retrieval.build import build_index
    from retrieval.corpora.readers import read_passages

    places = {thing: PLACES[index % 4] for index, thing in enumerate(THINGS)}
    corpus = [{"id": t, "title": t, "text": f"The {t} lies in {p}."} for t, p in places.items()]
    (directory / "corpus.json").write_text(json.dumps(corpus))
    for name, question in {"tasks": "Where is the {} ?", "eval_tasks": "Where does the {} lie ?"}.items():
        tasks = [{"id": t, "question": question.format(t), "answer": p} for t, p in places.items()]
        (directory / f"{name}.json").write_text(json.dumps(tasks))
    build_index(read_passages(directory / "corpus.json"), directory / "index", progress=False)
    return directory


def make_config(files: Path, sft: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """Everything in the driver."""
    sft = sft or {}
    return (
        AlgorithmConfig()
        .environment(
            tasks=str(files / "tasks.json"),
            eval_tasks=str(files / "eval_tasks.json"),
            prompt="{question}",
            max_turns=2,
            options={"top_k": 1},
        )
        .policy(options={"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 400})
        .env_runners(num_env_runners=0, max_context_tokens=160, max_new_tokens_per_turn=12)
        .retrieval(index=str(files / "index"), num_retrievers=0)
        .sft(
            **{
                "num_steps": 150,
                "batch_size": 16,
                "num_demonstrations": 256,
                "lr": 6e-3,
                "warmup_steps": 3,
                "demonstrations": "mixture",
                **sft,
            }
        )
        .training(**{"train_batch_size": 8, "group_size": 8, "lr": 1e-3, "num_iterations": 4, **training})
        .learners(num_learners=0, zero_stage=0, micro_batch_tokens=4096)
        .evaluation(num_tasks=8)
        .debugging(seed=0, num_threads=1, fault_tolerance={"hang_timeout_s": 300})
        .freeze()
    )


def make_recipe(path: Path, files: Path, **training: Any) -> Path:
    """Write a recipe with one actor of each sort, two steps of SFT and a held-out task."""
    config = make_config(files, SHORT | {"num_steps": 2}, **training).model_dump()
    config["environment"]["eval_tasks"] = ""
    config["env_runners"]["num_env_runners"] = config["retrieval"]["num_retrievers"] = 1
    config["learners"]["num_learners"] = 1
    config["retrieval"]["num_cpus_per_retriever"] = config["learners"]["num_cpus_per_learner"] = 0  # on two cores
    path.write_text(json.dumps(config))
    return path


def a_persons_environment() -> dict[str, str]:
    """Return this environment without the variables by which ``conftest.py`` silences libraries."""
    quiet = ("DS_ACCELERATOR",)
    return {name: value for name, value in os.environ.items() if name not in quiet} | {"PYTHONPATH": str(ROOT)}


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``ragr1 train`` in a separate process group with its output in pipes; end it with the context."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ragr1_actors", "train", *arguments],
        cwd=cwd,
        env=a_persons_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=300)


def wait_for(condition: Callable[[], bool], timeout_s: float, process: subprocess.Popen[str] | None = None) -> bool:
    """Return whether ``condition`` comes true in time, and before ``process`` ends."""
    deadline = time.monotonic() + timeout_s
    while not (is_true := condition()) and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    return is_true


def invoke(*arguments: str) -> str:
    """Run the command line in this process and return its output, or the message of its ``UserError``."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def descendants(root: int) -> set[int]:
    """Return the process ids below ``root``, Ray's among them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, frontier = set(), {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def session_folders(root: int) -> set[Path]:
    """Return the folders of Ray's files that the processes below ``root`` were told."""
    commands = []
    for pid in descendants(root):
        with suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    return {Path(name) for command in commands for name in re.findall(r"/tmp/ragr1-[\w-]+", command)}


def ended(pids: set[int]) -> bool:
    """Return whether none of the processes is there any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
