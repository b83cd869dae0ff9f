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
from rich.text import Text

from ragr1_actors.config import AlgorithmConfig
from ragr1_actors.preflight import check_environment

_console = Console()
_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red", "wrong": "bold red"}
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``ragr1``."""
    app.command()(evaluate)
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
    from ragr1_actors.evaluating import evaluate as evaluate_policy  # torch and transformers take seconds

    result = asdict(evaluate_policy(checkpoint, tasks=tasks, index=index, num_tasks=num_tasks))
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        shown = f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
        _console.print(f"{name:>18}  {shown}", highlight=False)


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
    from ragr1_actors.doctor import examine

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
