"""The command line, ``ragr1``: thin functions that parse, call and print. Heavy imports happen inside them."""

from __future__ import annotations

import errno
import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragr1_actors.config import AlgorithmConfig, RunConfig, recipe_names
from ragr1_actors.errors import ConfigError, RagR1Error, UserError
from ragr1_actors.plugins import load_object
from ragr1_actors.run_directory import create_run_directory, open_run_directory

app = typer.Typer(
    help="Train language models to reason and search with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
index_app = typer.Typer(help="Build, search and measure an index.", no_args_is_help=True)
app.add_typer(index_app, name="index")

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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --run-dir.")] = False,
) -> None:
    """Train a policy: SFT to learn the format, then RL to learn to search."""
    if resume:
        if run_dir is None:
            raise UserError("--resume needs --run-dir, the directory that the run printed when it started")
        if overrides:
            raise UserError("a resumed run keeps its configuration; leave the section.key=value arguments out")
        config = open_run_directory(run_dir)
        if (run_dir / "report.json").exists():
            _console.print(f"{run_dir} is finished; see it with: ragr1 report {run_dir}", soft_wrap=True)
            return
    else:
        config = AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze()
        _check_names(config)
        run_dir = run_dir or _new_run_dir(recipe)
        create_run_directory(config, run_dir)
    from ragr1_actors.training_run import TrainingRun  # torch and Ray take seconds; what is wrong is said before

    _console.print(config.to_yaml(), style="dim", highlight=False)
    _console.print(f"run directory {run_dir}", soft_wrap=True, highlight=False)
    run = TrainingRun(config, run_dir, _console)
    try:
        report = run.execute()
    except KeyboardInterrupt:
        _errors.print(f"interrupted; go on with: ragr1 train {recipe} --run-dir {run_dir} --resume", soft_wrap=True)
        raise typer.Exit(130) from None
    run.describe_end(report)
    _console.print(f'try: ragr1 ask {run_dir} "{_example_question(run_dir)}"', soft_wrap=True, highlight=False)


def _check_names(config: RunConfig) -> None:
    """Say at once which name in a recipe is nothing that there is; the libraries behind known ones are not imported."""
    from envs.registry import ENVS
    from envs.rewards import REWARDS
    from learners.registry import LEARNERS
    from ragr1_actors.engines.registry import ENGINES

    names: list[tuple[str, str, Mapping[str, Any]]] = [
        ("environment.env", config.environment.env, ENVS),
        ("environment.reward", config.environment.reward, REWARDS),
        ("env_runners.engine", config.env_runners.engine, ENGINES),
        ("training.algorithm", config.training.algorithm, LEARNERS),
    ]
    for key, name, known in names:
        if name in known:
            continue
        try:
            load_object(name, known)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error


@app.command()
def claims(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ..., for both recipes")] = None,
    run_dir: RunDirOption = None,
) -> None:
    """Check RAG-R1's claim at toy scale: several queries a turn against one, EM and search rounds."""
    from ragr1_actors.claims import compare, render_comparison
    from ragr1_actors.training_run import TrainingRun

    base = run_dir or _new_run_dir("claims")
    reports = []
    for recipe in ("quickstart", "quickstart_sq"):
        config = AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze()
        _check_names(config)
        create_run_directory(config, base / recipe)
        run = TrainingRun(config, base / recipe, _console)
        try:
            reports.append(run.execute())
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        run.describe_end(reports[-1])
    comparison = compare(*reports)
    _console.print(render_comparison(comparison))
    if not comparison.holds:
        raise typer.Exit(1)


@app.command()
def ask(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    as_json: JsonOption = False,
) -> None:
    """Answer a question with the newest policy of a run, its searches shown."""
    from ragr1_actors.asking import ask as ask_policy
    from ragr1_actors.asking import render_trajectory

    trajectory = ask_policy(run, question)
    if as_json:
        rounds = [{"queries": turn.queries, "text": turn.completion_text} for turn in trajectory.turns]
        _print_json({"answer": trajectory.answer, "stop_reason": trajectory.stop_reason, "turns": rounds})
    else:
        _console.print(render_trajectory(trajectory))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="rollout")],
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
    for name in recipe_names():
        _console.print(name)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")], as_json: JsonOption = False) -> None:
    """Print the report of a finished run."""
    from ragr1_actors.report import read_report, render_table

    open_run_directory(run)
    found = read_report(run)
    if as_json:
        sys.stdout.write((run / "report.json").read_text(encoding="utf-8"))
    else:
        _console.print(render_table(found))


@index_app.command("build")
def index_build(
    corpus: Annotated[Path, typer.Option("--corpus", help="A corpus file.")],
    out: Annotated[Path, typer.Option("--out", help="The index directory to make.")],
    index_type: Annotated[str, typer.Option("--type", help="flat")] = "flat",
    encoder: Annotated[str, typer.Option("--encoder", help="static, a folder or a hub name.")] = "static",
) -> None:
    """Index a corpus."""
    from retrieval.build import build_index, index_info
    from retrieval.corpus import read_passages

    build_index(read_passages(corpus), out, encoder=encoder, index_type=index_type)
    info = index_info(out)
    _console.print(f"{info['count']:,} passages, {info['bytes'] / 1e6:,.1f} MB in {out}", soft_wrap=True)


@index_app.command("info")
def index_info_command(index: Annotated[Path, typer.Argument(help="An index directory.")]) -> None:
    """Print an index's manifest."""
    from retrieval.build import index_info

    _print_json(index_info(index))


@index_app.command("search")
def index_search(
    index: Annotated[Path, typer.Argument(help="An index directory.")],
    queries: Annotated[list[str], typer.Argument(help="One or more queries.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Passages a query.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Search an index."""
    from dataclasses import asdict

    from retrieval.retriever import LocalRetriever

    results = LocalRetriever(index).search_batch(queries, k)
    if as_json:
        _print_json([{"query": q, "passages": [asdict(p) for p in ps]} for q, ps in zip(queries, results, strict=True)])
        return
    for query, passages in zip(queries, results, strict=True):
        _console.print(f"{query}", style="bold", markup=False)
        for passage in passages:
            _console.print(f"  {passage.score:.3f}  {passage.title}: {passage.text}", markup=False, highlight=False)


@index_app.command("eval")
def index_eval(
    index: Annotated[Path, typer.Argument(help="An index directory.")],
    tasks: Annotated[Path, typer.Option("--tasks", help="A task file with supporting facts.")],
    as_json: JsonOption = False,
) -> None:
    """Measure recall at k of the questions' supporting passages."""
    from envs.tasks import load_tasks
    from retrieval.build import evaluate_index

    loaded = load_tasks(tasks)
    recall = evaluate_index(index, loaded.tasks)
    if as_json:
        _print_json(recall)
    else:
        _console.print(str(loaded.report), soft_wrap=True, highlight=False)
        for name, value in recall.items():
            _console.print(f"{name:>10}  {value:.3f}", highlight=False)


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
    from ragr1_actors.asking import example_question

    return example_question(run_dir)


if __name__ == "__main__":
    main()
