"""``ragr1 scale``: other sizes for the fleets of a live run, from another shell."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragr1_actors.cli import print_line
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.process.advice import advised

if TYPE_CHECKING:
    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.runs.scale_order import ScaleAnswer
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

    Raises:
        UserError: the run does not answer in time; the order is then withdrawn.
    """
    from ragr1_actors.runs.scale_order import ScaleOrder, read_answer, withdraw_order, write_order

    order = ScaleOrder.model_validate({"order_id": secrets.token_hex(8), **content})
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
    return answer
