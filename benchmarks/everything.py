"""``ragr1 bench all``: runs each benchmark in a separate process, and logs the seconds that it takes.

The benchmark ``rollout`` needs vLLM: it runs in ``.venv-vllm`` of the checkout if this environment has no vLLM. The
benchmark ``trl`` starts TRL in ``.venv-trl``; ``gpu`` runs where there is a GPU. ``real`` trains for hours and is left
out. A benchmark that fails is named at the end; the others go on.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.measurement import Measurement, choose, log, this_machine
from ragr1_actors.core.errors import UserError

NAMES = ("learner", "retrieval", "rollout", "scale", "view", "growth", "crowd", "trl", "gpu")
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def describe() -> str:
    """The workload, in one line."""
    return f"all: {', '.join(_names())}"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric, or a benchmark failed; what the others found was yielded before.
    """
    wanted = {name: metrics_of(name) for name in _names()}
    if only is not None:
        choose(only, [metric for metrics in wanted.values() for metric in metrics])
        wanted = {name: (only,) for name, metrics in wanted.items() if only in metrics}
    options = [*(["--repeats", str(repeats)] if repeats else []), *(["--quick"] if quick else [])]
    failed = []
    for name in wanted:
        started = time.monotonic()
        status = yield from _measured(name, [*options, *(["--only", only] if only else [])])
        log(f"{name}: {time.monotonic() - started:.0f} s")
        failed += [f"{name} (exit status {status})"] if status else []
    if failed:
        raise UserError(f"these benchmarks failed: {', '.join(failed)}; what they said is above")


def metrics_of(name: str) -> Sequence[str]:
    """Return the metrics of a benchmark."""
    found: Sequence[str] = importlib.import_module(BENCHMARKS[name]).METRICS
    return found


def _names() -> list[str]:
    return [name for name in NAMES if name != "gpu" or this_machine().gpu]


def _measured(name: str, options: Sequence[str]) -> Generator[Measurement, None, int]:
    """Yield the rows of a benchmark that runs in a process, and return its exit status."""
    python = python_of(name)
    if not python.exists():
        log(f"{name} needs vLLM: make {VLLM_PYTHON.parts[0]}/.installed")
        return 1
    command = [str(python), "-m", "ragr1_actors", "bench", name, "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield Measurement.from_json(line)
                else:  # a library's word
                    log(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    return process.returncode


def python_of(name: str) -> Path:
    """Return the Python with the packages that a benchmark needs."""
    return VLLM_PYTHON if name == "rollout" and find_spec("vllm") is None else Path(sys.executable)
