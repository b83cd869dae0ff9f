"""``ragr1 plan``: the needs of a recipe on each machine, in bytes and seconds, before anything starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragr1_actors.cli import JsonOption, console, print_json, print_line
from ragr1_actors.core.errors import UserError

if TYPE_CHECKING:
    from ragr1_actors.planning.plan import Machine, Plan

GIB = 2**30


def plan(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Passages of the index; default: those of retrieval.index or .corpus.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Plan for this machine; the options below are ignored.")] = False,
    gpu: Annotated[str, typer.Option(help="a100-40gb, a100-80gb, h100-80gb, h200-141gb.")] = "a100-80gb",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per machine.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores per machine.")] = 96,
    memory: Annotated[int, typer.Option(min=1, help="GiB of memory per machine.")] = 1000,
    shm: Annotated[int | None, typer.Option(min=1, help="GiB of /dev/shm; default: half of --memory.")] = None,
    disk: Annotated[int, typer.Option(min=1, help="GiB of free disk per machine.")] = 2000,
    machines: Annotated[int, typer.Option(min=1, help="Number of equal machines.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Compute the memory and time that a recipe needs, and what does not fit. Exit status 1 if something does not."""
    from ragr1_actors.core.resolve import named_folder
    from ragr1_actors.planning.micro_batch import choose_micro_batch
    from ragr1_actors.planning.plan import GPUS, Machine, count_passages, make_plan, this_machine
    from ragr1_actors.planning.preflight import check_classes, check_tokenizer
    from ragr1_actors.runs.run_directory import with_newest_policy
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    config = with_newest_policy(AlgorithmConfig.from_recipe(recipe).override(overrides or []).freeze())
    check_classes(config)
    folder = named_folder(config.policy.model)
    if folder is not None and (folder / "tokenizer_config.json").is_file():  # the sizes alone are enough for a plan
        check_tokenizer(config)
    if here:
        machine = this_machine(Path.cwd())
    elif gpu in GPUS:
        sizes = (memory * GIB, (shm or max(1, memory // 2)) * GIB, disk * GIB)
        machine = Machine(GPUS[gpu] if gpus else None, gpus, cpus, *sizes, machines)
    else:
        raise UserError(f"--gpu: got {gpu!r}, expected one of {', '.join(GPUS)}")
    num_passages = passages or count_passages(config)
    config = choose_micro_batch(config, machine, num_passages)
    found = make_plan(config, machine, num_passages)
    if as_json:
        print_json({"machine": asdict(machine), **asdict(found), "problems": found.problems})
    else:
        console.print(render_plan(found, machine))
        for problem in found.problems:
            print_line(f"does not fit: {problem}")
    if found.problems:
        raise typer.Exit(1)


def render_plan(plan: Plan, machine: Machine) -> Table:
    """Return a table of every memory and its contents, and of the seconds of an iteration."""
    gpus = f"{machine.num_gpus} x {machine.gpu.name}" if machine.gpu is not None else "no GPU"
    title = f"{machine.num_machines} x ({gpus}, {machine.num_cpus} CPUs); the actors reserve {plan.num_gpus:g} GPUs"
    table = Table("", "GiB", "of", title=title, title_justify="left")
    for need in plan.needs:
        state = "" if need.fits else "  does not fit"
        table.add_row(
            f"[bold]{need.place}[/bold]{state}", f"{need.num_bytes / GIB:,.1f}", f"{need.available / GIB:,.1f}"
        )
        for name, size in need.parts.items():
            if size >= GIB // 20:
                table.add_row(f"  {name}", f"{size / GIB:,.1f}", "")
        table.add_section()
    table.add_row("learners.micro_batch_tokens", f"{plan.micro_batch_tokens:,}", "")
    times = plan.times
    seconds = {"generation": times.generation_s, "search": times.search_s, "learning": times.learning_s}
    seconds["one batch of searches"] = times.batch_search_s
    for name, value in seconds.items():
        shown = f"{value:,.2f}" if value or "search" in name else "not estimated"
        table.add_row(f"{name}, s per iteration" if "batch" not in name else f"{name}, s", shown, "")
    if times.index_s:
        num_gpus = machine.num_gpus * machine.num_machines
        table.add_row(f"building the index, h on {num_gpus} GPUs", f"{times.index_s / 3600:,.2f}", "")
    return table
