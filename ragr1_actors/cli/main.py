"""The command line, ``ragr1``: thin functions that parse, call and print. Heavy imports happen inside them."""

from __future__ import annotations

import errno
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragr1_actors.cli import tools as tools_cli
from ragr1_actors.cli.index import index_app
from ragr1_actors.core.errors import DataError, RagR1Error, UserError
from ragr1_actors.core.resolve import recipe_descriptions
from ragr1_actors.runs.run_directory import change_learners, create_run_directory, open_run_directory
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.preflight import check_names

app = typer.Typer(
    help="Train language models to reason and search with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(index_app, name="index")
tools_cli.register(app)

_console = Console()
_errors = Console(stderr=True)

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Where the run is kept; default runs/RECIPE-TIME.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or YAML file; see `ragr1 recipes`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    run_dir: RunDirOption = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --run-dir; of overrides, it takes learners.key=value."),
    ] = False,
) -> None:
    """Train a policy: SFT to learn the format, then RL to learn to search."""
    if resume:
        if run_dir is None:
            raise UserError("--resume needs --run-dir, the directory that the run printed when it started")
        config = open_run_directory(run_dir)
        if (run_dir / "report.json").exists():
            _console.print(f"{run_dir} is finished; see it with: ragr1 report {run_dir}", soft_wrap=True)
            return
        config = change_learners(run_dir, config, overrides or [])
        check_names(config, has_index=(run_dir / "index").is_dir())
    else:
        config = AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze()
        check_names(config)
        run_dir = run_dir or _new_run_dir(recipe)
        create_run_directory(config, run_dir)
    from ragr1_actors.training.stages import (
        TrainingRun,
        exit_status,
    )  # torch and Ray take seconds; what is wrong is said before

    _console.print(config.to_yaml(), style="dim", highlight=False)
    _console.print(f"run directory {run_dir}", soft_wrap=True, highlight=False)
    run = TrainingRun(config, run_dir, _console)
    try:
        report = run.execute()
    except KeyboardInterrupt as interrupt:
        _errors.print(f"interrupted; go on with: ragr1 train {recipe} --run-dir {run_dir} --resume", soft_wrap=True)
        raise typer.Exit(exit_status(interrupt)) from None
    run.describe_end(report)
    _console.print(f'try: ragr1 ask {run_dir} "{_example_question(run_dir)}"', soft_wrap=True, highlight=False)


@app.command()
def claims(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ..., for both recipes")] = None,
    run_dir: RunDirOption = None,
) -> None:
    """Check RAG-R1's claim at toy scale: several queries a turn against one, EM and search rounds."""
    from ragr1_actors.cli.claims import compare, render_comparison
    from ragr1_actors.training.stages import TrainingRun, exit_status

    base = run_dir or _new_run_dir("claims")
    reports = []
    for recipe in ("quickstart", "quickstart_sq"):
        config = AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze()
        check_names(config)
        create_run_directory(config, base / recipe)
        run = TrainingRun(config, base / recipe, _console)
        try:
            reports.append(run.execute())
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(exit_status(interrupt)) from None
        run.describe_end(reports[-1])
    comparison = compare(*reports)
    _console.print(render_comparison(comparison))
    if not comparison.holds:
        raise typer.Exit(1)


@app.command()
def ask(
    run: Annotated[Path, typer.Argument(help="A run directory, or one of its checkpoints.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    as_json: JsonOption = False,
) -> None:
    """Answer a question with the newest policy of a run, its searches shown."""
    from ragr1_actors.cli.ask import render_trajectory
    from ragr1_actors.training.evaluation import ask as ask_policy

    trajectory = ask_policy(run, question)
    if as_json:
        rounds = [{"queries": turn.queries, "text": turn.completion_text} for turn in trajectory.turns]
        _print_json({"answer": trajectory.answer, "stop_reason": trajectory.stop_reason, "turns": rounds})
    else:
        _console.print(render_trajectory(trajectory))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="learner, retrieval or rollout")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a metric and line.")] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="METRIC", help="Measure this one.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Of each side; the median counts.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: does it run?")] = False,
) -> None:
    """Measure the project against its goals, both sides of each ratio in one run; from a checkout only."""
    benchmark = _load_benchmark(name)
    found = []
    for measurement in benchmark.run(only=only, repeats=repeats, quick=quick):
        found.append(measurement)
        if as_json:
            sys.stdout.write(measurement.to_json() + "\n")
            sys.stdout.flush()
    if not as_json:
        _console.print(importlib.import_module("benchmarks.measurement").render(found, benchmark.describe()))


@app.command()
def recipes() -> None:
    """List the recipes that ship with the project."""
    table = Table.grid(padding=(0, 2))
    for name, description in recipe_descriptions().items():
        table.add_row(name, Text(description))
    _console.print(table, highlight=False)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")], as_json: JsonOption = False) -> None:
    """Print the report of a finished run."""
    from ragr1_actors.runs.report import read_report, render_table

    open_run_directory(run)
    found = read_report(run)
    if as_json:
        sys.stdout.write((run / "report.json").read_text(encoding="utf-8"))
    else:
        _console.print(render_table(found))


def main() -> None:
    """Run the command line; what goes wrong on the user's side is one sentence and exit status 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True, highlight=False)
        sys.exit(2)
    except RagR1Error as error:
        _errors.print(f"failed: {error}", style="red", markup=False, soft_wrap=True, highlight=False)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _errors.print(
            f"error: no room on the disk to write {error.filename or 'what was asked for'}; free some and try again",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        sys.exit(2)


def _load_benchmark(name: str) -> Any:
    """Import a benchmark from the checkout that is the current folder: it is no part of what is installed."""
    if not Path("benchmarks/__init__.py").is_file():
        raise UserError(f"no benchmarks/ in {Path.cwd()}; ragr1 bench runs in the folder of a checkout of the project")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    known: dict[str, str] = importlib.import_module("benchmarks").BENCHMARKS
    if name not in known:
        raise UserError(f"got bench {name}, expected one of {', '.join(known)}")
    return importlib.import_module(known[name])


def _new_run_dir(name: str) -> Path:
    return Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def _example_question(run_dir: Path) -> str:
    """A question of the run's; the run is over and whole, whatever became of the file it stands in."""
    from ragr1_actors.cli.ask import NO_EXAMPLE, example_question

    try:
        return example_question(run_dir)
    except DataError as error:
        _errors.print(f"note: {error}", style="yellow", markup=False, soft_wrap=True, highlight=False)
        return NO_EXAMPLE


if __name__ == "__main__":
    main()
