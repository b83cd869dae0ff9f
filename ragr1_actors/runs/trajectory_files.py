"""``trajectories/*.arrow`` of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragr1_actors.core.schema import write_trajectories


def keep_trajectories(run_dir: Path, name: str, batches: Sequence[Any]) -> None:
    """Write ``trajectories/<name>.arrow``, whole or not at all, from record batches or references to them."""
    directory = run_dir / "trajectories"
    directory.mkdir(exist_ok=True)
    final = directory / f"{name}.arrow"
    writing = final.with_suffix(".writing")
    try:
        write_trajectories(writing, [_fetch(batch) for batch in batches])
        writing.rename(final)
    finally:
        writing.unlink(missing_ok=True)  # half a file, of a disk that is full


def _fetch(batch: Any) -> Any:
    """A record batch is itself in the driver, and a reference where actors sample."""
    import ray

    return ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch
