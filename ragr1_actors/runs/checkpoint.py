"""Checkpoints that are whole or absent, and the two formats they are written in: safetensors and JSON.

::

    checkpoints/
      step_10/            whole: it got its name by one rename, after everything in it was on disk
      step_20/
      best -> step_10     where a best one is kept: a link, so that best/policy is a folder like any other
      .writing_step_30/   being written, or left by a crash; never read, removed before the next is written

Nothing is pickled: a checkpoint that somebody else made cannot run code when it is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.files import NO_ROOM, WRITING, error_number, read_json, sync, sync_tree, write_json

_STEP = re.compile(r"step_(\d+)")
_REPLACED = ".replaced_"


SCORE_FILE = "score.json"
"""What the policy scored on the held-out tasks: ``{"metric": "em", "value": 0.93}``."""
BEST = "best"

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run: ``step_<n>`` folders, the newest ``num_to_keep`` of them and the best one."""

    def __init__(self, directory: Path, num_to_keep: int = 2, best_metric: str = "") -> None:
        """Keep checkpoints in ``directory``, which is made when the first is saved.

        Args:
            directory: ``runs/mine/checkpoints``
            num_to_keep: of the newest.
            best_metric: what scores are of; the checkpoint with the highest is kept too. Empty keeps none for that.
        """
        if num_to_keep < 1:
            raise ValueError(f"got num_to_keep={num_to_keep}, expected at least 1")
        self._directory = directory
        self._num_to_keep = num_to_keep
        self._best_metric = best_metric

    def save(self, step: int, write: Callable[[Path], None], score: float | None = None) -> Path:
        """``begin`` and ``commit`` in one."""
        self.begin(step, write, score)
        return self.commit(step)

    def begin(self, step: int, write: Callable[[Path], None], score: float | None = None) -> Path:
        """Make the folder that is to become ``step_<step>`` and have ``write`` fill it; return it.

        What more belongs into it may be written until ``commit``, one checkpoint at a time.

        Args:
            step: a checkpoint of that step that exists already is replaced by ``commit``.
            write: writes into the folder it is given.
            score: of ``best_metric``; None where this policy was not evaluated, or was when the step was saved before.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written. Earlier checkpoints stay as they are,
                also where ``write`` raises.
        """
        writing = self._writing(step)
        with self._cleaned_up():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clean()
            writing.mkdir()
            before = self._directory / f"step_{step}" / SCORE_FILE
            if score is not None and self._best_metric:
                write_json(writing / SCORE_FILE, {"metric": self._best_metric, "value": score})
            elif before.is_file():
                shutil.copyfile(before, writing / SCORE_FILE)
            write(writing)
        return writing

    def commit(self, step: int, finish: Callable[[], None] = lambda: None) -> Path:
        """Give what ``begin`` made its name ``step_<step>`` once ``finish`` has returned and all of it is on disk.

        Older ones beyond ``num_to_keep`` are removed but for the best, and so are newer ones: they belong to a life of
        the run that this one has not come to.

        Raises:
            UserError: as of ``begin``.
        """
        final, writing = self._directory / f"step_{step}", self._writing(step)
        with self._cleaned_up():
            finish()
            sync_tree(writing)
            if final.exists():  # a folder with content cannot be renamed over
                final.rename(self._directory / f"{_REPLACED}{final.name}")
            writing.rename(final)
            sync(self._directory)
            self._prune(step)
        self._clean()
        return final

    def _writing(self, step: int) -> Path:
        return self._directory / f"{WRITING}step_{step}"

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Where the block raises, leave nothing half written, also on Ctrl-C."""
        is_whole = False
        try:
            yield
            is_whole = True
        except (OSError, SafetensorError) as error:
            raise _as_user_error(error, self._directory) from error
        finally:
            if not is_whole:
                self._clean()

    def best(self) -> Path | None:
        """Return the whole checkpoint with the highest score, of equal ones the newest; None where none has any."""
        best = self._best()
        return best[1] if best else None

    def is_best(self, score: float) -> bool:
        """Whether a checkpoint with this score would be the best; never where none is kept for that."""
        best = self._best()
        return bool(self._best_metric) and (best is None or score > best[0])

    def _best(self) -> tuple[float, Path] | None:
        scores = [
            (score, path) for _, path in sorted(self._whole().items()) if (score := self._score(path)) is not None
        ]
        return max(reversed(scores), key=lambda scored: scored[0], default=None)

    def _score(self, checkpoint: Path) -> float | None:
        path = checkpoint / SCORE_FILE
        if not self._best_metric or not path.is_file():
            return None
        try:
            found = TypeAdapter(_Score).validate_python(read_json(path))
        except (DataError, ValidationError):  # no reason to end a run
            logger.warning("%s is damaged: %s does not count as the best checkpoint", path, checkpoint.name)
            return None
        return found.value if found.metric == self._best_metric else None

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None where there is none. Changes nothing on disk."""
        return max(self._whole().items(), default=(0, None))[1]

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, oldest first."""
        return sorted(self._whole())

    def without(self, checkpoint: Path) -> str:
        """Return what to do about a checkpoint that is damaged: ``delete the folder ... and --resume goes on ...``."""
        before = [path for path in self._whole().values() if path != checkpoint]
        rest = f"goes on from {max(before, key=_step).name}" if before else "begins anew, there is no other checkpoint"
        return f"delete the folder {checkpoint} and --resume {rest}"

    def _whole(self) -> dict[int, Path]:
        if not self._directory.is_dir():
            return {}
        whole: dict[int, Path] = {}
        # Sorted, so that step_3 comes after .replaced_step_3 and wins; the latter counts only where a crash fell
        # between the two renames of a replacement.
        for entry in sorted(self._directory.iterdir()):
            match = _STEP.fullmatch(entry.name.removeprefix(_REPLACED))
            if match and entry.is_dir():
                whole[int(match[1])] = entry
        return whole

    def _prune(self, saved: int) -> None:
        whole = self._whole()
        not_newer = [step for step in sorted(whole) if step <= saved]
        for step in set(whole) - set(not_newer):
            whole[step].rename(self._directory / f"{WRITING}removed_{whole[step].name}")
        best = self.best()
        self._link(best)
        for step in not_newer[: -self._num_to_keep]:
            if whole[step] != best:
                # Renamed first: a removal that is cut short must not leave half a checkpoint with a whole one's name.
                whole[step].rename(self._directory / f"{WRITING}removed_{whole[step].name}")

    def _link(self, best: Path | None) -> None:
        link, writing = self._directory / BEST, self._directory / f"{WRITING}{BEST}"
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(best.name):
            writing.symlink_to(best.name)
            writing.rename(link)

    def _clean(self) -> None:
        if not self._directory.is_dir():
            return
        for leftover in self._directory.glob(f"{WRITING}*"):
            if leftover.is_symlink():
                leftover.unlink()
            shutil.rmtree(leftover, ignore_errors=True)
        for replaced in self._directory.glob(f"{_REPLACED}*"):
            final = self._directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(final)


@dataclass(frozen=True)
class _Score:
    metric: str
    value: float


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _as_user_error(error: OSError | SafetensorError, directory: Path) -> UserError:
    number = error_number(error)
    if number in NO_ROOM:
        return UserError(
            f"no room to write a checkpoint into {directory} ({os.strerror(number)}); free some space and go on with "
            "--resume: the checkpoints written before are whole"
        )
    return UserError(f"cannot write a checkpoint into {directory}: {error}")
