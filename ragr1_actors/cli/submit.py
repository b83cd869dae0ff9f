"""``ragr1 submit``: train on a Ray cluster from this machine, and follow, stop and list its jobs."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragr1_actors.cli import console, print_error, print_line
from ragr1_actors.core.credentials import refuse_credentials
from ragr1_actors.core.errors import UserError, advised
from ragr1_actors.core.process.interrupts import TerminationError
from ragr1_actors.core.process.progress_bar import is_progress

if TYPE_CHECKING:
    from cluster.submit import Job, JobClient

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
DETACHED = 130
_CLEAR_LINE = "\r\x1b[K"


def submit(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file in the working directory."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The dashboard of the cluster's head.")
    ] = DEFAULT_ADDRESS,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", help="Directory or URI of the run on the cluster; a run there is continued."),
    ] = None,
    working_dir: Annotated[
        Path, typer.Option("--working-dir", help="Directory with your modules and recipe; it is uploaded.")
    ] = Path(),
    profile: Annotated[int, typer.Option("--profile", min=0, help="See `ragr1 train --profile`.")] = 0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the job is submitted.")] = False,
    list_jobs: Annotated[bool, typer.Option("--list", help="List the jobs of the cluster.")] = False,
    logs: Annotated[str | None, typer.Option("--logs", metavar="ID", help="Follow a job from its first line.")] = None,
    stop: Annotated[
        str | None, typer.Option("--stop", metavar="ID", help="End a job; it writes a checkpoint first.")
    ] = None,
) -> None:
    """Train on a Ray cluster: upload the working directory, run `ragr1 train` there, and follow it."""
    if [recipe is not None, list_jobs, logs is not None, stop is not None].count(True) != 1:
        raise UserError("give one of these: a recipe, --list, --logs ID or --stop ID")
    from cluster.submit import JobClient, check_address, check_size

    check_address(address)
    if recipe is None:
        client = JobClient(address)
        if list_jobs:
            console.print(render_jobs(client.jobs()))
        elif stop is not None:
            start = client.num_log_chars(stop)
            _stop(client, stop)
            _follow(client, stop, address, start)
        elif logs is not None:
            _follow(client, logs, address)
        return
    arguments = train_arguments(recipe, overrides or [], run_dir, working_dir)
    if profile:
        arguments += ["--profile", str(profile)]
    check_size(working_dir, arguments[1] if Path(recipe).suffix in (".yaml", ".yml") else "")
    client = JobClient(address)
    job_id = client.submit(working_dir, arguments)
    print_line(f"submitted {job_id}; follow it with: {_command('--logs', job_id, address)}")
    if run_dir is None:
        print_line(
            "note: the run is written to runs/ in the job's folder, which Ray deletes some time after the job; "
            "--run-dir names a place that lasts"
        )
    if not no_wait:
        _follow(client, job_id, address)


def train_arguments(recipe: str, overrides: list[str], run_dir: str | None, working_dir: Path) -> list[str]:
    """Return the arguments of ``ragr1`` on the cluster, after a check of every key and value here.

    Raises:
        UserError: the recipe is not in the working directory, a key or a value is wrong, or ``run_dir`` is relative
            or a URI that cannot be read.
    """
    from cluster.storage import check_uri, is_uri
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    local = recipe
    if Path(recipe).suffix in (".yaml", ".yml"):
        path = (working_dir / recipe).resolve()
        if not path.is_relative_to(working_dir.resolve()):
            raise UserError(f"{recipe} is not in the working directory {working_dir}, which is all that is uploaded")
        local, recipe = str(path), str(path.relative_to(working_dir.resolve()))
    AlgorithmConfig.from_recipe(local).override(overrides).freeze()
    arguments = ["train", recipe, *overrides]
    if run_dir is None:
        return arguments
    refuse_credentials(run_dir, "--run-dir")
    if is_uri(run_dir):
        check_uri(run_dir)
    elif not run_dir.startswith("/"):
        raise UserError(
            f"--run-dir: got {run_dir!r}, expected an absolute path that every node of the cluster sees, or a URI such "
            "as s3://bucket/runs/mine; a relative path would lie in the job's folder, which Ray deletes"
        )
    return [*arguments, "--run-dir", run_dir, "--auto-resume"]


def render_jobs(jobs: list[Job]) -> Table:
    """Return the table of ``ragr1 submit --list``, the newest job last."""
    table = Table.grid(padding=(0, 2))
    for is_command in (False, False, False, True):  # an id that is cut cannot be copied
        table.add_column(no_wrap=not is_command, overflow="fold")
    for job in jobs:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started_s)) if job.started_s else ""
        table.add_row(job.job_id, job.status, started, Text(job.command))
    return table


class LogView:
    """Writes the log of a job as it arrives. On a terminal, a line of progress replaces the previous one."""

    def __init__(self, *, is_terminal: bool, num_chars: int = 0) -> None:
        """Write the log after its first ``num_chars`` characters to standard output."""
        self.num_chars = num_chars
        """Number of characters of the log so far."""
        self._is_terminal = is_terminal
        self._rest = ""
        self._has_progress = False

    def write(self, text: str) -> None:
        """Write the whole lines of the text, and the rest when its line is complete."""
        self.num_chars += len(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            in_place = self._is_terminal and is_progress(line)
            before = _CLEAR_LINE if self._has_progress else ""
            self._has_progress = in_place
            shown = line[: shutil.get_terminal_size().columns - 1] if in_place else f"{line}\n"
            sys.stdout.write(f"{before}{shown}")
        sys.stdout.flush()

    def close(self) -> None:
        """End an incomplete last line."""
        if self._rest or self._has_progress:
            sys.stdout.write(f"{self._rest}\n")
            sys.stdout.flush()
            self._rest, self._has_progress = "", False


def _follow(client: JobClient, job_id: str, address: str, start: int = 0) -> None:
    """Show the log of a job, from a character on, until it ends, and exit with its status; Ctrl-C asks about a stop."""
    is_stopping = False
    view = LogView(is_terminal=sys.stdout.isatty(), num_chars=start)
    while True:
        try:
            job = client.follow(job_id, view.write, start=view.num_chars)
            break
        except KeyboardInterrupt as interrupt:
            if is_stopping or isinstance(interrupt, TerminationError) or not _wants_stop():
                print_error(
                    f"the job goes on; follow it with: {_command('--logs', job_id, address)}\n"
                    f"stop it with: {_command('--stop', job_id, address)}",
                    style="default",
                )
                raise typer.Exit(DETACHED) from None
            _stop(client, job_id)
            is_stopping = True
        finally:
            view.close()
    if job.problem:
        print_error(f"failed: {job.problem}")
    print_line(f"job {job_id} {job.status.lower()}")
    if job.exit_status:
        raise typer.Exit(job.exit_status)


def _stop(client: JobClient, job_id: str) -> None:
    if client.stop(job_id):
        print_line(f"stopping {job_id}: it ends its step and writes a checkpoint first")


def _wants_stop() -> bool:
    """Ask on the terminal; without one the job continues."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return typer.confirm("\nstop the job? (no: it goes on, and this command ends)", default=False)
    except (typer.Abort, KeyboardInterrupt):
        return False


def _command(option: str, job_id: str, address: str) -> str:
    return advised("submit", option, job_id, "--address", address)
