"""Damage to the files of a stopped run, for ``ragr1 chaos``: bits of a byte are flipped, or a file is lost."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ragr1_actors.core.errors import UserError

SPARE = "chaos.lost"
"""File beside the run directory that keeps the lost file until it is put back."""


@dataclass(frozen=True, slots=True)
class Damage:
    """File of a run that differs from what was stored."""

    run_dir: Path
    path: Path
    offset: int
    """Offset of the changed byte."""
    mask: int
    """Bits of the byte that are flipped; 0: the file is lost."""

    def __str__(self) -> str:
        """Return ``"byte 1,234 of checkpoints/step_8/learner.safetensors flipped"``."""
        name = self.path.relative_to(self.run_dir)
        return f"byte {self.offset:,} of {name} flipped" if self.mask else f"{name} lost"

    def apply(self) -> None:
        """Damage the file."""
        if self.mask:
            self._flip()
        else:
            shutil.move(self.path, self._spare)

    def undo(self) -> None:
        """Restore the file, unless the run has removed its folder meanwhile."""
        if not self.path.parent.is_dir():
            self._spare.unlink(missing_ok=True)
        elif self.mask:
            self._flip()
        else:
            shutil.move(self._spare, self.path)

    def is_named_in(self, said: str) -> bool:
        """Return whether a text names the file, in one path or as a name and its folder; a terminal may break lines."""
        text = _squeezed(said)
        return all(_squeezed(name) in text for name in (self.path.name, self.path.parent.name))

    def checkpoint_to_delete(self, said: str) -> Path | None:
        """Return the checkpoint with the damage, if a text advises to delete it and continue from the one before."""
        folder = newest_checkpoint(self.run_dir)
        is_in_it = folder is not None and self.path.is_relative_to(folder)
        return (
            folder
            if is_in_it and _squeezed(f"delete the folder {folder} and --resume goes on") in _squeezed(said)
            else None
        )

    @property
    def _spare(self) -> Path:
        return self.run_dir.parent / f"{self.run_dir.name}.{SPARE}"

    def _flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            byte = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([byte ^ self.mask]))


def draw_damage(run_dir: Path, rng: random.Random) -> Damage:
    """Choose a folder from which a stopped run would continue, a file in it, and the damage.

    The folders are the newest checkpoint, ``policy_sft`` and ``index``, with equal probability, as are the files of
    one. Files that no run reads again are not chosen: logs, curves, reports and the cache of the viewer.
    """
    from ragr1_actors.runs.storage.layout import INDEX, SFT_POLICY

    folders = [newest_checkpoint(run_dir), run_dir / SFT_POLICY, run_dir / INDEX]
    files = [_files(folder) for folder in folders if folder is not None and folder.is_dir()]
    if not any(files):
        raise UserError(
            f"{run_dir} has no checkpoint, policy or index yet whose files could be damaged; take fewer flips"
        )
    path = rng.choice(rng.choice([found for found in files if found]))
    size = path.stat().st_size
    is_lost = not size or rng.random() < 0.5
    return Damage(run_dir, path, rng.randrange(max(1, size)), 0 if is_lost else rng.randrange(1, 256))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the folder of the newest whole checkpoint."""
    from ragr1_actors.runs.storage.layout import CHECKPOINTS

    steps = {int(found[1]): path for path in (run_dir / CHECKPOINTS).glob("*") if (found := _STEP.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


_STEP = re.compile(r"step_(\d+)")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _squeezed(text: str) -> str:
    return "".join(text.split())
