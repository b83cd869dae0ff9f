"""``ragr1 rescore``: another reward for the trajectories that a run has kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ragr1_actors.cli import JsonLinesOption, print_json, print_line
from ragr1_actors.core.errors import ConfigError

_TAKEN = ("environment.reward_options", "environment.models")
"""Keys of a recipe on which a reward depends."""


def rescore(
    run: Annotated[str, typer.Argument(help="A run directory or URI.")],
    reward: Annotated[str, typer.Option("--reward", help="exact_match, token_f1, none or my_module:my_reward.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="environment.reward_options.key=value, environment.models.name=value ...")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the trajectories with the new rewards here.")] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Compute the rewards of a run's trajectories again, with another reward. Nothing is sampled."""
    from ragr1_actors.core.resolve import override, resolve
    from ragr1_actors.core.schema import TRAJECTORIES
    from ragr1_actors.evaluation.rescore import Rescored
    from ragr1_actors.evaluation.rescore import rescore as compute
    from ragr1_actors.runs.run_directory import open_run_directory
    from ragr1_actors.runs.storage.store import find_store

    store = find_store(run)
    sections = override(open_run_directory(store).model_dump(), [*(overrides or []), f"environment.reward={reward}"])
    _check_overrides(overrides or [])

    def show(found: Rescored) -> None:
        if as_json:
            print_json(asdict(found))
            return
        correlation = "-" if found.correlation is None else f"{found.correlation:.3f}"
        print_line(
            f"{found.file:<28} {found.num_trajectories:>6,} trajectories   mean {found.before:.3f} -> {found.after:.3f}"
            f"   changed {found.changed:.3f}   correlation {correlation}"
        )

    compute(resolve(sections), store.bring(TRAJECTORIES).parent, out, show)


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides without an effect; raises ``ConfigError``."""
    from ragr1_actors.core.resolve import split_assignment

    for name in (split_assignment(assignment)[0] for assignment in overrides):
        if name == "environment.reward":
            raise ConfigError("got environment.reward, which --reward replaces; leave it out")
        if ".".join(name.split(".")[:2]) not in _TAKEN:
            raise ConfigError(f"got {name}, which has no effect on rewards; leave it out")
