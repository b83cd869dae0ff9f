"""Commands of ``ragr1`` that look something over: a trained policy, a custom environment, this machine."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.preflight import check_environment

_console = Console()
_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red", "wrong": "bold red"}
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``ragr1``."""
    app.command()(evaluate)
    app.command()(select)
    app.command("check-env")(check_env)
    app.command()(doctor)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run directory, or one of its checkpoints.")],
    tasks: Annotated[Path | None, typer.Option("--tasks", help="A task file; default what the run held out.")] = None,
    index: Annotated[Path | None, typer.Option("--index", help="An index directory; default the run's.")] = None,
    num_tasks: Annotated[int | None, typer.Option("--num-tasks", min=1, help="Of the first tasks only.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer tasks greedily with a trained policy and print exact match, F1 and how much it searched."""
    from ragr1_actors.training.evaluation import evaluate as evaluate_policy  # torch and transformers take seconds

    result = asdict(evaluate_policy(checkpoint, tasks=tasks, index=index, num_tasks=num_tasks))
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        shown = f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
        _console.print(f"{name:>18}  {shown}", highlight=False)


def select(
    source: Annotated[str, typer.Argument(help="A recipe, whose policy.model samples; or a run or checkpoint.")],
    tasks: Annotated[Path, typer.Option("--tasks", help="The task file to choose from.")],
    out: Annotated[Path, typer.Option("--out", help="The task file to write, JSONL.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    index: Annotated[Path | None, typer.Option("--index", help="An index directory; default the recipe's.")] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Trajectories a task.")] = 10,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Of sampling; 0 is greedy.")] = 1.2,
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Searches and the answer.")] = 11,
    max_pass_rate: Annotated[
        float,
        typer.Option("--max-pass-rate", min=0.0, max=1.0, help="Up to this share of right answers a task is hard."),
    ] = 0.5,
    easy_share: Annotated[
        float, typer.Option("--easy-share", min=0.0, max=1.0, help="Of the tasks above it that is kept.")
    ] = 0.25,
    as_json: JsonOption = False,
) -> None:
    """Keep the tasks that a policy answers sometimes, and a share of the easy ones, as RAG-R1 chose its RL data."""
    from ragr1_actors.training.selection import SelectionSettings  # torch and Ray take seconds
    from ragr1_actors.training.selection import select as select_tasks

    settings = SelectionSettings(num_samples, temperature, max_turns, max_pass_rate, easy_share)
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("sampling", total=None)
        counts = select_tasks(
            source,
            tasks,
            out,
            settings,
            overrides=overrides or [],
            index=index,
            on_task=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(counts)) + "\n")
        return
    for name, value in asdict(counts).items():
        _console.print(f"{name:>18}  {value:,}", highlight=False)
    _console.print(f"{out} holds the {counts.kept:,} tasks that are kept", soft_wrap=True, highlight=False)


def check_env(
    name: Annotated[str, typer.Argument(help="my_module:MyEnv, or a known name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="environment.key=value ...")] = None,
) -> None:
    """Look a custom environment over: one small episode over made-up evidence; exit status 1 if anything is wrong."""
    from envs.checker import check_env as check

    settings = AlgorithmConfig().override(overrides or []).freeze().environment
    checks = asyncio.run(check(check_environment(name), settings))
    for found in checks:
        _print_line("wrong" if found.problem else "ok", found.name, found.problem)
    if any(found.problem for found in checks):
        raise typer.Exit(1)


def doctor(
    with_ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Start Ray too; takes seconds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a finding and line.")] = False,
) -> None:
    """Look this machine over: packages, cores, GPUs, room; exit status 1 if something required is missing."""
    from ragr1_actors.cli.doctor import examine

    is_whole = True
    for finding in examine(with_ray):
        is_whole = is_whole and finding.state != "missing"
        if as_json:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
        else:
            _print_line(finding.state, finding.name, finding.found)
    if not is_whole:
        raise typer.Exit(1)


def _print_line(state: str, name: str, rest: str) -> None:
    line = Text(f"{state:>8}", style=_STYLES[state])
    line.append(f"  {name}", style="default")
    if rest:
        line.append(f": {rest}", style="default")
    _console.print(line, soft_wrap=True, highlight=False)
