"""Claims of methods, and the check by their runs. ``claim.yaml`` in the folder of a method::

claim: as exact as with one query per turn, in at least 15 % fewer rounds
paper: 2.15 rounds against 2.53 ...             what the paper reports, with its place
differs: a generated world, a tiny policy ...   what is not as in the paper
seeds: 3
hours: 1.2                                      of all runs of all seeds, measured on two cores
runs:
  start: {recipe: quickstart, set: {training.num_iterations: 0}}
  several: {recipe: quickstart, set: {policy.model: "{start}", sft.num_steps: 0}}    # where `start` ended
  one: ...
checks:
  - {measure: rounds, of: several, over: one, at_most: 0.85}
  - {measure: em, of: several, minus: one, at_least: -0.05, counts: interval}
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self, TextIO

import numpy as np
from pydantic import Field, model_validator

from ragr1_actors.core.errors import ConfigError, DataError, RagR1Error, UserError, nearest, shortened
from ragr1_actors.core.resolve import (
    CLAIM_FILE,
    RECIPES,
    check_value,
    override,
    read_yaml_file,
    recipe_files,
    with_modules_beside,
)
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.section import Section
from ragr1_actors.planning.preflight import check_classes, check_environment
from ragr1_actors.runs.report import REPORT_JSON, EvalResult, read_report
from ragr1_actors.runs.run_directory import as_started, holds_run, open_run_directory
from ragr1_actors.runs.scores import Interval, bootstrap, score
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.runs.telemetry.metrics import is_iteration, read_metrics
from ragr1_actors.training.algorithm_config import AlgorithmConfig

_FORM = "write it as the docstring of ragr1_actors/lab/claim.py says"
_PR_SET_PDEATHSIG = 1
SCORES = ("em", "f1", "rounds", "queries", "tokens")
"""Numbers of each evaluated trajectory, besides the measures of its environment."""


class RunPlan(Section):
    """Run of a claim, made with each seed."""

    recipe: str
    """Name of a recipe of the project, or of one beside the claim."""
    set: dict[str, Any] = Field({})
    """Keys of the recipe, ``training.lr: 1e-4``. ``{start}`` in a text is the directory of the run ``start``; ``my:X``
    is looked up beside the claim first, as in a recipe."""

    def overrides(self, run_dirs: Mapping[str, Path]) -> dict[str, Any]:
        """Return ``set`` with the directories of the earlier runs."""
        return {key: _filled(value, run_dirs) for key, value in self.set.items()}


def _filled(value: Any, run_dirs: Mapping[str, Path]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, run_dirs) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, run_dirs) for inner in value]
    if isinstance(value, str):
        for name, run_dir in run_dirs.items():
            value = value.replace(f"{{{name}}}", str(run_dir))
    return value


class ClaimCheck(Section):
    """Number of the runs, with its limit."""

    measure: str
    """``em``, ``f1``, ``rounds``, ``queries``, ``tokens`` or a measure of the environment: its mean over the evaluation
    tasks after the last stage, and over the seeds. With ``reaches`` a metric of iterations, such as ``rollout/em``."""
    of: str
    """Name of the run."""
    minus: str = ""
    """Name of another run: the difference counts, paired by seed and task."""
    over: str = ""
    """Name of another run: the ratio of the means counts."""
    stage: Literal["sft", "rl"] = "rl"
    """Evaluation: after SFT, or the last one."""
    reaches: float | None = None
    """Value of the metric: the iterations count until the mean of three in a row has it, or one more than all if it
    never does."""
    at_least: float | None = None
    at_most: float | None = None
    counts: Literal["mean", "interval"] = "mean"
    """Whether the mean must keep the limits, or the 95 % interval of the difference."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("expected one of at_least and at_most")
        if self.minus and self.over:
            raise ValueError("expected one of minus and over")
        if self.counts == "interval" and (not self.minus or self.reaches is not None):
            raise ValueError("an interval is that of a difference of evaluations: give minus, and no reaches")
        return self

    def __str__(self) -> str:
        """Return the check in words: ``em of several less one ≥ -0.05``."""
        name = self.measure if self.reaches is None else f"iterations until {self.measure} is {self.reaches:g}"
        name = name if self.stage == "rl" else f"{name} after SFT"
        name = f"{name} of {self.of}"
        name += f" less {self.minus}" if self.minus else f" ÷ {self.over}" if self.over else ""
        return f"{name} ≥ {self.at_least:g}" if self.at_least is not None else f"{name} ≤ {self.at_most:g}"


class Claim(Section):
    """Claim of a method."""

    claim: str
    """Claim in one line, for people."""
    paper: str
    """Figures that the paper reports, and their place."""
    differs: str
    """Differences from the paper."""
    seeds: int = Field(1, ge=1)
    """Number of seeds; each run is made with the seeds from 0."""
    hours: float = Field(gt=0)
    """Hours that all runs take with all seeds, on two CPU cores."""
    runs: dict[str, RunPlan] = Field(min_length=1)
    """Runs in the order in which they are made."""
    checks: list[ClaimCheck] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        named = [name for check in self.checks for name in (check.of, check.minus, check.over) if name]
        if wrong := [name for name in named if name not in self.runs]:
            raise ValueError(f"there is no run {wrong[0]}{nearest(wrong[0], self.runs)}")
        if wrong := [name for name in self.runs if not re.fullmatch(r"[\w-]{1,64}", name)]:
            raise ValueError(f"the run {wrong[0]!r} cannot be a folder's name; take letters, digits, _ and -")
        return self


def claim_files() -> dict[str, Path]:
    """Return the files of the project's claims, by method: ``{"rag_r1": .../recipes/rag_r1/claim.yaml}``."""
    return {file.parent.name: file for file in sorted(RECIPES.glob(f"*/{CLAIM_FILE}"))}


def read_claim(method: str) -> Claim:
    """Return the claim of a method of the project, or of a folder such as ``./mine``, with its recipes beside it.

    Raises:
        ConfigError: there is no such method or recipe, or the folder has the name of a method.
    """
    known, own = claim_files(), Path(method) / CLAIM_FILE
    file = known.get(method, own)
    if not file.is_file():
        if Path(method).is_dir():
            raise ConfigError(f"{method} has no {CLAIM_FILE}; {_FORM}")
        raise ConfigError(f"unknown method {method!r}{nearest(method, known)}; see: ragr1 recipes, or give a folder")
    if file is own and own.resolve().parent.name in known:
        raise ConfigError(f"{method}: the project has a method of this name; rename the folder")
    content = read_yaml_file(file, _FORM)
    if not isinstance(content, dict):
        got = "nothing" if content is None else shortened(repr(content))
        raise ConfigError(f"{file}: got {got}, expected claim, paper, differs, hours, runs and checks; {_FORM}")
    check_value(str(file), content)
    claim = Claim.read(with_modules_beside(content, file.parent), str(file))
    beside = {path.stem: str(path) for path in own.parent.glob("*.yaml") if file is own and path != own}
    recipes, runs = recipe_files() | beside, {}
    for name, plan in claim.runs.items():
        if plan.recipe not in recipes:
            raise ConfigError(f"{file}: there is no recipe {plan.recipe}{nearest(plan.recipe, recipes)}")
        runs[name] = plan.model_copy(update={"recipe": beside.get(plan.recipe, plan.recipe)})
    return claim.model_copy(update={"runs": runs})


@dataclass(frozen=True)
class EvaluatedRun:
    """Run directory of a claim, with the data for its checks."""

    path: Path

    def mean(self, measure: str, stage: str) -> float:
        """Return the mean in the report; raises ``DataError`` if there is none."""
        return _named(self._result(stage).by_name(), measure, self.path)

    def scores(self, measure: str, stage: str) -> dict[str, float]:
        """Return the measure of each task: ``{"world/eval/7": 1.0}``."""
        own = self._result(stage).measures
        path = self.path / "trajectories" / f"eval_{stage}.arrow"
        ended = [one for group in read_trajectories(path) for one in group.trajectories]
        found = {}
        for one in (one for one in ended if not one.stop_reason.is_failure):
            scored = score(one, own)
            numbers = {name: float(getattr(scored, name)) for name in SCORES} | scored.measures
            found[scored.task_id] = _named(numbers, measure, path)
        return found

    def iterations_until(self, metric: str, value: float) -> int:
        """Return the number of iterations until the mean of three has a value; one more than all if it never does."""
        values = [_named(row, metric, self.path) for row in read_metrics(self.path) if is_iteration(row)]
        reached = (end for end in range(3, len(values) + 1) if fmean(values[end - 3 : end]) >= value)
        return next(reached, len(values) + 1)

    def _result(self, stage: str) -> EvalResult:
        results: dict[str, EvalResult] = {one.stage: one.eval for one in read_report(self.path).stages}
        if stage not in results:
            raise DataError(f"{self.path} has no evaluation after {stage}; delete it, and start the claim again")
        return results[stage]


def _named(numbers: Mapping[str, Any], name: str, path: Path) -> float:
    if name not in numbers:
        raise DataError(f"{path} has no {name}{nearest(name, numbers)}; mend the measure in {CLAIM_FILE}")
    return float(numbers[name])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    check: str
    """Check in words."""
    value: float
    """Mean over the seeds."""
    per_seed: tuple[float, ...]
    interval: Interval | None
    """95 % interval of a paired difference; None for other checks."""
    holds: bool


def judge(check: ClaimCheck, runs: Mapping[str, Sequence[EvaluatedRun]]) -> Verdict:
    """Return whether a check holds, by the runs of each name, one per seed.

    Raises:
        DataError: a run lacks the measure.
    """
    first, second = runs[check.of], runs.get(check.minus or check.over, ())
    if check.minus and check.reaches is None:
        return _paired(check, first, second)
    values = tuple(_value(check, one) for one in first)
    if check.over:
        others = tuple(_value(check, one) for one in second)
        value = fmean(values) / fmean(others) if any(others) else float("inf")
        per_seed = tuple(a / b if b else float("inf") for a, b in zip(values, others, strict=True))
    elif check.minus:
        per_seed = tuple(a - _value(check, b) for a, b in zip(values, second, strict=True))
        value = fmean(per_seed)
    else:
        value, per_seed = fmean(values), values
    return Verdict(str(check), value, per_seed, None, _keeps(check, value, value))


def _value(check: ClaimCheck, run: EvaluatedRun) -> float:
    if check.reaches is not None:
        return float(run.iterations_until(check.measure, check.reaches))
    return run.mean(check.measure, check.stage)


def _paired(check: ClaimCheck, first: Sequence[EvaluatedRun], second: Sequence[EvaluatedRun]) -> Verdict:
    """Compare two runs task by task, seed by seed."""
    differences: list[list[float]] = []
    for one, other in zip(first, second, strict=True):
        others = other.scores(check.measure, check.stage)
        ours = one.scores(check.measure, check.stage)
        differences.append([value - others[task] for task, value in ours.items() if task in others])
        if not differences[-1]:
            raise DataError(
                f"{one.path} and {other.path} have no evaluated task in common; delete both and start again"
            )
    interval = bootstrap(np.asarray([value for seed in differences for value in seed], np.float64))
    low, high = (interval.low, interval.high) if check.counts == "interval" else (interval.mean, interval.mean)
    return Verdict(str(check), interval.mean, tuple(map(fmean, differences)), interval, _keeps(check, low, high))


def _keeps(check: ClaimCheck, low: float, high: float) -> bool:
    if check.at_least is not None:
        return low >= check.at_least
    return check.at_most is not None and high <= check.at_most


# -- runs of the claims ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimedRun:
    """Run of a claim with one seed: a process of ``ragr1 train``, which continues where it was stopped."""

    name: str
    run_dir: Path
    recipe: str
    keys: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """Words after ``ragr1``."""
        return ("train", self.recipe, *self.keys, "--run-dir", str(self.run_dir), "--auto-resume")

    def check(self, checks: Sequence[ClaimCheck]) -> None:
        """Refuse keys, names of classes and measures that cannot be, and a folder that holds another run.

        Raises:
            UserError: it says what is wrong, without the name of the claim.
        """
        config = AlgorithmConfig.from_recipe(self.recipe).override(list(self.keys)).freeze()
        check_classes(config)
        own = check_environment(config.environment.env).measures
        for check in checks:
            known = sorted(
                {*(SCORES if check.minus else map(attrgetter("name"), fields(EvalResult))), *own} - {"measures"}
            )
            is_named = check.reaches is None and self.name in (check.of, check.minus, check.over)
            if is_named and check.measure not in known:
                raise ConfigError(f"there is no measure {check.measure}{nearest(check.measure, known)}")
        if holds_run(store := find_store(self.run_dir)):
            as_started(store, open_run_directory(store), config)

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
        """Plan the runs below ``root``, as ``METHOD/seed0/NAME``, and check all of them before the first is made.

        Raises:
            UserError: as in ``read_claim``, or a run cannot be made, or its folder holds another run.
        """
        claim, method = read_claim(method), Path(method).resolve().name
        override({}, overrides)  # a wrong word is not the claim's
        runs = [run for seed in range(claim.seeds) for run in _planned(claim, seed, root / method, overrides)]
        for run in runs:
            try:
                run.check(claim.checks)
            except UserError as error:
                raise ConfigError(f"{CLAIM_FILE} of {method}, run {run.name}: {error}") from error
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
    run_dirs: dict[str, Path] = {}
    for name, plan in claim.runs.items():
        values = plan.overrides(run_dirs)
        if "{" in (model := f"{values.get('policy.model', '')}"):
            raise ConfigError(
                f"{CLAIM_FILE} of {folder.name}, run {name}: policy.model: got {model}, expected a model or an earlier "
                f'run such as "{{{next(iter(claim.runs))}}}", in quotes'
            )
        keys = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        run_dirs[name] = folder / f"seed{seed}" / name
        yield ClaimedRun(name, run_dirs[name], plan.recipe, (*keys, *overrides, f"debugging.seed={seed}"))


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
    """Make a run and return its exit status; an interrupt is passed on to it, and its checkpoint is awaited.

    The run is told to end, too, if this process is killed.
    """
    command = [sys.executable, "-m", "ragr1_actors", *run.command]
    libc = ctypes.CDLL(None)  # loaded before the fork

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    # a new session: Ctrl-C in a terminal would reach the run twice, and the second would prevent a checkpoint
    with subprocess.Popen(command, stdout=output, start_new_session=True, preexec_fn=end_with_parent) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
