"""Runs of the claims: each is a process of ``ragr1 train``, which continues where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ragr1_actors.core.errors import RagR1Error
from ragr1_actors.lab.claim import Claim, EvaluatedRun, Verdict, judge, read_claim
from ragr1_actors.runs.report import REPORT_JSON

SEED = "debugging.seed"


@dataclass(frozen=True)
class ClaimedRun:
    """Run of a claim with one seed."""

    name: str
    run_dir: Path
    command: tuple[str, ...]
    """Words after ``ragr1``."""

    @property
    def is_done(self) -> bool:
        """Whether it ended, in this process or in an earlier one."""
        return (self.run_dir / REPORT_JSON).is_file()


@dataclass(frozen=True)
class ClaimTest:
    """Claim, with the runs that it needs."""

    method: str
    claim: Claim
    runs: tuple[ClaimedRun, ...]
    """Runs in the order in which they are made."""

    @classmethod
    def plan(cls, method: str, root: Path, overrides: Sequence[str]) -> ClaimTest:
        """Plan the runs below ``root``, as ``METHOD/seed0/NAME``; ``ConfigError`` as in ``read_claim``."""
        claim, method = read_claim(method), Path(method).resolve().name
        runs = (run for seed in range(claim.seeds) for run in _planned(claim, seed, root / method, overrides))
        return cls(method, claim, tuple(runs))

    @property
    def hours_left(self) -> float:
        """Hours that the remaining runs take on two CPU cores, if each takes the same time."""
        return self.claim.hours * sum(not run.is_done for run in self.runs) / len(self.runs)

    def verdicts(self) -> list[Verdict]:
        """Return the result of each check; all runs must be done."""
        by_name: dict[str, list[EvaluatedRun]] = {}
        for run in self.runs:
            by_name.setdefault(run.name, []).append(EvaluatedRun(run.run_dir))
        return [judge(check, by_name) for check in self.claim.checks]


def _planned(claim: Claim, seed: int, folder: Path, overrides: Sequence[str]) -> Iterator[ClaimedRun]:
    run_dirs = {name: folder / f"seed{seed}" / name for name in claim.runs}
    for name, plan in claim.runs.items():
        keys = [f"{key}={json.dumps(value)}" for key, value in plan.overrides(run_dirs).items()]
        words = ["train", plan.recipe, *keys, *overrides, f"{SEED}={seed}", "--run-dir", str(run_dirs[name])]
        yield ClaimedRun(name, run_dirs[name], (*words, "--auto-resume"))


def make_runs(test: ClaimTest, on_run: Callable[[ClaimedRun], None], *, as_errors: bool = False) -> None:
    """Make the runs that are not done; with ``as_errors`` their output goes to standard error.

    Raises:
        RagR1Error: a run failed and has printed why.
    """
    for run in test.runs:
        if run.is_done:
            continue
        on_run(run)
        status = _train(run, sys.stderr if as_errors else None)
        if status:
            raise RagR1Error(
                f"the run {run.name} of {test.method} ended with exit status {status}, see above; the same command "
                "goes on with it"
            )


def _train(run: ClaimedRun, output: TextIO | None) -> int:
    """Make a run and return its exit status; an interrupt is passed on to it, and its checkpoint is awaited."""
    command = [sys.executable, "-m", "ragr1_actors", *run.command]
    # a new session: Ctrl-C in a terminal would reach the run twice, and the second would prevent a checkpoint
    with subprocess.Popen(command, stdout=output, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
