"""Commands that inspect: ``ragr1 recipes``, ``report``, ``check-env`` and ``bench``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragr1_actors.cli.output import JsonLinesOption, JsonOption, console, print_state
from ragr1_actors.core.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the commands to ``ragr1``."""
    app.command()(recipes)
    app.command()(report)
    app.command("check-env")(check_env)
    app.command()(bench)


def recipes() -> None:
    """List the recipes that ship with the project."""
    from ragr1_actors.core.resolve import recipe_descriptions

    table = Table.grid(padding=(0, 2))
    for name, description in recipe_descriptions().items():
        table.add_row(name, Text(description))
    console.print(table, highlight=False)


def report(run: Annotated[Path, typer.Argument(help="A run directory.")], as_json: JsonOption = False) -> None:
    """Print the report of a finished run."""
    from ragr1_actors.runs.report import REPORT_JSON, read_report, render_table
    from ragr1_actors.runs.run_directory import open_run_directory

    open_run_directory(run)
    found = read_report(run)
    if as_json:
        sys.stdout.write((run / REPORT_JSON).read_text(encoding="utf-8"))
    else:
        console.print(render_table(found))


def check_env(
    name: Annotated[str, typer.Argument(help="A class my_module:MyEnv, or a known name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="environment.key=value ...")] = None,
) -> None:
    """Check a custom environment: one small episode over made-up evidence; exit status 1 if a check fails."""
    import asyncio

    from envs.checker import check_env as check
    from ragr1_actors.training.algorithm_config import AlgorithmConfig
    from ragr1_actors.training.preflight import check_environment

    settings = AlgorithmConfig().override(overrides or []).freeze().environment
    checks = asyncio.run(check(check_environment(name), settings))
    for found in checks:
        print_state("wrong" if found.problem else "ok", found.name, found.problem)
    if any(found.problem for found in checks):
        raise typer.Exit(1)


def bench(
    name: Annotated[str, typer.Argument(help="learner, retrieval or rollout")],
    as_json: JsonLinesOption = False,
    only: Annotated[str | None, typer.Option("--only", metavar="METRIC", help="Measure this metric only.")] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Runs of each side; the median counts.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure little: does the benchmark run at all?")] = False,
) -> None:
    """Measure the project against its goals, both sides of each ratio in one run; needs a checkout."""
    benchmark = _load_benchmark(name)
    found = []
    for measurement in benchmark.run(only=only, repeats=repeats, quick=quick):
        found.append(measurement)
        if as_json:
            sys.stdout.write(measurement.to_json() + "\n")
            sys.stdout.flush()
    if not as_json:
        console.print(importlib.import_module("benchmarks.measurement").render(found, benchmark.describe()))


def _load_benchmark(name: str) -> Any:
    """Import a benchmark from the current folder, which must be a checkout: benchmarks are not installed."""
    if not Path("benchmarks/__init__.py").is_file():
        raise UserError(f"no benchmarks/ in {Path.cwd()}; run ragr1 bench in the folder of a checkout of the project")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    known: dict[str, str] = importlib.import_module("benchmarks").BENCHMARKS
    if name not in known:
        raise UserError(f"got bench {name}, expected one of {', '.join(known)}")
    return importlib.import_module(known[name])
