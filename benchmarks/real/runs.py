"""Runs of a recipe with several seeds, and what their evaluations answered. A finished run is read, not repeated."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from benchmarks.measurement import log
from benchmarks.real.two_wiki import is_yes_no
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import Trajectory
from ragr1_actors.runs.report import RunReport, read_report
from ragr1_actors.runs.scores import TaskScore, score

ROOT = Path("runs/real")


@dataclass(frozen=True, slots=True)
class Answered:
    """A question of an evaluation, and how it was answered."""

    category: str
    is_yes_no: bool
    """Whether the answer is yes or no."""
    is_found: bool
    """Whether a passage that was found has the answer in it."""
    is_shown: bool
    """Whether the policy has read the answer: observations have room for a part of the passages only."""
    score: TaskScore


@dataclass(frozen=True)
class FinishedRun:
    """The run directory of a run that ended."""

    path: Path
    """``NAME_seed0``."""

    @property
    def seed(self) -> int:
        return int(self.path.name.rpartition("_seed")[2])

    @cached_property
    def report(self) -> RunReport:
        return read_report(self.path)

    def answers(self, stage: str) -> list[Answered]:
        """What the evaluation after a stage, ``start``, ``sft`` or ``rl``, answered.

        Attempts that the machinery failed are left out, as in the report: their tasks were asked again.

        Raises:
            DataError: the run kept no trajectories of the evaluation, or its file is damaged.
        """
        path = self.path / "trajectories" / f"eval_{stage}.arrow"
        trajectories = [one for group in read_trajectories(path) for one in group.trajectories]
        found = [answered(one) for one in trajectories if not one.stop_reason.is_failure]
        if not found:
            raise DataError(f"{path} has no answers; train the run again, with checkpointing.keep_trajectories")
        return found

    def evaluated(self, stage: str, measure: str) -> float:
        """The mean of a measure after a stage: ``evaluated("rl", "em")``; ``DataError`` if there is no such stage."""
        means = {one.stage: asdict(one.eval) for one in self.report.stages}
        if stage not in means:
            raise DataError(f"{self.path} was evaluated after {', '.join(means)}, expected {stage} too; train it again")
        return float(means[stage][measure])


def finished_runs(name: str, root: Path = ROOT) -> list[FinishedRun]:
    """The runs ``NAME_seed0``, ``NAME_seed1`` and so on that ended, in the order of their seeds."""
    folders = [path.parent for path in root.glob("*/report.json")]
    found = [FinishedRun(path) for path in folders if re.fullmatch(re.escape(name) + r"_seed\d+", path.name)]
    return sorted(found, key=lambda run: run.seed)


def answered(trajectory: Trajectory) -> Answered:
    """Say how a trajectory answered its question."""
    task, turns = trajectory.task, trajectory.turns
    passages = [(record.title, record.text) for turn in turns for call in turn.calls for record in call.records]
    observations = [turn.observation for turn in turns]

    def has_answer(texts: Iterable[str]) -> bool:
        return any(answer.lower() in text.lower() for text in texts for answer in task.golden_answers)

    is_found, is_shown = has_answer(chain.from_iterable(passages)), has_answer(observations)
    return Answered(task.category, any(map(is_yes_no, task.golden_answers[:1])), is_found, is_shown, score(trajectory))


def train(recipe: str, name: str, overrides: Sequence[str], seed: int, root: Path = ROOT) -> FinishedRun:
    """Train a recipe to the end, or read the run that did; one that was interrupted goes on.

    Raises:
        UserError: the run failed; its own message is on the terminal.
    """
    path = root / f"{name}_seed{seed}"
    if not (path / "report.json").is_file():
        log(f"{path}: ragr1 train {recipe} {' '.join(overrides)} debugging.seed={seed}")
        command = [sys.executable, "-m", "ragr1_actors", "train", recipe, *overrides, f"debugging.seed={seed}"]
        ended = subprocess.run([*command, "--run-dir", str(path), "--auto-resume"], stdout=sys.stderr)
        if ended.returncode:
            raise UserError(f"the run {path} ended with {ended.returncode}; mend what it says and measure again")
    return FinishedRun(path)
