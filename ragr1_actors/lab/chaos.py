"""Chaos: a run whose processes are killed and stopped and whose files are damaged, and counts of its reactions.

::

    ragr1 train RECIPE ──► a process is killed or stopped ──► the run logs progress ──► the next one
            ▲                        │
            ├── with --auto-resume ──┘ the driver was killed
            └── the file is restored ◄── the product names it ◄── ask, --auto-resume ◄── a file is damaged ◄── SIGTERM
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from ragr1_actors.core.disk.files import INDEX, SFT_POLICY
from ragr1_actors.core.errors import RunDirectoryError, UserError
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.report import REPORT_JSON
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics

DRIVER = "driver"
ACTORS = {
    "env runner": "EnvRunnerActor",
    "retriever": "RetrieverActor",
    "encoder": "EncoderActor",
    "learner": "LearnerWorker",
}
"""Class of each kind of actor; Ray names a worker process after it."""
ANSWER_TIMEOUT_S = 300.0
"""Longest wait in seconds for a run's answer, which comes between two searches or updates, also during a recovery."""
LOG = "chaos.log"
"""File beside the run directory with the output of the drivers."""
RUNNER_SHARE = 2 / 3
"""Share of the hangs that hit env runners; they come before a weight sync, when all others wait for them."""
RL_SHARE = 0.75
"""Share of the kills and of the other hangs that come in RL, where all kinds of actors work."""
LOOK_INTERVAL_S = 0.2
_SHORT_INTERVAL_S = 0.02
"""Seconds between two looks for a moment that lasts as long as one update."""
_BACK = re.compile(r"(env runner|retriever|encoder|learner)\b.{,500} is back after (\d+) s")
Deed = Literal["kill", "hang", "flip"]
_QUESTION = "Where was Ana Bell born?"


@dataclass(frozen=True, slots=True)
class Hit:
    """Fault in a process or in a file: ``Hit("retriever", "kill", "rl", 7)``."""

    kind: str
    """Kind of the process; empty for a file."""
    deed: Deed
    stage: str
    iteration: int
    """Iteration of the stage, or step of SFT, after whose log line it happens; 0 is at once."""

    def __str__(self) -> str:
        """Return ``"rl 7: kill retriever"``."""
        return f"{self.stage} {self.iteration}: {self.deed} {self.kind}".rstrip()


def schedule(counts: Mapping[Deed, int], kinds: Sequence[str], lengths: Mapping[str, int], seed: int) -> list[Hit]:
    """Return kills, in equal numbers per kind up to one, hangs and flips, spread over the stages of the given lengths.

    ``counts`` are ``{"kill": 20, "hang": 6, "flip": 10}``.

    ``lengths`` are ``{"sft": steps, "rl": iterations}``. RL gets ``RL_SHARE`` of the kills and hangs, if there is SFT,
    and all hangs of env runners and all flips: before RL no weights move, and there may be no checkpoint.
    """
    rng = random.Random(f"chaos {seed}")
    runner, others = next(iter(ACTORS)), [kind for kind in kinds if kind not in (DRIVER, next(iter(ACTORS)))]
    num_runners = round(counts["hang"] * (RUNNER_SHARE if others else 1)) if runner in kinds else 0
    anywhere = [("kill", kind) for kind in _in_turn(kinds, counts["kill"], rng)]
    anywhere += [("hang", kind) for kind in _in_turn(others, counts["hang"] - num_runners, rng)]
    rng.shuffle(anywhere)
    num_in_sft = len(anywhere) - round(len(anywhere) * RL_SHARE) if lengths["sft"] else 0
    in_rl = [*anywhere[num_in_sft:], *([("hang", runner)] * num_runners), *([("flip", "")] * counts["flip"])]
    rng.shuffle(in_rl)
    hits = []
    for stage, deeds in (("sft", anywhere[:num_in_sft]), ("rl", in_rl)):
        for index, (deed, kind) in enumerate(deeds):
            at = int((index + rng.random()) / len(deeds) * (lengths[stage] - 1))
            hits.append(Hit(kind, deed, stage, at))  # type: ignore[arg-type]  # of the lists above
    return hits


def _in_turn(kinds: Sequence[str], count: int, rng: random.Random) -> list[str]:
    return list(itertools.islice(itertools.cycle(rng.sample(kinds, len(kinds))), count))


@dataclass
class Tally:
    """Counts of the faults in a run, and of those that it noticed."""

    kills: int = 0
    hangs: int = 0
    hangs_noticed: int = 0
    flips: int = 0
    silent: int = 0
    """Damaged files that were used without a message."""
    unnamed: int = 0
    """Damaged files that were refused with a message that does not name them."""
    noticed_s: list[float] = field(default_factory=list)
    """Seconds from the stop of a process until the run ended it."""
    back_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until a process works again, by kind."""

    @property
    def num_hits(self) -> int:
        """Number of all faults."""
        return self.kills + self.hangs + self.flips


def _position(stage: str, iteration: int) -> tuple[int, int]:
    """Return a key that orders the lines of the metrics; the evaluation before RL ends the SFT."""
    return {"eval_start": 0, "sft": 0, "eval_sft": 1, "rl": 1, "eval_rl": 2}[stage], iteration


class Victim:
    """Run in a process of the operating system, which is started again with ``--auto-resume`` after it was killed."""

    def __init__(self, recipe: str, overrides: Sequence[str], run_dir: Path, hang_timeout_s: float) -> None:
        """Start the run, which should notice a hang after ``hang_timeout_s``; its output is appended to ``LOG``."""
        self.patience_s = ANSWER_TIMEOUT_S + hang_timeout_s
        self._command = [sys.executable, "-m", "ragr1_actors", "train", recipe, *overrides]
        self._command += ["--run-dir", str(run_dir), "--auto-resume"]
        self.run_dir = run_dir
        self.log = run_dir.parent / f"{run_dir.name}.{LOG}"
        self.start()

    def start(self) -> None:
        """Start or continue the run."""
        with self.log.open("ab") as output:
            self.driver = psutil.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        """Whether the driver's process has ended."""
        return self.driver.poll() is not None

    def find(self, kind: str) -> list[psutil.Process]:
        """Return the running processes of a kind, without those that this command has stopped."""
        if kind == DRIVER:
            return [] if self.has_ended else [self.driver]
        everything, start = self.driver.children(recursive=True), f"ray::{ACTORS[kind]}"
        return [process for process in everything if self._title(process).startswith(start)]

    @staticmethod
    def _title(process: psutil.Process) -> str:
        """Return Ray's name of a process, such as ``ray::LearnerWorker.update``; "" if it has stopped or ended."""
        try:
            is_worker = process.name().startswith("ray::") and process.status() != psutil.STATUS_STOPPED
            return str(process.cmdline()[0]) if is_worker else ""
        except (psutil.NoSuchProcess, IndexError):  # it has just ended
            return ""

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines that the run has logged."""
        try:
            return read_metrics(self.run_dir)
        except RunDirectoryError:  # it has not begun
            return []

    def wait_for_progress(self, before: list[dict[str, Any]]) -> bool:
        """Return True once the run has logged another row, or False if it ends before.

        A run that continues from a checkpoint first drops the rows after it.
        """
        fewest = len(before)
        while True:
            has_ended, number = self.has_ended, len(self.rows())
            if number > fewest:
                return True
            if has_ended:
                return False
            fewest = number
            time.sleep(LOOK_INTERVAL_S)

    def wait_for_update(self) -> None:
        """Return while a learner rank learns from a batch, after which weights move.

        Ray names a process after the method that it runs. If the learner is no actor, or updates are too short to be
        seen, it returns after the second row from now.
        """
        most = len(self.rows()) + 2
        while not self.has_ended and len(self.rows()) < most:
            for _ in range(round(LOOK_INTERVAL_S / _SHORT_INTERVAL_S)):
                if any("update" in self._title(process) for process in self.find("learner")):
                    return
                time.sleep(_SHORT_INTERVAL_S)

    def wait_for(self, hit: Hit) -> None:
        """Return once the run is at the planned place of the fault, or after it, or has ended."""
        planned = _position(hit.stage, hit.iteration)
        while not self.has_ended:
            if any(_position(row["stage"], row["iteration"]) >= planned for row in self.rows()[-1:]):
                return
            time.sleep(LOOK_INTERVAL_S)

    def choose(self, kind: str, rng: random.Random) -> psutil.Process | None:
        """Return a process of the kind, once there is one; None if the run ends before."""
        while not (found := self.find(kind)):
            if self.has_ended:
                return None
            time.sleep(LOOK_INTERVAL_S)
        return rng.choice(found)

    def stop(self) -> None:
        """Let the run write a checkpoint and end."""
        self.driver.terminate()
        self.driver.wait()

    def ask(self) -> str:
        """Return the output of ``ragr1 ask`` for the run as it is on the disk."""
        command = [sys.executable, "-m", "ragr1_actors", "ask", str(self.run_dir), _QUESTION]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.stdout.decode(errors="replace")

    def said(self, since: int = 0) -> str:
        """Return the output of the drivers, from a byte of the log on."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def recoveries(self) -> Iterator[tuple[str, float]]:
        """Yield kind and seconds of every recovery that the run has printed."""
        for line in self.said().splitlines():
            if found := _BACK.search(line):
                yield found[1], float(found[2])


@contextmanager
def ended(victim: Victim) -> Iterator[None]:
    """End the run when the block ends."""
    try:
        yield
    finally:
        if not victim.has_ended:
            victim.stop()


def _kill(victim: Victim, hit: Hit, rng: random.Random, tally: Tally) -> str | None:
    """Kill a process and wait for progress; return a line to print, or None if the run ended before."""
    process, before, hit_at = victim.choose(hit.kind, rng), victim.rows(), time.monotonic()
    if process is None:
        return None
    process.kill()
    tally.kills += 1
    if process is victim.driver:
        victim.driver.wait()
        victim.start()
    if victim.wait_for_progress(before) and hit.kind == DRIVER:
        tally.back_s.setdefault(DRIVER, []).append(time.monotonic() - hit_at)
    return ""


def _hang(victim: Victim, hit: Hit, rng: random.Random, tally: Tally) -> str | None:
    """Stop a process until the run ends it, and wait for progress; returns as ``_kill``."""
    if hit.kind == next(iter(ACTORS)):
        victim.wait_for_update()
    process, before, hit_at = victim.choose(hit.kind, rng), victim.rows(), time.monotonic()
    if process is None:
        return None
    process.send_signal(signal.SIGSTOP)
    tally.hangs += 1
    while process.is_running() and not victim.has_ended:
        if time.monotonic() - hit_at > victim.patience_s:
            process.send_signal(signal.SIGCONT)
            return f": not noticed in {victim.patience_s:.0f} s"
        time.sleep(LOOK_INTERVAL_S)
    if victim.has_ended:
        return ": not noticed before the run ended"
    took_s = time.monotonic() - hit_at
    tally.hangs_noticed += 1
    tally.noticed_s.append(took_s)
    victim.wait_for_progress(before)
    return f": noticed after {took_s:.0f} s"


def _flip(victim: Victim, hit: Hit, rng: random.Random, tally: Tally) -> str | None:
    """Stop the run, damage a file, check whether ``ask`` or the run names it, and continue without the damage."""
    victim.stop()
    if (victim.run_dir / REPORT_JSON).is_file():
        return None
    damage = draw_damage(victim.run_dir, rng)
    damage.apply()
    tally.flips += 1
    before, mark = victim.rows(), victim.log.stat().st_size
    if damage.is_named_in(said := victim.ask()):
        outcome = "named by ask"
    else:
        victim.start()
        goes_on = victim.wait_for_progress(before)
        outcome = _judge(damage, said := victim.said(mark), tally, goes_on=goes_on)
    checkpoint = damage.checkpoint_to_delete(said) if victim.has_ended and rng.random() < 0.5 else None
    if checkpoint is not None:
        shutil.rmtree(checkpoint)
        outcome += f", which goes on without {checkpoint.name}"
    else:
        damage.undo()
    if victim.has_ended:
        before = victim.rows()
        victim.start()
        victim.wait_for_progress(before)
    return f" {damage}, {outcome}"


def _judge(damage: Damage, said: str, tally: Tally, *, goes_on: bool) -> str:
    """Return the reaction of the run to a damaged file, and count a wrong one."""
    if damage.is_named_in(said):
        return "named by the run"
    if goes_on:
        tally.silent += 1
        return "used without a word"
    tally.unnamed += 1
    return f"refused without its name: {said.strip().splitlines()[-1] if said.strip() else 'nothing was said'}"


DEEDS = {"kill": _kill, "hang": _hang, "flip": _flip}


# -- damage to files ---------------------------------------------------------------------------------------------------


SPARE = "chaos.lost"
"""File beside the run directory that keeps the lost file until it is put back."""


@dataclass(frozen=True, slots=True)
class Damage:
    """File of a stopped run that differs from what was stored: bits of a byte are flipped, or it is lost."""

    run_dir: Path
    path: Path
    offset: int
    """Offset of the changed byte."""
    mask: int
    """Bits of the byte that are flipped; 0: the file is lost."""

    def __str__(self) -> str:
        """Return ``"byte 1,234 of checkpoints/step_8/learner.safetensors flipped"``."""
        name = self.path.relative_to(self.run_dir)
        return f"byte {self.offset:,} of {name} flipped" if self.mask else f"{name} lost"

    def apply(self) -> None:
        """Damage the file."""
        if self.mask:
            self._flip()
        else:
            shutil.move(self.path, self._spare)

    def undo(self) -> None:
        """Restore the file, unless the run has removed its folder meanwhile."""
        if not self.path.parent.is_dir():
            self._spare.unlink(missing_ok=True)
        elif self.mask:
            self._flip()
        else:
            shutil.move(self._spare, self.path)

    def is_named_in(self, said: str) -> bool:
        """Return whether a text names the file, in one path or as a name and its folder; a terminal may break lines."""
        text = _squeezed(said)
        return all(_squeezed(name) in text for name in (self.path.name, self.path.parent.name))

    def checkpoint_to_delete(self, said: str) -> Path | None:
        """Return the checkpoint with the damage, if a text advises to delete it and continue from the one before."""
        folder = newest_checkpoint(self.run_dir)
        is_in_it = folder is not None and self.path.is_relative_to(folder)
        return (
            folder
            if is_in_it and _squeezed(f"delete the folder {folder} and --resume goes on") in _squeezed(said)
            else None
        )

    @property
    def _spare(self) -> Path:
        return self.run_dir.parent / f"{self.run_dir.name}.{SPARE}"

    def _flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            byte = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([byte ^ self.mask]))


def draw_damage(run_dir: Path, rng: random.Random) -> Damage:
    """Choose a folder from which a stopped run would continue, a file in it, and the damage.

    The folders are the newest checkpoint, ``policy_sft`` and ``index``, with equal probability, as are the files of
    one. Files that no run reads again are not chosen: logs, curves, reports and the cache of the viewer.
    """
    folders = [newest_checkpoint(run_dir), run_dir / SFT_POLICY, run_dir / INDEX]
    files = [_files(folder) for folder in folders if folder is not None and folder.is_dir()]
    if not any(files):
        raise UserError(
            f"{run_dir} has no checkpoint, policy or index yet whose files could be damaged; take fewer flips"
        )
    path = rng.choice(rng.choice([found for found in files if found]))
    size = path.stat().st_size
    is_lost = not size or rng.random() < 0.5
    return Damage(run_dir, path, rng.randrange(max(1, size)), 0 if is_lost else rng.randrange(1, 256))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the folder of the newest whole checkpoint."""
    newest = Checkpoints(RunStore(run_dir)).latest()
    return None if newest is None else Path(str(newest))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _squeezed(text: str) -> str:
    return "".join(text.split())
