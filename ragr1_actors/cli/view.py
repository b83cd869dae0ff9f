"""``ragr1 view``: a local web page over the trajectories of a run, live while it trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragr1_actors.cli import print_line

if TYPE_CHECKING:
    from ragr1_actors.runs.storage.store import RunStore


def view(
    run: Annotated[str, typer.Argument(help="A run directory or URI.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of loopback; 0 takes a free one.")] = 0,
) -> None:
    """Show the trajectories of a run in a browser: search, filters, tokens, documents; live while it trains.

    The page listens on loopback only. An index of a tenth of the trajectories' size is kept in RUN/view. A run at a
    URI is shown as it is now.
    """
    from cluster.http import run_until_signal
    from cluster.session.leftovers import scratch_folder
    from cluster.storage import is_uri
    from ragr1_actors.core.schema import TRAJECTORIES
    from ragr1_actors.pages.viewer.parts import PARTS, Index
    from ragr1_actors.pages.viewer.server import ViewServer
    from ragr1_actors.runs.run_directory import open_run_directory
    from ragr1_actors.runs.storage.store import find_store

    store = find_store(run)
    model = open_run_directory(store).policy.model
    with scratch_folder() as folder:
        parts = folder if is_uri(run) or not _is_writable(store.path) else store.path / PARTS
        tokenizers: Callable[[], Iterable[Path]] = partial(tokenizer_folders, store, model)
        if is_uri(run):  # asked once
            tokenizers = partial(list, list(tokenizers()))
        server = ViewServer(Index(store.bring(TRAJECTORIES), parts), str(store), tokenizers, port=port)
        run_until_signal(server, lambda url: print_line(f"open {url} in a browser; Ctrl-C stops it"))


def tokenizer_folders(store: RunStore, model: str) -> Iterator[Path]:
    """Yield the folders of a run that may hold its tokenizer; ``model`` is its ``policy.model``."""
    from ragr1_actors.core.disk.files import POLICY, POLICY_FOLDER, SFT_POLICY
    from ragr1_actors.core.disk.folders import on_this_node, part_of
    from ragr1_actors.core.resolve import TINY, path_of
    from ragr1_actors.runs.checkpoint import Checkpoints

    yield from (store.bring(POLICY), store.bring(SFT_POLICY))
    if (folder := path_of(model, *TINY)) is not None:
        yield folder
    if (newest := Checkpoints(store).latest()) is not None:
        yield Path(on_this_node(part_of(newest, f"{POLICY_FOLDER}/tokenizer"))) / POLICY_FOLDER


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
