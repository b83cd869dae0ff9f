"""``ragr1 bench view``: seconds of the viewer's slowest filter, until its page is ready, and of a report, over goals.

The server runs in a separate process, as ``ragr1 view`` starts it, over a made-up run; every time is of a request.
A side of a ratio is the goal itself, so a ratio of at most 1 meets it. ``writing`` is the share of an iteration that
writing adds: ``ours`` are seconds per iteration with it, and ``theirs`` without.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import yaml

from benchmarks.measurement import Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from benchmarks.view import writing
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import Record, StopReason, Task, ToolCall, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.pages.report.page import AGREEMENT, LEARNING, LOADS, SEARCH, THROUGHPUT
from ragr1_actors.pages.viewer.payloads import OUTCOMES
from ragr1_actors.runs.telemetry.events import Incident
from ragr1_actors.runs.telemetry.metrics import MetricsLogger

FILTER_S, READY_S, REPORT_S = 0.3, 2.0, 10.0
NUM_ITERATIONS, NUM_ITERATIONS_QUICK = 400, 4
GROUPS, SIBLINGS = 100, 5
"""Per iteration; 400 iterations have 200,000 trajectories."""
REPORTED, REPORTED_QUICK = 1000, 10
"""Iterations of the run that is reported."""
WORDS_PER_TURN, NUM_TURNS, WORDS_PER_PASSAGE, NUM_PASSAGES = 60, 3, 40, 3
GOALS = {
    "filter": Goal(1.0, at_least=False),
    "ready": Goal(1.0, at_least=False),
    "first_ready": Goal(1.0, at_least=False),
    "report": Goal(1.0, at_least=False),
    "writing": Goal(0.01, at_least=False),
}
METRICS = tuple(GOALS)


def describe() -> str:
    """The workload, in one line."""
    return "view: the slowest filter of 200,000 trajectories of three turns in 400 files; the page of 1,000 iterations"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    if "report" in wanted:
        yield measure("report", _report(REPORTED_QUICK if quick else REPORTED, times), "s", GOALS["report"])
    if wanted & {"filter", "ready", "first_ready"}:
        yield from _viewer(wanted, times, quick)
    if "writing" in wanted:
        with tempfile.TemporaryDirectory(prefix="ragr1-writing-") as folder:
            yield measure("writing", writing.cost(Path(folder), times, quick=quick), "s", GOALS["writing"])


def _viewer(wanted: set[str], repeats: Repeats, quick: bool) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory(prefix="ragr1-view-") as folder:
        words = make_run(Path(folder), NUM_ITERATIONS_QUICK if quick else NUM_ITERATIONS)
        with served(Path(folder)) as (url, started):  # the index is made now
            first = quotient(_ready(url, started), READY_S)
            begun = time.monotonic()
            while (state := _get(url, "api/run"))["num_indexed"] < state["num_files"]:
                time.sleep(0.2)
            log(f"index of {state['num_trajectories']:,} trajectories made in {time.monotonic() - begun:.1f} s more")
            if "filter" in wanted:
                yield measure("filter", _slowest(url, words, repeats), "s", GOALS["filter"])
        if "ready" in wanted:
            yield measure("ready", [_start(Path(folder)) for _ in repeats], "s", GOALS["ready"])
        if "first_ready" in wanted:
            yield measure("first_ready", [first], "s", GOALS["first_ready"])


def _report(num_iterations: int, repeats: Repeats) -> list[Sample]:
    """Time ``ragr1 report --html``, from the command to the file."""
    rng = random.Random(0)
    charts = (*LEARNING, *SEARCH, *THROUGHPUT, *AGREEMENT, *LOADS)
    names = [metric for chart in charts for metric in chart.curves.values()]
    names += [f"other/metric_{number}" for number in range(60)]
    with tempfile.TemporaryDirectory(prefix="ragr1-report-") as folder:
        run_dir = Path(folder)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(RunConfig().model_dump(mode="json")), "utf-8")
        with closing(MetricsLogger(run_dir)) as logger:
            for iteration in range(1, num_iterations + 1):
                failed = [Incident(1.79e9 + iteration, f"env runner {iteration % 8} died; it is started again")]
                logger.log("rl", iteration, {name: rng.random() for name in names}, (), failed)
        return [quotient(_seconds_of_report(run_dir), REPORT_S) for _ in repeats]


def _seconds_of_report(run_dir: Path) -> float:
    started = time.monotonic()
    command = [sys.executable, "-m", "ragr1_actors", "report", str(run_dir), "--html"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def make_run(run_dir: Path, num_iterations: int) -> list[str]:
    """Write a run, and return the words of its texts."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(20_000)]
    (run_dir / "trajectories").mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(RunConfig().model_dump(mode="json")), "utf-8")
    passages = [" ".join(rng.choices(words, k=WORDS_PER_PASSAGE)) for _ in range(2_000)]
    for iteration in range(num_iterations):
        if iteration % 50 == 0:
            log(f"writes trajectories of iteration {iteration} of {num_iterations}")
        groups = [_group(rng, words, passages, f"t/{rng.randrange(5_000)}") for _ in range(GROUPS)]
        batches = [groups_to_record_batch([group]) for group in groups]  # as a run has them
        write_trajectories(run_dir / "trajectories" / f"iteration_{iteration:05d}.arrow", batches)
    return words


def _group(rng: random.Random, words: list[str], passages: list[str], task_id: str) -> TrajectoryGroup:
    task = Task(task_id, " ".join(rng.choices(words, k=12)), ("Riga",), "", (f"p{rng.randrange(4)}",))
    return TrajectoryGroup(task, tuple(_attempt(rng, words, passages, task, index) for index in range(SIBLINGS)))


def _attempt(rng: random.Random, words: list[str], passages: list[str], task: Task, index: int) -> Trajectory:
    turns = []
    for turn in range(NUM_TURNS):
        texts = rng.choices(passages, k=NUM_PASSAGES)
        ids = [f"p{rng.randrange(8)}" for _ in texts]
        records = tuple(Record(i, i, text, 0.5) for i, text in zip(ids, texts, strict=True))
        found = ToolCall("search", {"query": "a query", "k": NUM_PASSAGES}, records=records, latency_s=0.1)
        searched = turn < NUM_TURNS - 1 and rng.random() < 0.8
        action = "malformed" if rng.random() < 0.03 else "search" if searched else "answer"
        calls = (found,) if searched else ()
        turns.append(Turn(" ".join(rng.choices(words, k=WORDS_PER_TURN)), 80, action, calls))
    tokens = np.arange(240, dtype=np.int32)
    answer, stop = rng.choice(["Riga", "Oslo"]), rng.choices(list(StopReason), [90, 4, 3, 1, 1, 1])[0]
    kinds, versions = (tokens % 2).astype(np.uint8), np.zeros(240, np.int32)
    name = f"{task.task_id}#0/{index}"
    logprobs = -(tokens % 7).astype(np.float32)
    return Trajectory(
        name, task, tokens, kinds, logprobs, versions, tuple(turns), stop, float(answer == "Riga"), answer
    )


@contextmanager
def served(run_dir: Path) -> Iterator[tuple[str, float]]:
    """Start ``ragr1 view``; yields its address and the time at which it was started."""
    started = time.monotonic()
    command = [sys.executable, "-m", "ragr1_actors", "view", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1], started
    finally:
        process.terminate()
        process.wait()


def _start(run_dir: Path) -> Sample:
    with served(run_dir) as (url, started):
        return quotient(_ready(url, started), READY_S)


def _ready(url: str, started: float) -> float:
    """Return the seconds from the command until the page has its first rows."""
    for path in ("", "view.js", "view.css"):
        with urllib.request.urlopen(f"{url}/{path}") as answer:
            answer.read()
    while not _get(url, "api/trajectories")["rows"]:
        time.sleep(0.02)
    return time.monotonic() - started


def _slowest(url: str, words: list[str], repeats: Repeats) -> list[Sample]:
    rng, found = random.Random(1), []
    for _ in repeats:
        # other words each time: the server remembers the rows of a scope
        one, two = rng.sample(words, 2)
        filters = [{"outcome": outcome, "first": str(rng.randrange(3))} for outcome in OUTCOMES]
        filters += [{"text": one}, {"text": f"{one} {two}", "order": "reward"}, {"text": f'"{two} {one}"'}]
        filters += [{"text": "zzqqxxjj" + one}, {"text": one[:2]}, {"task": f"t/{rng.randrange(5_000)}"}]
        filters += [{"stage": "training", "order": order} for order in ("newest", "reward", "length")]
        times = {json.dumps(given): _seconds(url, given) for given in filters}
        slowest = max(times, key=times.__getitem__)
        log(f"slowest filter {slowest}: {times[slowest] * 1000:.0f} ms of {len(times)}")
        found.append(quotient(times[slowest], FILTER_S))
    return found


def _seconds(url: str, given: dict[str, str]) -> float:
    started = time.monotonic()
    _get(url, "api/trajectories?" + urllib.parse.urlencode(given))
    return time.monotonic() - started


def _get(url: str, path: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/{path}") as answer:
        return json.load(answer)  # type: ignore[no-any-return]
