"""``ragr1 recipes``, ``new`` and ``claims``: the methods of the project, and the check of their claims."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragr1_actors.cli import JsonLinesOption, JsonOption, console, print_error, print_json, print_line
from ragr1_actors.core.errors import UserError, advised, shortened

if TYPE_CHECKING:  # pyarrow is loaded inside the command
    from ragr1_actors.lab.claim import ClaimTest, Verdict


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that ship with the project, by method, and what each method claims."""
    from ragr1_actors.core.resolve import recipe_descriptions, recipe_methods
    from ragr1_actors.lab.claim import claim_files, read_claim

    claims = {method: read_claim(method).claim for method in claim_files()}
    descriptions = recipe_descriptions()
    rows = {
        name: {"method": method, "description": descriptions[name], "claim": claims.get(method, "")}
        for name, method in recipe_methods().items()
    }
    if as_json:
        print_json(rows)
        return
    for method in sorted({row["method"] for row in rows.values()}):
        table = Table.grid(padding=(0, 2))
        for name, row in rows.items():
            if row["method"] == method:
                table.add_row(f"  {name}", Text(row["description"]))
        console.print(Text(method or "without a method", style="bold"), end="")
        console.print(Text(f"  claims: {claims[method]}" if method in claims else ""))
        console.print(table, highlight=False)
    print_line(f"which claims were shown: docs/methods.md; put one to the test with: {advised('claims', 'METHOD')}")


def new(
    method: Annotated[str, typer.Argument(help="A method, see `ragr1 recipes`.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
) -> None:
    """Copy the recipes, the Python and the claim of a method to a folder, to begin a method of your own from."""
    from ragr1_actors.core.resolve import copy_method

    for path in copy_method(method, folder):
        description = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        print_line(f"{advised('train', str(path))}    {description}")


def claims(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD ...] [section.key=value ...]",
            help="A method, or a folder with a claim.yaml. Default: all methods.",
        ),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Where the runs are; those that are done are not made again.")
    ] = Path("runs/claims"),
    as_json: JsonLinesOption = False,
) -> None:
    """Train what the methods claim, each against its baseline; exit status 1 if a claim does not hold."""
    from ragr1_actors.lab.claim import ClaimTest, claim_files, make_runs

    overrides = [word for word in words or () if "=" in word]
    methods = [word for word in words or () if "=" not in word] or list(claim_files())
    tests = [ClaimTest.plan(method, run_dir.absolute(), overrides) for method in dict.fromkeys(methods)]
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir: {shortened(str(run_dir))} is a file; give a folder")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir: {shortened(str(run_dir))}: {error.strerror}; give another folder") from error
    _say_how_long(tests)
    holds = True
    table = Table("method", "check", "shown", "per seed", "holds", title="Claims")
    for test in tests:
        make_runs(
            test,
            lambda run: print_error(f"{run.name}: {advised(*run.command)}", style="default"),
            as_errors=as_json,
        )
        for verdict in test.verdicts():
            holds = holds and verdict.holds
            if as_json:
                print_json({"method": test.method, **asdict(verdict)})
            per_seed = ", ".join(f"{value:.3f}" for value in verdict.per_seed)
            shown = "yes" if verdict.holds else "no"
            table.add_row(test.method, verdict.check, _shown(verdict), per_seed, shown)
    if not as_json:
        console.print(table, highlight=False)
    if not holds:
        raise typer.Exit(1)


def _say_how_long(tests: list[ClaimTest]) -> None:
    left = [run for test in tests for run in test.runs if not run.is_done]
    hours = sum(test.hours_left for test in tests)
    if left:
        print_error(
            f"{len(left)} runs are to be made, about {hours:.1f} hours on two CPU cores; if they are interrupted, the "
            "same command goes on",
            style="default",
        )


def _shown(verdict: Verdict) -> str:
    if verdict.interval is None:
        return f"{verdict.value:.3f}"
    return f"{verdict.value:+.3f} ({verdict.interval.low:+.3f} to {verdict.interval.high:+.3f})"
