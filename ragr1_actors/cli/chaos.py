"""``ragr1 scale`` and ``chaos``: other sizes of the fleets of a live run, and faults in it, from another shell."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragr1_actors.cli import JsonOption, console, print_error, print_json, print_line
from ragr1_actors.core.errors import RunDirectoryError, UserError, advised

if TYPE_CHECKING:
    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.lab.chaos import Deed, Tally
    from ragr1_actors.runs.report import RunReport
    from ragr1_actors.runs.run_directory import ScaleAnswer
    from ragr1_actors.runs.storage.store import RunStore

_LOOK_INTERVAL_S = 0.2
SizeOption = Annotated[int | None, typer.Option(min=1, max=10_000, help="Replicas from now on.")]


def scale(
    run: Annotated[str, typer.Argument(help="The directory or URI of a run that is under way.")],
    runners: SizeOption = None,
    retrievers: SizeOption = None,
    encoders: SizeOption = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let all fleets follow their load again.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="How long to wait for the run.")] = 120.0,
) -> None:
    """Change how many env runners, retrievers and encoders a live run has; the sizes hold until --auto."""
    from ragr1_actors.runs.storage.store import find_store

    sizes = {"runners": runners, "retrievers": retrievers, "encoders": encoders}
    chosen = {name: size for name, size in sizes.items() if size is not None}
    if bool(chosen) == auto:
        raise UserError("got no size or --auto with one; give --runners, --retrievers or --encoders, or only --auto")
    store = find_store(run)
    check_under_way(store)
    answer = give_order(store, {"sizes": chosen}, timeout_s)
    if answer.is_refused:
        raise UserError(f"the run refused: {answer.message}")
    print_line(answer.message if auto else f"{answer.message}; until {advised('scale', str(store), '--auto')}")


def check_under_way(store: RunStore) -> RunConfig:
    """Return the configuration of a live run; raises ``UserError`` if there is no run, or it has ended."""
    from ragr1_actors.runs.run_directory import open_run_directory

    config = open_run_directory(store)
    if (store.path / "report.json").exists():
        raise UserError(f"{store} is finished; give a run that is under way")
    return config


def give_order(store: RunStore, content: dict[str, Any], timeout_s: float) -> ScaleAnswer:
    """Give a live run an order, a ``ScaleOrder`` without its id, and return the answer.

    Sizes of earlier orders stay, for a run that is continued; a kill is carried out once.

    Raises:
        UserError: the run does not answer in time; the order is then withdrawn.
    """
    from ragr1_actors.runs.run_directory import (
        ScaleOrder,
        order_in_force,
        read_answer,
        read_order,
        withdraw_order,
        write_order,
    )

    before = order_in_force(store)
    order = ScaleOrder.model_validate({"order_id": secrets.token_hex(8), **content})
    if before is not None and order.sizes:
        order = order.model_copy(update={"sizes": before.sizes | order.sizes})
    write_order(store, order)
    deadline = time.monotonic() + timeout_s
    try:
        while (answer := read_answer(store)) is None or answer.order_id != order.order_id:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no answer from the run in {store} within {timeout_s:g} s, and the order is withdrawn: it is not "
                    "under way, still starts, or writes a checkpoint; try again when its progress line moves"
                )
            time.sleep(_LOOK_INTERVAL_S)
    except BaseException:  # Ctrl-C too
        withdraw_order(store, order.order_id)
        raise
    finally:
        if before is not None and (order.kill is not None or read_order(store) is None):
            write_order(store, before)
    return answer


FLEETS = {"env runner": "runners", "retriever": "retrievers", "encoder": "encoders", "learner": "learners"}
"""Names of the fleets in an order to a live run."""


def chaos(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe (see `ragr1 recipes`), or a YAML file.", show_default=False)
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    kills: Annotated[int, typer.Option(min=0, help="Processes that are killed.")] = 20,
    hangs: Annotated[
        int, typer.Option(min=0, help="Actors that are stopped, most of them env runners while weights move.")
    ] = 6,
    flips: Annotated[
        int, typer.Option(min=0, help="Files of checkpoint, policy or index that lose a byte's bits, or are lost.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the kinds, the files and their order.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Directory of the run; default: runs/chaos-DATE-TIME.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Instead of a recipe: a run under way, also on a cluster."),
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.0, help="Seconds between two kills in a run under way.")] = 20.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before actors of a run under way are killed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train on this machine while processes are killed or hang and files are damaged.

    Exit status 1 if a task is lost or trained twice, a hang is not noticed, or a damaged file is used without a word.
    """
    if (recipe is None) == (run is None):
        raise UserError("give a recipe to train, or --run with the directory or URI of a run under way")
    if run is not None:
        _kill_actors(run, kills, seed, every_s, is_asked=not yes)
        return
    assert recipe is not None
    place = run_dir or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    if place.exists():
        raise UserError(f"{place} exists; give a new directory, or none")
    counts: dict[Deed, int] = {"kill": kills, "hang": hangs, "flip": flips}
    _train(recipe, overrides or [], counts, seed, place, as_json=as_json)


def _kinds(config: RunConfig) -> list[str]:
    """Return the kinds of actors that a run has."""
    from ragr1_actors.lab.chaos import ACTORS

    sizes = (
        config.env_runners.num_env_runners,
        config.retrieval.num_retrievers,
        config.retrieval.encoders.num_encoders,
    )
    return [kind for kind, size in zip(ACTORS, (*sizes, config.learners.num_learners), strict=True) if size]


def _kill_actors(run: str, kills: int, seed: int, every_s: float, *, is_asked: bool) -> None:
    """Order a live run to kill some of its actors; its driver and other runs are not affected."""
    from ragr1_actors.lab.chaos import ANSWER_TIMEOUT_S, LOOK_INTERVAL_S
    from ragr1_actors.runs.storage.store import find_store

    store = find_store(run)
    kinds = _kinds(check_under_way(store))
    if not kinds:
        raise UserError(f"{store} has no actors: its driver does everything")
    if is_asked:
        typer.confirm(f"kill {kills} actors ({', '.join(kinds)}) of the run in {store}?", abort=True)
    rng = random.Random(f"chaos {seed}")
    for number in range(kills):
        if number:
            time.sleep(every_s)
        order, deadline = {"kill": FLEETS[rng.choice(kinds)]}, time.monotonic() + ANSWER_TIMEOUT_S
        while (answer := give_order(store, order, ANSWER_TIMEOUT_S)).is_refused:  # it has lost the last one of a kind
            if time.monotonic() > deadline:
                raise UserError(f"the run refused: {answer.message}")
            time.sleep(LOOK_INTERVAL_S)
        print_line(f"{number + 1} of {kills}: {answer.message}")
    print_line(f"the run counts what it lost: {advised('report', run)}, once it has ended")


def _train(
    recipe: str, overrides: list[str], counts: dict[Deed, int], seed: int, place: Path, *, as_json: bool
) -> None:
    from ragr1_actors.lab.chaos import DEEDS, DRIVER, Tally, Victim, ended, schedule
    from ragr1_actors.runs.report import read_report
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    overrides = ["checkpointing.interval=1", *overrides]
    config = AlgorithmConfig.from_recipe(recipe).override(overrides).freeze()
    lengths = {"sft": config.sft.num_steps, "rl": config.training.num_iterations}
    hits = schedule(counts, [DRIVER, *_kinds(config)], lengths, seed)
    rng, tally, say = random.Random(seed), Tally(), print_error if as_json else print_line
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {place}: {error.strerror}; choose another --run-dir") from error
    patient = f"debugging.fault_tolerance.max_learner_restarts={counts['kill'] + counts['hang']}"
    victim = Victim(recipe, [*overrides, patient], place, config.debugging.fault_tolerance.hang_timeout_s)
    with ended(victim):
        for hit in hits:
            victim.wait_for(hit)
            outcome = DEEDS[hit.deed](victim, hit, rng, tally)
            if outcome is None:
                break
            say(f"{hit}{outcome}")
        status = victim.driver.wait()
    if status:
        raise UserError(
            f"the run ended with status {status} after {tally.num_hits} of {len(hits)} hits; see {victim.log}"
        )
    for kind, took_s in victim.recoveries():
        tally.back_s.setdefault(kind, []).append(took_s)
    report = read_report(place)
    if as_json:
        print_json({**asdict(tally), **asdict(report.tasks), "em": report.stages[-1].eval.em})
    else:
        console.print(_table(report, tally))
        print_line(advised("report", str(place)))
    if report.tasks.lost or report.tasks.doubled or tally.silent or tally.unnamed or tally.hangs_noticed < tally.hangs:
        raise typer.Exit(1)
    if tally.num_hits < len(hits):
        raise UserError(f"the run ended after {tally.num_hits} of {len(hits)} hits; take fewer, or a longer run")


def _table(report: RunReport, tally: Tally) -> Table:
    from ragr1_actors.lab.chaos import ACTORS, DRIVER

    title = f"{tally.kills} processes killed, {tally.hangs} stopped, {tally.flips} files damaged"
    table = Table(title=title, show_header=False)
    for name in ("issued", "trained", "failed", "skipped", "lost", "doubled"):
        table.add_row(f"tasks {name}", f"{getattr(report.tasks, name):,}")
    if tally.flips:
        table.add_row("silent", f"{tally.silent:,}")
        table.add_row("refused without a name", f"{tally.unnamed:,}")
    if tally.hangs:
        after = f", after {_means(tally.noticed_s)}" if tally.noticed_s else ""
        table.add_row("hangs noticed", f"{tally.hangs_noticed:,} of {tally.hangs:,}{after}")
    for kind in (*ACTORS, DRIVER):
        if took_s := tally.back_s.get(kind):
            table.add_row(f"{kind} back after", _means(took_s))
    table.add_row("EM", f"{report.stages[-1].eval.em:.3f}")
    return table


def _means(took_s: Sequence[float]) -> str:
    return f"{mean(took_s):.1f} s in the mean of {len(took_s)}, {max(took_s):.0f} s at most"
