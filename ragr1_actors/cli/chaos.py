"""``ragr1 chaos``: trains a recipe while its processes are killed and stopped, and counts what was lost.

::

    ragr1 train RECIPE ──► a process of a random kind is killed or stopped ──► the run logs progress ──► the next one
            ▲                                │
            └── with --auto-resume ── the driver was killed
"""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragr1_actors.cli import console, print_line
from ragr1_actors.core.advice import advised
from ragr1_actors.core.errors import RunDirectoryError, UserError

if TYPE_CHECKING:
    import psutil

    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.runs.report import RunReport

DRIVER = "driver"
ACTORS = {
    "env runner": "EnvRunnerActor",
    "retriever": "RetrieverActor",
    "encoder": "EncoderActor",
    "learner": "LearnerWorker",
}
"""The class of each kind; Ray names a worker process after it."""
FLEETS = {"env runner": "runners", "retriever": "retrievers", "encoder": "encoders", "learner": "learners"}
"""What an order to a live run calls them."""
ANSWER_TIMEOUT_S = 300.0
"""A run answers between two searches or updates, also while it recovers from the kill before."""
LOG = "chaos.log"
"""Beside the run directory: what the drivers printed."""
STOPPED_SHARE = 0.25
"""Of the actors that are hit, those that are stopped and not killed: they hang."""
RL_SHARE = 0.75
"""Share of the hits that come in RL, where all kinds of actors work."""
_LOOK_INTERVAL_S = 0.2
_BACK = re.compile(r"(env runner|retriever|encoder|learner)\b.* is back after (\d+) s")


@dataclass(frozen=True, slots=True)
class Hit:
    """What happens to a process: ``Hit("retriever", signal.SIGKILL, "rl", 7)``."""

    kind: str
    signal: signal.Signals
    stage: str
    iteration: int
    """It happens once this iteration of the stage, or step of SFT, is logged; 0 is at once."""


def schedule(num_hits: int, kinds: Sequence[str], lengths: Mapping[str, int], seed: int) -> list[Hit]:
    """Return hits of every kind as many, up to one, spread over the stages of the given lengths.

    ``lengths`` are ``{"sft": steps, "rl": iterations}``; RL gets ``RL_SHARE`` of the hits, if there is SFT.
    """
    rng = random.Random(f"chaos {seed}")
    chosen = list(itertools.islice(itertools.cycle(rng.sample(kinds, len(kinds))), num_hits))
    rng.shuffle(chosen)
    num_in_rl = round(num_hits * RL_SHARE) if lengths["sft"] else num_hits
    hits = []
    for stage, count in (("sft", num_hits - num_in_rl), ("rl", num_in_rl)):
        for index in range(count):
            kind = chosen.pop()
            is_stopped = kind != DRIVER and rng.random() < STOPPED_SHARE
            at = int((index + rng.random()) / count * (lengths[stage] - 1))
            hits.append(Hit(kind, signal.SIGSTOP if is_stopped else signal.SIGKILL, stage, at))
    return hits


def _position(stage: str, iteration: int) -> tuple[int, int]:
    """Order the lines of the metrics; the evaluation before RL ends the SFT."""
    return {"eval_start": 0, "sft": 0, "eval_sft": 1, "rl": 1, "eval_rl": 2}[stage], iteration


class Victim:
    """A run in a process of the operating system, which is started again with ``--auto-resume`` after it was killed."""

    def __init__(self, recipe: str, overrides: Sequence[str], run_dir: Path) -> None:
        """Start the run; its output is appended to ``LOG``."""
        self._command = [sys.executable, "-m", "ragr1_actors", "train", recipe, *overrides]
        self._command += ["--run-dir", str(run_dir), "--auto-resume"]
        self._run_dir = run_dir
        self.log = run_dir.parent / f"{run_dir.name}.{LOG}"
        self._start()

    def _start(self) -> None:
        import psutil

        with self.log.open("ab") as output:
            self.driver = psutil.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        """Whether the driver's process is gone."""
        return self.driver.poll() is not None

    def find(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind that are there, without those that this command has stopped."""
        import psutil

        if kind == DRIVER:
            return [] if self.has_ended else [self.driver]
        found = []
        for process in self.driver.children(recursive=True):
            try:
                is_one = process.name().startswith("ray::") and process.cmdline()[0].startswith(f"ray::{ACTORS[kind]}")
                if is_one and process.status() != psutil.STATUS_STOPPED:
                    found.append(process)
            except (psutil.NoSuchProcess, IndexError):  # it has just ended
                continue
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return what the run has logged."""
        from ragr1_actors.runs.telemetry.metrics import read_metrics

        try:
            return read_metrics(self._run_dir)
        except RunDirectoryError:  # it has not begun
            return []

    def wait_for_progress(self, before: list[dict[str, Any]]) -> None:
        """Return once the run has logged something new, or has ended."""
        while not self.has_ended and self.rows() == before:
            time.sleep(_LOOK_INTERVAL_S)

    def wait_for(self, hit: Hit) -> None:
        """Return once the run is where the hit is planned, or behind it, or has ended."""
        planned = _position(hit.stage, hit.iteration)
        while not self.has_ended:
            if any(_position(row["stage"], row["iteration"]) >= planned for row in self.rows()[-1:]):
                return
            time.sleep(_LOOK_INTERVAL_S)

    def hit(self, hit: Hit, rng: random.Random) -> bool:
        """Kill or stop a process of the kind, once there is one; False if the run has ended before."""
        while not (found := self.find(hit.kind)):
            if self.has_ended:
                return False
            time.sleep(_LOOK_INTERVAL_S)
        process = rng.choice(found)
        process.send_signal(hit.signal)
        if process is self.driver:
            self.driver.wait()
            self._start()
        return True

    def recoveries(self) -> Iterator[tuple[str, float]]:
        """Yield kind and seconds of every return that the run has printed."""
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if found := _BACK.search(line):
                yield found[1], float(found[2])


@contextmanager
def _ended(victim: Victim) -> Iterator[None]:
    """End the run with the block."""
    try:
        yield
    finally:
        if not victim.has_ended:
            victim.driver.terminate()
            victim.driver.wait()


def chaos(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file.", show_default=False)
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    kills: Annotated[int, typer.Option(min=1, help="Processes that are killed or stopped.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the kinds and their order.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Directory of the run; default: runs/chaos-DATE-TIME.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Instead of a recipe: a run under way, also on a cluster."),
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.0, help="Seconds between two kills in a run under way.")] = 20.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before actors of a run under way are killed.")] = False,
) -> None:
    """Train on this machine while processes of every kind are killed or hang; exit status 1 if a task is lost."""
    if (recipe is None) == (run is None):
        raise UserError("give a recipe to train, or --run with the directory or URI of a run under way")
    if run is not None:
        _kill_actors(run, kills, seed, every_s, is_asked=not yes)
        return
    assert recipe is not None
    place = run_dir or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    if place.exists():
        raise UserError(f"{place} exists; give a new directory, or none")
    _train(recipe, overrides or [], kills, seed, place)


def _kinds(config: RunConfig) -> list[str]:
    """Return the kinds of which a run has actors."""
    sizes = (config.env_runners.num_env_runners, config.retrieval.num_retrievers, config.retrieval.num_encoders)
    return [kind for kind, size in zip(ACTORS, (*sizes, config.learners.num_learners), strict=True) if size]


def _kill_actors(run: str, kills: int, seed: int, every_s: float, *, is_asked: bool) -> None:
    """Order a run under way to kill some of its actors; its driver and other runs are left alone."""
    from ragr1_actors.cli.scale import check_under_way, give_order
    from ragr1_actors.runs.places import find_place

    place = find_place(run)
    kinds = _kinds(check_under_way(place))
    if not kinds:
        raise UserError(f"{place} has no actors: its driver does everything")
    if is_asked:
        typer.confirm(f"kill {kills} actors ({', '.join(kinds)}) of the run in {place}?", abort=True)
    rng = random.Random(f"chaos {seed}")
    for number in range(kills):
        if number:
            time.sleep(every_s)
        order, deadline = {"kill": FLEETS[rng.choice(kinds)]}, time.monotonic() + ANSWER_TIMEOUT_S
        while (answer := give_order(place, order, ANSWER_TIMEOUT_S)).is_refused:  # it has lost the last one of a kind
            if time.monotonic() > deadline:
                raise UserError(f"the run refused: {answer.message}")
            time.sleep(_LOOK_INTERVAL_S)
        print_line(f"{number + 1} of {kills}: {answer.message}")
    print_line(f"the run counts what it lost: {advised('report', run)}, once it has ended")


def _train(recipe: str, overrides: list[str], kills: int, seed: int, place: Path) -> None:
    from ragr1_actors.runs.report import read_report
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    overrides = ["checkpointing.interval=1", *overrides]
    config = AlgorithmConfig.from_recipe(recipe).override(overrides).freeze()
    patient = config.debugging.fault_tolerance | {"max_learner_restarts": kills}
    lengths = {"sft": config.sft.num_steps, "rl": config.training.num_iterations}
    hits = schedule(kills, [DRIVER, *_kinds(config)], lengths, seed)
    rng, driver_s, num_hits = random.Random(seed), [], 0
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {place}: {error.strerror}; choose another --run-dir") from error
    victim = Victim(recipe, [*overrides, f"debugging.fault_tolerance={json.dumps(patient)}"], place)
    with _ended(victim):
        for hit in hits:
            victim.wait_for(hit)
            before, hit_at = victim.rows(), time.monotonic()
            if not victim.hit(hit, rng):
                break
            num_hits += 1
            print_line(f"{hit.stage} {hit.iteration}: {hit.signal.name} {hit.kind}")
            victim.wait_for_progress(before)
            if hit.kind == DRIVER:
                driver_s.append(time.monotonic() - hit_at)
        status = victim.driver.wait()
    if status:
        raise UserError(f"the run ended with status {status} after {num_hits} of {kills} hits; see {victim.log}")
    recoveries = [*victim.recoveries(), *((DRIVER, took_s) for took_s in driver_s)]
    report = read_report(place)
    console.print(_table(report, recoveries, num_hits))
    print_line(advised("report", str(place)))
    if report.tasks.lost or report.tasks.doubled:
        raise typer.Exit(1)
    if num_hits < kills:
        raise UserError(f"the run ended after {num_hits} of {kills} hits; take fewer, or a longer run")


def _table(report: RunReport, recoveries: Sequence[tuple[str, float]], num_hits: int) -> Table:
    table = Table(title=f"{num_hits} processes killed or stopped", show_header=False)
    for name in ("issued", "trained", "failed", "lost", "doubled"):
        table.add_row(f"tasks {name}", f"{getattr(report.tasks, name):,}")
    for kind in (*ACTORS, DRIVER):
        took_s = [seconds for found, seconds in recoveries if found == kind]
        if took_s:
            table.add_row(
                f"{kind} back after", f"{mean(took_s):.1f} s in the mean of {len(took_s)}, {max(took_s):.0f} s at most"
            )
    table.add_row("EM", f"{report.stages[-1].eval.em:.3f}")
    return table
