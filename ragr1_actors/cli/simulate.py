"""``ragr1 plan`` and ``simulate``: the needs and the times of a recipe on each machine, before anything starts."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragr1_actors.cli import JsonOption, console, errors, print_json, print_line
from ragr1_actors.core.errors import UserError

if TYPE_CHECKING:
    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.lab.simulation.run import Simulation, Study
    from ragr1_actors.lab.simulation.workload import Recording, Workload
    from ragr1_actors.planning.machine import Machine
    from ragr1_actors.planning.pace import Pace
    from ragr1_actors.planning.plan import Plan

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
    from ragr1_actors.planning.machine import GPUS, Machine, this_machine
    from ragr1_actors.planning.plan import count_passages, make_plan
    from ragr1_actors.planning.preflight import check_classes, check_tokenizer, choose_micro_batch
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


BAR_WIDTH = 30
DEFAULT_GPU = "a100-80gb"
_SHOWN_BATCH = 64


def simulate(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    runners: Annotated[int | None, typer.Option(min=1, max=10_000, help="Env runners; default: the recipe's.")] = None,
    retrievers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Retriever replicas; default: the recipe's.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations, after a warm-up.")] = 4,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same result.")] = None,
    run: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Take times and trajectories from this run, a directory or URI."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of every actor: a100-40gb, a100-80gb, ...", show_default=DEFAULT_GPU)
    ] = None,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Passages of the index; default: those of retrieval.index or .corpus.")
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let both fleets follow their load, up to the sizes given.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate the loop of a recipe in virtual time: throughput, what limits it, and how many actors it needs.

    The loop, the environment, the batching of searches and the Arrow batches are those of a run. Engines, retrievers
    and learners only take time: that of `ragr1 plan`, or what a run measured.
    """
    from ragr1_actors.core.process.progress_bar import counted_bar
    from ragr1_actors.lab.simulation.run import Size, study, with_autoscaling
    from ragr1_actors.lab.simulation.workload import read_recording
    from ragr1_actors.runs.run_directory import with_newest_policy
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    if run is not None and (gpu is not None or passages is not None):
        raise UserError("--gpu, --passages: got --from, whose run has measured the times; leave them out")
    seeds = [] if seed is None else [f"debugging.seed={seed}"]
    config = with_newest_policy(AlgorithmConfig.from_recipe(recipe).override([*(overrides or []), *seeds]).freeze())
    recording = None if run is None else read_recording(run)
    if recording is None:
        pace, workload = planned(config, gpu or DEFAULT_GPU, passages)
    else:
        pace, workload = recording.pace, recording.workload
    size = Size(
        runners or max(1, config.env_runners.num_env_runners), retrievers or max(1, config.retrieval.num_retrievers)
    )
    if autoscale:
        config = with_autoscaling(config, size)
    started = time.monotonic()
    with counted_bar(errors, "simulating") as on_point:
        found = study(config, pace, workload, size, iterations, on_point)
    if as_json:
        print_json(as_data(found, pace, recording))
        return
    print_line(describe_pace(pace, recording))
    print_study(found)
    print_line(f"simulated in {time.monotonic() - started:.0f} s")


def planned(config: RunConfig, gpu: str, passages: int | None) -> tuple[Pace, Workload]:
    """Return the times of ``ragr1 plan`` for a kind of GPU, and trajectories of its mean lengths."""
    from ragr1_actors.lab.simulation.workload import DrawnWorkload
    from ragr1_actors.planning.machine import GPUS, Machine
    from ragr1_actors.planning.plan import count_passages, make_pace

    if gpu not in GPUS:
        raise UserError(f"--gpu: got {gpu!r}, expected one of {', '.join(GPUS)}")
    machine = Machine(GPUS[gpu], num_gpus=8, num_cpus=96, host_bytes=0, shm_bytes=0, disk_bytes=0)
    return make_pace(config, machine, passages or count_passages(config)), DrawnWorkload(config)


def describe_pace(pace: Pace, recording: Recording | None) -> str:
    """Return the times of the simulation, and their source."""
    engine, learner = pace.engine, pace.learner
    source = "from `ragr1 plan`"
    if recording is not None:
        source = (
            f"from {recording.num_iterations} iterations of the run ({recording.trajectories_per_s:.2f} trajectories/s)"
        )
    return (
        f"times {source}: a decode step {engine.base_s * 1000:.3g} ms and {engine.row_s * 1000:.3g} ms per row, a "
        f"prompt token {engine.prefill_s * 1000:.3g} ms, a batch of {_SHOWN_BATCH} queries "
        f"{pace.search.batch_s(_SHOWN_BATCH) * 1000:.3g} ms, learning {learner.trajectory_s * 1000:.3g} ms per "
        f"trajectory, a weight sync {learner.publish_s:.3g} s"
    )


def print_study(found: Study) -> None:
    """Print the curves, the verdict, and the sizes that are needed."""
    console.print(render_curve(found.by_runners, "runners"))
    console.print(render_curve(found.by_retrievers, "retrievers"))
    asked, needed = found.asked, found.needed
    for change in asked.resized:
        print_line(f"{change.time_s:8.0f} s  {change.fleet} {change.before} -> {change.after}: {change.reason}")
    load = asked.load
    print_line(
        f"{load.num_runners} runners, {load.num_retrievers} retrievers: "
        f"{asked.trajectories_per_s:.2f} trajectories/s, an iteration {asked.wall_s / len(asked.iterations):.1f} s"
    )
    print_line(f"limited by: {asked.verdict.limit}; {asked.verdict.advice}")
    print_line(
        f"enough for {needed.trajectories_per_s:.2f} trajectories/s: {needed.size.num_runners} runners, "
        f"{needed.size.num_retrievers} retrievers"
    )
    tasks = ", ".join(f"{count:,} {name}" for name, count in asked.tasks.items())
    print_line(f"tasks: {tasks}; record batches: {asked.num_batch_bytes / 2**20:,.0f} MiB")


def render_curve(curve: tuple[Simulation, ...], fleet: str) -> Table:
    """Return a table with bars of the throughput by the size of a fleet, ``runners`` or ``retrievers``."""
    other = "retrievers" if fleet == "runners" else "runners"
    table = Table(title=f"Throughput by {fleet}, with {_count(curve[0], other)} {other}", title_justify="left")
    for heading in (fleet, "trajectories/s", "learner waits", "retrievers busy"):
        table.add_column(heading, justify="right")
    table.add_column("limited by")
    table.add_column("")
    best = max(simulation.trajectories_per_s for simulation in curve)
    for simulation in curve:
        load = simulation.load
        table.add_row(
            f"{_count(simulation, fleet):,}",
            f"{simulation.trajectories_per_s:.2f}",
            f"{load.learner_wait:.0%}",
            f"{load.retriever_busy:.0%}",
            simulation.verdict.limit,
            "█" * max(1, round(BAR_WIDTH * simulation.trajectories_per_s / best)),
        )
    return table


def as_data(found: Study, pace: Pace, recording: Recording | None) -> dict[str, Any]:
    """Return the results as JSON."""
    return {
        "pace": {
            "engine": asdict(pace.engine),
            "batch_s": {count: pace.search.batch_s(count) for count in (1, _SHOWN_BATCH)},
            "search_overhead_s": pace.search.overhead_s,
            "learner": asdict(pace.learner),
        },
        "recorded_trajectories_per_s": None if recording is None else recording.trajectories_per_s,
        "asked": point(found.asked) | {"tasks": found.asked.tasks, "batch_bytes": found.asked.num_batch_bytes},
        "needed": asdict(found.needed.size),
        "by_runners": [point(simulation) for simulation in found.by_runners],
        "by_retrievers": [point(simulation) for simulation in found.by_retrievers],
    }


def point(simulation: Simulation) -> dict[str, Any]:
    """Return a point of a curve as JSON."""
    count = len(simulation.iterations)
    names = ("sample_s", "learn_s", "publish_s", "iteration_s", "lag", "num_stale")
    return {
        **asdict(simulation.size),
        "trajectories_per_s": simulation.trajectories_per_s,
        **{name: simulation.total(name) / count for name in names},
        "load": asdict(simulation.load),
        "resized": [asdict(change) for change in simulation.resized],
        "verdict": asdict(simulation.verdict),
    }


def _count(simulation: Simulation, fleet: str) -> int:
    return simulation.size.num_runners if fleet == "runners" else simulation.size.num_retrievers
