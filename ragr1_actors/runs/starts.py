"""``starts.jsonl``: one line per process that began or continued a run, with its machine and its versions."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ragr1_actors.core.disk.json_files import read_json_lines

STARTS_FILE = "starts.jsonl"
_PACKAGES = (
    "ragr1-actors",
    "torch",
    "ray",
    "vllm",
    "transformers",
    "deepspeed",
    "faiss-gpu",
    "faiss-cpu",
    "sentence-transformers",
    "numpy",
    "pyarrow",
)


@dataclass(frozen=True, slots=True)
class Start:
    """Process that trained: ``Start(1790000000.0, "node-7", "Linux-6.8 x86_64", 16, "3.11.7", {"torch": "2.13.0"})``.

    The machine is the driver's; runners, retrievers and learners may be on others.
    """

    time_s: float
    """Unix time."""
    host: str
    system: str
    num_cpus: int
    python: str
    versions: dict[str, str]
    """Versions of the installed packages, by name."""
    words: tuple[str, ...] = ()
    """Recipe and overrides that began the run, as given; empty if the run began earlier, or without them."""


def this_start(words: Sequence[str] = ()) -> Start:
    """Return a description of this process and its machine; ``words`` are the recipe and overrides of the run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # such as vllm, which a run may not need
            continue
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    machine = (socket.gethostname(), system, os.cpu_count() or 1, platform.python_version())
    return Start(time.time(), *machine, versions, tuple(words))


def append_start(run_dir: Path, start: Start) -> None:
    """Append a line to ``starts.jsonl``."""
    with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def read_starts(run_dir: Path) -> tuple[Start, ...]:
    """Return the starts of a run, without a line that a crash cut off; empty if the run has no such file.

    Raises:
        DataError: a line is damaged.
    """
    path = run_dir / STARTS_FILE
    return tuple(read_json_lines(Start, path, "delete the file")) if path.is_file() else ()
