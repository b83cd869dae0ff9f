"""Command ``ragr1``: training, the inspection of runs, and one sentence for every error of a user."""

from __future__ import annotations

import errno
import importlib
import shlex
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ragr1_actors.cli import (
    START_AGAIN,
    Group,
    JsonLinesOption,
    JsonOption,
    ask,
    chaos,
    claims,
    console,
    doctor,
    evaluate,
    index,
    print_error,
    print_json,
    print_line,
    print_state,
    simulate,
    submit,
    view,
)
from ragr1_actors.core.errors import ConfigError, DataError, RagR1Error, UserError, advised, shortened
from ragr1_actors.core.process.imports import installed_version
from ragr1_actors.core.process.interrupts import InterruptGuard, ended_during_imports, exit_status

if TYPE_CHECKING:  # torch, Ray and transformers are loaded inside the commands
    from envs.checker import Check
    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.runs.storage.store import RunStore


class Commands(Group):
    """Commands of ``ragr1``. An interrupt of any prints one line, and gives the exit status of its signal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer does not export the base of its Context
        """Refuse characters that no path, address or text can hold; only a program can give them."""
        if wrong := [word for word in args if "\0" in word]:
            raise UserError(f"got {shortened(repr(wrong[0]))}, expected words without the character NUL; leave it out")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with exit_on_interrupt(START_AGAIN), _paths_refused(), InterruptGuard():
            return super().invoke(ctx)


_UNUSABLE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EROFS)
"""Errors of the system for a path that a person has to change."""


@contextmanager
def _paths_refused() -> Iterator[None]:
    """Print one sentence for a path that the system refuses, wherever a command first uses it.

    Commands use a path at different times, and each may get one that is too long for a name.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE or error.filename is None:
            raise
        raise DataError(
            f"{shortened(str(error.filename))} cannot be used: {error.strerror}; give another path"
        ) from error


@contextmanager
def exit_on_interrupt(advice: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line that ends with ``advice``, and end the command."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print_error(f"interrupted; {advice}", style="default")
        raise typer.Exit(exit_status(interrupt)) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(index.app, name="index")


def _print_version(is_asked: bool) -> None:
    if not is_asked:
        return
    checkout = f"not installed: the code in {Path(__file__).parents[2]}"  # on the path, as in a submitted job
    print_line(installed_version("ragr1-actors") or checkout)
    raise typer.Exit


@app.callback()
def show_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models to reason and search with reinforcement learning."""


RunDirOption = Annotated[
    str | None,
    typer.Option("--run-dir", help="Directory or URI (s3://...) of the run; default: runs/RECIPE-DATE-TIME."),
]

ProfileOption = Annotated[
    int, typer.Option("--profile", min=0, help="Iterations of RL to profile, after the first one; 0 profiles none.")
]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    run_dir: RunDirOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --run-dir, by the same recipe; only learners.key=value may be changed.",
        ),
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Continue the run in --run-dir if it holds one, else start it there.")
    ] = False,
    profile: ProfileOption = 0,
) -> None:
    """Train a policy: supervised fine-tuning to learn the format, then reinforcement learning to learn to search."""
    with ended_during_imports(START_AGAIN):
        from cluster.submit import stop_warning
        from ragr1_actors.core.disk.files import INDEX, POLICY
        from ragr1_actors.planning.fit import check_gpus
        from ragr1_actors.planning.preflight import check_names, check_services
        from ragr1_actors.runs.run_directory import (
            holds_run,
            open_run_directory,
            refuse_last_release,
            removed_if_unused,
        )
        from ragr1_actors.runs.storage.store import find_store
        from ragr1_actors.training.algorithm_config import AlgorithmConfig

    if warning := stop_warning():
        print_error(f"warning: {warning}", "yellow")
    if (resume or auto_resume) and run_dir is None:
        option = "--resume" if resume else "--auto-resume"
        raise UserError(f"{option} needs --run-dir, the directory that the run printed when it started")
    store = find_store(run_dir or f"runs/{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    if resume or (auto_resume and holds_run(store)):
        config = open_run_directory(store)
        if (store.path / "report.json").exists():
            print_line(f"{store} is finished; see it with: {advised('report', str(store))}")
            return
        refuse_last_release(store)
        config = _continued(store, config, recipe, overrides or [], is_same=not resume)
        check_names(config, has_index=store.bring(INDEX).is_dir(), has_policy=store.bring(POLICY).is_dir())
        check_gpus(config)
        config = check_services(config, store)
        cleaned: AbstractContextManager[None] = nullcontext()
        words: tuple[str, ...] = ()
    else:
        config = AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze()
        config, cleaned, words = _begin(config, store, profile), removed_if_unused(store), (recipe, *(overrides or []))
    lasts = run_dir is not None and (store.remote is not None or store.path.is_absolute())
    advice = how_to_continue(recipe, str(store), lasts=lasts, repeats=resume or auto_resume)
    with exit_on_interrupt(advice), cleaned:
        console.print(describe_start(recipe, config, str(store)))
        _run(config, store, advice, profile, words)
    print_line(f"try: {advised('ask', str(store), _question(store))}")


def _continued(store: RunStore, stored: RunConfig, recipe: str, overrides: list[str], *, is_same: bool) -> RunConfig:
    """Return the configuration with which a run continues; ``is_same``: recipe and overrides are as at its start."""
    from ragr1_actors.runs.run_directory import change_learners, check_recipe, start_again
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    if is_same:
        return start_again(store, stored, AlgorithmConfig.from_recipe(recipe).override(overrides).freeze())
    if note := check_recipe(store, stored, recipe):
        print_error(f"warning: {note}", "yellow")
    return change_learners(store, stored, overrides)


def _question(store: RunStore) -> str:
    """Return a question for the run."""
    try:
        return evaluate.example_question(store.path)
    except DataError as error:  # the run is complete all the same
        print_error(f"note: {error}", style="yellow")
        return evaluate.NO_EXAMPLE


def how_to_continue(recipe: str, run_dir: str, *, lasts: bool, repeats: bool) -> str:
    """Return the advice of a run when it is interrupted.

    Args:
        recipe: recipe as given.
        run_dir: path or URI of the run.
        lasts: whether ``run_dir`` still exists after the job, if the run is a job.
        repeats: whether the same command continues the run.
    """
    from cluster.submit import is_job

    if not is_job():
        return f"go on with: {advised('train', recipe, '--run-dir', run_dir, '--resume')}"
    if not lasts:
        return (
            f"{run_dir} is in the job's folder, which Ray deletes; submit it with --run-dir s3://bucket/runs/mine or "
            "an absolute path that all nodes see, and it can go on"
        )
    options = "" if repeats else f" with {shlex.join(['--run-dir', run_dir])} --auto-resume"
    return f"submit the same command again{options}, and the run goes on"


for command in (
    chaos.scale,
    simulate.plan,
    simulate.simulate,
    submit.submit,
    evaluate.evaluate,
    ask.ask,
    ask.serve,
    evaluate.select,
    claims.recipes,
    claims.new,
    claims.claims,
    view.view,
    evaluate.rescore,
):
    app.command()(command)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run directory or URI.")],
    as_json: JsonOption = False,
    as_html: Annotated[
        bool, typer.Option("--html", help="Write report.html instead; the run may be under way.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file of --html; default: RUN/report.html, of a URI ./report.html.")
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Do as --html, and open the page in a browser.")] = False,
) -> None:
    """Print the report of a finished run, or write its page of charts at any time."""
    from ragr1_actors.core.disk.json_files import read_json
    from ragr1_actors.runs.report import REPORT_JSON, read_report, render_table
    from ragr1_actors.runs.run_directory import open_run_directory
    from ragr1_actors.runs.storage.store import find_store

    as_html = as_html or is_opened
    if (as_html and as_json) or (out is not None and not as_html):
        raise ConfigError("--html excludes --json, and --out is the file of --html; give --html alone or with --out")
    store = find_store(run)
    config = open_run_directory(store)
    if as_html:
        page = _write_page(store, config, out)
        has_browser = is_opened and webbrowser.open(page.as_uri())
        print_line(str(page) if has_browser else f"open {page} in a browser")
        return
    found = read_report(store.path)
    if as_json:
        print_json(read_json(store.path / REPORT_JSON))
    else:
        console.print(render_table(found))


def _write_page(store: RunStore, config: RunConfig, out: Path | None) -> Path:
    """Write the page of a run and return its path."""
    from cluster.storage import is_uri
    from ragr1_actors.pages.report.page import write_page
    from ragr1_actors.runs.report import REPORT_HTML, REPORT_JSON, read_report

    path = (out or (Path(REPORT_HTML) if is_uri(str(store)) else store.path / REPORT_HTML)).absolute()
    if path.exists() and not path.is_file():  # a device would be replaced
        raise DataError(f"{shortened(str(path))} is no regular file; choose another --out")
    report = read_report(store.path) if (store.path / REPORT_JSON).is_file() else None
    try:
        write_page(path, Path(str(store).partition("?")[0]).name, config, store.path, report)
    except OSError as error:
        raise DataError(f"{shortened(str(path))} cannot be written ({error.strerror}); choose another --out") from error
    return path


@app.command("check-env")
def check_env(
    name: Annotated[str, typer.Argument(help="A class my_module:MyEnv, or a known name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="environment.key=value ...")] = None,
) -> None:
    """Check a custom environment: one small episode over made-up evidence; exit status 1 if a check fails."""
    import asyncio

    from envs.checker import check_env as play
    from ragr1_actors.planning.preflight import check_environment
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    settings = AlgorithmConfig().override(overrides or []).freeze().environment
    _print_checks(asyncio.run(play(check_environment(name), settings)))


@app.command()
def check(
    kind: Annotated[
        Literal["reward", "source", "strategy", "curriculum", "tool", "agent"],
        typer.Argument(help="What is checked: reward, source, strategy, curriculum, tool or agent."),
    ],
    name: Annotated[str, typer.Argument(help="my_module:MyName, a known name, or what environment.agent takes.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Check a part that you wrote, before a run; exit status 1 if a check fails."""
    import asyncio

    from envs.checker import check_reward, check_source, check_tool
    from ragr1_actors.planning.agent_trial import try_agent
    from ragr1_actors.planning.preflight import check_curriculum, check_strategy, try_curriculum
    from ragr1_actors.rollout.groups import try_strategy
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    if kind != "agent" and ("=" in name or name.startswith("{")):
        raise UserError(f"got {name} where the name belongs; put it first: ragr1 check {kind} my_module:MyName {name}")
    keys = {
        "reward": "environment.reward",
        "strategy": "env_runners.strategy",
        "curriculum": "environment.curriculum",
        "agent": "environment.agent",
    }
    named = [f"{keys[kind]}={name}"] if kind in keys else []
    config = AlgorithmConfig().override([*(overrides or []), *named]).freeze()
    checks: dict[str, Callable[[], list[Check]]] = {
        "reward": lambda: asyncio.run(check_reward(config.environment)),
        "source": lambda: check_source(name, config.environment),
        "strategy": lambda: asyncio.run(try_strategy(check_strategy(config.env_runners))),
        "curriculum": lambda: try_curriculum(check_curriculum(config.environment)),
        "tool": lambda: asyncio.run(check_tool(name, config.environment)),
        "agent": lambda: try_agent(config),
    }
    _print_checks(checks[kind]())


def _print_checks(checks: Sequence[Check]) -> None:
    for found in checks:
        print_state("wrong" if found.problem else "ok", found.name, found.problem)
    if any(found.problem for found in checks):
        raise typer.Exit(1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="all, fast, or one such as scale; a wrong name lists them.")],
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


app.command()(doctor.doctor)
app.command()(chaos.chaos)


def describe_start(recipe: str, config: RunConfig, run_dir: str) -> Panel:
    """Return the first output of ``ragr1 train``: the keys that differ from the defaults, and the run directory."""
    rows = Table.grid(padding=(0, 2))
    for key, value in config.changes().items():
        rows.add_row(key, Text(shortened(" ".join(str(value).split()) or '""', 60)))
    rows.add_row("")
    rows.add_row("run directory", Text(run_dir, overflow="fold"))
    rows.add_row("all keys", Text(f"{run_dir.partition('?')[0]}/config.yaml", overflow="fold"))
    return Panel(rows, title=Text(f"{recipe}: keys that differ from the defaults"), title_align="left", expand=False)


def main() -> None:
    """Run the command line. A ``UserError`` or a full disk prints one sentence and exits with status 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        print_error(f"error: {error}")
        sys.exit(2)
    except RagR1Error as error:
        print_error(f"failed: {error}")
        sys.exit(1)
    except OSError as error:
        from ragr1_actors.core.disk.files import is_no_room

        if not is_no_room(error):
            raise
        print_error(f"error: no room on the disk to write {error.filename or 'a file'}; free some and try again")
        sys.exit(2)


def _begin(config: RunConfig, store: RunStore, num_profiled: int) -> RunConfig:
    """Check the configuration of a new run, and make its directory; return the configuration."""
    from cluster.placement_plan import actor_demands
    from cluster.session import worker_forks
    from ragr1_actors.planning.fit import check_gpus
    from ragr1_actors.planning.preflight import check_names, check_room, check_services, fit_micro_batch
    from ragr1_actors.runs.run_directory import create_run_directory, with_newest_policy

    num_iterations = config.training.num_iterations
    if num_profiled and num_profiled >= num_iterations:
        raise UserError(
            f"got --profile {num_profiled}, but the run has {num_iterations} iterations, of which the first is not "
            "profiled; give fewer"
        )
    if actor_demands(config, has_index=True):
        worker_forks.start_early()
    config = with_newest_policy(config)
    check_names(config)
    check_gpus(config)
    config = check_services(config)
    if (chosen := fit_micro_batch(config, Path.cwd())) is not config:
        config = chosen
        console.print(f"learners.micro_batch_tokens={config.learners.micro_batch_tokens}, the largest that fits here")
    for warning in check_room(config, Path.cwd()):
        print_error(f"warning: {warning}", "yellow")
    create_run_directory(config, store)
    return config


def _run(config: RunConfig, store: RunStore, advice: str, num_profiled: int, words: Sequence[str]) -> None:
    """Run to the end and print the table of the run; ``advice`` is printed at an interrupt before its start."""
    with ended_during_imports(advice):
        from ragr1_actors.training.training_run import TrainingRun

    run = TrainingRun(config, store, console, num_profiled=num_profiled, words=words)
    run.describe_end(run.execute())
